"""`python -m benchmarks convex`: its options, and its result as tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.convex.measure import Problem, bench_convex
from benchmarks.speed.console import make_table, positive, prepare_output

PARTS = ("speed", "recovery", "rates")
FULL: dict[str, Any] = {
    "speed": Problem(rows=100_000, columns=1_000_000, sparsity=40),
    "recovery": [
        Problem(rows=100, columns=5_000, sparsity=4),
        Problem(rows=200, columns=20_000, sparsity=4),
    ],
    "base": Problem(),
    "values": {
        "rows": (300, 1_000, 3_000, 10_000, 30_000),
        "columns": (3_000, 10_000, 30_000, 100_000, 300_000),
        "sparsity": (1, 4, 16, 64, 256),
        "epsilon": (0.1, 0.3, 1.0, 3.0, 10.0),
    },
    "repeats": 3,
}
QUICK: dict[str, Any] = {
    "speed": Problem(rows=1_000, columns=10_000, sparsity=8),
    "recovery": [Problem(rows=60, columns=2_000, sparsity=2)],
    "base": Problem(rows=1_000, columns=5_000, sparsity=4),
    "values": {"rows": (500, 2_000), "columns": (2_000, 20_000), "sparsity": (2, 8), "epsilon": (0.5, 2.0)},
    "repeats": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Private means of sparse rows: time and memory of the projection, the reach of l1 recovery, and how errors grow with the "
        "sizes, as fitted exponents beside the paper's."
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="one of them (default: all); may be repeated")
    parser.add_argument("--repeats", type=positive, metavar="N", help="runs of each (default: 3; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    prepare_output(args)
    sizes = QUICK if args.quick else FULL
    repeats = args.repeats or sizes["repeats"]
    result = bench_convex(args.part or PARTS, **{**sizes, "repeats": repeats})
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    show(console, result)
    if args.plots is not None:
        from benchmarks.convex.plots import write_plots

        console.print(f"plots in {args.plots}: {', '.join(write_plots(result, args.plots))}", markup=False)
    return 0


def show(console: Console, result: dict[str, Any]) -> None:
    if "speed" in result:
        table = make_table("Projection", ("n", "d", "s", "noise", "best", "median", "processor", "peak memory"))
        for row in result["speed"]:
            times = [f"{row[name]:.1f} s" for name in ("best", "median", "processor")]
            table.add_row(*_sizes(row), row["noise"], *times, f"{row['memory'] / 1e9:.2f} GB")
        console.print(table)
    if "recovery" in result:
        heads = "n", "d", "s", "m", "time", "solver", "iterations", "gap", "error", "projection's error"
        table = make_table("l1 recovery", heads)
        for row in result["recovery"]:
            went, errors = row["recovery"], (f"{row['error']:.3f}", f"{row['projection']:.3f}")
            how = ("-", f"{row['seconds']:.1f} s", "-", "-", "-")  # noise alone
            if went:
                ended = str(went["iterations"]), f"{went['gap']:.1e}"
                how = (str(went["measurements"]), f"{row['seconds']:.1f} s", went["solver"], *ended)
            table.add_row(*_sizes(row), *how, *errors)
        console.print(table)
    if "exponents" in result:
        table = make_table("Exponents of the error", ("method", "quantity", "range", "points", "fitted", "paper"))
        for fit in result["exponents"]:
            span = f"{fit['first']:g} to {fit['last']:g}"
            fitted = f"{fit['exponent']:.2f}", f"{fit['paper']:g}"
            table.add_row(fit["variant"], fit["quantity"], span, str(fit["points"]), *fitted)
        console.print(table)


def _sizes(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['rows']:,}", f"{row['columns']:,}", str(row["sparsity"])
