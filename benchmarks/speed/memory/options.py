"""`python -m benchmarks memory`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table
from benchmarks.speed.machine import total_memory
from benchmarks.speed.memory.measure import BATCH, PHASES, VARIANTS, bench_memory
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines
from sparsedp.errors import SparseDPError

FULL: dict[str, Any] = {"batch": BATCH, "variant": tuple(VARIANTS)}
QUICK: dict[str, Any] = {"gigabytes": 0.2, "batch": BATCH, "variant": ("lazydp", "adafest")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gigabytes", type=positive_number, metavar="GB",
        help=f"size of the table (default: half of the machine's memory; {QUICK['gigabytes']:g} with --quick)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=positive_count, metavar="N", help=f"units in a batch (default: {FULL['batch']})"
    )
    parser.add_argument(
        "--variant", choices=tuple(VARIANTS), action="append",
        help=f"what to train (default: all; {' and '.join(QUICK['variant'])} with --quick); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER",
        help="where files of the table's size are written for a while; needs 1.1 times that (default: the system's own)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="some seconds: a small table, two variants")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    if args.folder is not None and not args.folder.is_dir():
        raise SparseDPError(f"There is no folder '{args.folder}' to write files into.")
    defaults = QUICK if args.quick else {"gigabytes": total_memory() / 2e9, **FULL}
    chosen = {key: getattr(args, key) or value for key, value in defaults.items()}
    return bench_memory(
        gigabytes=chosen["gigabytes"],
        batch=chosen["batch"],
        variants=chosen["variant"],
        folder=args.folder,
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    share = 100 * result["table_bytes"] / result["machine"]["memory_bytes"]
    console.print(
        f"One table of {result['table_rows']:,} rows, dim {result['dim']}: {result['table_bytes'] / 1e9:.2f} GB, {share:.0f} % "
        f"of this machine's memory; batch {result['batch']}",
        highlight=False,
    )
    columns = ("phase", "seconds", "MB/s", "memory beyond the table, MB", "% of it", "at most, MB", "% of it")
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        table = make_table(VARIANTS[variant], columns)
        for row in (row for row in result["rows"] if row["variant"] == variant):
            if "skipped" in row:
                table.add_row(PHASES[row["phase"]], "skipped", *["-"] * 5)
                continue
            speed = row.get("megabytes_per_second")
            table.add_row(
                PHASES[row["phase"]], f"{row['seconds']:.2f}", "-" if speed is None else f"{speed:.0f}",
                f"{row['bytes'] / 1e6:.1f}", f"{100 * row['share']:.1f}",
                f"{row['peak_bytes'] / 1e6:.1f}", f"{100 * row['peak_share']:.1f}",
            )  # fmt: skip
        console.print(table)
    for reason in dict.fromkeys(row["skipped"] for row in result["rows"] if "skipped" in row):
        console.print(f"Skipped: {reason}.", markup=False)
    for gone in result["left_out"]:
        console.print(f"Left out: {VARIANTS[gone['variant']]}, {gone['reason']}.", markup=False)
