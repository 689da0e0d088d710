"""`python -m benchmarks distributed`: its options, and its result as tables."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import default_text, make_table, milliseconds
from benchmarks.speed.distributed.measure import TASKS, bench_distributed
from benchmarks.speed.distributed.page import said_apart
from benchmarks.speed.distributed.scaling import HOSTS
from benchmarks.speed.distributed.setting import MODELS, SHARDINGS, VARIANTS, WAYS, Setting
from benchmarks.speed.machine import total_memory
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines

COMPARED = tuple(name for name in VARIANTS if name != "plain")  # which is always measured
FULL: dict[str, Any] = {"gigabytes": 0.25, "batch": 2048, "repeats": 10, "ids": (1,), "large": None}
QUICK: dict[str, Any] = {"gigabytes": 0.01, "batch": 128, "repeats": 2, "ids": (1,), "large": 0.05}
_MODELS, _SHARDINGS = ("dlrm", "light"), ("table_wise", "row_wise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument(
        "--task", choices=TASKS, action="append",
        help="what to measure: steps and bytes, scaling, lookups in one process, tables divided one by one, one large table "
        "(default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--model", choices=_MODELS, action="append", help="TorchRec's DLRM, or tables with one layer (default: both)"
    )
    parser.add_argument(
        "--sharding", choices=tuple(SHARDINGS), action="append",
        help=f"how tables are divided (default: {' and '.join(_SHARDINGS)}); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--variant", choices=COMPARED, action="append",
        help="what to compare with TorchRec (default: all); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--gigabytes", type=positive_number, metavar="GB",
        help=f"size of all tables together; up to nine times as much memory is used {default('gigabytes')}",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive_count, metavar="N", help=f"examples of each rank {default('batch')}")
    parser.add_argument(
        "--ids", type=positive_count, action="append", metavar="N",
        help=f"ids of each feature {default('ids')}; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"repeats of each variant {default('repeats')}"
    )
    parser.add_argument(
        "--large", type=positive_number, metavar="GB",
        help="size of the one table that is divided among two processes "
        f"(default: half of the machine's memory; {QUICK['large']:g} with --quick)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="some minutes: small, few repeats")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    settings = [
        Setting(model, sharding, chosen["gigabytes"], chosen["batch"], ids)
        for model in args.model or _MODELS
        for sharding in args.sharding or _SHARDINGS
        for ids in chosen["ids"]
    ]
    return bench_distributed(
        settings,
        large=chosen["large"] or total_memory() / 2e9,
        repeats=chosen["repeats"],
        full=not args.quick,
        tasks=args.task or TASKS,
        variants=args.variant or COMPARED,
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    columns = (
        "variant",
        "ms: best / median ± spread",
        "/ TorchRec",
        "of medians",
        "of processor time",
        "kB sent",
        "/ TorchRec",
    )
    for setting in dict.fromkeys(Setting(**row["setting"]) for row in result["rows"]):
        table = make_table(f"{setting}, {result['ranks']} processes", columns)
        for row in (row for row in result["rows"] if Setting(**row["setting"]) == setting):
            sent = row["bytes_ratio_to_plain"]
            table.add_row(
                VARIANTS[row["variant"]], milliseconds(row), f"{row['ratio_to_plain']['best']:.2f}",
                f"{row['ratio_to_plain']['median']:.2f}", f"{row['processor_ratio_to_plain']['best']:.2f}",
                f"{row['bytes']['step'] / 1e3:,.0f}", "-" if sent is None else f"{sent:.3f}",
            )  # fmt: skip
        console.print(table)
    if result["scaling"] is not None:
        _show_scaling(console, result["scaling"])
    for row in result["lookups"]:
        shares = ", ".join(f"{WAYS[name]} {100 * way['share_of_step']:.2f} %" for name, way in row["ways"].items())
        console.print(
            f"{row['tables']} lookups of {row['model']} in one process, of a private step: {shares}", markup=False
        )
    for row in result["apart"]:
        console.print(f"{Setting(**row['setting'])}: {said_apart(row)}", markup=False)
    if result["large"] is not None:
        _show_large(console, result["large"])


def _show_scaling(console: Console, scaling: dict[str, Any]) -> None:
    console.print(
        f"A message takes {1e6 * scaling['latency']:.0f} us, and {scaling['bandwidth'] / 1e9:.2f} GB go in a second.",
        highlight=False,
    )
    is_fitted = all("model" in row for row in scaling["rows"])
    hosts_shown = HOSTS if is_fitted else ()
    table = make_table(
        f"Weak scaling, ms: measured on 1 and 2 processes{', and a model of more hosts' if is_fitted else ''}",
        ("", "measured: 1", "2", *(f"model: {hosts}" if hosts == HOSTS[0] else str(hosts) for hosts in hosts_shown)),
    )
    for row in scaling["rows"]:
        setting = Setting(**row["setting"])
        times = [row["measured"]["1"], row["measured"]["2"], *(row["model"][str(hosts)] for hosts in hosts_shown)]
        name = f"{MODELS[setting.model]}, {SHARDINGS[setting.sharding]}, {VARIANTS[row['variant']]}"
        table.add_row(name, *(f"{1e3 * seconds:.0f}" for seconds in times))
    console.print(table)


def _show_large(console: Console, large: dict[str, Any]) -> None:
    setting = Setting(**large["setting"])
    if large["left_out"] is not None:
        console.print(f"Left out: {setting}, {large['left_out']}.", markup=False)
        return
    table = make_table(
        f"{setting}, 2 processes", ("variant", "steps", "ms of a step, median", "peak GB of each", "of both")
    )
    for row in large["rows"]:
        peaks = [rank["peak_bytes"] / 1e9 for rank in row["ranks"]]
        seconds = sorted(row["ranks"][0]["seconds"])
        table.add_row(
            VARIANTS[row["variant"]], str(len(seconds)), f"{1e3 * seconds[len(seconds) // 2]:.0f}",
            ", ".join(f"{peak:.2f}" for peak in peaks), f"{sum(peaks):.2f}",
        )  # fmt: skip
    console.print(table)
