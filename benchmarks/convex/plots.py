"""The result of `python -m benchmarks convex` as plots; needs matplotlib (the extra `plot`).

convex_mean_rows.png, convex_mean_columns.png, convex_mean_sparsity.png, convex_mean_epsilon.png   errors and bounds of means
convex_risk.png                                                                                  excess risks over n and d
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.convex.optimisation import SOLVERS
from benchmarks.convex.problem import KINDS
from benchmarks.convex.rates import QUANTITIES
from sparsedp.report.panels import legend_beside, log_axis

_NOISE, _PROJECTED = "#d55e00", "#0072b2"
_REGIMES = {"with delta": ("gaussian", "projection"), "pure": ("laplace", "pure projection")}
_TITLES = {"with delta": "Gaussian noise, delta = 1e-6", "pure": "Laplace noise, delta = 0"}
_SOLVERS = dict(zip(SOLVERS, ("#d55e00", "#cc79a7", "#0072b2"), strict=True))


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    figures = {
        f"convex_mean_{quantity}.png": rates_plot(result, quantity)
        for quantity in dict.fromkeys(row["quantity"] for row in result.get("rates", []))
    }
    if result.get("optimisation"):
        figures["convex_risk.png"] = risk_plot(result)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110, bbox_inches="tight")
    return list(figures)


def rates_plot(result: Mapping[str, Any], quantity: str) -> Figure:
    """Measured errors on each kind of rows, our upper bounds, the poster's lower bound, and where the sparse regime begins."""
    figure = Figure(figsize=(11.5, 6), layout="constrained")
    panels = figure.subplots(len(_REGIMES), len(KINDS), sharex=True, sharey=True)
    for line, (regime, (alone, projected)) in zip(panels, _REGIMES.items()):
        for panel, (kind, kind_title) in zip(line, KINDS.items()):
            for variant, color, name in (
                (alone, _NOISE, "noise alone"),
                (projected, _PROJECTED, "noise and projection"),
            ):
                rows = [
                    row
                    for row in result["rates"]
                    if (row["quantity"], row["variant"], row["kind"]) == (quantity, variant, kind)
                ]
                at = [row["value"] for row in rows]
                panel.loglog(at, [row["error"] for row in rows], "o-", color=color, markersize=4, label=name)
                upper = [row["upper"] for row in rows]
                panel.loglog(at, upper, ":", color=color, linewidth=1.2, label=f"upper bound of {name}")
            lower = [row["lower_rate"] for row in rows]
            panel.loglog(
                at,
                lower,
                "--",
                color="0.35",
                linewidth=1,
                label="the paper's lower bound (its constant is open: 1 here)",
            )
            crossing = result["crossings"][quantity][regime]
            if crossing is not None and min(at) / 2 < crossing < max(at) * 2:
                panel.axvline(crossing, color="0.6", linewidth=0.8, label="where the bounds of both regimes cross")
            panel.set_title(f"{_TITLES[regime]}:\n{kind_title}", fontsize=8)
    for panel in panels.ravel():
        log_axis(panel, "x", at)
        log_axis(panel, "y")
    _label(figure, panels, QUANTITIES[quantity], "l2 error, root mean square")
    return figure


def risk_plot(result: Mapping[str, Any]) -> Figure:
    """Excess risks of logistic regression over n and over d, the loss of zero, and the poster's rates."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    quantities = list(dict.fromkeys(row["quantity"] for row in result["optimisation"]))
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)
    for panel, quantity in zip(panels[0], quantities):
        for name, color in _SOLVERS.items():
            rows = [row for row in result["optimisation"] if (row["quantity"], row["method"]) == (quantity, name)]
            at = [row["value"] for row in rows]
            panel.loglog(at, [row["excess"] for row in rows], "o-", color=color, markersize=4, label=name)
        panel.loglog(at, [row["zero"] for row in rows], "-", color="0.6", linewidth=1, label="the model zero")
        for rate, style, name in (("sparse_rate", "--", "sparse"), ("dense_rate", ":", "dense")):
            label = f"the paper's {name} rate (its constant is open: 1 here)"
            panel.loglog(at, [row[rate] for row in rows], style, color="0.35", linewidth=1, label=label)
        log_axis(panel, "x", at)
        log_axis(panel, "y")
        panel.set_xlabel(QUANTITIES[quantity], fontsize=8)
    _label(figure, panels, None, "excess risk")
    return figure


def _label(figure: Figure, panels: Any, below: str | None, left: str) -> None:
    """Names of the axes, and one legend for all panels."""
    for panel in panels.ravel():
        assert isinstance(panel, Axes)
        panel.tick_params(which="both", labelsize=7)
    for line in panels:
        line[0].set_ylabel(f"{left} (lower is better)", fontsize=8)
    if below is not None:
        for panel in panels[-1]:
            panel.set_xlabel(below, fontsize=8)
    legend_beside(figure)
