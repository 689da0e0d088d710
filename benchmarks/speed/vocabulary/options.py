"""`python -m benchmarks vocabulary`: its options, and its result as a table."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table, megabytes, milliseconds
from benchmarks.speed.vocabulary.measure import SIZES, bench_vocabulary
from sparsedp.cli.arguments import positive_count

QUICK_ROWS = (10_000, 100_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=positive_count, action="append", metavar="N",
        help=f"rows of the table (default: the paper's sizes; {QUICK_ROWS[0]} and {QUICK_ROWS[1]} with --quick); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help="repeats of each variant (default: 15; 3 with --quick)"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="some seconds: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    sizes = args.rows or list(QUICK_ROWS if args.quick else SIZES)
    repeats = args.repeats or (3 if args.quick else 15)
    return bench_vocabulary(sizes, repeats=repeats, memory=not (args.no_memory or args.quick))


def show(console: Console, result: dict[str, Any]) -> None:
    title = f"A step on one table, dim {result['dim']}, batch {result['batch']}; best / median ± spread, ms"
    table = make_table(title, ("rows", "variant", "time", "ratio to plain", "DP-SGD / this", "extra MB"))
    for row in result["rows"]:
        table.add_row(
            f"{row['rows']:,}", row["variant"], milliseconds(row), f"{row['ratio_to_plain']['best']:.2f}",
            f"{row['dpsgd_over_this']['best']:.1f}", megabytes(row),
        )  # fmt: skip
    console.print(table)
