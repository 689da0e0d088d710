"""The result of `python -m benchmarks noise` as a plot; needs matplotlib (the extra `plot`).

noise_sources.png   nanoseconds for a number, by source, over how many are drawn
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names: none, if nothing was measured."""
    if not result["rows"]:
        return []
    figure = Figure(figsize=(5.5, 4.0), layout="constrained")
    panel = figure.subplots()
    for threads in sorted({row["threads"] for row in result["rows"]}):
        for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
            points = sorted(
                (row["size"], row["nanoseconds_each"])
                for row in result["rows"]
                if (row["threads"], row["variant"]) == (threads, variant)
            )
            if points:
                style = "--" if variant == "torch" else "-"
                label = f"{variant}, {threads} thread{'s' if threads > 1 else ''}"
                panel.plot(*zip(*points), style, marker="o", label=label)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("numbers")
    panel.set_ylabel("ns for each, best", fontsize=8)
    panel.set_title("Normal numbers in float32", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(folder / "noise_sources.png", dpi=130, bbox_inches="tight")
    return ["noise_sources.png"]
