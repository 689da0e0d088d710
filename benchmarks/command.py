"""`sparsedp bench`: measures on this machine.

Each part is a module with its options, what it measures, and its tables; sparsedp.report has its plots (<part>plots.py) and its
section of the page that `sparsedp bench all` makes (speed/<part>.py).
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.cli import (
    benchall,
    benchbound,
    benchdual,
    benchgrowth,
    benchlazydp,
    benchmemory,
    benchnoise,
    benchpeers,
    benchstep,
    benchtied,
    benchvocabulary,
)
from sparsedp.cli.benchtables import prepare_output

PARTS = {
    "step": (benchstep, "a private step against a plain PyTorch one, with a breakdown by stage"),
    "vocabulary": (benchvocabulary, "one table of 10^5 to 10^7 rows under every mechanism (DP-AdaFEST's Table 4)"),
    "lazydp": (
        benchlazydp,
        "DLRM under SGD, DP-SGD(B, R, F), LazyDP, EANA and AdaFEST (LazyDP's figures 10, 11, 13 and 14)",
    ),
    "tied": (benchtied, "a Transformer with tied item tables, private and not (DPFormer's figure 3)"),
    "dual": (benchdual, "a dual encoder under SGD, DP-SGD, EANA, LazyDP and AdaFEST (EANA's Table 3)"),
    "bound": (
        benchbound,
        "the stages of plain and private steps against the least that they could take on this machine",
    ),
    "growth": (benchgrowth, "how a step's time grows with batch, tables, dim, rows and length, as fitted exponents"),
    "peers": (
        benchpeers,
        "SparseDP beside FBGEMM, Opacus, JAX Privacy and TF-Privacy on one table of 10^4 to 10^7 rows",
    ),
    "memory": (benchmemory, "a table of half of the machine's memory, trained, settled, saved and loaded"),
    "noise": (benchnoise, "normal numbers from ChaCha8 against torch's own"),
}
WITHOUT_PLOTS = frozenset({"noise"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure speed on this machine, as ratios of interleaved repeats."
    kinds = parser.add_subparsers(dest="what", required=True)
    benchall.add_arguments(
        kinds.add_parser("all", help="all parts, one after another, and the page that they make"), PARTS
    )
    for name, (part, summary) in PARTS.items():
        options = kinds.add_parser(name, help=summary)
        part.add_arguments(options)
        options.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
        options.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.what == "all":
        return benchall.run(args, console)
    prepare_output(args)
    part = PARTS[args.what][0]
    result = part.measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    part.show(console, result)
    if args.json is not None:
        console.print(f"written to {args.json}")
    if args.plots is not None:
        console.print(_plot(args.what, result, args.plots), markup=False)
    return 0


def _plot(part: str, result: dict[str, Any], folder: Path) -> str:
    if part in WITHOUT_PLOTS:
        return f"bench {part} has no plots"
    write = getattr(import_module(f"sparsedp.report.{part}plots"), f"write_{part}_plots")
    return f"plots in {folder}: {', '.join(write(result, folder))}"
