"""The result of `python -m benchmarks lazydp` as plots; needs matplotlib (the extra `plot`).

lazydp_batch.png, lazydp_gigabytes.png, lazydp_pooling.png, lazydp_skew.png   a step's time over SGD's at the same setting
lazydp_stages.png   where the time of a step goes, in units of SGD's step (LazyDP, figure 11)
lazydp_eana.png     SGD, LazyDP and EANA over batch sizes, in units of SGD's step at the base setting (figure 14)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.lazydp.measure import QUANTITIES, VARIANTS
from benchmarks.speed.stageplot import stacked_stages
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = dict(
    zip(VARIANTS, ("0.55", "#8c510a", "#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7"), strict=True)
)
_UNITS = {"batch": "units in a batch", "gigabytes": "GB in all tables", "pooling": "ids per feature", "skew": "skew"}

Rows = Sequence[Mapping[str, Any]]


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    rows = result["rows"]
    figures = {f"lazydp_{key}.png": ratio_plot(rows, key) for key in QUANTITIES}
    figures["lazydp_stages.png"] = stage_plot([row for row in rows if row["base"]])
    figures["lazydp_eana.png"] = eana_plot(rows)
    written = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in written.items():
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    return list(written)


def _along(rows: Rows, key: str) -> tuple[Rows, list[Any]]:
    """The rows along which a quantity varies, and its values in order."""
    mine = [row for row in rows if key in row["varied"]]
    values = list(dict.fromkeys(row["setting"][key] for row in mine))
    return mine, values if key == "skew" else sorted(values)


def _bars(rows: Rows, key: str, names: Sequence[str], base: float | None) -> Figure:
    """Grouped bars: best times over SGD's at the same setting, or over `base` seconds."""
    rows, values = _along(rows, key)
    figure = Figure(figsize=(2.0 + 1.6 * len(values), 4.0), layout="constrained")
    panel = figure.subplots()
    width = 0.85 / len(names)
    for index, name in enumerate(names):
        mine = {row["setting"][key]: row for row in rows if row["variant"] == name}
        places = [at - 0.425 + (index + 0.5) * width for at, value in enumerate(values) if value in mine]
        present = [mine[value] for value in values if value in mine]
        heights = [row["ratio_to_sgd"]["best"] if base is None else row["best"] / base for row in present]
        bars = panel.bar(places, heights, width, color=_COLORS[name], label=VARIANTS[name])
        panel.bar_label(bars, fmt="{:.3g}", fontsize=6, rotation=90, padding=2)
    panel.set_xticks(range(len(values)), [str(value) if key == "skew" else f"{value:g}" for value in values])
    panel.set_xlabel(_UNITS[key])
    panel.axhline(1, color="k", linewidth=0.8)
    panel.margins(y=0.15)
    panel.set_title(QUANTITIES[key].title, fontsize=9)
    legend_beside(figure)
    return figure


def ratio_plot(rows: Rows, key: str) -> Figure | None:
    measured = {row["variant"] for row in _along(rows, key)[0]}
    names = [name for name in VARIANTS if name in measured and name != "sgd"]
    if not names:
        return None
    figure = _bars(rows, key, names, None)
    panel = figure.axes[0]
    log_axis(panel, "y")
    panel.set_ylabel("time of a step / SGD's, best (lower is better)", fontsize=8)
    return figure


def eana_plot(rows: Rows) -> Figure | None:
    measured = {row["variant"] for row in _along(rows, "batch")[0]}
    base = next((row["best"] for row in rows if row["base"] and row["variant"] == "sgd"), None)
    if base is None or not {"lazydp", "eana"} <= measured:
        return None
    figure = _bars(rows, "batch", ["sgd", "lazydp", "eana"], base)
    figure.axes[0].set_ylabel("time of a step / SGD's at the base setting, best (lower is better)", fontsize=8)
    figure.axes[0].set_title("LazyDP and EANA over batch sizes (figure 14)", fontsize=9)
    return figure


def stage_plot(rows: Rows) -> Figure | None:
    """Stacked bars of the variants whose step is not longer than ten of SGD's; the others would flatten them."""
    shown = [row for row in rows if row["ratio_to_sgd"]["best"] <= 10]
    labels = [VARIANTS[row["variant"]].replace(" without ", "\nwithout ") for row in shown]
    return stacked_stages(shown, "sgd", "SGD", labels, "Where the time of a step goes (figure 11)")
