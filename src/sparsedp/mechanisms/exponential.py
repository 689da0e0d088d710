"""DP-SGD with exponential selection (Zhang, Mironov, Hejazinia 2021): each step trains k rows, by gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.accounting import ExponentialMechanismDpEvent
from sparsedp.capture import Captured, RowSpace, RowSparse
from sparsedp.generator import CipherGenerator
from sparsedp.mechanisms.base import Mechanism, Step


@dataclass(frozen=True)
class ExponentialSelection(Mechanism):
    """Selects `k` rows of all tables, one after another, by the exponential mechanism.

    A row's score is the norm of the clipped sum's gradient on it. A unit moves the clipped sum by at most C, and so
    every row's norm by at most C, up or down: two scores move apart by at most 2C. Each pick is an exponential
    mechanism with `epsilon` / k. Selection and noise are on one Poisson sample and are accounted for as one sampled
    composition (docs/accounting.md).
    """

    name: ClassVar[str] = "exponential"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    k: int = 1000
    epsilon: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be a whole number of at least 1, not {self.k!r}")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be positive and finite, not {self.epsilon}")

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, all of them together"

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        pick = ExponentialMechanismDpEvent(self.epsilon / self.k)
        step = dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(pick, self.k), dp_accounting.GaussianDpEvent(noise_multiplier)]
        )
        return step if sample_rate == 1 else dp_accounting.PoissonSampledDpEvent(sample_rate, step)

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        rows, norms = _row_norms(batch, space, step)
        scores = norms * (self.epsilon / self.k) / (2 * step.clipping.max_norm)
        return space.split(torch.from_numpy(top_k_gumbel(rows, scores, space.size, self.k, step.key.generator(0))))


def _row_norms(batch: Sequence[Captured], space: RowSpace, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """The touched global rows and the norms of the clipped sum's gradient on them."""
    totals: dict[str, Tensor] = {}
    for captured in batch:
        if not captured.uses:  # an empty batch
            continue
        squares = [captured.squared_norms(uses).double() for uses in captured.uses.values()]
        norms = torch.stack(squares).sum(0).sqrt() * step.scale(captured)
        weights = captured.each(step.clipping.factors(norms) * step.scale(captured))
        for name in space.names:
            if name in captured.uses:
                table = step.tables[name]
                total = captured.uses[name].weighted_sum(weights.to(table.dtype), table.shape)
                if isinstance(total, RowSparse):
                    total = torch.sparse_coo_tensor(total.rows[None], total.values, table.shape, check_invariants=False)
                else:
                    total = total.to_sparse(1)
                totals[name] = totals[name] + total if name in totals else total
    rows, found = [np.empty(0, dtype=np.int64)], [np.empty(0)]
    for name, start in zip(space.names, space.starts):
        if name in totals:
            total = totals[name].coalesce()
            rows.append(total.indices()[0].numpy() + start)
            found.append(torch.linalg.vector_norm(total.values().double(), dim=1).numpy())
    return np.concatenate(rows), np.concatenate(found)


def top_k_gumbel(rows: np.ndarray, scores: np.ndarray, size: int, k: int, generator: CipherGenerator) -> np.ndarray:
    """The k rows of 0..size-1 with the largest score + Gumbel noise, ascending; rows not in `rows` (ascending) score 0.

    The same law as noise on all rows, in time proportional to `rows` and k: Gumbel noise is -log of an exponential
    variable, and the k smallest of m exponential variables are sums of E_i / (m - i + 1) (Renyi).
    """
    k = min(k, size)
    rest = size - len(rows)
    own = scores + generator.gumbel(len(scores))
    few = min(k, rest)
    others = -np.log(np.cumsum(generator.standard_exponential(few) / (rest - np.arange(few))))
    order = np.argsort(-np.concatenate([own, others]), kind="stable")[:k]
    touched = rows[order[order < len(own)]]
    picked = generator.choice(rest, len(order) - len(touched))
    shift = np.searchsorted(rows - np.arange(len(rows)), picked, side="right")
    return np.sort(np.concatenate([touched, picked + shift]))
