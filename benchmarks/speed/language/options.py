"""`python -m benchmarks language`: its options, and its result as tables."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table, megabytes, milliseconds, stage_table
from benchmarks.speed.language.measure import VARIANTS, bench_language
from benchmarks.speed.language.models import ENCODERS
from sparsedp.cli.arguments import positive_count

REPEATS = {"minilm": 5, "mpnet": 2, "opacus": 1, "tables": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=tuple(ENCODERS), action="append", help="which encoder (default: all); may be repeated"
    )
    shown = ", ".join(f"{name} {count}" for name, count in REPEATS.items())
    parser.add_argument(
        "--repeats",
        type=positive_count,
        metavar="N",
        help=f"repeats of every variant (default: {shown}; 1 with --quick)",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="some seconds: tiny models, one repeat, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    repeats = dict.fromkeys(REPEATS, args.repeats or 1) if args.repeats or args.quick else REPEATS
    return bench_language(
        args.model or list(ENCODERS),
        repeats=repeats,
        small=args.quick,
        memory=not (args.no_memory or args.quick),
        say=lambda text: print(text, file=sys.stderr),
    )


def show(console: Console, result: dict[str, Any]) -> None:
    _show(console, "Encoders; best / median ± spread, ms", result["rows"], lambda row: f"{row['model']}, {row['way']}")
    _show(console, "A table alone", result["tables"], lambda row: f"{row['rows']:,} rows")
    _show(console, "A causal model with a large vocabulary", result["causal"], lambda row: f"{row['rows']:,} rows")
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in result["rows"]):
        mine = [row for row in result["rows"] if (row["model"], row["way"]) == (model, way) and row["stages"]]
        title = f"Where the time of a step goes: {model}, {way}; best, ms"
        console.print(stage_table(title, mine, [VARIANTS[row["variant"]] for row in mine]))
    for gone in result["left_out"]:
        console.print(f"{gone['model']}, {gone['way']}, {VARIANTS[gone['variant']]}: {gone['why']}", markup=False)


def _show(console: Console, title: str, rows: list[dict[str, Any]], where: Any) -> None:
    table = make_table(title, ("model", "variant", "time", "ratio of best", "of median", "extra MB", "ratio of memory"))
    for row in rows:
        memory = f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else "-"
        table.add_row(
            where(row), VARIANTS[row["variant"]], milliseconds(row), f"{row['ratio_to_plain']['best']:.2f}",
            f"{row['ratio_to_plain']['median']:.2f}", megabytes(row), memory,
        )  # fmt: skip
    console.print(table)
