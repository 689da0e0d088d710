"""An error bound for Gaussian l1 recovery with all of its constants, and the measurements for which it is least.

Let G = sqrt(m) A, which has standard normal entries, e the error of the measurements, R a bound on the mean's l1 norm. By
Gordon's inequality (Y. Gordon, "On Milman's inequality and random subspaces which escape through a mesh in R^n", 1988) and
concentration, each with probability 1 - exp(-t^2/2) at least:

1. for all w, |G w|_2 >= (E chi_m - sqrt(d E(|g| - beta)_+^2) - t) |w|_2 - beta |w|_1, for any beta that was fixed before;
2. for all e there is a v with A v = e and |v|_1 <= sqrt(m) |e|_2 / tau, where tau = (E of the largest size of d/k normals) -
   (E chi_m + t) / sqrt(k), for any k that was fixed before. (The least |v|_1 is the largest <e, y> with |A^T y|_inf <= 1, and
   |G^T y|_inf is at least the mean of the largest sizes in k blocks of it.)

The mean plus v has the measurements, so the vector of least norm differs from the mean by a w with |w|_1 <= 2 R + |v|_1 and
A w = e. With 1 and 2,

    |w|_2 <= (sqrt(m) |e|_2 (1 + beta / tau) + 2 R beta) / (E chi_m - sqrt(d E(|g| - beta)_+^2) - t),

and the cut at 2 L makes no error larger than 3 L where 1 or 2 fail. e is the noise, and what the clip of A z takes away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

_TIMES = np.arange(1.0, 8.1, 0.5)  # t
_SIZES = np.arange(0.01, 14.0, 0.01)  # of normals, that an integral is a sum over
_CLIPS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)  # that are tried
_RATIO = 1.25  # of numbers of measurements that are tried


@dataclass(frozen=True)
class RecoveryBound:
    """The bound for means with |mean|_1 <= `l1` and |mean|_2 <= `l2` in d = `columns` columns.

    `noise` is the deviation on each measurement if |A z| is clipped to L; a clip to c L has c times as much.
    """

    columns: int
    l2: float  # L
    l1: float  # R
    noise: float

    def at(self, measurements: int, clip: float) -> float:
        """On the root mean square of the error's l2 norm, over the noise and the matrix; infinite where m is too small."""
        return self._for_clips(measurements, (clip,))[0]

    def best(self, measurements: int | None = None, clip: float | None = None) -> tuple[int, float] | None:
        """(m, clip) with the smallest bound, of those that are not given; None if there is none for any m below d."""
        clips = _CLIPS if clip is None else (clip,)
        count = math.ceil(math.log(self.columns) / math.log(_RATIO))
        every = sorted({round(_RATIO**power) for power in range(count)}) if measurements is None else [measurements]
        bounds = {(m, c): at for m in every for c, at in zip(clips, self._for_clips(m, clips))}
        smallest = min(bounds, key=bounds.__getitem__, default=None)
        return smallest if smallest is not None and bounds[smallest] < math.inf else None

    def _for_clips(self, m: int, clips: Sequence[float]) -> list[float]:
        length = _mean_length(m)
        divisors = length - self._excesses - _TIMES  # (betas, times)
        counts, largest = self._largest
        taus = (largest - (length + _TIMES) / np.sqrt(counts)).max(axis=0)
        valid = (divisors > 0) & (taus > 0)
        divisors, taus = np.where(valid, divisors, 1.0), np.where(taus > 0, taus, 1.0)
        failing = 2 * np.exp(-(_TIMES**2) / 2) * (3 * self.l2) ** 2
        bounds = []
        for clip in clips:
            error = clip * self.noise * math.sqrt(m) + self.l2 * _clipped_away(m, clip)
            norms = (math.sqrt(m) * error * (1 + self._betas / taus) + 2 * self.l1 * self._betas) / divisors
            bounds.append(float(np.sqrt(np.where(valid, norms**2 + failing, math.inf)).min()))
        return bounds

    @cached_property
    def _betas(self) -> np.ndarray:
        """(betas, 1), up to where no normal of d is expected to be."""
        return np.linspace(0.1, math.sqrt(2 * math.log(2 * self.columns)) + 1, 60)[:, None]

    @cached_property
    def _excesses(self) -> np.ndarray:
        """sqrt(d E(|g| - beta)_+^2), (betas, 1)."""
        beta = self._betas
        density = np.exp(-(beta**2) / 2) / math.sqrt(2 * math.pi)
        mean = 2 * ((1 + beta**2) * special.ndtr(-beta) - beta * density)
        return np.sqrt(self.columns * np.maximum(0.0, mean))

    @cached_property
    def _largest(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of blocks k, (ks, 1), and E of the largest size of d/k standard normals, from below.

        It is the integral of P(largest > x), which falls: as a sum over right ends it is not overestimated.
        """
        counts = np.unique(np.geomspace(1, self.columns, 40).astype(np.int64))[:, None]
        within = np.log1p(-2 * special.ndtr(-_SIZES))
        means = -np.expm1((self.columns // counts) * within).sum(axis=1, keepdims=True) * (_SIZES[1] - _SIZES[0])
        return counts, means


def _mean_length(m: int) -> float:
    """E chi_m, of a vector of m standard normals."""
    return math.sqrt(2) * math.exp(math.lgamma((m + 1) / 2) - math.lgamma(m / 2))


def _clipped_away(m: int, clip: float) -> float:
    """The root mean square of (chi_m / sqrt(m) - clip)_+: what a clip takes from A z with |z| = 1."""
    second, first, none = special.gammaincc((m + np.array([2, 1, 0])) / 2, clip**2 * m / 2).tolist()  # tails of chi^2
    return math.sqrt(max(0.0, second - 2 * clip * _mean_length(m) / math.sqrt(m) * first + clip**2 * none))
