"""Precision@k of each run (figure 4 of the EANA paper), exposures (figure 5), and one against the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.secret_sharer.measure import TOP, Row
from sparsedp.report.exposure_plot import exposure_plot
from sparsedp.report.panels import legend_beside

_COLORS = {"SGD": "black", "DP-SGD": "#0072b2", "LazyDP": "#56b4e9", "EANA": "#d55e00", "AdaFEST": "#009e73"}


def write_plots(rows: Sequence[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The paper's figures have its two noises; the last one has all runs.
    shown = [row for row in rows if row.noise_multiplier in (0.0, 0.064, 0.64)]
    figures = {
        "precision": precision_plot(shown),
        "exposure": exposure_plot({row.label: row.result for row in shown}, {row.label: _style(row) for row in shown}),
        "tradeoff": tradeoff_plot(rows),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"secret_sharer_{name}.png", dpi=110)


def _style(row: Row) -> tuple[str, str]:
    """A colour for each mechanism, a line for each noise."""
    return _COLORS[row.mechanism], "-" if row.noise_multiplier < 0.1 else "--"


def precision_plot(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        color, line = _style(row)
        axes.plot(TOP, list(row.precision.values()), line, color=color, marker="o", label=row.label)
    axes.plot(TOP, list(rows[0].popularity.values()), ":", color="grey", label="the most popular items")
    axes.set_xticks(TOP)
    axes.set_xlabel("k")
    axes.set_ylabel("precision@k of test users (higher is better)")
    axes.grid(alpha=0.25)
    legend_beside(figure)
    return figure


def tradeoff_plot(rows: Sequence[Row]) -> Figure:
    """Precision@10 against the median exposure at the fewest and at the two largest numbers of repetitions."""
    entries = rows[0].result.exposures
    places = (0, -2, -1)
    markers = dict(zip(sorted({f"{row.noise_multiplier:.2g}" for row in rows}), "*ovsD^Pp"))
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(places), sharey=True)
    for panel, place in zip(panels, places):
        for row in rows:
            x, y = row.result.exposures[place].extrapolated.median, row.precision["10"]
            panel.scatter(x, y, color=_COLORS[row.mechanism], marker=markers[f"{row.noise_multiplier:.2g}"], s=30)
        panel.set_title(f"{entries[place].repetitions} times in the data", fontsize=9)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("precision@10 (higher is better)")
    figure.supxlabel("median exposure by extrapolation [bits], lower is better", fontsize="medium")
    for name, color in _COLORS.items():
        panels[-1].plot([], [], color=color, linewidth=4, label=name)
    for noise, marker in markers.items():
        panels[-1].scatter([], [], color="grey", marker=marker, label=f"noise {noise}")
    legend_beside(figure)
    return figure
