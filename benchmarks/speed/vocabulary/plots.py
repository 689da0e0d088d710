"""The result of `python -m benchmarks vocabulary` as a plot; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.names import COLORS, NAMES
from sparsedp.report.panels import legend_beside, log_axis


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """vocabulary_rows.png: the best time of a step against the rows of the table."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    panel = figure.subplots()
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        points = sorted((row["rows"], 1e3 * row["best"]) for row in result["rows"] if row["variant"] == variant)
        panel.plot(*zip(*points), marker="o", color=COLORS[variant], label=NAMES[variant])
    log_axis(panel, "x", [row["rows"] for row in result["rows"]])
    log_axis(panel, "y")
    panel.set_xlabel("rows of the table")
    panel.set_ylabel("time of a step, ms, best (lower is better)", fontsize=8)
    legend_beside(figure)
    figure.savefig(folder / "vocabulary_rows.png", dpi=130, bbox_inches="tight")
    return ["vocabulary_rows.png"]
