"""EANA: noise on the rows that the batch touches, and on no others (EANA, Algorithm 2). Not differentially private."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import dp_accounting.rdp
import numpy as np
from torch import Tensor

from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import touched_rows
from sparsedp.mechanisms.base import Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts


@dataclass(frozen=True)
class EANA(Mechanism):
    """Selects the touched rows. Which rows changed tells which rows the data contain, so epsilon is infinite."""

    name: ClassVar[str] = "eana"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return (
            "none: whoever sees the model learns which rows were ever used, so a unit with a rare id is exposed. "
            "What a used row contains is noised as in DP-SGD"
        )

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        return dp_accounting.NonPrivateDpEvent()

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        return Expected(1 - rows.absent, np.zeros_like(rows.absent), rows.mean)

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        return space.split(touched_rows(batch, space))


def eana_renyi_bound(alpha: int, *, min_count: int, max_rows: int, gradient_bound: float, noise_std: float) -> float:
    """Theorem 3.1's bound on the Renyi divergence of order `alpha` between EANA's models on neighbouring data.

    alpha L^2 / (2 (C0 + 1 - alpha) sigma^2) + d0/2 ln(1 + 1/C0) + d0 / (2 (alpha - 1)) ln((C0 + 1) / (C0 + 1 - alpha))

    with C0 = `min_count`, d0 = `max_rows`, L = `gradient_bound`, sigma = `noise_std`. It is advisory, not a guarantee:
    it holds for a linear loss trained in one pass, and only for pairs of data sets in both of which every row is used
    by at least C0 units and no unit uses more than d0 rows. That is a property of the data, and stating it releases
    something about them.
    """
    if not isinstance(alpha, int) or not 2 <= alpha <= min_count:
        raise ValueError(f"alpha must be a whole number from 2 to min_count ({min_count}), not {alpha!r}")
    if not (max_rows >= 1 and gradient_bound >= 0 and noise_std > 0):  # nor NaN
        raise ValueError("max_rows must be at least 1, gradient_bound not negative, noise_std positive")
    left = min_count + 1 - alpha
    shift = alpha * gradient_bound**2 / (2 * left * noise_std**2)
    spread = max_rows / 2 * math.log1p(1 / min_count)
    return shift + spread + max_rows / (2 * (alpha - 1)) * math.log((min_count + 1) / left)


def eana_advisory_epsilon(
    delta: float, *, min_count: int, max_rows: int, gradient_bound: float, noise_std: float
) -> float:
    """The epsilon at `delta` that Theorem 3.1 gives under its conditions (see `eana_renyi_bound`); advisory only."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, not {delta}")
    orders = list(range(2, min(min_count, 512) + 1))
    if not orders:
        raise ValueError("min_count must be at least 2")
    bounds = [
        eana_renyi_bound(
            alpha, min_count=min_count, max_rows=max_rows, gradient_bound=gradient_bound, noise_std=noise_std
        )
        for alpha in orders
    ]
    return float(dp_accounting.rdp.compute_epsilon(orders, bounds, delta)[0])
