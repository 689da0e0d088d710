"""Exposures of several models in one picture, as figure 5 of the EANA paper; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from sparsedp.audit.secret_sharers import SecretSharer
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_LINES = ("-", "--", "-.", ":")  # another one when all colours are used
_NO_TRACE = 1.0  # the median exposure of what was not trained on


def exposure_plot(results: Mapping[str, SecretSharer], styles: Mapping[str, tuple[str, str]] | None = None) -> Figure:
    """The median exposure over the repetitions, and its quartiles as a band: by rank on the left, extrapolated on the right.

    `styles` has the colour and the line of each model, where there is more to tell by them than which is which.
    """
    if styles is None:
        looks = ((color, line) for line in itertools.cycle(_LINES) for color in _COLORS)
        styles = dict(zip(results, looks))
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, method, title in zip(panels, ("rank", "extrapolated"), ("by rank", "by extrapolation")):
        for name, result in results.items():
            color, line = styles[name]
            at = [entry.repetitions for entry in result.exposures]
            quartiles = [getattr(entry, method) for entry in result.exposures]
            panel.plot(at, [q.median for q in quartiles], line, color=color, marker="o", markersize=3, label=name)
            if len(results) <= len(_COLORS):
                low, high = [q.low for q in quartiles], [q.high for q in quartiles]
                panel.fill_between(at, low, high, color=color, alpha=0.12, linewidth=0)
        panel.axhline(_NO_TRACE, color="black", linewidth=0.8, linestyle=":", label="no trace")
        log_axis(panel, "x", [entry.repetitions for result in results.values() for entry in result.exposures])
        panel.set_xlabel("repetitions of a canary")
        panel.set_ylabel(f"exposure {title} [bits], lower is better")
        panel.grid(alpha=0.25)
    legend_beside(figure)
    return figure
