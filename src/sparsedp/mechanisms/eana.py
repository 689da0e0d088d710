"""EANA: noise on the rows that the batch touches, and on no others (EANA, Algorithm 2). Not differentially private."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting
import dp_accounting.rdp
import numpy as np
from numpy.typing import ArrayLike, NDArray
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
    takes_ranks: ClassVar[bool] = True

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
        return space.split(step.exchange(space, touched_rows(batch, space)).rows)


# ---------------------------------------------------------------------- Theorem 3.1, corrected
#
# The theorem compares two models, trained in one pass with a linear loss: P without a unit x, Q with it. A row that x uses,
# and that C noises reached in P, has C + 1 of them in Q. With s the deviation of one noise, each of the row's coordinates is
#
#     P = N(0, C s^2)    against    Q = N(x, (C + 1) s^2).
#
# For D_alpha(N(m0, v0) || N(m1, v1)) the variance in the middle is v = alpha v1 + (1 - alpha) v0 (van Erven and Harremoes
# 2014, equation 10); the paper has v0 and v1 in each other's place. So equation 3 pairs one direction's v with the other's
# logarithms, and so does equation 7. Correct is, for every alpha > 1,
#
#     D(P || Q) = alpha x^2 / (2 (C + alpha) s^2)     + ln(1 + 1/C) / 2 - ln((C + alpha) / (C + 1)) / (2 (alpha - 1))
#     D(Q || P) = alpha x^2 / (2 (C + 1 - alpha) s^2) - ln(1 + 1/C) / 2 - ln((C + 1 - alpha) / C) / (2 (alpha - 1))
#
# the second for alpha < C + 1, and infinite beyond. Both logarithmic terms are about alpha / (4 C^2), where the paper prints
# about 1 / C. With t = 1/C and a = alpha - 1, their derivatives in t are alpha t / (2 (1 + t) (1 + alpha t)) and
# alpha t / (2 (1 + t) (1 - a t)): both grow with t, so a row with more noises costs less, and D(Q || P), which grows faster,
# is the larger of the two. The code takes the larger all the same, without relying on it.


def eana_renyi_divergences(
    alpha: float, *, count: int, row_norm: float, noise_std: float, dim: int = 1
) -> tuple[float, float]:
    """(D_alpha(P || Q), D_alpha(Q || P)) of one row, exactly: equations 3 and 7, with their variances in the right places.

    P is the row's law without the unit, in which `count` noises of deviation `noise_std` reached it; Q is its law with the
    unit, whose gradient in this row has the norm `row_norm`. The row has `dim` coordinates, each with its own noise.
    """
    _require_order(alpha)
    _require_noise(noise_std, dim)
    counts, norms = _rows([count], [row_norm])
    forth, back = _divergences(alpha, counts, norms, noise_std, dim)
    return float(forth[0]), float(back[0])


def eana_renyi_bound(
    alpha: int, *, min_count: int, max_rows: int, gradient_bound: float, noise_std: float, dim: int = 1
) -> float:
    """Theorem 3.1 (equation 1), corrected: the larger Renyi divergence of order `alpha` of EANA's models on neighbouring data.

    alpha L^2 / (2 (C0 + 1 - alpha) sigma^2) - d0/2 ln(1 + 1/C0) - d0 / (2 (alpha - 1)) ln((C0 + 1 - alpha) / C0)

    with C0 = `min_count`, d0 = `max_rows` x `dim` (the theorem counts coordinates), L = `gradient_bound`, sigma = `noise_std`.
    It is reached, by a unit of norm L that uses d0 coordinates with C0 noises each.

    It is advisory, not a guarantee: it holds for a linear loss trained in one pass, and only for pairs of data sets in both
    of which at least C0 noises reach every row and no unit uses more than `max_rows` rows. With one unit in a step, as in
    the paper, that is C0 units to a row; with larger batches, C0 steps in which somebody uses it. That is a property of the
    data, and stating it releases something about them.
    """
    left = _require_theorem(alpha, min_count, max_rows, gradient_bound, noise_std, dim)
    shift, coordinates = alpha * gradient_bound**2 / (2 * noise_std**2), max_rows * dim
    forth = shift / (min_count + alpha) + coordinates * _spread_forth(alpha, min_count)
    back = shift / left + coordinates * _spread_back(alpha, min_count)
    return max(forth, back)


def eana_renyi_bound_as_printed(
    alpha: int, *, min_count: int, max_rows: int, gradient_bound: float, noise_std: float, dim: int = 1
) -> float:
    """Theorem 3.1 as the paper prints it: true, but loose by orders of magnitude where C0 is large (see `eana_renyi_bound`).

    alpha L^2 / (2 (C0 + 1 - alpha) sigma^2) + d0/2 ln(1 + 1/C0) + d0 / (2 (alpha - 1)) ln((C0 + 1) / (C0 + 1 - alpha))

    At C0 = 1000, d0 = 10, alpha = 10 the terms in d0 are 0.0106, and 2.5e-5 where they are right.
    """
    left = _require_theorem(alpha, min_count, max_rows, gradient_bound, noise_std, dim)
    shift = alpha * gradient_bound**2 / (2 * left * noise_std**2)
    coordinates = max_rows * dim
    spread = coordinates / 2 * math.log1p(1 / min_count)
    return shift + spread + coordinates / (2 * (alpha - 1)) * math.log((min_count + 1) / left)


def eana_renyi_bound_by_row(
    alpha: float, counts: ArrayLike, *, gradient_bound: float, noise_std: float, dim: int = 1
) -> NDArray[np.float64]:
    """Equation 8, corrected: for each row the larger divergence of what a unit of norm `gradient_bound` can do to it alone.

    alpha L^2 / (2 (C + 1 - alpha) sigma^2) - dim/2 ln(1 + 1/C) - dim / (2 (alpha - 1)) ln((C + 1 - alpha) / C)

    `counts` (rows,) holds each row's C, how many noises reached it without the unit. Infinite for rows with C <= alpha - 1,
    0 included: that the row changed at all tells of the unit. Adding these up over the rows of a unit counts its gradient
    in full for each of them; `eana_renyi_bound_of_unit` does not. Advisory, as `eana_renyi_bound` is.
    """
    _require_order(alpha)
    _require_noise(noise_std, dim)
    rows = np.asarray(counts)
    return np.maximum(*_divergences(alpha, *_rows(rows, np.full(rows.shape, gradient_bound)), noise_std, dim))


def eana_renyi_bound_of_unit(
    alpha: float, counts: ArrayLike, row_norms: ArrayLike, *, noise_std: float, dim: int = 1
) -> float:
    """Equation 9, corrected: the larger divergence between the models without and with one particular unit, exactly.

    The sum over the unit's rows of
    alpha |x_r|^2 / (2 (C_r + 1 - alpha) sigma^2) - dim/2 ln(1 + 1/C_r) - dim / (2 (alpha - 1)) ln((C_r + 1 - alpha) / C_r)

    `counts` and `row_norms` (rows,) are of the rows that the unit uses: C_r noises reached row r without the unit, and the
    unit's own gradient there has the norm |x_r|. Infinite if a row has C_r <= alpha - 1. 0 for a unit that uses no row.
    Computed from a unit's own data: for whoever holds them, not for release.
    """
    _require_order(alpha)
    _require_noise(noise_std, dim)
    forth, back = _divergences(alpha, *_rows(counts, row_norms), noise_std, dim)
    return float(max(forth.sum(), back.sum()))


def eana_advisory_epsilon(
    delta: float, *, min_count: int, max_rows: int, gradient_bound: float, noise_std: float, dim: int = 1
) -> float:
    """The epsilon at `delta` that Theorem 3.1 gives under its conditions (see `eana_renyi_bound`); advisory only."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, not {delta}")
    orders = list(range(2, min(min_count, 512) + 1))
    if not orders:
        raise ValueError("min_count must be at least 2")
    bounds = [
        eana_renyi_bound(
            alpha, min_count=min_count, max_rows=max_rows, gradient_bound=gradient_bound, noise_std=noise_std, dim=dim
        )
        for alpha in orders
    ]
    return float(dp_accounting.rdp.compute_epsilon(orders, bounds, delta)[0])


