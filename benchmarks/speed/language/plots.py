"""The result of `python -m benchmarks language` as plots; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.language.measure import VARIANTS
from benchmarks.speed.stageplot import stacked_stages


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """language_<model>_<way>.png: where the time of a step goes."""
    written = []
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in result["rows"]):
        bars = [row for row in result["rows"] if (row["model"], row["way"]) == (model, way) and row["stages"]]
        labels = [VARIANTS[bar["variant"]] for bar in bars]
        figure = stacked_stages(
            bars, "plain", "plain PyTorch", labels, f"Where the time of a step goes: {model}, {way}"
        )
        assert figure is not None
        name = f"language_{model}_{way}.png"
        figure.savefig(folder / name, dpi=130, bbox_inches="tight")
        written.append(name)
    return written
