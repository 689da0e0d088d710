"""The result of `python -m benchmarks peers` as a plot; needs matplotlib (the extra `plot`).

peers_rows.png   the time of a step over the rows of the table
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.peers.measure import PEERS
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = dict(
    zip(
        PEERS,
        (
            "0.1",
            "0.55",
            "#d55e00",
            "#e69f00",
            "#f0c000",
            "#8c510a",
            "#c49c6b",
            "#cc79a7",
            "#0072b2",
            "#009e73",
            "#56b4e9",
        ),
        strict=True,
    )
)


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    figure = rows_plot(result)
    if figure is None:
        return []
    figure.savefig(folder / "peers_rows.png", dpi=130, bbox_inches="tight")
    return ["peers_rows.png"]


def rows_plot(result: Mapping[str, Any]) -> Figure | None:
    """Best times; SparseDP's lines are solid, others dashed. A line ends where a step takes too much memory or time."""
    if not result["rows"]:
        return None
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    panel = figure.subplots()
    for name, peer in PEERS.items():
        points = [(row["rows"], 1e3 * row["best"]) for row in result["rows"] if row["variant"] == name]
        if points:
            style = "-" if peer.title.startswith("SparseDP") else "--"
            panel.plot(*zip(*points), style, marker="o", markersize=4, color=_COLORS[name], label=peer.title)
    log_axis(panel, "x", [row["rows"] for row in result["rows"]])
    log_axis(panel, "y")
    panel.set_xlabel("rows of the table")
    panel.set_ylabel("time of a step, ms, best (lower is better)", fontsize=8)
    panel.set_title(f"A step of batch {result['problem']['batch']}", fontsize=9)
    legend_beside(figure)
    return figure
