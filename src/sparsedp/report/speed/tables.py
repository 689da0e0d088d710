"""Markdown that the sections share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, with its first column to the left and numbers to the right."""
    rows = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def milliseconds(timing: Mapping[str, Any]) -> str:
    """best (median ± spread), of a timing in seconds."""
    best, median, spread = (1e3 * timing[key] for key in ("best", "median", "spread"))
    digits = 0 if best >= 100 else 1 if best >= 10 else 2
    return f"{best:.{digits}f} ({median:.{digits}f} ± {spread:.{digits}f})"


def times(ratio: Mapping[str, float] | None) -> str:
    """A ratio of best times, with that of medians in brackets; a dash for none."""
    return "-" if ratio is None else f"{ratio['best']:.3g} ({ratio['median']:.3g})"


def images(plots: Iterable[str], start: str) -> str:
    """The plots whose names begin so."""
    return " ".join(
        f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots if name.startswith(start)
    )
