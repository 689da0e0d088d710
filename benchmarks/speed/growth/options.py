"""`python -m benchmarks growth`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks.speed.console import make_table, megabytes
from benchmarks.speed.growth.measure import MODELS, VARIED, Click, bench_growth
from benchmarks.speed.growth.page import along, exponent, lines_along, range_of, rows_along
from benchmarks.speed.tied import measure as tied
from sparsedp.cli.arguments import positive_count
from sparsedp.cli.progress import Lines

FULL = {
    **asdict(Click()), "items": tied.Setting.items, "length": 64, "sequences": 32, "repeats": 8, "slow_repeats": 4
}  # fmt: skip
QUICK = {
    "batch": 256, "tables": 4, "rows": 10_000, "dim": 16, "items": 500, "length": 16, "sequences": 8, "repeats": 3,
    "slow_repeats": 2,
}  # fmt: skip
_HELP = {
    "batch": "units in a batch of the click model",
    "tables": "its tables",
    "rows": "rows of each table",
    "dim": "dim of the tables",
    "items": "items of the tied Transformer",
    "length": "positions of a sequence",
    "sequences": "sequences in a batch",
    "repeats": "repeats of a variant",
    "slow_repeats": "of DP-SGD, which takes time for every row",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for key, text in _HELP.items():
        help = f"{text} (default: {FULL[key]}; {QUICK[key]} with --quick)"
        parser.add_argument(f"--{key.replace('_', '-')}", type=positive_count, metavar="N", help=help)
    parser.add_argument(
        "--vary", choices=VARIED, action="append",
        help="what to vary, one at a time, around the values above (default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="under half a minute: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_growth(
        Click(chosen["batch"], chosen["tables"], chosen["rows"], chosen["dim"]),
        tied.Setting(items=chosen["items"], length=chosen["length"], batch=chosen["sequences"]),
        vary=args.vary or VARIED,
        repeats=chosen["repeats"],
        slow_repeats=chosen["slow_repeats"],
        memory=not (args.no_memory or args.quick),
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    settings = {"click": Click(**result["click"]), "sequence": tied.Setting(**result["sequence"])}
    for model, kind in MODELS.items():
        lines = along(result, model)
        if not lines:
            continue
        console.print(f"{kind.title}, around {settings[model]}", highlight=False)
        table = make_table(
            "time ~ x^exponent ± standard error (top half)", ("quantity", "range", *kind.variants.values())
        )
        for name, fits in lines.items():
            cells = [exponent(fits.get(variant)) for variant in kind.variants]
            table.add_row(kind.quantities[name].title, range_of(fits), *cells)
        console.print(table)
    for model, kind in MODELS.items():
        for name, quantity in kind.quantities.items():
            measured = rows_along(result, model, name)
            if any("memory" in row for row in measured):
                head, cells_of = lines_along(quantity.title, measured, kind.variants, megabytes)
                table = make_table("Peak memory beyond the tables, MB", head)
                for line in cells_of:
                    table.add_row(*line)
                console.print(table)
    for gone in result["left_out"]:
        variants = ", ".join(MODELS[gone["model"]].variants[name] for name in gone["variants"])
        setting = type(settings[gone["model"]])(**gone["setting"])
        console.print(f"Left out at {setting}, not enough memory: {variants}", markup=False)
