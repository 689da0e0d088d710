"""The result of `python -m benchmarks bound` as plots; needs matplotlib (the extra `plot`).

bound_pctr.png and so on, one for each workload: the stages of each step, below the least that they could take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.bound.measure import VARIANTS
from benchmarks.speed.stages import STAGE_COLORS
from sparsedp.report.panels import legend_beside


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names."""
    written = []
    for workload in dict.fromkeys(row["workload"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["workload"] == workload]
        name = f"bound_{workload}.png"
        bound_plot(rows).savefig(folder / name, dpi=130, bbox_inches="tight")
        written.append(name)
    return written


def bound_plot(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """For each variant two stacked bars: the bounds of its stages, and their best times."""
    figure = Figure(figsize=(6.5, 0.8 + 0.75 * len(rows)), layout="constrained")
    panel = figure.subplots()
    bars = [(row, key) for row in rows for key in ("bound", "best")]
    places = [1.2 * (number // 2) + number for number in range(len(bars))]
    left = [0.0] * len(bars)
    for stage, color in STAGE_COLORS.items():
        widths = [
            1e3 * sum(measured[key] or 0.0 for measured in row["stages"] if measured["stage"] == stage)
            for row, key in bars
        ]
        if any(widths):
            panel.barh(places, widths, 0.9, left, color=color, label=stage)
        left = [before + width for before, width in zip(left, widths)]
    labels = [f"{VARIANTS[row['variant']]}: {'bound' if key == 'bound' else 'measured'}" for row, key in bars]
    panel.set_yticks(places, labels)
    panel.tick_params(axis="y", labelsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("ms", fontsize=8)
    panel.set_title(rows[0]["title"], fontsize=9)
    legend_beside(figure)
    return figure
