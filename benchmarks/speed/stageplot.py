"""Where the time of a step goes, as stacked bars; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.stages import STAGE_COLORS, stages_of
from sparsedp.report.panels import legend_beside


def stacked_stages(
    rows: Sequence[Mapping[str, Any]],
    unit: str,
    unit_name: str,
    labels: Sequence[str],
    title: str,
) -> Figure | None:
    """A bar for each of `rows`, in units of the step of variant `unit`. None without rows."""
    if not rows:
        return None
    step = next(row["best"] for row in rows if row["variant"] == unit)
    figure = Figure(figsize=(2.5 + 1.1 * len(rows), 4.0), layout="constrained")
    panel = figure.subplots()
    below = [0.0] * len(rows)
    for stage in stages_of(rows):
        heights = [row["stages"].get(stage, 0.0) / step for row in rows]
        panel.bar(range(len(rows)), heights, 0.7, below, label=stage, color=STAGE_COLORS.get(stage, "k"))
        below = [low + height for low, height in zip(below, heights)]
    panel.set_xticks(range(len(rows)), labels)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_ylabel(f"best times of the stages / {unit_name}'s step", fontsize=8)
    panel.margins(y=0.05)
    panel.set_title(title, fontsize=9)
    legend_beside(figure)
    return figure
