"""Markdown that the pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.speed.stages import stages_of
from benchmarks.speed.varied import Quantity

Rows = Sequence[Mapping[str, Any]]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, with columns of numbers to the right."""
    cells = [list(line) for line in lines]
    numbers = [all(_is_number(line[column]) for line in cells) for column in range(len(head))]
    rows = [list(head), ["---:" if right else "---" for right in numbers], *cells]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number as these tables write them, with or without a unit."""
    return cell in ("", "-") or cell.lstrip("-")[0].isdigit()


def milliseconds(timing: Mapping[str, Any]) -> str:
    """best (median ± spread), of a timing in seconds."""
    best, median, spread = (1e3 * timing[key] for key in ("best", "median", "spread"))
    digits = 0 if best >= 100 else 1 if best >= 10 else 2
    return f"{best:.{digits}f} ({median:.{digits}f} ± {spread:.{digits}f})"


def megabytes(row: Mapping[str, Any], tables: int | None = None) -> str:
    """A row's peak memory, with its share of the tables' bytes if these are given; a dash if it was not measured."""
    if "memory" not in row:
        return "-"
    share = "" if tables is None else f" ({number(100 * row['memory'] / tables)} %)"
    return f"{row['memory'] / 1e6:,.1f}{share}"


def number(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: Mapping[str, float] | None) -> str:
    """A ratio of best times, with that of medians in brackets; a dash for none."""
    return "-" if ratio is None else f"{number(ratio['best'])} ({number(ratio['median'])})"


def images(plots: Iterable[str], start: str) -> str:
    """The plots whose names begin so."""
    return " ".join(
        f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots if name.startswith(start)
    )


# ---------------------------------------------------------------------- one quantity at a time


def ratios_along(rows: Rows, key: str, quantity: Quantity, names: Mapping[str, str], unit: str, ratio: str) -> str:
    """A table of steps in units of the step of the variant `unit`, whose own time is the first line. "" if none was varied."""
    mine = [row for row in rows if key in row["varied"]]
    if not mine:
        return ""
    values, heads = _values(mine, key)
    row_of = {(row["variant"], row["setting"][key]): row for row in mine}
    lines = [[f"{names[unit]}, ms", *(f"{1e3 * row_of[unit, value]['best']:.0f}" for value in values)]]
    for name, title in names.items():
        if name != unit and any((name, value) in row_of for value in values):
            cells = [row_of.get((name, value), {}).get(ratio) for value in values]
            lines.append([title, *map(times, cells)])
    return f"{quantity.title}; steps / {names[unit]}'s:\n\n{markdown_table(('', *heads), lines)}"


def memory_along(rows: Rows, key: str, names: Mapping[str, str]) -> str:
    """A table of peak memory, for the same rows as `ratios_along`. "" if none was measured."""
    mine = [row for row in rows if key in row["varied"] and "memory" in row]
    if not mine:
        return ""
    values, heads = _values(mine, key)
    row_of = {(row["variant"], row["setting"][key]): row for row in mine}
    lines = [
        [title, *(megabytes(row_of.get((name, value), {})) for value in values)]
        for name, title in names.items()
        if any((name, value) in row_of for value in values)
    ]
    return markdown_table(("peak memory beyond the tables, MB", *heads), lines)


def _values(rows: Rows, key: str) -> tuple[list[Any], list[str]]:
    """The values of a quantity in their order, and as heads of columns."""
    values = list(dict.fromkeys(row["setting"][key] for row in rows))
    values = values if isinstance(values[0], str) else sorted(values)
    return values, [value if isinstance(value, str) else f"{value:g}" for value in values]


def stage_lines(rows: Rows, names: Mapping[str, str]) -> str:
    """Best times of the stages, one column for each of the rows."""
    return markdown_table(
        ("stage, best, ms", *(names[row["variant"]] for row in rows)),
        (
            [stage, *(f"{1e3 * row['stages'][stage]:.1f}" if stage in row["stages"] else "-" for row in rows)]
            for stage in stages_of(rows)
        ),
    )
