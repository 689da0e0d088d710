"""DP-AdaFEST: at every step, noise only on rows that enough units of the batch touch (DP-AdaFEST, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsedp.accounting import split_multiplier
from sparsedp.capture import Captured
from sparsedp.mechanisms.base import Mechanism
from sparsedp.mechanisms.contribution import RowSpace, contribution_map
from sparsedp.mechanisms.survivors import draw_survivors
from sparsedp.noise import RandomKey


@dataclass(frozen=True)
class AdaFEST(Mechanism):
    """Selects the rows whose noisy contribution reaches `threshold` (tau).

    The map of contributions is clipped to `map_clip` (C1) per unit and has noise C1 sigma1. The gradient is masked,
    clipped to C2 and has noise C2 sigma2. sigma1 / sigma2 = `noise_ratio`, and (sigma1^-2 + sigma2^-2)^(-1/2) is the
    step's noise multiplier: both are on one sample, so a step costs what DP-SGD costs with it (section 3.3).
    """

    name: ClassVar[str] = "adafest"
    selects: ClassVar[bool] = True
    threshold: float = 10.0
    noise_ratio: float = 5.0
    map_clip: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be a number, not {self.threshold}")
        for name in ("noise_ratio", "map_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, all of them together"

    def gradient_noise(self, noise_multiplier: float) -> float:
        return split_multiplier(noise_multiplier, self.noise_ratio)[1]

    def select(
        self, batch: Sequence[Captured], tables: Mapping[str, Tensor], noise_multiplier: float, key: RandomKey
    ) -> dict[str, Tensor]:
        space = RowSpace.of(tables)
        rows, values = contribution_map(batch, space, self.map_clip)
        std = split_multiplier(noise_multiplier, self.noise_ratio)[0] * self.map_clip
        kept = draw_survivors(rows.numpy(), values.numpy(), space.size, self.threshold, std, key.numpy(0))
        return space.split(torch.from_numpy(kept))
