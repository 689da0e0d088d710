"""A sweep's summary (`front.summarise`) as plots; needs matplotlib (the extra `plot`).

front.png   utility against reduction: every setting, the variants' fronts, the controls as lines (DP-AdaFEST, figure 8)
best.png    the best reduction at each utility loss (figures 3 and 4)
heat.png    utility and gradient size over two knobs, for variants with a grid over two numbers (figure 9)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure  # not pyplot: it keeps global state
from matplotlib.ticker import LogLocator

from sparsedp.report.chart import short
from sparsedp.report.markdown import CONTROL_NAMES, METRIC_NAMES, TABLES_DO_NOT_MATTER, describe_settings
from sparsedp.report.panels import legend_beside, log_axis

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_TITLE_WIDTH = 56  # letters above a panel of heat.png
_PANEL_WIDTH = 50  # above one of the others
_LINES = {"non_private": ":", "frozen": "--"}
_NAMES = {
    "dpsgd": "DP-SGD", "lazydp": "LazyDP", "eana": "EANA", "fest": "FEST", "adafest": "AdaFEST", "adafest_plus": "AdaFEST+",
    "adafest+": "AdaFEST+", "exponential": "exponential selection", "target_epsilon": "epsilon", "noise_ratio": "noise ratio",
    "lora": "LoRA",
}  # fmt: skip


def write_plots(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes what there is something to show for; returns the files' names. A plot of an earlier call does not stay."""
    written = []
    for name, draw in (("front.png", front_plot), ("best.png", best_plot), ("heat.png", heat_plot)):
        figure = draw(summary)
        if figure is None:
            (folder / name).unlink(missing_ok=True)
            continue
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
        written.append(name)
    return written


def _variants(summary: Mapping[str, Any]) -> dict[str, str]:
    """The variants but for the reference, each with its colour."""
    names = [name for name in summary["points"][0]["variants"] if name != summary["reference"]]
    return {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}


def _title(at: Mapping[str, Any]) -> str:
    short = {_plain(key.rpartition(".")[2]): value for key, value in at["point"].items()}
    note = f"({TABLES_DO_NOT_MATTER})" if at["tables_matter"] is False else ""
    return "\n".join([*wrap(describe_settings(short), _PANEL_WIDTH), *wrap(note, _PANEL_WIDTH)])


def _plain(name: str) -> str:
    """A variant's or a setting's name in plain words; one that somebody else gave stays."""
    return _NAMES.get(name, name)


