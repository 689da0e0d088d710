"""The `sparsedp` command."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sparsedp_command
from sparsedp.cli.processes import started_together
from sparsedp.errors import SparseDPError, SparseDPWarning, one_line

REFUSED, INTERRUPTED = 2, sparsedp_command.INTERRUPTED


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """With the arguments of the commands that are among `words`, as loading one takes its time; None: of all."""

    def fill(name: str, command: argparse.ArgumentParser) -> None:
        """Each module has `add_arguments(parser)` and `run(args) -> int`; its docstring is the command's description."""
        if words is None or name in words:
            module = importlib.import_module(f"sparsedp.cli.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, command=name, refuse=command.error)

    return sparsedp_command.make_parser(fill)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    args, unknown = make_parser(words).parse_known_args(words)
    if unknown:
        # Beside the usage of the command that does not know them.
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    args.argv = words  # for processes that run the same command
    if started_together() and args.command != "train":
        if os.environ.get("RANK", "0") == "0":
            print(f"sparsedp: error: {args.command} runs in one process: start it without torchrun", file=sys.stderr)
        return REFUSED
    return run_command("sparsedp", args)


def run_command(program: str, args: argparse.Namespace) -> int:
    """Calls `args.run(args)` and returns the exit code. Refusals and interruptions are printed in one line."""
    with warnings.catch_warnings(), _shown_log(program, args):
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


@contextmanager
def _shown_log(program: str, args: argparse.Namespace) -> Iterator[None]:
    """What the library logs, on the error stream: with --debug all of it, with --quiet what is wrong alone."""
    log, handler = logging.getLogger("sparsedp"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{program}: %(message)s"))
    before = log.level
    quiet = logging.WARNING if getattr(args, "quiet", False) else logging.INFO
    log.setLevel(logging.DEBUG if args.debug else quiet)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


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
