"""`python -m benchmarks bound`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks.speed.bound.measure import SUBJECTS, Sizes, bench_bound
from benchmarks.speed.bound.page import STAGE_HEAD, STEP_HEAD, rate_lines, stage_lines, step_lines
from benchmarks.speed.console import make_table
from benchmarks.speed.rates import Rates
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines

FULL = {**asdict(Sizes()), "repeats": 15}
QUICK = {
    "batch": 128, "scale": 0.05, "gigabytes": 0.02, "labels": 5000, "items": 300, "length": 20, "sequences": 8, "repeats": 2,
}  # fmt: skip
# Seconds for each way to do something, sizes of what is streamed, and of the table that rows are looked up in.
_FULL_RATES = (0.08, tuple(1 << power for power in (20, 22, 24, 25, 26, 29)), 1 << 29)
_QUICK_RATES = (0.005, tuple(1 << power for power in (20, 24, 25, 27)), 1 << 27)
_HELP = {
    "batch": "units in a batch of the click models and the dual encoder",
    "scale": "pCTR: Criteo's vocabulary sizes times this",
    "gigabytes": "size of DLRM's tables",
    "labels": "items of the dual encoder",
    "items": "items of the tied Transformer",
    "length": "positions of its sequences",
    "sequences": "sequences in its batch",
    "repeats": "repeats of each variant",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for key, text in _HELP.items():
        help = f"{text} (default: {FULL[key]:g}; {QUICK[key]:g} with --quick)"
        whole = isinstance(FULL[key], int)
        parser.add_argument(
            f"--{key}", type=positive_count if whole else positive_number, metavar="N" if whole else "X", help=help
        )
    parser.add_argument(
        "--workload", choices=tuple(SUBJECTS), action="append", help="which one (default: all); may be repeated"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="some seconds: small, few repeats, rough rates, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen: dict[str, Any] = {
        key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()
    }
    repeats = chosen.pop("repeats")
    return bench_bound(
        Sizes(**chosen),
        subjects=args.workload or SUBJECTS,
        repeats=repeats,
        rates=Rates(*(_QUICK_RATES if args.quick else _FULL_RATES)),
        memory=not (args.no_memory or args.quick),
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    table = make_table("The machine, at best", ("what", "in a second"))
    for line in rate_lines(result["rates"]):
        table.add_row(*line)
    console.print(table)
    for workload in dict.fromkeys(row["workload"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["workload"] == workload]
        title = rows[0]["title"]
        table = make_table(f"{title}, {rows[0]['setting']}", STAGE_HEAD)
        for line in stage_lines(rows):
            table.add_row(*line)
        console.print(table)
        table = make_table(f"{title}: steps, ms", STEP_HEAD)
        for step, *numbers in step_lines(rows):
            table.add_row(step.removeprefix(f"{title}, "), *numbers)
        console.print(table)
