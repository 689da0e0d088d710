"""The result of `python -m benchmarks noise` as a plot; needs matplotlib (the extra `plot`).

noise_sources.png   nanoseconds for a number, by source, over how many are drawn
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from sparsedp.report.panels import legend_beside, log_axis

_NAMES = {
    "torch": "torch.normal_",
    "chacha": "ChaCha8",
    "chacha rows": "ChaCha8, rows of a table",
    "settling": "LazyDP's settling",
}
_COLORS = {"torch": "0.35", "chacha": "#0072b2", "chacha rows": "#56b4e9", "settling": "#d55e00"}


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names: none, if nothing was measured."""
    if not result["rows"]:
        return []
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    panel = figure.subplots()
    for threads in sorted({row["threads"] for row in result["rows"]}):
        for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
            points = sorted(
                (row["size"], row["nanoseconds_each"])
                for row in result["rows"]
                if (row["threads"], row["variant"]) == (threads, variant)
            )
            if points:
                label = f"{_NAMES[variant]}, {threads} thread{'s' if threads > 1 else ''}"
                style = "-" if threads == 1 else "--"
                panel.plot(*zip(*points), style, marker="o", color=_COLORS[variant], label=label)
    log_axis(panel, "x", [row["size"] for row in result["rows"]])
    log_axis(panel, "y")
    panel.set_xlabel("numbers")
    panel.set_ylabel("ns for each, best (lower is better)", fontsize=8)
    panel.set_title("Normal numbers in float32", fontsize=9)
    legend_beside(figure)
    figure.savefig(folder / "noise_sources.png", dpi=130, bbox_inches="tight")
    return ["noise_sources.png"]
