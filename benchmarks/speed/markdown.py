"""Markdown that the sections share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, with columns of numbers to the right."""
    cells = [list(line) for line in lines]
    numbers = [all(_is_number(line[column]) for line in cells) for column in range(len(head))]
    rows = [list(head), ["---:" if right else "---" for right in numbers], *cells]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _is_number(cell: str) -> bool:
    """As these tables write them, with or without a unit."""
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
    """With three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: Mapping[str, float] | None) -> str:
    """A ratio of best times, with that of medians in brackets; a dash for none."""
    return "-" if ratio is None else f"{number(ratio['best'])} ({number(ratio['median'])})"


def images(plots: Iterable[str], start: str) -> str:
    """The plots whose names begin so."""
    return " ".join(
        f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots if name.startswith(start)
    )
