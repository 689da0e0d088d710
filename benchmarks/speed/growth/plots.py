"""The result of `python -m benchmarks growth` as plots; needs matplotlib (the extra `plot`).

growth_batch.png, growth_tables.png, growth_dim.png, growth_rows.png, growth_length.png   the time of a step
growth_memory.png   peak memory beyond the tables over their rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.growth.measure import MODELS, SEQUENCE_VARIANTS, VARIANTS
from benchmarks.speed.growth.page import rows_along
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = {
    "click": dict(zip(VARIANTS, ("0.35", "#d55e00", "#cc79a7", "#0072b2", "#009e73"), strict=True)),
    "sequence": dict(zip(SEQUENCE_VARIANTS, ("0.35", "#56b4e9", "#0072b2", "#009e73"), strict=True)),
}


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    figures = {
        f"growth_{name}.png": growth_plot(result, model, name)
        for model, kind in MODELS.items()
        for name in kind.quantities
    }
    figures["growth_memory.png"] = memory_plot(rows_along(result, "click", "rows"))
    written = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in written.items():
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    return list(written)


def growth_plot(result: Mapping[str, Any], model: str, quantity: str) -> Figure | None:
    """Best times, with bars up to the medians, and the fitted exponents in the legend."""
    rows = [row for row in result["rows"] if row["model"] == model and row["quantity"] == quantity]
    fits = {
        fit["variant"]: fit["exponent"]
        for fit in result["exponents"]
        if fit["model"] == model and fit["quantity"] == quantity
    }
    if not rows:
        return None
    kind = MODELS[model]
    figure, panel = _panel(f"{kind.title}: {kind.quantities[quantity].title}", kind.quantities[quantity].title)
    for name, title in kind.variants.items():
        points = sorted((row for row in rows if row["variant"] == name), key=lambda row: row["value"])
        if points:
            best = [1e3 * row["best"] for row in points]
            above = [1e3 * row["median"] - low for row, low in zip(points, best)]
            label = f"{title}: grows as x^{round(fits[name], 2) + 0.0:g}" if name in fits else title
            panel.errorbar(
                [row["value"] for row in points], best, ([0.0] * len(best), above), marker="o", capsize=2,
                color=_COLORS[model][name], label=label,
            )  # fmt: skip
    _finish(figure, panel, [row["value"] for row in rows], "a step, ms: best, and up to the median (lower is better)")
    return figure


def memory_plot(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    if not any("memory" in row for row in rows):
        return None
    figure, panel = _panel("Peak memory beyond the tables", "rows of a table")
    for name, title in VARIANTS.items():
        points = sorted((row["value"], max(row["memory"], 1) / 1e6) for row in rows if row["variant"] == name)
        if points:
            panel.plot(*zip(*points), marker="o", color=_COLORS["click"][name], label=title)
    _finish(figure, panel, [row["value"] for row in rows], "MB (lower is better)")
    return figure


def _panel(title: str, unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    panel = figure.subplots()
    panel.set_xlabel(unit)
    panel.set_title(title, fontsize=9)
    return figure, panel


def _finish(figure: Figure, panel: Axes, places: Sequence[float], label: str) -> None:
    panel.set_ylabel(label, fontsize=8)
    log_axis(panel, "x", places)
    log_axis(panel, "y")
    legend_beside(figure)
