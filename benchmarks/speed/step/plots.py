"""The result of `python -m benchmarks step` as plots; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.names import NAMES
from benchmarks.speed.stageplot import stacked_stages
from benchmarks.speed.step.page import MODEL_NAMES


def write_plots(result: Mapping[str, Any], folder: Path) -> list[str]:
    """step_<model>.png: where the time of a step goes, for each model."""
    written = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["model"] == model]
        bars = [{"variant": "plain", "best": mine[0]["plain"]["best"], "stages": mine[0]["plain_stages"]}]
        bars += [{"variant": row["mechanism"], "best": row["private"]["best"], "stages": row["stages"]} for row in mine]
        labels = [NAMES[bar["variant"]] for bar in bars]
        title = f"Where the time of a step goes: {MODEL_NAMES[model]}"
        figure = stacked_stages(bars, "plain", "plain PyTorch", labels, title)
        assert figure is not None
        figure.savefig(folder / f"step_{model}.png", dpi=130, bbox_inches="tight")
        written.append(f"step_{model}.png")
    return written
