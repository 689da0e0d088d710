"""Where the time of a step goes, as stacked bars; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it keeps global state

from sparsedp.bench.varied import stages_of


def stacked_stages(
    rows: Sequence[Mapping[str, Any]],
    unit: str,
    unit_name: str,
    labels: Sequence[str],
    colors: Mapping[str, str],
    title: str,
) -> Figure | None:
    """A bar for each of `rows`, in units of the step of variant `unit`; stages in the order of `colors`. None without rows."""
    if not rows:
        return None
    step = next(row["best"] for row in rows if row["variant"] == unit)
    figure = Figure(figsize=(2.5 + 1.1 * len(rows), 4.0), layout="constrained")
    panel = figure.subplots()
    below = [0.0] * len(rows)
    for stage in stages_of(rows, list(colors)):
        heights = [row["stages"].get(stage, 0.0) / step for row in rows]
        panel.bar(range(len(rows)), heights, 0.7, below, label=stage, color=colors.get(stage, "k"))
        below = [low + height for low, height in zip(below, heights)]
    panel.set_xticks(range(len(rows)), labels)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_ylabel(f"best times of the stages / {unit_name}'s step", fontsize=8)
    panel.margins(y=0.05)
    panel.set_title(title, fontsize=9)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


_COLORS = ("#0072b2", "#cc3311", "#56b4e9", "0.75", "#cc79a7", "#f0e442", "#009e73", "#e69f00", "0.4")


def write_step_plots(result: Mapping[str, Any], stages: Sequence[str], folder: Path) -> list[str]:
    """step_<model>.png: where the time of `sparsedp bench step`'s steps goes, for each of its models."""
    written = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["model"] == model]
        bars = [{"variant": "plain", "best": mine[0]["plain"]["best"], "stages": mine[0]["plain_stages"]}]
        bars += [{"variant": row["mechanism"], "best": row["private"]["best"], "stages": row["stages"]} for row in mine]
        colors = dict(zip(stages, _COLORS, strict=True))
        labels = [str(bar["variant"]) for bar in bars]
        figure = stacked_stages(
            bars, "plain", "plain PyTorch", labels, colors, f"Where the time of a step goes: {model}"
        )
        assert figure is not None
        figure.savefig(folder / f"step_{model}.png", dpi=130, bbox_inches="tight")
        written.append(f"step_{model}.png")
    return written
