"""DP-SGD: Gaussian noise on every row of every table (Abadi et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsedp.mechanisms.base import Mechanism


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """Every row is in the selection at every step; a step costs time in proportion to the size of the tables."""

    name: ClassVar[str] = "dpsgd"
    takes_ranks: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, all of them together"
