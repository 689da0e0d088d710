"""Sums of independent privacy losses: distributions on a grid, convolved by FFT, rounded up throughout.

Every distribution is tilted by e^(tilt * loss) before the FFT and back afterwards. An FFT's error is about
1e-16 times the number of terms, absolutely; tilted towards the losses that matter, relative to their mass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.signal import lfilter

from sparsedp.accounting.pairs import Array, Pair

MAX_POINTS = 2**22  # of a grid: a few hundred MB while composing
ROUNDING = 2.0**-52


class TooFineError(Exception):
    """The grid would need more than `MAX_POINTS` points."""


@dataclass(frozen=True)
class Estimate:
    """An upper bound, and about how far it may lie above the exact value."""

    value: float
    error: float


@dataclass(frozen=True)
class Cumulant:
    """K(tilt) = log E[e^(tilt * loss)] and its derivatives: mean and variance of the tilted loss."""

    value: float
    mean: float
    variance: float


@dataclass(frozen=True)
class Grid:
    """P's masses at the losses (first + i) * interval, rounded up, and `infinite` at infinity."""

    interval: float
    first: int
    mass: Array
    infinite: float
    spread: Array  # what rounding added to the variance, over interval^2, by cell

    @classmethod
    def of(cls, pair: Pair, interval: float) -> "Grid":
        """Connect the dots: split each cell's masses between its ends so that P's and Q's are kept."""
        first = math.floor(pair.low / interval) - 1
        last = math.ceil(pair.high / interval) + 1
        edges = interval * np.arange(first, last + 1)
        p_all, q_all = pair.masses(edges)
        p, q = p_all[1:-1], q_all[1:-1]
        upper = (p - q * np.exp(np.minimum(edges[:-1], 700.0))) / -math.expm1(-interval)
        # Up by the rounding error of p and q, which the division by the interval magnifies.
        upper = np.clip(upper + 4 * ROUNDING / interval * p, 0.0, p)
        mass = np.append(p - upper, 0.0)
        mass[1:] += upper
        mass[0] += p_all[0]
        spread = np.divide(upper * (p - upper), p, out=np.zeros_like(p), where=p > 0)
        return cls(interval, first, mass, float(p_all[-1]), spread)

    @property
    def last(self) -> int:
        return self.first + len(self.mass) - 1

    @cached_property
    def loss(self) -> Array:
        return self.interval * np.arange(self.first, self.last + 1)

    @cached_property
    def log_mass(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.mass)

    def tilted(self, tilt: float) -> tuple[Array, float]:
        """The masses times e^(tilt * loss), normalised, and the logarithm of their sum."""
        mass = self.log_mass + tilt * self.loss
        top = float(mass.max())
        mass -= top
        np.exp(mass, out=mass)
        total = float(mass.sum())
        mass /= total
        return mass, top + math.log(total)

    def cumulant(self, tilt: float) -> Cumulant:
        mass, value = self.tilted(tilt)
        loss = self.loss
        mean = _dot(mass, loss)
        return Cumulant(value, mean, _dot(mass, (loss - mean) ** 2))

    def added_variance(self, tilt: float) -> float:
        """What rounding to the grid adds to the variance of the tilted loss."""
        weight = np.exp(np.minimum(tilt * self.loss[:-1] - self.tilted(tilt)[1], 700.0))
        return self.interval**2 * _dot(weight, self.spread)


def sum_cumulant(grids: Sequence[Grid], counts: Sequence[int], tilt: float) -> Cumulant:
    parts = [(count, grid.cumulant(tilt)) for grid, count in zip(grids, counts)]
    return Cumulant(
        sum(count * part.value for count, part in parts),
        sum(count * part.mean for count, part in parts),
        sum(count * part.variance for count, part in parts),
    )


