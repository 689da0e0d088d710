"""The result of `python -m benchmarks dual` as plots; needs matplotlib (the extra `plot`).

dual_speed.png    steps a second over the vocabulary (EANA, Table 3)
dual_stages.png   where the time of a step goes, in units of SGD's step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.dual.measure import VARIANTS, Setting
from benchmarks.speed.stageplot import stacked_stages
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = dict(zip(VARIANTS, ("0.35", "#d55e00", "#009e73", "#0072b2", "#cc79a7"), strict=True))

Rows = Sequence[Mapping[str, Any]]


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    rows = result["rows"]
    figures = {
        "dual_speed.png": speed_plot([row for row in rows if "items" in row["varied"]]),
        "dual_stages.png": stage_plot([row for row in rows if row["base"]], Setting(**result["base"])),
    }
    written = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in written.items():
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    return list(written)


def speed_plot(rows: Rows) -> Figure | None:
    """Lines: steps a second, best, over items."""
    if not rows:
        return None
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    panel = figure.subplots()
    for name, title in VARIANTS.items():
        points = sorted((row["setting"]["items"], row["steps_per_second"]) for row in rows if row["variant"] == name)
        if points:
            panel.plot(*zip(*points), marker="o", color=_COLORS[name], label=title)
    log_axis(panel, "x", [row["setting"]["items"] for row in rows])
    log_axis(panel, "y")
    panel.set_xlabel("items")
    panel.set_ylabel("steps a second, best (higher is better)", fontsize=8)
    panel.set_title(f"The dual encoder, batch {rows[0]['setting']['batch']} (EANA, Table 3)", fontsize=9)
    legend_beside(figure)
    return figure


def stage_plot(rows: Rows, setting: Setting) -> Figure | None:
    """Stacked bars of the variants whose step is not longer than ten of SGD's; the others would flatten them."""
    shown = [row for row in rows if row["ratio_to_sgd"]["best"] <= 10]
    labels = [VARIANTS[row["variant"]] for row in shown]
    return stacked_stages(shown, "sgd", "SGD", labels, f"Where the time of a step goes, {setting}")
