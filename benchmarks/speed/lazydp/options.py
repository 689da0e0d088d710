"""`sparsedp bench lazydp`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from sparsedp.cli.benchtables import (
    default_text,
    make_table,
    megabytes,
    milliseconds,
    positive,
    positive_number,
    ratio_table,
    say_left_out,
    stage_table,
)
from sparsedp.cli.progress import Lines

# As in sparsedp.bench.lazydp, which is only loaded to measure.
VARIED = ("batch", "gigabytes", "pooling", "skew")
VARIANTS = ("dpsgd_b", "dpsgd_r", "dpsgd_f", "lazydp_unaggregated", "lazydp", "eana", "adafest")
FULL = {"gigabytes": 1.0, "batch": 2048, "repeats": 8, "slow_repeats": 2}
QUICK = {"gigabytes": 0.01, "batch": 64, "repeats": 3, "slow_repeats": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument(
        "--gigabytes", type=positive_number, metavar="GB",
        help=f"size of all tables together; up to six times as much memory is used {default('gigabytes')}",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive, metavar="N", help=f"units in a batch {default('batch')}")
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help=f"repeats of the fast variants {default('repeats')}"
    )
    parser.add_argument(
        "--slow-repeats", type=positive, metavar="N",
        help=f"of those that take time for every row {default('slow_repeats')}",
    )  # fmt: skip
    parser.add_argument(
        "--vary", choices=(*VARIED, "none"), action="append",
        help="what to vary, one at a time (default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--variant", choices=VARIANTS, action="append", help="what to compare with SGD (default: all); may be repeated"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--quick", action="store_true", help="under a minute: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    from sparsedp.bench.lazydp import Setting, bench_lazydp

    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_lazydp(
        Setting(gigabytes=chosen["gigabytes"], batch=int(chosen["batch"])),
        vary=[name for name in VARIED if name in (args.vary or VARIED)],
        variants=args.variant or VARIANTS,
        repeats=int(chosen["repeats"]),
        slow_repeats=int(chosen["slow_repeats"]),
        memory=not (args.no_memory or args.quick),
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    from sparsedp.bench.lazydp import QUANTITIES, STAGES, Setting
    from sparsedp.bench.lazydp import VARIANTS as NAMES
    from sparsedp.bench.varied import stages_of

    base = [row for row in result["rows"] if row["base"]]
    if base:
        rows = f"{base[0]['table_rows']:,} rows, of which a batch touches {base[0]['rows_touched']:,}"
        console.print(f"DLRM, {Setting(**result['base'])}: {rows}", highlight=False)
        table = make_table("A step", ("variant", "ms: best / median ± spread", "/ SGD", "of medians", "extra MB"))
        for row in base:
            table.add_row(
                NAMES[row["variant"]], milliseconds(row), f"{row['ratio_to_sgd']['best']:.2f}",
                f"{row['ratio_to_sgd']['median']:.2f}", megabytes(row),
            )  # fmt: skip
        console.print(table)
        heads = [NAMES[row["variant"]].replace("(", " (") for row in base]  # where a narrow terminal may break the line
        console.print(stage_table("Where the time goes (figure 11); best, ms", stages_of(base, STAGES), base, heads))
    for name, quantity in QUANTITIES.items():
        along = [row for row in result["rows"] if name in row["varied"]]
        if along:
            ratios = [(title, variant, "ratio_to_sgd") for variant, title in NAMES.items() if variant != "sgd"]
            if any(row["variant"] == "eana" for row in along):
                ratios.append(("LazyDP / EANA", "lazydp", "ratio_to_eana"))
            console.print(ratio_table(quantity.title, name, along, ("SGD", "sgd"), ratios))
    for row in base:
        if "settle" in row:
            console.print(
                f"Settling all tables at the end takes {milliseconds(row['settle'])} ms (best / median ± spread)."
            )
    say_left_out(console, result, NAMES, Setting)
