"""ROC curves of membership inference on log axes, and what epsilon allows; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # not pyplot: it keeps global state

from sparsedp.audit.membership import AttackResult, largest_tpr
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = ("#0072b2", "#d55e00")


def write_roc(attacks: Sequence[AttackResult], epsilon: float, delta: float, title: str, path: Path) -> None:
    """Curves with their intervals, the rates that were measured apart, chance, and the region that epsilon rules out."""
    figure = Figure(figsize=(8.6, 5.2), layout="constrained")
    axes = figure.subplots()
    lowest = max(1e-5, 0.5 / max(attack.non_members for attack in attacks))
    rates = np.geomspace(lowest, 1, 400)
    for attack, color in zip(attacks, _COLORS):
        fpr, tpr, low, high = (np.array(attack.roc[key]) for key in ("fpr", "tpr", "low", "high"))
        axes.plot(fpr, tpr, color=color, label=f"{attack.name} (area {attack.area:.3f})")
        axes.fill_between(fpr, low, high, color=color, alpha=0.15, linewidth=0)
        for rate in attack.rates:
            if rate.tpr is not None and rate.fpr is not None:
                errors = [[rate.tpr.value - rate.tpr.low], [rate.tpr.high - rate.tpr.value]]
                axes.errorbar(
                    max(rate.fpr.value, lowest), max(rate.tpr.value, lowest), yerr=errors, color=color, marker="o", capsize=3
                )  # fmt: skip
    axes.plot(rates, rates, color="#888888", linestyle=":", label="chance")
    if math.isfinite(epsilon):
        allowed = largest_tpr(rates, epsilon, delta)
        axes.plot(
            rates, allowed, color="#000000", linestyle="--", label=f"epsilon {epsilon:.3g}, delta {delta:.1g}: at most"
        )
        axes.fill_between(rates, allowed, 1, color="#000000", alpha=0.06, linewidth=0)
    else:
        axes.plot([], [], " ", label="epsilon is infinite: nothing is ruled out")
    axes.set(
        xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1), xlabel="false positive rate",
        ylabel="true positive rate (higher: the attack knows more)"
    )  # fmt: skip
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    legend_beside(figure)
    figure.savefig(path, dpi=130)
