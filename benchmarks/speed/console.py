"""What the parts' commands share: options, checks before a long run, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.speed.stages import stages_of
from sparsedp.errors import SparseDPError


def default_text(full: Mapping[str, Any], quick: Mapping[str, Any], key: str) -> str:
    """For an option's help: its default."""
    shown = [", ".join(map(str, of[key])) if isinstance(of[key], tuple) else f"{of[key]:g}" for of in (full, quick)]
    return f"(default: {shown[0]}; {shown[1]} with --quick)"


def prepare_output(args: argparse.Namespace) -> None:
    """Refuses before the run what could not be written after it."""
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise SparseDPError(f"There is no folder '{args.json.parent}' to write '{args.json.name}' into.")
    if args.plots is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise SparseDPError("--plots needs matplotlib: pip install 'sparsedp[plot]'") from error
        args.plots.mkdir(parents=True, exist_ok=True)


def milliseconds(timing: dict[str, float]) -> str:
    return f"{1e3 * timing['best']:.1f} / {1e3 * timing['median']:.1f} ± {1e3 * timing['spread']:.1f}"


def megabytes(row: Mapping[str, Any], key: str = "memory") -> str:
    """A row's peak memory; a dash if it was not measured."""
    return f"{row[key] / 1e6:,.1f}" if key in row else "-"


def make_table(title: str, columns: Sequence[str]) -> Table:
    """The first column is never cut; the heads of others may take several lines."""
    table = Table(title=title)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def stage_table(title: str, rows: list[dict[str, Any]], heads: Sequence[str]) -> Table:
    """Best times of the stages, one column for each of `rows`."""
    table = make_table(title, ("stage", *heads))
    for stage in stages_of(rows):
        times = [row["stages"].get(stage) for row in rows]
        table.add_row(stage, *("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in times))
    return table


def ratio_table(
    title: str, key: str, rows: list[dict[str, Any]], unit: tuple[str, str], ratios: Iterable[tuple[str, str, str]]
) -> Table:
    """One column for each value of the quantity `key`. `unit` is the title and the variant whose own time comes first.

    `ratios` are lines of a title, a variant and the name of its ratio; those that were not measured are left out.
    """
    values = list(dict.fromkeys(row["setting"][key] for row in rows))
    if not isinstance(values[0], str):
        values.sort()
    columns = [value if isinstance(value, str) else f"{value:g}" for value in values]
    table = make_table(f"{title}: a step / {unit[0]}'s, best", ("variant", *columns))
    row_of = {(row["variant"], row["setting"][key]): row for row in rows}

    def line(label: str, variant: str, of: Callable[[dict[str, Any]], str]) -> None:
        cells = [row_of.get((variant, value)) for value in values]
        if any(cells):
            table.add_row(label, *("-" if row is None else of(row) for row in cells))

    line(f"{unit[0]}, ms", unit[1], lambda row: f"{1e3 * row['best']:.1f}")
    for label, variant, ratio in ratios:
        line(label, variant, lambda row, ratio=ratio: f"{row[ratio]['best']:.2f}")  # type: ignore[misc]
    return table


def say_left_out(
    console: Console, result: dict[str, Any], names: dict[str, str], setting: Callable[..., object]
) -> None:
    for gone in result["left_out"]:
        variants = ", ".join(names[name] for name in gone["variants"])
        console.print(f"Left out at {setting(**gone['setting'])}, {gone['reason']}: {variants}", markup=False)
