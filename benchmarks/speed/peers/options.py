"""`python -m benchmarks peers`: its options, and its result as tables."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.speed.console import default_text, make_table, milliseconds
from benchmarks.speed.peers.bounds import TITLES
from benchmarks.speed.peers.measure import PEERS, bench_peers
from benchmarks.speed.peers.page import epsilon, setting, verdict
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.progress import Lines

COMPARED = tuple(name for name in PEERS if name != "plain")  # which is always measured
FULL: dict[str, Any] = {
    "rows": [10_000, 100_000, 1_000_000, 10_000_000], "repeats": 2, "steps": 20, "seconds": 0.7, "limit": 20.0
}  # fmt: skip
QUICK: dict[str, Any] = {"rows": [10_000, 100_000], "repeats": 1, "steps": 5, "seconds": 0.3, "limit": 5.0}
TENSORFLOW = "SPARSEDP_TENSORFLOW_PYTHON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = partial(default_text, FULL, QUICK)
    parser.add_argument(
        "--rows", type=positive_count, action="append", metavar="N",
        help="rows of the table (default: 10^4, 10^5, 10^6, 10^7; the first two with --quick); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--peer", choices=COMPARED, action="append", help="what to compare with PyTorch (default: all); may be repeated"
    )
    parser.add_argument(
        "--repeats", type=positive_count, metavar="N", help=f"processes of each peer {default('repeats')}"
    )
    parser.add_argument(
        "--steps", type=positive_count, metavar="N", help=f"steps of a process at a size {default('steps')}"
    )
    parser.add_argument(
        "--seconds", type=positive_number, metavar="S", help=f"after which it takes no more {default('seconds')}"
    )
    parser.add_argument(
        "--limit", type=positive_number, metavar="S", help=f"seconds that a step may take {default('limit')}"
    )
    parser.add_argument(
        "--gigabytes", type=positive_number, metavar="GB",
        help="memory that a process may take (default: nine tenths of what is available)",
    )  # fmt: skip
    parser.add_argument(
        "--tensorflow-python", default=os.environ.get(TENSORFLOW), metavar="FILE",
        help=f"interpreter of the environment with TF-Privacy (default: the variable {TENSORFLOW})",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small tables, one round")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `--json` writes."""
    chosen = {key: getattr(args, key) or value for key, value in (QUICK if args.quick else FULL).items()}
    return bench_peers(
        chosen["rows"],
        peers=args.peer or COMPARED,
        rounds=chosen["repeats"],
        steps=chosen["steps"],
        seconds=chosen["seconds"],
        limit=chosen["limit"],
        gigabytes=args.gigabytes,
        tensorflow_python=args.tensorflow_python,
        say=Lines(Console(stderr=True)).say,
    )


def show(console: Console, result: dict[str, Any]) -> None:
    titles = {peer["variant"]: peer["title"] for peer in result["peers"]}
    console.print(setting(result), highlight=False, markup=False)
    columns = (
        "peer",
        "ms: best / median ± spread",
        "examples/s",
        "/ PyTorch",
        "/ AdaFEST",
        "memory beyond the table, MB",
    )
    for size in dict.fromkeys(row["rows"] for row in [*result["rows"], *result["left_out"]]):
        table = make_table(f"{size:,} rows", columns)
        for row in (row for row in result["rows"] if row["rows"] == size):
            ratios = [row.get(f"ratio_to_{other}") for other in ("plain", "adafest")]
            table.add_row(
                titles[row["variant"]], milliseconds(row), f"{row['examples_per_second']:,.0f}",
                *("-" if ratio is None else f"{ratio['best']:.2f}" for ratio in ratios),
                f"{row['extra_memory']['bytes'] / 1e6:.0f}",
            )  # fmt: skip
        for gone in (gone for gone in result["left_out"] if gone["rows"] == size):
            table.add_row(titles[gone["variant"]], gone["reason"])
        console.print(table)
    bounds = make_table("Epsilon, and whether clipped sums honour the bound", ("peer", "epsilon", *TITLES.values()))
    for peer in result["peers"]:
        if "absent" not in peer:
            cells = [verdict(peer.get("bounds", {}).get(kind)) for kind in TITLES]
            bounds.add_row(peer["title"], epsilon(peer), *cells)
    console.print(bounds)
    for peer in result["peers"]:
        if "absent" in peer:
            console.print(f"{peer['title']}: absent: {peer['absent']}", markup=False)
        for kind, bound in peer.get("bounds", {}).items():
            if bound["outcome"] == "refused":
                console.print(f"{peer['title']}, {TITLES[kind]}: refused: {bound['reason']}", markup=False)
