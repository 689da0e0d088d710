"""`python -m benchmarks tied`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import default_text, make_table, milliseconds, ratio_table, say_left_out, stage_table
from benchmarks.speed.tied.measure import QUANTITIES, VARIANTS, Setting, bench_tied
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines

COMPARED = tuple(name for name in VARIANTS if name != "plain")  # which is always measured
FULL = {"items": Setting.items, "length": Setting.length, "batch": Setting.batch, "repeats": 8, "slow_repeats": 2}
QUICK = {"items": 500, "length": 20, "batch": 16, "repeats": 3, "slow_repeats": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument("--items", type=positive_count, metavar="N", help=f"items in the vocabulary {default('items')}")
    parser.add_argument(
        "--length", type=positive_count, metavar="N", help=f"positions of a sequence {default('length')}"
    )
    parser.add_argument("--batch", type=positive_count, metavar="N", help=f"units in a batch {default('batch')}")
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"repeats of a variant {default('repeats')}"
    )
    parser.add_argument(
        "--slow-repeats", type=positive_count, metavar="N",
        help=f"of per-example gradients and ghost clipping {default('slow_repeats')}",
    )  # fmt: skip
    parser.add_argument(
        "--vary", choices=(*QUANTITIES, "none"), action="append",
        help="what to vary, one at a time (default: all; none with --quick); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--variant", choices=COMPARED, action="append",
        help="what to compare with plain PyTorch (default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--gigabytes", type=positive_number, default=16.0, metavar="GB",
        help="memory that the largest batch is stated for (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes processes")
    parser.add_argument("--quick", action="store_true", help="under a minute: small, few repeats, no memory")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    vary = args.vary or (("none",) if args.quick else QUANTITIES)
    return bench_tied(
        Setting(items=chosen["items"], length=chosen["length"], batch=chosen["batch"]),
        vary=[name for name in QUANTITIES if name in vary],
        variants=args.variant or COMPARED,
        repeats=chosen["repeats"],
        slow_repeats=chosen["slow_repeats"],
        memory=not (args.no_memory or args.quick),
        gigabytes=args.gigabytes,
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    base = [row for row in result["rows"] if row["base"]]
    if base:
        console.print(f"Tied Transformer, {Setting(**result['base'])}", highlight=False)
        peaks = {row["variant"]: row for row in result["largest"]}
        fits = f"largest batch, {result['gigabytes']:g} GB"
        columns = ("variant", "ms: best / median ± spread", "/ PyTorch", "of medians", "/ chunked", "MB per unit", fits)
        table = make_table("A step", columns)
        for row in base:
            peak = peaks.get(row["variant"], {})
            chunked = row.get("ratio_to_chunked")
            table.add_row(
                VARIANTS[row["variant"]], milliseconds(row), f"{row['ratio_to_plain']['best']:.2f}",
                f"{row['ratio_to_plain']['median']:.2f}", "-" if chunked is None else f"{chunked['best']:.2f}",
                f"{peak['bytes_each'] / 1e6:.2f}" if peak else "-", f"{peak['largest_batch'] or '-'}" if peak else "-",
            )  # fmt: skip
        console.print(table)
        heads = [VARIANTS[row["variant"]] for row in base]
        console.print(stage_table("Where the time goes; best, ms", base, heads))
    for name, quantity in QUANTITIES.items():
        along = [row for row in result["rows"] if name in row["varied"]]
        if along:
            ratios = [(title, variant, "ratio_to_plain") for variant, title in VARIANTS.items() if variant != "plain"]
            console.print(ratio_table(quantity.title, name, along, ("PyTorch", "plain"), ratios))
    say_left_out(console, result, VARIANTS, Setting)
