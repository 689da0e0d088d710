"""`python -m benchmarks floating`: its options, and its result as the table of docs/audit.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.floating.measure import SIGNIFICANCE, bench_floating
from benchmarks.floating.runs import PAIRS
from benchmarks.speed.console import prepare_output
from sparsedp.cli.arguments import positive_count

NAMES = {
    "dpsgd": "DPSGD", "lazydp": "LazyDP()", "lazydp by step": "LazyDP(aggregate=False)", "adafest": "AdaFEST", "eana": "EANA",
    "sgd": "SGD", "momentum": "SGD, momentum 0.9", "adagrad": "Adagrad", "weight": "weights",
    "momentum_buffer": "momenta", "sum": "sums",
}  # fmt: skip
TYPES = "float32", "float64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Guesses from the bit patterns of weights, momenta and Adagrad's sums which rows of a table had a gradient of a "
        "thousandth of C: with releases as they are, and, as a control, with noise that is not rounded to a grid."
    )
    parser.epilog = "Takes about 5 minutes; 2 with --quick. The exit code is 1 if something is above chance."
    parser.add_argument(
        "--steps", type=positive_count, action="append", metavar="N", help="(default: 1, 10, 100); may be repeated"
    )
    parser.add_argument("--mechanism", choices=sorted({pair[0] for pair in PAIRS}), help="one of them (default: all)")
    parser.add_argument(
        "--rows", type=positive_count, default=4000, metavar="N", help="rows of each table (default: 4000)"
    )
    parser.add_argument("--quick", action="store_true", help="1 and 10 steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all outcomes as JSON")
    parser.set_defaults(plots=None)


def run(args: argparse.Namespace) -> int:
    prepare_output(args)
    steps = args.steps or ([1, 10] if args.quick else [1, 10, 100])
    pairs = [pair for pair in PAIRS if args.mechanism in (None, pair[0])]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=None)
        result = bench_floating(
            steps,
            rows=args.rows,
            pairs=pairs,
            advance=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print(verdict(result))
    return 1 if result["leaks"] else 0


def table(result: dict[str, Any]) -> str:
    """Markdown: the share of right guesses in percent, all runs of a cell together; in the last columns, without a grid."""
    steps = sorted({row["steps"] for row in result["outcomes"]})
    cells = [(dtype, count) for dtype in TYPES for count in steps]
    heads = [f"{dtype}, {count} step{'s' * (count > 1)}" for dtype, count in cells] + [
        f"no grid, {dtype}" for dtype in TYPES
    ]
    lines = [f"| mechanism, optimizer | read | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    for mechanism, optimizer in PAIRS:
        mine = [row for row in result["outcomes"] if (row["mechanism"], row["optimizer"]) == (mechanism, optimizer)]
        plain = [row for row in result["control"] if (row["mechanism"], row["optimizer"]) == (mechanism, optimizer)]
        for state in dict.fromkeys(row["state"] for row in mine):
            shares = [_share(mine, state, dtype=dtype, steps=count) for dtype, count in cells]
            shares += [_share(plain, state, dtype=dtype) for dtype in TYPES]
            lines.append(f"| {NAMES[mechanism]}, {NAMES[optimizer]} | {NAMES[state]} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share(rows: Sequence[dict[str, Any]], state: str, **where: Any) -> str:
    chosen = [row for row in rows if row["state"] == state and all(row[key] == value for key, value in where.items())]
    return f"{100 * sum(row['right'] for row in chosen) / sum(row['tested'] for row in chosen):.1f}" if chosen else "-"


def verdict(result: dict[str, Any]) -> str:
    outcomes = result["outcomes"]
    smallest = min(row["p_value"] for row in outcomes)
    right, tested = (sum(row[key] for row in outcomes) for key in ("right", "tested"))
    text = (
        f"{len(outcomes)} attacks on releases as they are, {tested:,} guesses: {100 * right / tested:.2f} % right. Smallest "
        f"p-value {smallest:.2g}; a leak would be below {SIGNIFICANCE / len(outcomes):.1g}. "
    )
    if not result["leaks"]:
        return f"{text}Nothing is above chance."
    worst = ", ".join(
        f"{row['mechanism']} {row['optimizer']} {row['state']} ({row['dtype']}, {row['steps']} steps, rate {row['rate']}): "
        f"{100 * row['right'] / row['tested']:.1f} % by {row['view']}"
        for row in result["leaks"]
    )
    return f"{text}ABOVE CHANCE: {worst}"
