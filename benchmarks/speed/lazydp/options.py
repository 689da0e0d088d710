"""`python -m benchmarks lazydp`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import (
    default_text,
    make_table,
    megabytes,
    milliseconds,
    ratio_table,
    say_left_out,
    stage_table,
)
from benchmarks.speed.lazydp.measure import QUANTITIES, VARIANTS, Setting, bench_lazydp
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines

COMPARED = tuple(name for name in VARIANTS if name != "sgd")  # which is always measured
FULL = {"gigabytes": Setting.gigabytes, "batch": Setting.batch, "repeats": 8, "slow_repeats": 2}
QUICK = {"gigabytes": 0.01, "batch": 64, "repeats": 3, "slow_repeats": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument(
        "--gigabytes", type=positive_number, metavar="GB",
        help=f"size of all tables together; up to six times as much memory is used {default('gigabytes')}",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive_count, metavar="N", help=f"units in a batch {default('batch')}")
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"repeats of the fast variants {default('repeats')}"
    )
    parser.add_argument(
        "--slow-repeats", type=positive_count, metavar="N",
        help=f"of those that take time for every row {default('slow_repeats')}",
    )  # fmt: skip
    parser.add_argument(
        "--vary", choices=(*QUANTITIES, "none"), action="append",
        help="what to vary, one at a time (default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--variant", choices=COMPARED, action="append", help="what to compare with SGD (default: all); may be repeated"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="under a minute: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_lazydp(
        Setting(gigabytes=chosen["gigabytes"], batch=int(chosen["batch"])),
        vary=[name for name in QUANTITIES if name in (args.vary or QUANTITIES)],
        variants=args.variant or COMPARED,
        repeats=int(chosen["repeats"]),
        slow_repeats=int(chosen["slow_repeats"]),
        memory=not (args.no_memory or args.quick),
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    base = [row for row in result["rows"] if row["base"]]
    if base:
        rows = f"{base[0]['table_rows']:,} rows, of which a batch touches {base[0]['rows_touched']:,}"
        console.print(f"DLRM, {Setting(**result['base'])}: {rows}", highlight=False)
        table = make_table("A step", ("variant", "ms: best / median ± spread", "/ SGD", "of medians", "extra MB"))
        for row in base:
            table.add_row(
                VARIANTS[row["variant"]], milliseconds(row), f"{row['ratio_to_sgd']['best']:.2f}",
                f"{row['ratio_to_sgd']['median']:.2f}", megabytes(row),
            )  # fmt: skip
        console.print(table)
        heads = [
            VARIANTS[row["variant"]].replace("(", " (") for row in base
        ]  # where a narrow terminal may break the line
        console.print(stage_table("Where the time goes (figure 11); best, ms", base, heads))
    for name, quantity in QUANTITIES.items():
        along = [row for row in result["rows"] if name in row["varied"]]
        if along:
            ratios = [(title, variant, "ratio_to_sgd") for variant, title in VARIANTS.items() if variant != "sgd"]
            if any(row["variant"] == "eana" for row in along):
                ratios.append(("LazyDP / EANA", "lazydp", "ratio_to_eana"))
            console.print(ratio_table(quantity.title, name, along, ("SGD", "sgd"), ratios))
    for row in base:
        if "settle" in row:
            console.print(
                f"Settling all tables at the end takes {milliseconds(row['settle'])} ms (best / median ± spread)."
            )
    say_left_out(console, result, VARIANTS, Setting)
