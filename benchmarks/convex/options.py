"""`python -m benchmarks convex`: its options, and its result as tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.convex.measure import bench_convex
from benchmarks.convex.optimisation import SOLVERS, Classification
from benchmarks.convex.problem import KINDS, Problem
from benchmarks.convex.rates import VARIANTS
from benchmarks.convex.speed import sentence
from benchmarks.convex.truncation import Bags
from benchmarks.speed.console import make_table, prepare_output
from sparsedp.cli.arguments import positive_count

PARTS = ("speed", "recovery", "rates", "risk", "truncation")
FULL: dict[str, Any] = {
    "speed": Problem(rows=100_000, columns=1_000_000, sparsity=40),
    "recovery": [
        Problem(rows=100, columns=5_000, sparsity=4),
        Problem(rows=200, columns=20_000, sparsity=4),
        Problem(rows=300, columns=100_000, sparsity=4),
        Problem(rows=200, columns=1_000_000, sparsity=4),
    ],
    "base": Problem(),
    "values": {
        "rows": (200, 400, 800, 1_500, 2_500, 5_000, 10_000),
        "columns": (1_000, 3_000, 10_000, 20_000, 30_000, 50_000, 100_000),
        "sparsity": (1, 3, 8, 24, 64),
        "epsilon": (0.2, 0.4, 0.8, 1.5, 2.5, 5.0, 10.0),
    },
    "classification": Classification(),
    "sizes": {"rows": (500, 1_000, 2_000, 4_000, 8_000), "columns": (1_000, 3_000, 10_000, 30_000)},
    "bags": [
        Bags(),
        Bags(rows=5_000, columns=200_000, batch=250, epsilon=0.5),
        Bags(rows=5_000, columns=200_000, batch=250, epsilon=0.5, decay=2.5),
    ],
    "thresholds": (2.0, 20.0, 60.0, 120.0),
    "repeats": 3,
}
QUICK: dict[str, Any] = {
    "speed": Problem(rows=1_000, columns=10_000, sparsity=8),
    "recovery": [Problem(rows=60, columns=2_000, sparsity=2)],
    "base": Problem(rows=1_000, columns=5_000, sparsity=4),
    "values": {"rows": (500, 2_000), "columns": (2_000, 20_000), "sparsity": (2, 8), "epsilon": (0.5, 2.0)},
    "classification": Classification(rows=500, columns=300),
    "sizes": {"rows": (300, 600)},
    "bags": [Bags(rows=500, columns=800, batch=100, steps=5)],
    "thresholds": (20.0,),
    "repeats": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Private means of sparse rows: time and memory of the projection (speed), the reach of l1 recovery (recovery), how "
        "errors and excess risks grow with the sizes, as fitted exponents beside the paper's (rates, risk), and when a "
        "truncated gradient is better than a whole one (truncation)."
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="one of them (default: all); may be repeated")
    parser.add_argument("--repeats", type=positive_count, metavar="N", help="runs of each (default: 3; 2 with --quick)")
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
    for row in result.get("speed", []):
        console.print(sentence(row), markup=False, soft_wrap=True)
    if "recovery" in result:
        _show_recovery(console, result["recovery"])
    if "exponents" in result:
        _show_rates(console, result)
    if "optimisation" in result:
        _show_optimisation(console, result)
    if "truncation" in result:
        _show_truncation(console, result["truncation"])


def _show_recovery(console: Console, rows: list[dict[str, Any]]) -> None:
    heads = "rows", "constants", "m, clip", "wall", "processor", "solver, rounds", "gap", "error (bound)", "projection"
    table = make_table("l1 recovery", heads)
    for row in rows:
        went = row["recovery"]
        how = ["-", f"{row['seconds']:.1f} s", f"{row['processor']:.1f} s", "noise alone", "-"]
        if went:
            ended = "" if went["finished"] else " (not finished)"
            how[0] = f"{went['measurements']}, {row['clip']:g}"
            how[3:] = [f"{went['solver']}, {went['iterations']}{ended}", f"{went['gap']:.0e}"]
        errors = [
            f"{row[error]:.3f}" + ("" if row[bound] is None else f" ({row[bound]:.2f})")
            for error, bound in (("error", "bound"), ("projection", "projection_bound"))
        ]
        table.add_row(f"{row['rows']:,} x {row['columns']:,}", row["constants"], *how, *errors)
    console.print(table)


def _show_rates(console: Console, result: dict[str, Any]) -> None:
    rates, crossings = result["rates"], result["crossings"]
    for quantity in dict.fromkeys(row["quantity"] for row in rates):
        along = list(dict.fromkeys(row["value"] for row in rates if row["quantity"] == quantity))
        title = f"Root mean square error; {quantity} ="
        table = make_table(title, ("method", "rows", *(f"{value:,}" for value in along)))
        for variant in VARIANTS:
            for kind in KINDS:
                errors = [
                    row["error"]
                    for row in rates
                    if (row["kind"], row["quantity"], row["variant"]) == (kind, quantity, variant)
                ]
                table.add_row(variant, kind, *(f"{error:.3f}" for error in errors))
        console.print(table)
        for regime, at in crossings[quantity].items():
            side = "above" if quantity == "columns" else "below"
            where = "does not depend on it" if at is None else f"{side} {quantity} = {at:,.3g}"
            console.print(f"the sparse regime, by our bounds, {regime}: {where}", markup=False)
    table = make_table("Exponents of the error", ("method", "rows", "quantity", "range", "points", "fitted", "paper"))
    for fit in result["exponents"]:
        span = f"{fit['first']:g} to {fit['last']:g}"
        fitted = f"{fit['exponent']:.2f}", f"{fit['paper']:g}"
        table.add_row(fit["variant"], fit["kind"], fit["quantity"], span, str(fit["points"]), *fitted)
    console.print(table)


def _show_optimisation(console: Console, result: dict[str, Any]) -> None:
    table = make_table("Excess risk of logistic regression", ("n", "d", *SOLVERS, "zero", "sparse rate", "dense rate"))
    rows = result["optimisation"]
    for first in (row for row in rows if row["method"] == next(iter(SOLVERS))):
        same = [row for row in rows if (row["quantity"], row["value"]) == (first["quantity"], first["value"])]
        excess = [f"{row['excess']:.3f}" for row in same]
        others = [f"{first[name]:.3f}" for name in ("zero", "sparse_rate", "dense_rate")]
        table.add_row(f"{first['rows']:,}", f"{first['columns']:,}", *excess, *others)
    console.print(table)
    table = make_table("Exponents of the excess risk", ("method", "quantity", "points", "fitted", "sparse", "dense"))
    for fit in result["risk_exponents"]:
        fitted = f"{fit['exponent']:.2f}", f"{fit['sparse']:g}", f"{fit['dense']:g}"
        table.add_row(fit["method"], fit["quantity"], str(fit["points"]), *fitted)
    console.print(table)


def _show_truncation(console: Console, rows: list[dict[str, Any]]) -> None:
    heads = "threshold", "h", "gamma", "pays below", "left", "right", "eq. 2 says", "AdaFEST", "DP-SGD", "zero"
    for problem in dict.fromkeys((row["rows"], row["columns"], row["epsilon"], row["decay"]) for row in rows):
        n, d, epsilon, decay = problem
        table = make_table(f"Excess losses: n = {n:,}, D = {d:,}, epsilon = {epsilon:g}, decay {decay:g}", heads)
        for row in rows:
            if (row["rows"], row["columns"], row["epsilon"], row["decay"]) == problem:
                says = "AdaFEST" if row["selected"] < row["dense"] else "DP-SGD"
                numbers = [f"{row[name]:.2f}" for name in ("truncated", "largest", "selected", "dense")]
                measured = [f"{row[name]:.3f}" for name in ("excess", "dense_excess", "zero")]
                table.add_row(f"{row['threshold']:g}", f"{row['coordinates']:,.0f}", *numbers, says, *measured)
        console.print(table)
