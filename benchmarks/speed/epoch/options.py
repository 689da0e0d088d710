"""`python -m benchmarks epoch`: its options, and its result as a table."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table, milliseconds
from benchmarks.speed.epoch.measure import Setting, bench_epoch
from sparsedp.cli.arguments import positive_count

QUICK = Setting(examples=10_000, batch=512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help="epochs of each variant (default: 10; 2 with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="a second: few examples, few repeats")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    repeats = args.repeats or (2 if args.quick else 10)
    return bench_epoch(QUICK if args.quick else Setting(), repeats=repeats, busy_repeats=(repeats + 1) // 2)


def show(console: Console, result: dict[str, Any]) -> None:
    title = f"An epoch of {result['setting']['examples']:,} examples, two towers; best / median ± spread, ms"
    table = make_table(
        title,
        (
            "variant",
            "threads",
            "epoch",
            "its batches alone",
            "ratio of best",
            "ratio of median",
            "beside other work",
            "ratio of median",
        ),
    )
    for row in result["rows"]:
        table.add_row(
            row["variant"], str(row["threads"]), milliseconds(row), milliseconds(row["fetching"]),
            f"{row['ratio_to_plain']['best']:.2f}", f"{row['ratio_to_plain']['median']:.2f}",
            milliseconds(row["busy"]), f"{row['busy_ratio_to_plain']['median']:.2f}",
        )  # fmt: skip
    console.print(table)
