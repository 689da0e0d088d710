"""`sparsedp bench`: measures on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODELS = ("mlp", "pctr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure speed on this machine, as ratios of interleaved repeats."
    kinds = parser.add_subparsers(dest="what", required=True)
    step = kinds.add_parser("step", help="a private step against a plain PyTorch one, with a breakdown by stage")
    step.add_argument("--model", choices=MODELS, action="append", help="which model (default: all); may be repeated")
    step.add_argument("--batch", type=int, default=2048, help="units in a batch (default: %(default)s)")
    step.add_argument("--repeats", type=int, default=20, help="repeats of each variant (default: %(default)s)")
    step.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="pCTR: Criteo's vocabulary sizes times this (default: %(default)s)",
    )
    step.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    from sparsedp.bench.step import bench_step

    result = bench_step(args.model or list(MODELS), batch=args.batch, repeats=args.repeats, scale=args.scale)
    console = Console()
    _show(console, result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written to {args.json}")
    return 0


def _milliseconds(timing: dict[str, float]) -> str:
    return f"{1e3 * timing['best']:.1f} / {1e3 * timing['median']:.1f} ± {1e3 * timing['spread']:.1f}"


def _show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"Private step ({result['mechanism']}) against plain PyTorch SGD; best / median ± spread, ms")
    for column in ("model", "batch", "plain", "private", "ratio of best", "ratio of median"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in result["rows"]:
        table.add_row(
            row["model"],
            str(row["batch"]),
            _milliseconds(row["plain"]),
            _milliseconds(row["private"]),
            f"{row['ratio']['best']:.2f}",
            f"{row['ratio']['median']:.2f}",
        )
    console.print(table)
    stages = Table(title="Where the private step's time goes; best, ms")
    stages.add_column("model")
    names = list(dict.fromkeys(stage for row in result["rows"] for stage in row["stages"]))
    for name in names:
        stages.add_column(name, justify="right")
    for row in result["rows"]:
        stages.add_row(row["model"], *(f"{1e3 * row['stages'].get(name, 0.0):.1f}" for name in names))
    console.print(stages)
