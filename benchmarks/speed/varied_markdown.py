"""What the sections of benchmarks share that vary one quantity at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsedp.bench.varied import Quantity, stages_of
from sparsedp.report.speed.tables import markdown_table, megabytes, times

Rows = Sequence[Mapping[str, Any]]


def ratios_along(rows: Rows, key: str, quantity: Quantity, names: Mapping[str, str], unit: str, ratio: str) -> str:
    """A table of steps in units of the step of the variant `unit`, whose own time is the first line. "" if none was varied."""
    mine = [row for row in rows if key in row["varied"]]
    if not mine:
        return ""
    values, heads = _values(mine, key)
    found = {(row["variant"], row["setting"][key]): row for row in mine}
    lines = [[f"{names[unit]}, ms", *(f"{1e3 * found[unit, value]['best']:.0f}" for value in values)]]
    for name, title in names.items():
        if name != unit and any((name, value) in found for value in values):
            cells = [found.get((name, value), {}).get(ratio) for value in values]
            lines.append([title, *map(times, cells)])
    return f"{quantity.title}; steps / {names[unit]}'s:\n\n{markdown_table(('', *heads), lines)}"


def memory_along(rows: Rows, key: str, names: Mapping[str, str]) -> str:
    """A table of peak memory, for the same rows as `ratios_along`. "" if none was measured."""
    mine = [row for row in rows if key in row["varied"] and "memory" in row]
    if not mine:
        return ""
    values, heads = _values(mine, key)
    found = {(row["variant"], row["setting"][key]): row for row in mine}
    lines = [
        [title, *(megabytes(found.get((name, value), {})) for value in values)]
        for name, title in names.items()
        if any((name, value) in found for value in values)
    ]
    return markdown_table(("peak memory beyond the tables, MB", *heads), lines)


def _values(rows: Rows, key: str) -> tuple[list[Any], list[str]]:
    """Of a quantity, in their order, and as heads of columns."""
    values = list(dict.fromkeys(row["setting"][key] for row in rows))
    values = values if isinstance(values[0], str) else sorted(values)
    return values, [value if isinstance(value, str) else f"{value:g}" for value in values]


def stage_lines(rows: Rows, names: Mapping[str, str], order: Sequence[str]) -> str:
    """Best times of the stages, one column for each of the rows."""
    return markdown_table(
        ("stage, best, ms", *(names[row["variant"]] for row in rows)),
        (
            [stage, *(f"{1e3 * row['stages'][stage]:.1f}" if stage in row["stages"] else "-" for row in rows)]
            for stage in stages_of(rows, order)
        ),
    )
