"""`python -m benchmarks step`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import default_text, make_table, megabytes, milliseconds, stage_table
from benchmarks.speed.step.measure import MODELS, bench_step
from sparsedp.cli.arguments import positive_count, positive_number

FULL = {"batch": 2048, "repeats": 40, "scale": 1.0}
QUICK = {"batch": 256, "repeats": 5, "scale": 0.1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument("--model", choices=MODELS, action="append", help="which model (default: all); may be repeated")
    parser.add_argument("--batch", type=positive_count, metavar="N", help=f"units in a batch {default('batch')}")
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"repeats of each variant {default('repeats')}"
    )
    parser.add_argument(
        "--scale",
        type=positive_number,
        metavar="X",
        help=f"pCTR: Criteo's vocabulary sizes times this {default('scale')}",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="some seconds: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_step(
        args.model or list(MODELS),
        batch=int(chosen["batch"]),
        repeats=int(chosen["repeats"]),
        scale=chosen["scale"],
        memory=not (args.no_memory or args.quick),
    )


def show(console: Console, result: dict[str, Any]) -> None:
    table = make_table(
        "Private step against plain PyTorch SGD; best / median ± spread, ms",
        (
            "model",
            "mechanism",
            "batch",
            "plain",
            "private",
            "ratio of best",
            "ratio of median",
            "extra MB: plain, private",
        ),
    )
    for row in result["rows"]:
        table.add_row(
            row["model"], row["mechanism"], str(row["batch"]), milliseconds(row["plain"]), milliseconds(row["private"]),
            f"{row['ratio']['best']:.2f}", f"{row['ratio']['median']:.2f}",
            f"{megabytes(row, 'plain_memory')}, {megabytes(row)}",
        )  # fmt: skip
    console.print(table)
    heads = [f"{row['model']} {row['mechanism']}" for row in result["rows"]]
    title = "Where the private step's time goes; best, ms"
    console.print(stage_table(title, result["rows"], heads))
