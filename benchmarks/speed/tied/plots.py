"""The result of `python -m benchmarks tied` as plots; needs matplotlib (the extra `plot`).

tied_items.png, tied_length.png, tied_filled.png   a step's time over plain PyTorch's at the same setting
tied_stages.png     where the time of a step goes, in units of PyTorch's step
tied_batch.png      the largest batch that fits (DPFormer, figure 3, left)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.stageplot import stacked_stages
from benchmarks.speed.tied.measure import QUANTITIES, VARIANTS
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = dict(
    zip(VARIANTS, ("0.35", "0.65", "#56b4e9", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#d55e00"), strict=True)
)
_UNITS = {"items": "items", "length": "positions of a sequence", "filled": "share of positions that are not padding"}

Rows = Sequence[Mapping[str, Any]]


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    rows = result["rows"]
    figures = {f"tied_{key}.png": ratio_plot(rows, key) for key in QUANTITIES}
    figures["tied_stages.png"] = stage_plot([row for row in rows if row["base"]])
    figures["tied_batch.png"] = batch_plot(result["largest"], result["gigabytes"])
    written = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in written.items():
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    return list(written)


def ratio_plot(rows: Rows, key: str) -> Figure | None:
    """Lines: best times over plain PyTorch's."""
    mine = [row for row in rows if key in row["varied"]]
    if not mine:
        return None
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    panel = figure.subplots()
    for name in VARIANTS:
        points = sorted((row["setting"][key], row["ratio_to_plain"]["best"]) for row in mine if row["variant"] == name)
        if points and name != "plain":
            panel.plot(*zip(*points), marker="o", color=_COLORS[name], label=VARIANTS[name])
    panel.axhline(1, color="k", linewidth=0.8)
    log_axis(panel, "y")
    if key != "filled":
        log_axis(panel, "x", [row["setting"][key] for row in mine])
    panel.set_xlabel(_UNITS[key])
    panel.set_ylabel("time of a step / PyTorch's, best (lower is better)", fontsize=8)
    panel.set_title(QUANTITIES[key].title, fontsize=9)
    legend_beside(figure)
    return figure


def stage_plot(rows: Rows) -> Figure | None:
    """Stacked bars of the variants whose step is not longer than five of PyTorch's; the others would flatten them."""
    shown = [row for row in rows if row["ratio_to_plain"]["best"] <= 5]
    labels = [VARIANTS[row["variant"]].replace(", ", ",\n") for row in shown]
    return stacked_stages(shown, "plain", "PyTorch", labels, "Where the time of a step goes")


def batch_plot(memory: Rows, gigabytes: float) -> Figure | None:
    shown = [row for row in memory if row["largest_batch"]]
    if not shown:
        return None
    figure = Figure(figsize=(2.0 + 1.1 * len(shown), 4.0), layout="constrained")
    panel = figure.subplots()
    bars = panel.bar(
        [VARIANTS[row["variant"]].replace(", ", ",\n") for row in shown], [row["largest_batch"] for row in shown],
        color=[_COLORS[row["variant"]] for row in shown],
    )  # fmt: skip
    panel.bar_label(bars, fontsize=7)
    log_axis(panel, "y")
    panel.tick_params(axis="x", labelsize=7)
    panel.set_ylabel(f"units that fit into {gigabytes:g} GB (higher is better)", fontsize=8)
    panel.set_title("The largest batch (DPFormer, figure 3)", fontsize=9)
    return figure
