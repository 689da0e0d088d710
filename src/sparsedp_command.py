"""The `sparsedp` console script: settles what must be settled before torch is loaded, then runs the command line.

Outside of the package, because importing anything of it loads torch, which takes seconds: `--help` and `--version` are
answered from here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130
# What each command does: the first sentence of its module in sparsedp/cli/commands.
COMMANDS = {
    "init": "Looks at a file, guesses what its columns are, and writes a configuration that trains on it.",
    "train": "Trains a model privately, as a configuration says, and leaves a folder with the model and its promise.",
    "evaluate": "Evaluates the model of a run on what was held out, again or where that failed at its end.",
    "export": "Copies what may leave of a run: the weights, the privacy statement, and what was public before training.",
    "report": "Writes a report on one or several runs as one HTML file, or a model card.",
    "plan": "Says what a run will cost in noise, time, memory and rows before it starts.",
    "sweep": "Runs a grid over a mechanism's knobs and finds the front of utility against gradient-size reduction.",
    "account": "Computes what a run costs in privacy, or the noise that a budget asks for, without any model or data.",
    "mean": "Releases the mean of the rows of a sparse matrix with noise, and says what may be promised about it.",
    "audit": "Measures what a trained model gives away: an attack, a number, and a sentence.",
    "schema": "Prints the JSON schema of configurations, with which editors complete keys and mark what is wrong.",
    "completion": "Prints what makes a shell complete commands, options and files.",
}

EPILOG = """examples:
  sparsedp init clicks.csv       look at a file of your own and write a configuration that trains on it
  sparsedp train demo            train a click-through-rate model with epsilon 3, in about a minute
  sparsedp plan demo             what that run will cost, before it starts
  sparsedp report runs/RUN       a page about a run: its promise, curves, where the time went
  sparsedp export runs/RUN       copy what may leave of a run: weights and privacy statement
  sparsedp sweep demo            what a mechanism's knobs trade: utility against gradient size
  sparsedp audit secret-sharer demo   how much a model remembers of examples that were inserted into its data
  sparsedp account epsilon --noise-multiplier 0.6 --sample-rate 0.002 --steps 500 --delta 1e-6
  sparsedp audit replay demo     by how much one unit moves the clipped sum
  sparsedp mean rows.npz --epsilon 1 --delta 1e-6 --bound 1 --sparsity 40

`sparsedp COMMAND --help` explains each command.
"""


def main() -> int:
    # OpenMP's threads spin while they wait, which on a busy machine makes steps many times slower. It reads this once,
    # when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = sys.argv[1:]
    if not any(word in COMMANDS for word in words):
        parser = make_parser()
        given = [word for word in words if not word.startswith("-")]
        if given and not {"-h", "--help", "--version"} & set(words):
            _refuse(parser, given[0])
        parser.parse_args(words)  # answers --help and --version, and refuses everything else
    try:
        from sparsedp.cli.main import main

        return main()
    except KeyboardInterrupt:  # while torch is loaded; later on the command line itself answers
        print("sparsedp: interrupted", file=sys.stderr)
        return INTERRUPTED


def _refuse(parser: argparse.ArgumentParser, given: str) -> NoReturn:
    from difflib import get_close_matches

    close = get_close_matches(given, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
    parser.error(f"there is no command {given!r}: {hint}")


def make_parser(
    fill: Callable[[str, argparse.ArgumentParser], None] = lambda name, command: None,
) -> argparse.ArgumentParser:
    """The parser of the command line. `fill` adds the arguments of a command to its parser."""
    parser = argparse.ArgumentParser(
        prog="sparsedp",
        description="Differentially private training of PyTorch models with large embedding tables.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, description in COMMANDS.items():
        command = commands.add_parser(
            name, help=description, description=description, formatter_class=parser.formatter_class
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
        )
        fill(name, command)
    return parser


class _Version(argparse.Action):
    """Looks for versions when it is asked: that takes as long as all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        print(f"sparsedp {_version('sparsedp')} (torch {_version('torch')}, Python {sys.version.split()[0]})")
        parser.exit()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "of a checkout that is not installed"
