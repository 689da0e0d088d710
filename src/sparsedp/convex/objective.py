"""The regularised empirical risk F(w) = (1/n) sum_i phi(<x_i, w>, y_i) + lambda/2 |w|^2 of a linear model on sparse rows.

Its gradient comes with a bound on what float64 arithmetic can have changed, so that a bound on the true gradient follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from sparsedp.convex.losses import Loss

_UNIT = 2.0**-53  # the relative error of one operation


@dataclass(frozen=True)
class Bounds:
    """What is known of an objective without looking at its rows. Everything that privacy rests on follows from it."""

    loss: Loss
    rows: int  # n, the divisor: public
    columns: int  # d
    row_norm: float  # no row's l2 norm is above it
    regularisation: float  # lambda
    radius: float  # no feasible point's l2 norm is above it; may be infinite

    @property
    def minimiser_norm(self) -> float:
        """No minimiser's norm is above it, if the point 0 is feasible.

        F(0) >= F(w*) + lambda/2 |w*|^2 >= lambda |w*|^2 bounds it, and -<gradient of the losses, w*> >= lambda |w*|^2 does.
        """
        by_value = np.sqrt(self.loss.largest_at_zero / self.regularisation)
        slope = self.loss.largest_slope(self.row_norm * min(by_value, self.radius))
        by_gradient = slope * self.row_norm / self.regularisation
        return float(min(by_value, by_gradient, self.radius))

    @property
    def slope(self) -> float:
        """sup |phi'| at any minimiser, for any row."""
        return self.loss.largest_slope(self.row_norm * self.minimiser_norm)

    @property
    def lipschitz(self) -> float:
        """L: no row's gradient at a minimiser has a larger norm."""
        return self.slope * self.row_norm

    @property
    def smoothness(self) -> float:
        """H: how fast a row's gradient can change."""
        return self.loss.largest_curvature * self.row_norm**2

    def rounding(self, norm: float, slope: float) -> float:
        """How far a gradient computed in float64 at a point of that norm can be from the true one, in l2 norm.

        A sum of k products is within (k + 1) 2^-53 of the sum of their absolute values, relatively, whatever the order; the
        margins have at most d terms, the gradient's sums at most n. The derivative phi' is taken to be right to 16 units.
        """
        margins = (self.columns + 2) * self.loss.largest_curvature * self.row_norm**2 * norm
        sums = (self.rows + 20) * slope * self.row_norm
        return 1.01 * _UNIT * (margins + sums + 8 * self.regularisation * norm)


class Objective:
    """F on data: `rows` (n, d) of float64 and `targets` (n,), as `bounds` says of them."""

    def __init__(self, bounds: Bounds, rows: csr_array, targets: np.ndarray) -> None:
        self.bounds = bounds
        self._rows, self._transposed = rows, rows.T.tocsr()
        self._targets = targets

    def value_and_gradient(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        margins = self._rows @ w
        loss, n = self.bounds.loss, self.bounds.rows
        value = loss.value(margins, self._targets).sum() / n + 0.5 * self.bounds.regularisation * (w @ w)
        slopes = loss.slope(margins, self._targets)
        return float(value), self._transposed @ slopes / n + self.bounds.regularisation * w

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.value_and_gradient(w)[1]

    def residual(self, w: np.ndarray, gradient: np.ndarray) -> float:
        """A number that the true gradient's norm at w does not exceed, given the computed one."""
        norm = float(np.linalg.norm(w))
        slope = self.bounds.loss.largest_slope(self.bounds.row_norm * norm)
        # The norm itself is computed with a relative error of at most d units.
        return 1.0001 * float(np.linalg.norm(gradient)) + self.bounds.rounding(1.0001 * norm, slope)

    def curvatures(self, w: np.ndarray) -> np.ndarray:
        """phi'' of every row, (n,), for `hessian_product`."""
        return self.bounds.loss.curvature(self._rows @ w, self._targets)

    def hessian_product(self, curvatures: np.ndarray, v: np.ndarray) -> np.ndarray:
        products = curvatures * (self._rows @ v)
        return self._transposed @ products / self.bounds.rows + self.bounds.regularisation * v
