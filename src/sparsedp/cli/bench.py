"""`sparsedp bench`: measures on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparsedp.cli import benchlazydp, benchtied

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
    vocabulary = kinds.add_parser("vocabulary", help="one table of 10^5 to 10^7 rows under every mechanism (Table 4)")
    vocabulary.add_argument(
        "--rows", type=int, action="append", help="rows of the table (default: the paper's sizes); may be repeated"
    )
    vocabulary.add_argument("--repeats", type=int, default=5, help="repeats of each variant (default: %(default)s)")
    vocabulary.add_argument(
        "--no-memory", action="store_true", help="do not measure memory, which takes a process each"
    )
    lazydp = kinds.add_parser(
        "lazydp", help="DLRM under SGD, DP-SGD(B, R, F), LazyDP, EANA and AdaFEST (LazyDP's figures 10, 11, 13 and 14)"
    )
    benchlazydp.add_arguments(lazydp)
    tied = kinds.add_parser("tied", help="a Transformer with tied item tables, private and not (DPFormer's figure 3)")
    benchtied.add_arguments(tied)
    noise = kinds.add_parser("noise", help="normal numbers from ChaCha8 against torch's own")
    noise.add_argument("--size", type=int, action="append", help="numbers to draw; may be repeated")
    noise.add_argument("--repeats", type=int, default=20, help="repeats of each variant (default: %(default)s)")
    for kind in (step, vocabulary, lazydp, tied, noise):
        kind.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.what == "step":
        from sparsedp.bench.step import bench_step

        result = bench_step(args.model or list(MODELS), batch=args.batch, repeats=args.repeats, scale=args.scale)
        _show_step(console, result)
    elif args.what == "lazydp":
        result = benchlazydp.run(args, console)
    elif args.what == "tied":
        result = benchtied.run(args, console)
    elif args.what == "noise":
        from sparsedp.bench.noise import SIZES as NUMBERS
        from sparsedp.bench.noise import bench_noise

        result = bench_noise(args.size or list(NUMBERS), repeats=args.repeats)
        _show_noise(console, result)
    else:
        from sparsedp.bench.vocabulary import SIZES, bench_vocabulary

        result = bench_vocabulary(args.rows or list(SIZES), repeats=args.repeats, memory=not args.no_memory)
        _show_vocabulary(console, result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written to {args.json}")
    return 0


def _milliseconds(timing: dict[str, float]) -> str:
    return f"{1e3 * timing['best']:.1f} / {1e3 * timing['median']:.1f} ± {1e3 * timing['spread']:.1f}"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left")
    return table


def _show_step(console: Console, result: dict[str, Any]) -> None:
    title = "Private step against plain PyTorch SGD; best / median ± spread, ms"
    table = _table(title, ("model", "mechanism", "batch", "plain", "private", "ratio of best", "ratio of median"))
    for row in result["rows"]:
        table.add_row(
            row["model"], row["mechanism"], str(row["batch"]), _milliseconds(row["plain"]), _milliseconds(row["private"]),
            f"{row['ratio']['best']:.2f}", f"{row['ratio']['median']:.2f}",
        )  # fmt: skip
    console.print(table)
    variants = [f"{row['model']} {row['mechanism']}" for row in result["rows"]]
    stages = Table(title="Where the private step's time goes; best, ms")
    for index, column in enumerate(("stage", *variants)):
        stages.add_column(column, justify="right" if index else "left")
    for name in dict.fromkeys(stage for row in result["rows"] for stage in row["stages"]):
        stages.add_row(name, *(f"{1e3 * row['stages'].get(name, 0.0):.1f}" for row in result["rows"]))
    console.print(stages)


def _show_noise(console: Console, result: dict[str, Any]) -> None:
    title = "Normal numbers in float32; best / median ± spread, ms"
    table = _table(title, ("threads", "source", "numbers", "time", "ns each, best", "ratio to torch"))
    for row in result["rows"]:
        table.add_row(
            str(row["threads"]), row["variant"], f"{row['size']:,}", _milliseconds(row), f"{row['nanoseconds_each']:.2f}",
            f"{row['ratio_to_torch']['best']:.2f}",
        )  # fmt: skip
    console.print(table)


def _show_vocabulary(console: Console, result: dict[str, Any]) -> None:
    title = f"A step on one table, dim {result['dim']}, batch {result['batch']}; best / median ± spread, ms"
    columns = ("rows", "variant", "time", "ratio to plain", "DP-SGD / this", "extra memory, share of table")
    table = _table(title, columns)
    for row in result["rows"]:
        memory = f"{100 * row['extra_memory']['share_of_table']:.1f} %" if "extra_memory" in row else "-"
        table.add_row(
            f"{row['rows']:,}", row["variant"], _milliseconds(row), f"{row['ratio_to_plain']['best']:.2f}",
            f"{row['dpsgd_over_this']['best']:.1f}", memory,
        )  # fmt: skip
    console.print(table)
