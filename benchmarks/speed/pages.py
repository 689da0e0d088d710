"""The page "How fast is it": one screen with the budget and three figures; and a page for each part behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed import budget
from benchmarks.speed.markdown import markdown_table
from benchmarks.speed.papers import page as papers
from benchmarks.speed.parts import PARTS, page_of, plots_of

RESULTS = "results.json"
# One for each thing that has to be true: the cost follows the rows of a batch, not those of the table; a private step
# costs what a plain one does; nothing of the table's size is made beside it.
FIGURES = {
    "peers_rows.png": "A step over the rows of the table, beside other libraries",
    "bound_pctr.png": "Where the time of a step goes, and the least that it could take",
    "memory_peaks.png": "Memory beside a table of half of the machine's",
}

_HEAD = """# How fast is it

`python -m benchmarks all` (or `make bench`) measures speed and memory. This page and those behind it are made from
[results.json](results.json) by `python -m benchmarks page`. Ratios are of best times of interleaved repeats."""

_READING = """Times are in ms, best (median ± spread) of interleaved repeats, and ratios are of best times, with those of medians
in brackets: on a machine that does other work as well, the best is what the code can do, and the spread, the distance of
the quartiles, says how much the machine disturbed."""

Results = Mapping[str, Mapping[str, Any]]


def write_pages(folder: Path, results: Results) -> None:
    """Plots and pages of the parts in `results`, beside which they are written. Earlier plots of theirs do not stay."""
    for part in (part for part in PARTS if part in results):
        for old in folder.glob(f"{part}_*.png"):
            old.unlink()
        plots_of(part).write_plots(results[part], folder)
    for name, text in pages(results, [path.name for path in folder.glob("*.png")]).items():
        (folder / name).write_text(text)


def pages(results: Results, plots: Collection[str]) -> dict[str, str]:
    """Markdown by file name. `results` are the parts that were run, by name; `plots` the pictures beside the pages."""
    plots = sorted(plots)
    texts = {"README.md": _front(results, plots)}
    for part in PARTS:
        if part in results:
            text_of_part = page_of(part).page(results[part], plots).strip()
            texts[f"{part}.md"] = f"{text_of_part}\n\n---\n\n{_READING}\n\n{_origin(results[part])}\n"
    for name, text in (("budget.md", budget.page(results)), ("papers.md", papers.page(results))):
        if text:
            texts[name] = f"{text}\n\n---\n\n[How fast is it](README.md)\n"
    return texts


def _front(results: Results, plots: Collection[str]) -> str:
    shown = [(title, name) for name, title in FIGURES.items() if name in plots]
    figures = [f"![{title}]({name})" for title, name in shown]
    behind = [[f"[{part}]({part}.md)", summary] for part, summary in PARTS.items() if part in results]
    behind.append(["[papers](papers.md)", "what the papers published, beside what was measured here"])
    pieces = [
        _HEAD,
        budget.section(results),
        markdown_table([title for title, _ in shown], [figures]) if shown else "",
        _in_two_columns(("page", "what was measured"), behind),
    ]
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def _in_two_columns(head: tuple[str, str], lines: list[list[str]]) -> str:
    """A table of half as many lines: the second half stands beside the first."""
    half = (len(lines) + 1) // 2
    others = [*lines[half:], *[["", ""]] * (2 * half - len(lines))]
    return markdown_table((*head, *head), [[*one, *other] for one, other in zip(lines[:half], others)])


def _origin(result: Mapping[str, Any]) -> str:
    """One sentence: what was run, when, and on what."""
    machine = result["machine"]
    commit = f", commit {result['commit']}" if result["commit"] else ""
    return (
        f"`{result['command']}`, {result['seconds']:.0f} s, {result['day']}{commit}; {machine['threads']} threads, "
        f"Python {machine['python']}, torch {machine['torch']}. [How fast is it](README.md)"
    )
