"""EANA: noise on the rows that the batch touches, and on no others (EANA, Algorithm 2). Not differentially private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import torch
from torch import Tensor

from sparsedp.capture import Captured
from sparsedp.mechanisms.base import Mechanism, Step
from sparsedp.mechanisms.contribution import RowSpace, touched_pairs


@dataclass(frozen=True)
class EANA(Mechanism):
    """Selects the touched rows. Which rows changed tells which rows the data contain, so epsilon is infinite."""

    name: ClassVar[str] = "eana"
    selects: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return (
            "none: whoever sees the model learns which rows were ever used, so a unit with a rare id is exposed. "
            "What a used row contains is noised as in DP-SGD"
        )

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        return dp_accounting.NonPrivateDpEvent()

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        return space.split(torch.unique(torch.cat([touched_pairs(captured, space)[1] for captured in batch])))
