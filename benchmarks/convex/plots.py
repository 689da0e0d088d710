"""The result of `python -m benchmarks convex` as plots; needs matplotlib (the extra `plot`).

convex_mean_rows.png, convex_mean_columns.png, convex_mean_sparsity.png, convex_mean_epsilon.png   errors, and the poster's rates
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.convex.measure import QUANTITIES, VARIANTS

_COLORS = dict(zip(VARIANTS, ("#d55e00", "#0072b2", "#cc79a7", "#009e73"), strict=True))


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names."""
    written = []
    for quantity in dict.fromkeys(row["quantity"] for row in result.get("rates", [])):
        rates_plot(result, quantity).savefig(folder / f"convex_mean_{quantity}.png", dpi=130, bbox_inches="tight")
        written.append(f"convex_mean_{quantity}.png")
    return written


def rates_plot(result: Mapping[str, Any], quantity: str) -> Figure:
    """Errors of the variants, and dashed the poster's rates, each scaled by one constant to the errors that they bound."""
    figure = Figure(figsize=(5.5, 4.4), layout="constrained")
    panel = figure.subplots()
    for variant, color in _COLORS.items():
        rows = [row for row in result["rates"] if row["quantity"] == quantity and row["variant"] == variant]
        at, errors = [row["value"] for row in rows], [row["error"] for row in rows]
        panel.loglog(at, errors, marker="o", color=color, label=variant)
        name = "sparse_rate" if "projection" in variant else "dense_rate"
        rates = [row[name] for row in rows]
        constant = max(error / rate for error, rate in zip(errors, rates))
        panel.loglog(at, [constant * rate for rate in rates], "--", linewidth=0.8, color=color)
    panel.axhline(1.0, color="0.6", linewidth=0.8)
    panel.set_title("Error of a private mean of rows of norm 1", fontsize=9)
    panel.set_xlabel(QUANTITIES[quantity], fontsize=8)
    panel.set_ylabel("l2 error, root mean square", fontsize=8)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, title="dashed: the paper's rates", title_fontsize=7)
    return figure
