"""The result of `python -m benchmarks epoch` as a plot; needs matplotlib (the extra `plot`).

epoch_batches.png   seconds of an epoch, and how many of them its batches alone take
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.names import NAMES
from sparsedp.report.panels import legend_beside


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names."""
    rows = result["rows"]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    panel = figure.subplots()
    names = [f"{NAMES[row['variant']]}, {row['threads']} thread{'s'[: row['threads'] > 1]}" for row in rows]
    panel.barh(names, [row["best"] for row in rows], color="#56b4e9", label="epoch")
    panel.barh(names, [row["fetching"]["best"] for row in rows], height=0.3, color="#d55e00", label="its batches alone")
    panel.invert_yaxis()
    panel.set_xlabel("seconds, best (lower is better)")
    legend_beside(figure)
    figure.savefig(folder / "epoch_batches.png", dpi=130, bbox_inches="tight")
    return ["epoch_batches.png"]
