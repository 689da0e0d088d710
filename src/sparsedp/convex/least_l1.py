"""argmin |z|_1 subject to A z = b, with a certified gap: by HiGHS where A is small, elsewhere by generating columns.

The dual problem is max b^T y subject to |A^T y|_inf <= 1. Any y, divided by |A^T y|_inf, bounds the least norm from below, so
a solution of A z = b and one such y say together how far the solution is from the least norm at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from sparsedp.convex.interior_point import interior_point
from sparsedp.convex.recovery import GaussianMatrix
from sparsedp.errors import SparseDPError

_EXACT = 400_000  # elements of a matrix for which HiGHS takes seconds
_FIRST, _JOINING = 4, 2  # columns of the first round, and that join in a round at most, over the measurements
_STAYING = 1.5  # columns with the largest |a^T y| that stay, over the measurements
_ZERO = 1e-7  # of the largest entry: columns with larger ones stay as well
_MORE = 50  # columns beyond these multiples


@dataclass(frozen=True)
class Solved:
    """A vector z, and how near it is to the least |z|_1 with A z = b."""

    point: np.ndarray  # (d,)
    solver: str  # "highs" or "columns"
    iterations: int  # rounds of columns, or iterations of HiGHS
    gap: float  # |z|_1 is above the least by this share at most, where A z = b to rounding
    finished: bool


def least_l1(
    matrix: GaussianMatrix, target: np.ndarray, *, solver: str | None = None, tolerance: float = 1e-5, rounds: int = 50
) -> Solved:
    """argmin |z|_1 subject to A z = b: by HiGHS where A is small, elsewhere by columns, until the gap is `tolerance`."""
    size = float(np.abs(target).max())
    if size == 0:
        return Solved(np.zeros(matrix.shape[1]), "none", 0, 0.0, True)
    solver = solver or ("highs" if matrix.shape[0] * matrix.shape[1] <= _EXACT else "columns")
    if solver not in ("highs", "columns"):
        raise SparseDPError(f"solver must be highs or columns, not {solver!r}")
    # In units of b's size: the solvers' tolerances are absolute.
    if solver == "highs":
        return _by_highs(matrix, target / size, size)
    return _by_columns(matrix, target / size, size, tolerance, rounds)


def _by_highs(matrix: GaussianMatrix, target: np.ndarray, size: float) -> Solved:
    """z = u - v with u, v >= 0 and the least sum."""
    dense = matrix.dense()
    columns = dense.shape[1]
    answer = scipy.optimize.linprog(
        np.ones(2 * columns), A_eq=np.hstack([dense, -dense]), b_eq=target, bounds=(0, None), method="highs"
    )
    if answer.x is None:
        return Solved(np.zeros(columns), "highs", int(answer.nit), math.inf, False)
    point = answer.x[:columns] - answer.x[columns:]
    multipliers = answer.eqlin.marginals
    gap = max(0.0, 1 - _lower_bound(target, multipliers, dense.T @ multipliers) / float(np.abs(point).sum()))
    return Solved(point * size, "highs", int(answer.nit), gap, answer.status == 0)


def _by_columns(matrix: GaussianMatrix, target: np.ndarray, size: float, tolerance: float, rounds: int) -> Solved:
    """The problem on some columns of A, again and again, with those that its multipliers y say are missing: |a^T y| > 1.

    There is a solution with m non-zeros at most, so a few times m columns are enough. A round has one product with all of A.
    """
    measurements, columns = matrix.shape
    chosen = np.argsort(-np.abs(matrix.transposed_times(target)))[: _FIRST * measurements + _MORE]
    point, norm, bound, gap = np.zeros(columns), math.inf, 0.0, math.inf
    for done in range(1, rounds + 1):
        values, multipliers = interior_point(matrix.columns(chosen), target, tolerance / 4)
        if (sum_of_sizes := float(np.abs(values).sum())) < norm:
            norm, point = sum_of_sizes, np.zeros(columns)
            point[chosen] = values
        prices = np.abs(matrix.transposed_times(multipliers))
        bound = max(bound, _lower_bound(target, multipliers, prices))
        gap = max(0.0, 1 - bound / norm)
        if gap <= tolerance:
            return Solved(point * size, "columns", done, gap, True)
        used = chosen[np.abs(values) > _ZERO * np.abs(values).max()]
        dearest = chosen[np.argsort(-prices[chosen])[: round(_STAYING * measurements) + _MORE]]
        prices[chosen] = 0
        others = np.argsort(-prices)[: _JOINING * measurements]
        joining = others[prices[others] > 1]
        if not joining.size:
            break  # rounding is all that is left of the gap
        chosen = np.concatenate([np.union1d(used, dearest), joining])
    return Solved(point * size, "columns", done, gap, False)


def _lower_bound(target: np.ndarray, multipliers: np.ndarray, prices: np.ndarray) -> float:
    """On the least norm: b^T y / |A^T y|_inf, `prices` being A^T y or its sizes."""
    return float(target @ multipliers) / max(1.0, float(np.abs(prices).max()))
