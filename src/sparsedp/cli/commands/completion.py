"""Prints what makes a shell complete commands, options and files."""

from __future__ import annotations

import argparse

import shtab

SHELLS = ("bash", "zsh", "fish")
EPILOG = """examples:
  sparsedp completion bash > ~/.local/share/bash-completion/completions/sparsedp
  sparsedp completion zsh > ~/.zfunc/_sparsedp           with fpath+=(~/.zfunc) before compinit in ~/.zshrc
  sparsedp completion fish > ~/.config/fish/completions/sparsedp.fish

What is printed knows all commands and options and runs nothing of sparsedp, so that it answers at once. Print it again
after an update.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def run(args: argparse.Namespace) -> int:
    from sparsedp.cli.main import make_parser  # which imports this module

    parser = make_parser()
    _complete_values(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Files, folders and the names of bundled configurations, for arguments that name such."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_values(command)
        elif action.choices is None and (completed := _KINDS.get(str(action.metavar or ""))) is not None:
            action.complete = completed  # type: ignore[attr-defined]


_KINDS = {
    **dict.fromkeys(("RUN", "DIR"), shtab.DIRECTORY),
    **dict.fromkeys(("FILE", "CONFIG", "CONFIG|RUN", "MEAN.npy", "SWEEP"), shtab.FILE),
}
