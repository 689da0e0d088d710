"""Audits of an epsilon as a plot: how far the scores of canaries that were in lie from those that were out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap

import numpy as np
from matplotlib.figure import Figure  # not pyplot: it keeps global state

from sparsedp.audit import EpsilonAudit

_IN, _OUT = "#d55e00", "#0072b2"
_TITLE_WIDTH = 60  # letters above a panel
_SHOWN = 0.99  # of the scores, in the middle


def bound_plot(audits: Sequence[EpsilonAudit]) -> Figure:
    """One panel for each audit: two histograms of scores, with the bound and the claim above them."""
    figure = Figure(figsize=(1.0 + 5.2 * len(audits), 3.8), layout="constrained")
    for panel, audit in zip(figure.subplots(1, len(audits), squeeze=False)[0], audits):
        scores = np.concatenate([audit.in_scores, audit.out_scores])
        low, high = np.quantile(scores, [(1 - _SHOWN) / 2, (1 + _SHOWN) / 2])
        bins = np.linspace(low, high if high > low else low + 1, 41)
        for values, color, name in ((audit.out_scores, _OUT, "out"), (audit.in_scores, _IN, "in")):
            panel.hist(np.clip(values, bins[0], bins[-1]), bins, color=color, alpha=0.5, label=f"{len(values)} {name}")
        claimed = f"{audit.claimed:.3g}" if math.isfinite(audit.claimed) else "none"
        shown = f"epsilon: at least {audit.bound:.3g} shown, {claimed} claimed"
        panel.set_title("\n".join([shown, *wrap(audit.attack, _TITLE_WIDTH)]), fontsize=8)
        panel.set_xlabel("score: higher, more likely in")
        panel.set_ylabel("canaries")
        panel.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)  # beside the bars
    return figure
