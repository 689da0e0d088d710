"""The stages of a step, in their order, and the colours that they have in all plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STAGE_COLORS = {
    "candidates": "#882255",
    "forward": "#0072b2",
    "settling": "#cc3311",
    "backward": "#56b4e9",
    "second backward": "#a6cee3",
    "collect": "0.75",
    "selection": "#009e73",
    "noise": "#e69f00",
    "unit gradients": "#8c510a",
    "norms": "#cc79a7",
    "sums": "#f0e442",
    "ranks": "#117733",
    "update": "0.4",
    "the rest": "0.88",  # of a step: what lies between the stages
}
STAGES = tuple(STAGE_COLORS)


def stages_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The stages that some of the rows have, in order; those that no step here is known to have come last."""
    present = dict.fromkeys(stage for row in rows for stage in row["stages"])
    return [*(stage for stage in STAGES if stage in present), *(stage for stage in present if stage not in STAGES)]
