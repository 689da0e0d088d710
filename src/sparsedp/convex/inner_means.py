"""The private means inside of a step of bias-reduced SGD: of a sample, of its halves, and of the row that stands alone.

A mean adds up clipped gradients, gives the sum noise, divides it by the sample's *expected* size, and goes on from there without
the data. A row moves the sum by `sensitivity` at most, in the norm that the noise asks for; the noise over that is the same for
all of a run's means, so that what a step costs does not depend on which they are (`ladder.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from sparsedp.convex.feasible import L1Ball
from sparsedp.convex.least_l1 import least_l1
from sparsedp.convex.projections import project
from sparsedp.convex.recovery import GaussianMatrix, needs_no_recovery
from sparsedp.convex.release import FixedPoint, Releases
from sparsedp.convex.rows import ExactSum, RowBounds
from sparsedp.noise import RandomKey

_MEASUREMENT_CLIP = 1.5  # |A z| / L beyond which measurements are scaled down, as in `private_mean`


@dataclass(frozen=True)
class NoisyMean:
    """Noise on every coordinate: Gaussian, or Laplace's if `pure`; and the projection onto the l1 ball if `projected`."""

    bounds: RowBounds  # on the gradients
    columns: int
    noise_multiplier: float  # deviation, or scale, over the sensitivity
    pure: bool
    projected: bool

    @property
    def sensitivity(self) -> float:
        return self.bounds.l1 if self.pure else self.bounds.l2

    def total(self, rows: csr_array) -> FixedPoint:
        """The sum of clipped rows, exact."""
        total = ExactSum(self.columns, self.bounds.step)
        total.add(rows)
        return total.sum

    def release(self, total: FixedPoint | np.ndarray, size: int, releases: Releases) -> np.ndarray:
        if self.pure:
            mean = releases.laplace(total, self.sensitivity, 1 / self.noise_multiplier) / size
        else:
            mean = releases.gaussian(total, self.sensitivity, self.noise_multiplier) / size
        return project(mean, L1Ball(self.bounds.l1), norm="l2") if self.projected else mean

    def squared_error(self, size: int) -> float:
        """A bound on what the noise adds to E |mean - exact|^2: d variances, or 2 |ball| |noise|_inf (Lemma 3.1)."""
        scale = self.noise_multiplier * self.sensitivity / size
        if self.pure:
            alone, largest = 2 * self.columns * scale**2, scale * (1 + math.log(self.columns))
        else:
            alone, largest = self.columns * scale**2, scale * math.sqrt(2 * math.log(2 * self.columns))
        return min(alone, 2 * self.bounds.l1 * largest) if self.projected else alone


@dataclass(frozen=True)
class RecoveredMean:
    """Gaussian l1 recovery (algorithm 2): noise on m measurements of every gradient, and the vector of least l1 norm with them.

    Each gradient's measurements are scaled down to norm 1.5 L, so that the sensitivity is certain, whatever A is. A is public.
    """

    bounds: RowBounds
    columns: int
    noise_multiplier: float
    measurements: int  # m
    key: RandomKey  # of A

    @property
    def sensitivity(self) -> float:
        return _MEASUREMENT_CLIP * self.bounds.l2

    @cached_property
    def _matrix(self) -> GaussianMatrix:
        return GaussianMatrix(self.key, self.measurements, self.columns)

    def total(self, rows: csr_array) -> FixedPoint:
        """The sum of the clipped measurements of clipped rows, exact."""
        total = ExactSum(self.measurements, RowBounds(self.sensitivity, self.sensitivity).step)
        self._matrix.clipped_sum([rows], self.sensitivity, total)
        return total.sum

    def release(self, total: FixedPoint | np.ndarray, size: int, releases: Releases) -> np.ndarray:
        noisy = releases.gaussian(total, self.sensitivity, self.noise_multiplier) / size
        # How far the solver got says how near the mean is; privacy does not depend on it.
        point = least_l1(self._matrix, noisy).point
        return point if float(np.linalg.norm(point)) <= 2 * self.bounds.l2 else np.zeros(self.columns)

    def squared_error(self, size: int) -> float:
        """Of a vector of norm 2 L at most, from one of norm L at most."""
        return 9 * self.bounds.l2**2


InnerMean = NoisyMean | RecoveredMean


def recovery_of(size: int, bounds: RowBounds, columns: int, noise_multiplier: float, key: RandomKey) -> InnerMean:
    """Algorithm 2 for a sample of that expected size, or what takes its place.

    m = size sqrt(2 s ln(d/s)) / sigma: the paper's n epsilon sqrt(s ln(d/s) / ln(1/delta)) in terms of the noise that there is,
    of which its own has sqrt(2 ln(1/delta)) / epsilon. Of one row algorithm 2 fails, and algorithm 1 is taken; where m is so
    large that there is nothing to recover, noise alone (its other branch).
    """
    if size == 1:
        return NoisyMean(bounds, columns, noise_multiplier, pure=False, projected=True)
    sparsity = min(float(columns), (bounds.l1 / bounds.l2) ** 2)
    logarithm = max(1.0, math.log(columns / sparsity))
    m = max(1, math.ceil(size * math.sqrt(2 * sparsity * logarithm) / noise_multiplier))
    if needs_no_recovery(m, columns):
        return NoisyMean(bounds, columns, noise_multiplier, pure=False, projected=False)
    return RecoveredMean(bounds, columns, noise_multiplier, m, key.child(size))
