"""The result of `python -m benchmarks memory` as a plot; needs matplotlib (the extra `plot`).

memory_peaks.png    the most memory beyond the table in each phase, against a second copy of it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from benchmarks.speed.memory.measure import PHASES, VARIANTS
from sparsedp.report.panels import legend_beside

_COLORS = dict(zip(VARIANTS, ("#009e73", "#0072b2", "#e69f00", "0.5"), strict=True))


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the files' names: none, if nothing was measured."""
    figure = peak_plot(result)
    if figure is None:
        return []
    figure.savefig(folder / "memory_peaks.png", dpi=130, bbox_inches="tight")
    return ["memory_peaks.png"]


def peak_plot(result: Mapping[str, Any]) -> Figure | None:
    share_of = {(row["variant"], row["phase"]): row["peak_share"] for row in result["rows"] if "skipped" not in row}
    names = [name for name in VARIANTS if any(variant == name for variant, _ in share_of)]
    phases = [phase for phase in PHASES if any(measured == phase for _, measured in share_of)]
    if not share_of:
        return None
    figure = Figure(figsize=(2.0 + 0.9 * len(phases), 4.0), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        bars = [(at, share_of[name, phase]) for at, phase in enumerate(phases) if (name, phase) in share_of]
        places = [at + (number - (len(names) - 1) / 2) * width for at, _ in bars]
        drawn = panel.bar(places, [100 * share for _, share in bars], width, color=_COLORS[name], label=VARIANTS[name])
        panel.bar_label(
            drawn, fmt=lambda share: f"{share:.1f}" if share >= 0.05 else "<0.05", fontsize=6, rotation=90, padding=2
        )
    panel.axhline(100, color="k", linewidth=0.8, linestyle="--")
    panel.text(0, 97, "a second copy of the table", fontsize=7, va="top")
    panel.set_xticks(range(len(phases)), [PHASES[phase].replace(" ", "\n") for phase in phases], fontsize=7)
    panel.set_ylabel("at most, beyond the table, % of it (lower is better)", fontsize=8)
    panel.set_title(f"Memory with a table of {result['table_bytes'] / 1e9:.3g} GB", fontsize=9)
    legend_beside(figure)
    return figure
