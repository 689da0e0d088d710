"""`python -m benchmarks`: measures on this machine, as ratios of interleaved repeats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import reading, startup
from benchmarks.audit import bound
from benchmarks.compare import options as compare
from benchmarks.convex import options as convex
from benchmarks.floating import options as floating
from benchmarks.secret_sharer import options as secret_sharer
from benchmarks.speed import all_parts
from benchmarks.speed.console import prepare_output
from benchmarks.speed.parts import PARTS, options_of, plots_of
from benchmarks.texts import options as texts
from sparsedp.cli.main import run_command

PROGRAM = "python -m benchmarks"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Measure speed and memory on this machine, as ratios of interleaved repeats."
    )
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(metavar="PART", required=True)
    whole = commands.add_parser("all", help="all parts, one after another, and the pages that they make")
    all_parts.add_arguments(whole)
    whole.set_defaults(run=all_parts.run)
    page = commands.add_parser("page", help="plots and pages of a results.json again, without a measurement")
    all_parts.add_page_arguments(page)
    page.set_defaults(run=all_parts.run_page)
    other = commands.add_parser("compare", help="this tree against another revision, in steps that take turns")
    compare.add_arguments(other)
    other.set_defaults(run=compare.run)
    means = commands.add_parser(
        "convex", help="private means of sparse rows: time, memory, and errors beside the paper's rates"
    )
    convex.add_arguments(means)
    bounds = commands.add_parser("audit-bound", help="audits of every mechanism: claimed epsilons and lower bounds")
    bound.add_arguments(bounds)
    bounds.set_defaults(run=bound.run)
    means.set_defaults(run=convex.run)
    lattice = commands.add_parser(
        "floating", help="attacks on floating-point noise: can bit patterns tell rows with a gradient from others?"
    )
    floating.add_arguments(lattice)
    lattice.set_defaults(run=floating.run)
    exposure = commands.add_parser(
        "secret-sharer", help="what models remember of canaries, by mechanism and noise, beside their precision"
    )
    secret_sharer.add_arguments(exposure)
    exposure.set_defaults(run=secret_sharer.run)
    readers = commands.add_parser("reading", help="rows per second and memory of reading a click log")
    reading.add_arguments(readers)
    readers.set_defaults(run=reading.run)
    questions = commands.add_parser("startup", help="seconds of `sparsedp --version` and `--help`")
    startup.add_arguments(questions)
    questions.set_defaults(run=startup.run)
    classifiers = commands.add_parser(
        "texts", help="what the experiments on texts start from, and LoRA's gradient sizes"
    )
    texts.add_arguments(classifiers)
    for name, summary in PARTS.items():
        part = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        options_of(name).add_arguments(part)
        part.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
        part.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots there; needs matplotlib")
        part.set_defaults(run=_run_part, part=name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return run_command(PROGRAM, args)


def _run_part(args: argparse.Namespace) -> int:
    console, options = Console(), options_of(args.part)
    prepare_output(args)
    result = options.measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    options.show(console, result)
    if args.json is not None:
        console.print(f"written to {args.json}")
    if args.plots is not None:
        written = plots_of(args.part).write_plots(result, args.plots)
        console.print(f"plots in {args.plots}: {', '.join(written)}", markup=False)
    return 0
