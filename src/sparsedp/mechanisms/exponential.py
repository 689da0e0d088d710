"""DP-SGD with exponential selection (Zhang, Mironov, Hejazinia 2021): each step trains k rows, by gradient norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.accounting import ExponentialMechanismDpEvent
from sparsedp.capture import Captured, RowSpace, RowSparse
from sparsedp.kernels.loops import distinct_with_places, find
from sparsedp.mechanisms.base import Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.noise import RandomKey, draw_marked_rows, one_gumbel_each
from sparsedp.tables import RowExchange


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
    selects_by_sum: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = True
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

    @property
    def prediction_note(self) -> str:
        return (
            "Which rows the exponential mechanism favours depends on gradients, which are not known yet: false "
            "positives are predicted as if it favoured none, which is the most there can be."
        )

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        return rows.all_chosen(min(1.0, self.k / rows.size))

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        if not space.names:
            return {}
        sums = _row_sums(batch, space, step)
        exchange = step.exchange(space, space.join({name: total.rows for name, total in sums.items()}))
        rows, norms = _row_norms(exchange, sums)
        scores = norms * (self.epsilon / self.k) / (2 * step.clipping.max_norm)
        keys = [step.key.child(step.tables[name].index) for name in space.names]
        picked = space.split(torch.from_numpy(top_k_gumbel(rows, scores, space.sizes, self.k, keys)))
        return {name: exchange.owned_of(name, rows) for name, rows in picked.items()}


def _row_sums(batch: Sequence[Captured], space: RowSpace, step: Step) -> dict[str, RowSparse]:
    """The clipped sum's gradient of each table, on the rows that are touched."""
    totals: dict[str, list[RowSparse]] = {}
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
                if not isinstance(total, RowSparse):
                    rows = total.any(1).nonzero()[:, 0]
                    total = RowSparse(rows, total[rows])
                totals.setdefault(name, []).append(total)
    return {name: _added_up(parts) for name, parts in totals.items()}


def _added_up(parts: Sequence[RowSparse]) -> RowSparse:
    """The sum of some, each of distinct rows, ascending."""
    if len(parts) == 1:
        return parts[0]
    rows, places = distinct_with_places(torch.cat([part.rows for part in parts]))
    values = torch.cat([part.values for part in parts])
    return RowSparse(rows, values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, places, values))


def _row_norms(exchange: RowExchange, sums: Mapping[str, RowSparse]) -> tuple[np.ndarray, np.ndarray]:
    """The global rows that are touched on any rank, and the norms of the clipped sum's gradient on them."""
    owned = exchange.add_up_rows(sums)
    rows = exchange.space.join({name: total.rows for name, total in owned.items()})
    squares = [total.values.double().square().sum(1) for _, total in sorted(owned.items())]
    rows, squared = exchange.on_all_ranks(rows, torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64))
    return rows.numpy(), squared.sqrt().numpy()


# Purposes of a table's key.
_TOUCHED, _UNTOUCHED = 0, 1


def top_k_gumbel(
    rows: np.ndarray, scores: np.ndarray, sizes: Sequence[int], k: int, keys: Sequence[RandomKey], of: int | None = None
) -> np.ndarray:
    """The k rows with the largest score + Gumbel noise, ascending; rows not in `rows` (ascending) score 0.

    Tables of these `sizes` are laid end to end; each has its key, and the noise on a row is a function of the table's key, the
    row's number in its table, k and `of`, the rows of all tables (None: these are all). The same law as noise on all rows, in
    time proportional to `rows` and k.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    width = (k + 6 * math.sqrt(k) + 8) / max(1, int(starts[-1]) if of is None else of)
    k = min(k, int(starts[-1]))
    edges = np.searchsorted(rows, starts)
    noise = [
        one_gumbel_each(key.child(_TOUCHED), rows[begin:end] - start)
        for key, start, begin, end in zip(keys, starts, edges, edges[1:])
    ]
    others, values = _largest(rows, starts, min(k, int(starts[-1]) - len(rows)), width, keys)
    noisy = np.concatenate([scores + np.concatenate(noise), values])
    every = np.concatenate([rows, others])
    return np.sort(every if len(every) == k else every[np.argpartition(-noisy, k - 1)[:k]])


def _largest(
    rows: np.ndarray, starts: np.ndarray, few: int, width: float, keys: Sequence[RandomKey]
) -> tuple[np.ndarray, np.ndarray]:
    """At least the `few` rows not in `rows` that have the largest Gumbel noise, and that noise.

    Gumbel noise is -log E with E exponential, so these are the smallest E. They are drawn in slices of the `width` w, from 0
    to w, from w to 2 w and so on: a row whose E is not below a slice falls into it with probability 1 - e^-w.
    """
    share = -math.expm1(-width)
    passed, largest, values = np.zeros(0, np.int64), [np.zeros(0, np.int64)], [np.zeros(0)]
    missing, slice_ = few, 0
    while missing > 0:
        drawn = [
            draw_marked_rows(key.child(_UNTOUCHED, slice_), 0, int(end - start), math.log(share))
            for key, start, end in zip(keys, starts, starts[1:])
        ]
        fresh = np.concatenate([numbers + start for start, (numbers, _) in zip(starts, drawn)])
        exponential = slice_ * width - np.log1p(-share * np.concatenate([marks for _, marks in drawn]))
        new = ~_are_among(passed, fresh)
        passed = np.sort(np.concatenate([passed, fresh[new]]))
        new &= ~_are_among(rows, fresh)
        largest.append(fresh[new])
        values.append(-np.log(exponential[new]))
        missing, slice_ = missing - int(new.sum()), slice_ + 1
    return np.concatenate(largest), np.concatenate(values)


def _are_among(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which of the numbers `wanted` are in an array. (Much faster than np.isin, which sorts both.)"""
    return find(torch.from_numpy(ascending), torch.from_numpy(wanted)).numpy() >= 0
