"""`python -m benchmarks noise`: its options, and its result as a table."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table, milliseconds
from benchmarks.speed.noise.measure import SIZES, bench_noise
from sparsedp.cli.arguments import positive_count

QUICK_SIZES = (10_000, 1_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=positive_count, action="append", metavar="N",
        help="numbers to draw (default: 10^4, 10^6 and 10^7; without the last with --quick); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help="repeats of each variant (default: 20; 5 with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="a second: small, few repeats")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    sizes = args.size or list(QUICK_SIZES if args.quick else SIZES)
    return bench_noise(sizes, repeats=args.repeats or (5 if args.quick else 20))


def show(console: Console, result: dict[str, Any]) -> None:
    title = "Normal numbers in float32; best / median ± spread, ms"
    table = make_table(title, ("threads", "source", "numbers", "time", "ns each, best", "ratio to torch"))
    for row in result["rows"]:
        table.add_row(
            str(row["threads"]), row["variant"], f"{row['size']:,}", milliseconds(row), f"{row['nanoseconds_each']:.2f}",
            f"{row['ratio_to_torch']['best']:.2f}",
        )  # fmt: skip
    console.print(table)
