"""The result of `python -m benchmarks epoch` as a plot; needs matplotlib (the extra `plot`).

epoch_batches.png   seconds of an epoch, and how many of them its batches alone take
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names."""
    rows = result["rows"]
    figure = Figure(figsize=(5.5, 2.6), layout="constrained")
    panel = figure.subplots()
    names = [row["variant"] for row in rows]
    panel.barh(names, [row["best"] for row in rows], color="tab:blue", label="epoch")
    panel.barh(
        names, [row["fetching"]["best"] for row in rows], height=0.3, color="tab:orange", label="its batches alone"
    )
    panel.invert_yaxis()
    panel.set_xlabel("seconds, best")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figure.savefig(folder / "epoch_batches.png", dpi=130, bbox_inches="tight")
    return ["epoch_batches.png"]
