"""The page as a whole: what was measured with, the budget, then a section for each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from sparsedp.report.speed import budget, papers
from sparsedp.report.speed.tables import markdown_table

# In the order of the page.
SECTIONS = ("step", "lazydp", "tied", "dual", "vocabulary", "peers", "bound", "growth", "memory", "noise")

_HEAD = """# How fast is it

This page is made by `sparsedp bench all` from `results.json` beside it. Times are in ms, best (median ± spread) of interleaved
repeats, and ratios are of best times, with those of medians in brackets: on a machine that does other work as well, the best is
what the code can do, and the spread, the distance of the quartiles, says how much the machine disturbed."""


def page(results: Mapping[str, Mapping[str, Any]], plots: Sequence[str]) -> str:
    """Markdown. `results` are the parts that were run, by name; `plots` the names of the pictures beside the page."""
    parts = [name for name in SECTIONS if name in results]
    pieces = [_HEAD, _made_with(results), budget.section(results)]
    pieces += [import_module(f"sparsedp.report.speed.{name}").section(results[name], plots) for name in parts]
    pieces.append(papers.section(results, plots))
    return "\n\n".join(piece.strip() for piece in pieces if piece.strip()) + "\n"


def _made_with(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for result in results.values():
        machine = result["machine"]
        lines.append(
            [
                f"`{result['command']}`",
                f"{result['seconds']:.0f} s",
                result["day"],
                result["commit"] or "-",
                f"{machine['threads']} threads, Python {machine['python']}, torch {machine['torch']}",
            ]
        )
    return "## The parts\n\n" + markdown_table(("command", "took", "day", "commit", "with"), lines) if lines else ""