@dataclass(frozen=True)
class Total:
    """The composed loss, accurate from the tilted distribution's centre upwards."""

    interval: float
    first: int
    mass: Array
    infinite: float
    rounding: Array  # how much of the mass may be due to rounding errors

    @property
    def loss(self) -> Array:
        return self.interval * (self.first + np.arange(len(self.mass)))

    def _tails(self) -> tuple[Array, Array]:
        """At each loss, the mass there or above, and delta without `infinite`.

        That is the sum over larger losses of mass_j (1 - e^(loss - loss_j)).
        """
        above = np.cumsum(self.mass[::-1])[::-1]
        # delta_i = e^-h delta_(i+1) + (1 - e^-h) above_(i+1), from the right: sums of positive terms only.
        shifted = np.append(above[1:], 0.0)[::-1]
        delta = lfilter([-math.expm1(-self.interval)], [1.0, -math.exp(-self.interval)], shifted)[::-1]
        return above, delta

    def epsilon(self, delta: float, added_variance: float) -> Estimate:
        room = delta - self.infinite
        if room <= 0:
            return Estimate(math.inf, 0.0)
        above, deltas = self._tails()
        too_large = np.flatnonzero(deltas > room)
        index = int(too_large[-1]) + 1 if len(too_large) else 0
        epsilon = self.interval * (self.first + index)
        if index == 0:
            # Left of the window: this is only a bound.
            return Estimate(max(0.0, epsilon), max(0.0, epsilon))
        slope = above[index] - deltas[index]
        # Between two grid points delta is linear in e^epsilon.
        epsilon += math.log1p(-(room - deltas[index]) / slope)
        return Estimate(max(0.0, float(epsilon)), self._delta_error(index, added_variance) / float(slope))

    def delta(self, epsilon: float, added_variance: float) -> Estimate:
        index = max(0, math.ceil(epsilon / self.interval) - self.first)
        if index >= len(self.mass):
            return Estimate(min(1.0, self.infinite), self.infinite)
        above, deltas = self._tails()
        # Left of the window the mass is not known, save that it is at most one.
        mass = above[index] if index > 0 else 1.0
        share = -math.expm1(min(0.0, epsilon - self.interval * (self.first + index)))
        delta = min(1.0, float(self.infinite + mass * share + deltas[index] * (1 - share)))
        return Estimate(delta, self._delta_error(index, added_variance) if index > 0 else delta)

    def _delta_error(self, index: int, added_variance: float) -> float:
        """How much of delta is due to cut tails, to rounding errors, and to a variance v added to the loss.

        The latter is v/2 (delta'' - delta'): v/2 times the density of the loss.
        """
        blurred = added_variance / 2 * float(self.mass[index]) / self.interval
        return self.infinite + float(self.rounding[index:].sum()) + blurred


def compose(grids: Sequence[Grid], counts: Sequence[int], tilt: float, outside: float) -> Total:
    """The distribution of the summed losses of `counts[i]` draws from each `grids[i]`.

    On a window that holds all but `outside` of the tilted total on either side.
    """
    interval = grids[0].interval
    total = sum_cumulant(grids, counts, tilt)
    low, high = _window(grids, counts, tilt, outside)
    first = max(math.floor(low / interval), sum(count * grid.first for grid, count in zip(grids, counts)))
    last = min(math.ceil(high / interval), sum(count * grid.last for grid, count in zip(grids, counts)))
    size = last - first + 1
    if size > MAX_POINTS:
        raise TooFineError
    length = fft.next_fast_len(size, real=True)

    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    origin = 0
    for grid, count in zip(grids, counts):
        mass, _ = grid.tilted(tilt)
        # Indices relative to the mean, so that the phases that are raised to a large power stay small.
        centre = round(_dot(mass, grid.loss) / interval)
        index = np.arange(grid.first - centre, grid.last - centre + 1) % length
        spectrum *= _power(fft.rfft(np.bincount(index, weights=mass, minlength=length)), count)
        origin += count * centre
    tilted = np.roll(fft.irfft(spectrum, length), -((first - origin) % length))[:size]
    # Independent errors at each frequency spread evenly over the window; four standard deviations.
    rounding = 4 * ROUNDING * sum(counts) * math.sqrt(_dot(tilted, tilted) / length)

    loss = interval * (first + np.arange(size))
    weight = np.exp(np.minimum(total.value - tilt * loss, 600.0))
    mass = (np.maximum(tilted, 0.0) + rounding) * weight
    beyond = math.exp(min(0.0, total.value - tilt * interval * last + math.log(outside)))
    finite = sum(count * math.log1p(-grid.infinite) for grid, count in zip(grids, counts) if grid.infinite < 1)
    infinite = 1.0 if any(grid.infinite >= 1 for grid in grids) else -math.expm1(finite)
    return Total(interval, first, mass, infinite + beyond, rounding * weight)


def _power(spectrum: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """spectrum ** count, with zeros for what is far below the rounding error: often most of it."""
    if count == 1:
        return spectrum
    out = np.zeros_like(spectrum)
    kept = np.abs(spectrum) > math.exp(-46.0 / count)
    out[kept] = spectrum[kept] ** count
    return out


def _window(grids: Sequence[Grid], counts: Sequence[int], tilt: float, outside: float) -> tuple[float, float]:
    """Losses between which all but `outside` of the tilted total lies on either side, by Chernoff's bound."""
    total = sum_cumulant(grids, counts, tilt)
    tail = -math.log(outside)
    deviation = max(math.sqrt(total.variance), grids[0].interval)
    low, high = -math.inf, math.inf
    # 2 * sqrt(tail) would be best for a normal distribution, less for one with heavier tails.
    for power in range(10):
        step = 2 * math.sqrt(tail) / deviation / 2**power
        up = sum_cumulant(grids, counts, tilt + step).value - total.value
        down = sum_cumulant(grids, counts, tilt - step).value - total.value
        high = min(high, (up + tail) / step)
        low = max(low, -(down + tail) / step)
    return low, high


def _dot(a: Array, b: Array) -> float:
    # Not `a @ b`: BLAS threads cost more than they gain here when the cores are busy.
    return float(np.einsum("i,i", a, b))
