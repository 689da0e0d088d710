"""The `sparsedp` command."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sparsedp.errors import SparseDPError, SparseDPWarning, one_line
from sparsedp.version import __version__

# Each module has `add_arguments(parser)` and `run(args) -> int`; its docstring is the command's description.
COMMANDS = {
    name: f"sparsedp.cli.commands.{name}"
    for name in ("train", "evaluate", "export", "plan", "sweep", "account", "mean", "audit")
}
REFUSED, INTERRUPTED = 2, 130

EPILOG = """examples:
  sparsedp train demo            train a click-through-rate model with epsilon 3, in about a minute
  sparsedp plan demo             what that run will cost, before it starts
  sparsedp export runs/RUN       copy what may leave of a run: weights and privacy statement
  sparsedp sweep demo            what a mechanism's knobs trade: utility against gradient size
  sparsedp audit secret-sharer demo   how much a model remembers of examples that were inserted into its data
  sparsedp account epsilon --noise-multiplier 0.6 --sample-rate 0.002 --steps 500 --delta 1e-6
  sparsedp audit replay demo     by how much one unit moves the clipped sum
  sparsedp mean rows.npz --epsilon 1 --delta 1e-6 --bound 1 --sparsity 40

`sparsedp COMMAND --help` explains each command.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparsedp",
        description="Differentially private training of PyTorch models with large embedding tables.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = f"sparsedp {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        description = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        command = commands.add_parser(
            name, help=description, description=description, formatter_class=parser.formatter_class
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("sparsedp", make_parser().parse_args(argv))


def run_command(program: str, args: argparse.Namespace) -> int:
    """Calls `args.run(args)` and returns the exit code. Refusals and interruptions are printed in one line."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning(program, warnings.showwarning)
        try:
            return args.run(args)
        except (SparseDPError, OSError) as error:
            if args.debug:
                traceback.print_exc()
            else:
                print(f"{program}: error: {one_line(error)}", file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            return INTERRUPTED


def _show_warning(program: str, otherwise: Any) -> Any:
    """SparseDP's warnings in one line; all others as before."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, SparseDPWarning):
            print(f"{program}: warning: {message}", file=sys.stderr)
        else:
            otherwise(message, category, *where, **more)

    return show


if __name__ == "__main__":
    sys.exit(main())