def _divergences(
    alpha: float, counts: NDArray[np.float64], norms: NDArray[np.float64], noise_std: float, dim: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(D(P || Q), D(Q || P)) of each row."""
    shift = alpha * norms**2 / (2 * noise_std**2)
    forth, back = np.full(counts.shape, np.inf), np.full(counts.shape, np.inf)
    used = counts > 0  # in a row without noise, P is a point
    forth[used] = shift[used] / (counts[used] + alpha) + dim * _spread_forth(alpha, counts[used])
    finite = counts > alpha - 1
    back[finite] = shift[finite] / (counts[finite] + 1 - alpha) + dim * _spread_back(alpha, counts[finite])
    return forth, back


def _spread_forth(alpha: float, count: Any) -> Any:
    """What the variances add to D(P || Q) in each coordinate. `log1p` throughout: the terms cancel but for 1 / C^2."""
    return np.log1p(1 / count) / 2 - np.log1p((alpha - 1) / (count + 1)) / (2 * (alpha - 1))


def _spread_back(alpha: float, count: Any) -> Any:
    """What the variances add to D(Q || P) in each coordinate, for alpha < count + 1."""
    return -np.log1p(1 / count) / 2 - np.log1p(-(alpha - 1) / count) / (2 * (alpha - 1))


def _rows(counts: ArrayLike, row_norms: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Counts and norms of rows as float64, each (rows,)."""
    c, norms = np.asarray(counts, dtype=np.float64), np.asarray(row_norms, dtype=np.float64)
    if c.ndim != 1 or c.shape != norms.shape:
        raise ValueError(
            f"counts and row norms must be one number for each row, not of shapes {c.shape} and {norms.shape}"
        )
    if not (np.all(np.isfinite(c)) and np.all(c >= 0) and np.all(c == np.floor(c))):
        raise ValueError("counts must be whole numbers, not negative")
    if not (np.all(np.isfinite(norms)) and np.all(norms >= 0)):
        raise ValueError("the norms of a unit's rows must be finite and not negative")
    return c, norms


def _require_order(alpha: float) -> None:
    if not 1 < alpha < math.inf:
        raise ValueError(f"alpha must be above 1 and finite, not {alpha!r}")


def _require_noise(noise_std: float, dim: int) -> None:
    if not (noise_std > 0 and dim >= 1):
        raise ValueError("dim must be at least 1, noise_std positive")


def _require_theorem(
    alpha: int, min_count: int, max_rows: int, gradient_bound: float, noise_std: float, dim: int
) -> int:
    """C0 + 1 - alpha, if the theorem speaks of these numbers."""
    if not isinstance(alpha, int) or not 2 <= alpha <= min_count:
        raise ValueError(f"alpha must be a whole number from 2 to min_count ({min_count}), not {alpha!r}")
    if not (max_rows >= 1 and dim >= 1 and gradient_bound >= 0 and noise_std > 0):  # nor NaN
        raise ValueError("max_rows and dim must be at least 1, gradient_bound not negative, noise_std positive")
    return min_count + 1 - alpha
