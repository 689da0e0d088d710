"""`python -m benchmarks secret-sharer`: its options, and its result as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.secret_sharer.measure import TOP, Row, measure
from benchmarks.speed.console import prepare_output
from sparsedp.audit.secret_sharers import REPETITIONS
from sparsedp.cli.arguments import positive_count
from sparsedp.cli.progress import make_reporter
from sparsedp.cli.runfolder import plain

SWEEP = Path(__file__).parent / "timelines-sweep.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Precision@k against exposure of canaries for SGD, DP-SGD, LazyDP, EANA and AdaFEST (EANA paper, figures 4 and 5). Runs "
        "that are finished are not run again."
    )
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", type=Path, default=SWEEP, help=f"the runs ({SWEEP.name})")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", default=Path("runs/secret-sharer"), help="their folder")
    parser.add_argument(
        "--canaries", type=positive_count, metavar="N", default=10, help="for each number of repetitions (10)"
    )
    parser.add_argument(
        "--references", type=positive_count, metavar="N", default=4096, help="that are not inserted (4096)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    prepare_output(args)
    console = Console()
    reporter = make_reporter(console, quiet=False)
    rows = measure(args.sweep, args.run_dir, REPETITIONS, args.canaries, args.references, reporter)
    if args.json is not None:
        args.json.write_text(json.dumps(plain([row.to_dict() for row in rows]), indent=2) + "\n")
    console.print(markdown(rows), markup=False, soft_wrap=True)
    if args.plots is not None:
        from benchmarks.secret_sharer.plots import write_plots

        write_plots(rows, args.plots)
    return 0


def markdown(rows: Sequence[Row]) -> str:
    """A row for each run: precision@k, and the median exposure by extrapolation at each number of repetitions."""
    counts = [entry.repetitions for entry in rows[0].result.exposures]
    head = ["run", "epsilon", *(f"p@{k}" for k in TOP), *(f"{count}x" for count in counts)]
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for row in rows:
        epsilon = row.epsilon if isinstance(row.epsilon, str) else f"{row.epsilon:,.2f}"
        exposures = [f"{entry.extrapolated.median:.1f}" for entry in row.result.exposures]
        cells = [row.label, epsilon, *(f"{100 * row.precision[str(k)]:.2f}" for k in TOP), *exposures]
        lines.append("| " + " | ".join(cells) + " |")
    popular = [f"{100 * value:.2f}" for value in rows[0].popularity.values()]
    lines.append("| " + " | ".join(["the most popular items", "", *popular, *[""] * len(counts)]) + " |")
    return "\n".join(lines)
