"""`python -m benchmarks compare`: its options, and its result as a table."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare.measure import bench_compare
from benchmarks.compare.problem import PLAIN, VARIANTS, Problem
from benchmarks.speed.console import default_text, make_table
from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.errors import SparseDPError

FULL: dict[str, Any] = {"repeats": 40, "batch": {"step": 2048, "vocabulary": 1024, "tied": 64}, "scale": 0.2}
QUICK: dict[str, Any] = {"repeats": 5, "batch": {"step": 256, "vocabulary": 256, "tied": 16}, "scale": 0.01}
ROWS = {"step": (0, 0), "vocabulary": (1_000_000, 10_000), "tied": (3400, 200)}  # and with --quick
LENGTH = (100, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the package of this tree with that of a git revision: two processes whose steps of the same model take turns, "
        "so that the machine's slow moments meet both. The models are this tree's. The revision is checked out into a "
        "temporary folder. Ratios are this tree / base."
    )
    default = partial(default_text, FULL, QUICK)
    parser.add_argument("--base", required=True, metavar="REV", help="the git revision to compare with")
    parser.add_argument(
        "--part", choices=tuple(VARIANTS), default="vocabulary", help="which model (default: %(default)s)"
    )
    parser.add_argument(
        "--mechanism", action="append", metavar="NAME",
        help=f"one of the part's variants (default: all); may be repeated. '{PLAIN}', PyTorch alone, always runs: its ratio "
        f"should be 1. {'; '.join(f'{part}: ' + ', '.join(names[1:]) for part, names in VARIANTS.items())}",
    )  # fmt: skip
    parser.add_argument("--repeats", type=positive_count, metavar="N", help=f"turns of each {default('repeats')}")
    parser.add_argument("--batch", type=positive_count, metavar="N", help="units in a batch (default: the part's own)")
    parser.add_argument(
        "--rows",
        type=positive_count,
        metavar="N",
        help="vocabulary: rows of the table; tied: items (default: 1,000,000; 3400)",
    )
    parser.add_argument(
        "--scale",
        type=positive_number,
        metavar="X",
        help=f"step: Criteo's vocabulary sizes times this {default('scale')}",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, to see that it works")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the result goes (default: runs/compare/BASE-PART.json)"
    )


def problem_of(args: argparse.Namespace) -> Problem:
    part, chosen = args.part, QUICK if args.quick else FULL
    unknown = [name for name in args.mechanism or () if name not in VARIANTS[part]]
    if unknown:
        raise SparseDPError(f"{part} has no variant '{unknown[0]}'. Its variants are {', '.join(VARIANTS[part])}.")
    variants = tuple(dict.fromkeys((PLAIN, *(args.mechanism or VARIANTS[part]))))
    return Problem(
        part=part,
        variants=variants,
        batch=args.batch or chosen["batch"][part],
        rows=args.rows or ROWS[part][args.quick],
        scale=args.scale or chosen["scale"],
        length=LENGTH[args.quick],
    )


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise SparseDPError(f"There is no folder '{args.json.parent}' to write '{args.json.name}' into.")
    problem, repeats = problem_of(args), args.repeats or (QUICK if args.quick else FULL)["repeats"]
    # Whoever ends the command by a signal leaves no checkout behind either.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = bench_compare(problem, args.base, repeats=repeats, say=partial(console.print, markup=False))
    finally:
        signal.signal(signal.SIGTERM, before)
    path = args.json or Path("runs") / "compare" / f"{result['base']}-{problem.part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    show(console, result)
    console.print(f"written to {path}", markup=False)
    return 0


def show(console: Console, result: dict[str, Any]) -> None:
    """Processor time hardly changes with what else the machine does; its ratios are the ones to trust on a busy one."""
    table = make_table(
        f"This tree / {result['base']}: {result['title']}; median of paired turns (quartiles)",
        ("variant", "best, ms: base, this", "ratio of best", "ratio of turns", "processor, best", "processor, turns"),
    )
    for row in result["rows"]:
        busy = row["processor"]["this"] / row["processor"]["base"]
        table.add_row(
            row["variant"], f"{1e3 * row['base']['best']:.2f}, {1e3 * row['this']['best']:.2f}",
            f"{row['ratio_of_best']:.3f}", _quartiles(row["ratio"]), f"{busy:.3f}", _quartiles(row["processor_ratio"]),
        )  # fmt: skip
    console.print(table)


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"