def _panels(summary: Mapping[str, Any]) -> tuple[Figure, Sequence[Axes]]:
    points = summary["points"]
    figure = Figure(figsize=(1.0 + 4.6 * len(points), 4.2), layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
    for panel, at in zip(panels, points):
        panel.set_title(_title(at), fontsize=9)
        panel.grid(alpha=0.25)
    return figure, panels


def front_plot(summary: Mapping[str, Any]) -> Figure | None:
    if not any(variant["settings"] for at in summary["points"] for variant in at["variants"].values()):
        return None
    figure, panels = _panels(summary)
    for panel, at in zip(panels, summary["points"]):
        for name, color in _variants(summary).items():
            variant = at["variants"][name]
            trained = [entry for entry in variant["settings"] if entry["reduction"] is not None]
            panel.scatter(*_coordinates(trained), s=14, color=color, alpha=0.4, linewidths=0)
            panel.errorbar(
                *_coordinates(variant["front"]),
                yerr=[entry["metric"]["test"]["error"] or 0.0 for entry in variant["front"]],
                marker="o", markersize=5, color=color, linewidth=1.2, capsize=2, label=_plain(name),
            )  # fmt: skip
        lines = {CONTROL_NAMES[name]: (entry, _LINES[name]) for name, entry in at["controls"].items()}
        lines[f"{_plain(summary['reference'])} (reference)"] = (at["reference"], "-")
        low, high = _range(summary)
        for label, (entry, style) in lines.items():
            if entry is not None and low <= entry["metric"]["test"]["mean"] <= high:  # others are written at the edge
                panel.axhline(entry["metric"]["test"]["mean"], linestyle=style, color="0.35", linewidth=1, label=label)
    _focus(panels, summary)
    for panel in panels:
        log_axis(panel, "x")
        panel.set_xlabel("gradient-size reduction (right is better)")
    panels[0].set_ylabel(f"{METRIC_NAMES[summary['metric']]}, test half ({_better(summary)})")
    legend_beside(figure)
    return figure


def _better(summary: Mapping[str, Any]) -> str:
    return "higher is better" if summary["more_is_better"] else "lower is better"


def _range(summary: Mapping[str, Any]) -> tuple[float, float]:
    """From the smallest to the largest value that is drawn: of the variants, and of controls that are not far from them."""
    values = [
        entry["metric"]["test"]["mean"]
        for at in summary["points"]
        for entry in (at["reference"], *(e for variant in at["variants"].values() for e in variant["settings"]))
        if entry is not None
    ]
    low, high = min(values), max(values)
    reach = max(high - low, 1e-3)
    for at in summary["points"]:
        for entry in filter(None, at["controls"].values()):
            value = entry["metric"]["test"]["mean"]
            if low - reach <= value <= high + reach:
                low, high = min(low, value), max(high, value)
    return low, high


def _focus(panels: Sequence[Axes], summary: Mapping[str, Any]) -> None:
    """Shows the range of the variants; a control far outside of it is written at the edge instead of flattening them."""
    low, high = _range(summary)
    pad = 0.06 * max(high - low, 1e-3)
    panels[0].set_ylim(low - 2 * pad, high + 2 * pad)  # shared by all panels; with room for a line of text at each edge
    for panel, at in zip(panels, summary["points"]):
        for name, entry in at["controls"].items():
            value = None if entry is None else entry["metric"]["test"]["mean"]
            if value is not None and not low <= value <= high:
                below = value < low
                text = f"{CONTROL_NAMES[name]}: {value:.4f} {'(below)' if below else '(above)'}"
                place = (0.02, 0.02 if below else 0.98)
                align = "bottom" if below else "top"
                panel.text(*place, text, transform=panel.transAxes, va=align, fontsize=8, color="0.35")


def _coordinates(entries: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [entry["reduction"] for entry in entries], [entry["metric"]["test"]["mean"] for entry in entries]


def best_plot(summary: Mapping[str, Any]) -> Figure | None:
    variants = _variants(summary)
    if not variants or all(at["reference"] is None for at in summary["points"]):
        return None
    figure, panels = _panels(summary)
    at_loss = np.arange(len(summary["losses"]))
    width = 0.8 / len(variants)
    highest = 1.0
    for panel, at in zip(panels, summary["points"]):
        for i, (name, color) in enumerate(variants.items()):
            choices = [entry["choice"] for entry in at["variants"][name]["best_reduction"]]
            highest = max([highest, *(choice["reduction"] for choice in choices if choice is not None)])
            places = at_loss - 0.4 + width * (i + 0.5)
            heights = [np.nan if choice is None else choice["reduction"] for choice in choices]
            panel.bar(places, heights, width * 0.92, color=color, label=_plain(name))
            for place, choice in zip(places, choices):
                text = "none" if choice is None else f"{choice['reduction']:,.3g}x"
                height = 1.0 if choice is None else max(1.0, choice["reduction"])
                panel.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        log_axis(panel, "y")
        panel.set_xlim(-0.5, len(at_loss) - 0.5)
        panel.set_xticks(at_loss, [f"{loss:g}" for loss in summary["losses"]])
        panel.set_xlabel(f"utility loss of at most ({METRIC_NAMES[summary['metric']]}, validation half)")
    # Shared by all panels; with room for the number on the highest bar.
    panels[0].set_ylim(1.0, 2.0 * highest)
    panels[0].set_ylabel("best gradient-size reduction (higher is better)")
    legend_beside(figure)
    return figure


def heat_plot(summary: Mapping[str, Any]) -> Figure | None:
    """One row of panels per point and variant: utility, and gradient size, best of the other settings."""
    metric, rows = METRIC_NAMES[summary["metric"]], []
    for at in summary["points"]:
        for name in _variants(summary):
            settings = at["variants"][name]["settings"]
            axes = heat_axes(settings)
            if axes is not None:
                rows.append((at, name, settings, axes))
    if not rows:
        return None
    figure = Figure(figsize=(9.5, 3.4 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (left, right), (at, name, settings, (first, second)) in zip(panels, rows):
        down, across = _values(settings, first), _values(settings, second)
        utility, size = np.full((2, len(down), len(across)), np.nan)
        for (y, x), entry in best_cells(settings, first, second, summary["more_is_better"]).items():
            utility[down.index(y), across.index(x)] = entry["metric"]["test"]["mean"]
            size[down.index(y), across.index(x)] = entry["gradient_size"]
        # Dark is good in both, as in the paper.
        _heat(left, utility, "{:.4f}".format, "viridis_r" if summary["more_is_better"] else "viridis", None)
        scale = LogNorm() if 0 < np.nanmin(size) < np.nanmax(size) else None
        _heat(right, size, lambda value: short(value, 3), "viridis", scale)
        titles = (f"{metric}, test half", "gradient size (coordinates a step)")
        for panel, title in zip((left, right), titles):
            where = ", ".join(filter(None, (_plain(name), _title(at).partition("\n(")[0].replace("\n", " "))))
            panel.set_title("\n".join([*wrap(where, _TITLE_WIDTH), title]), fontsize=9)
            panel.set_yticks(range(len(down)), [f"{value:g}" for value in down])
            panel.set_xticks(range(len(across)), [f"{value:g}" for value in across])
            panel.set_ylabel(_plain(first.rpartition(".")[2]))
            panel.set_xlabel(_plain(second.rpartition(".")[2]))
    return figure


def heat_axes(settings: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The two numeric knobs of a variant: of its mechanism if it has exactly two, else of all; None if there are not two."""
    keys = [key for key in (settings[0]["settings"] if settings else {}) if _is_axis(settings, key)]
    for candidates in ([key for key in keys if key.startswith("privacy.mechanism.")], keys):
        if len(candidates) == 2:
            return candidates[0], candidates[1]
    return None


def _is_axis(settings: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = [entry["settings"][key] for entry in settings]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return numbers and len(set(values)) > 1


def _values(settings: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return sorted({entry["settings"][key] for entry in settings})


def best_cells(
    settings: Sequence[Mapping[str, Any]], first: str, second: str, more_is_better: bool
) -> dict[tuple[float, float], Mapping[str, Any]]:
    """For each pair of values, the entry with the best validation metric over all other settings."""
    sign = 1 if more_is_better else -1
    cells: dict[tuple[float, float], Mapping[str, Any]] = {}
    for entry in settings:
        cell = entry["settings"][first], entry["settings"][second]
        value = sign * entry["metric"]["validation"]["mean"]
        if cell not in cells or value > sign * cells[cell]["metric"]["validation"]["mean"]:
            cells[cell] = entry
    return cells


def _heat(panel: Axes, values: np.ndarray, written: Callable[[float], str], colors: str, norm: LogNorm | None) -> None:
    image = panel.imshow(values, cmap=colors, norm=norm, aspect="auto", origin="lower")
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            light = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
            panel.text(x, y, written(value), ha="center", va="center", fontsize=8, color="k" if light else "w")
    assert panel.figure is not None
    bar = panel.figure.colorbar(image, ax=panel, label="darker is better", format=lambda value, _: short(value))
    if norm is not None:
        bar.set_ticks(LogLocator(subs=(1, 2, 5)))
        bar.minorticks_off()
