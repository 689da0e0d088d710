"""`python -m benchmarks dual`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import default_text, make_table, megabytes, milliseconds, say_left_out, stage_table
from benchmarks.speed.dual.measure import VARIANTS, Setting, bench_dual
from benchmarks.speed.papers.published import EANA_TABLE_3
from sparsedp.cli.arguments import positive_count
from sparsedp.cli.progress import Lines

FULL: dict[str, Any] = {
    "items": tuple(speeds.items for speeds in EANA_TABLE_3), "batch": (Setting.batch, 1024), "repeats": 20, "slow_repeats": 2
}  # fmt: skip
QUICK: dict[str, Any] = {"items": (1000, 20_000), "batch": (Setting.batch,), "repeats": 3, "slow_repeats": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument(
        "--items", type=positive_count, action="append", metavar="N",
        help=f"items in the vocabulary; may be repeated {default('items')}",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=positive_count, action="append", metavar="N",
        help=f"units in a batch; may be repeated: further ones at the first vocabulary {default('batch')}",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"repeats of a variant {default('repeats')}"
    )
    parser.add_argument(
        "--slow-repeats", type=positive_count, metavar="N",
        help=f"of DP-SGD over more than a gigabyte of tables {default('slow_repeats')}",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="half a minute: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_dual(
        chosen["items"],
        chosen["batch"],
        repeats=chosen["repeats"],
        slow_repeats=chosen["slow_repeats"],
        memory=not (args.no_memory or args.quick),
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    columns = ("variant", "ms: best / median ± spread", "steps/s", "/ SGD", "/ EANA", "DP-SGD / this", "extra MB")
    for setting in dict.fromkeys(Setting(**row["setting"]) for row in result["rows"]):
        table = make_table(f"Dual encoder, {setting}", columns)
        for row in result["rows"]:
            if Setting(**row["setting"]) != setting:
                continue
            dense = row.get("dpsgd_over_this")
            table.add_row(
                VARIANTS[row["variant"]], milliseconds(row), f"{row['steps_per_second']:.3g}",
                f"{row['ratio_to_sgd']['best']:.2f}", f"{row['ratio_to_eana']['best']:.2f}",
                "-" if dense is None else f"{dense['best']:.3g}", megabytes(row),
            )  # fmt: skip
        console.print(table)
    base = [row for row in result["rows"] if row["base"]]
    if base:
        heads = [VARIANTS[row["variant"]] for row in base]
        title = f"Where the time goes, {Setting(**result['base'])}; best, ms"
        console.print(stage_table(title, base, heads))
    say_left_out(console, result, VARIANTS, Setting)
