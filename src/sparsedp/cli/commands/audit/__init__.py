"""Measures what a trained model gives away: an attack, a number, and a sentence."""

from __future__ import annotations

import argparse
import importlib

# Each module has `add_arguments(parser)` and `run(args) -> int`; its docstring is the audit's description.
AUDITS: dict[str, str] = {
    "bound": "sparsedp.cli.commands.audit.bound",
    "membership": "sparsedp.cli.commands.audit.membership",
    "replay": "sparsedp.cli.commands.audit.replay",
    "secret-sharer": "sparsedp.cli.commands.audit.secret_sharer",
}

EPILOG = """examples:
  sparsedp audit bound demo                             a lower bound on epsilon beside the claimed one
  sparsedp audit secret-sharer sequences --owner one    how much a model remembers of what is inserted into its data
  sparsedp audit AUDIT --help                           what an audit does, and its options

An audit trains with canaries, examples that nobody is behind: its models are for the audit, not for use.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    audits = parser.add_subparsers(metavar="AUDIT", required=True)
    for name, path in AUDITS.items():
        module = importlib.import_module(path)
        description = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        audit = audits.add_parser(
            name, help=description, description=description, formatter_class=parser.formatter_class
        )
        audit.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
        )
        module.add_arguments(audit)
        audit.set_defaults(run_audit=module.run)


def run(args: argparse.Namespace) -> int:
    return args.run_audit(args)
