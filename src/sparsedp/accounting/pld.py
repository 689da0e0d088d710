"""Composition of events by their privacy loss distributions (PLD), rounded up throughout.

The loss of each event is put on a grid by connecting the dots (Doroshenko et al. 2022), which never lowers delta at
any epsilon, and sums of losses are convolutions, done by FFT. Two things differ from `dp_accounting`'s PLD:

- Every distribution is tilted by e^(tilt * loss) before the FFT and back afterwards. An FFT has an absolute error of
  about 1e-16 times the number of steps; without the tilt it drowns a delta of 1e-8 after a million steps, and epsilon
  comes out too *small*. With it, the error is relative to delta.
- The grid is as fine as the answer needs and no finer: the variance that rounding adds is known, and from it the
  error of epsilon.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from scipy import fft
from scipy.signal import lfilter

from sparsedp.accounting.events import canonical
from sparsedp.accounting.pairs import Array, Atoms, Pair, closed_form_pair, sampled_pairs
from sparsedp.errors import UnsupportedError

_MAX_POINTS = 2**22  # of a grid: about 200 MB while composing
_MIN_INTERVAL = 1e-10  # of the grid: below it, rounding errors exceed what a finer grid gains
_TAIL = 38.0  # mass e^-38 of the tilted total may lie outside the window
_ROUNDING = 2.0**-52


class TooFineError(Exception):
    """The grid would need more than `_MAX_POINTS` points."""


@dataclass(frozen=True)
class Estimate:
    """An upper bound, and about how far it may lie above the exact value."""

    value: float
    error: float


def pld_epsilon(leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> Estimate:
    """The smallest epsilon at `delta` of composed events, as `canonical` gives them."""
    log_delta = math.log(delta)

    def gap(tilt: float, total: "_Cumulant") -> float:
        # Zero where (K(tilt) - log delta) / tilt, the Chernoff bound on epsilon, is smallest.
        return tilt * total.mean - total.value + log_delta

    def read(total: "_Total", added_variance: float) -> Estimate:
        return total.epsilon(delta, added_variance)

    return _refine(leaves, 1e-4 * delta, gap, read, relative_error, 1e-9)


def pld_delta(leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> Estimate:
    """The smallest delta at `epsilon` of composed events, as `canonical` gives them."""

    def gap(tilt: float, total: "_Cumulant") -> float:
        return total.mean - epsilon

    def read(total: "_Total", added_variance: float) -> Estimate:
        return total.delta(epsilon, added_variance)

    return _refine(leaves, 1e-20, gap, read, relative_error, 1e-20)


def _refine(
    leaves: Mapping[DpEvent, int],
    tail: float,
    gap: Callable[[float, "_Cumulant"], float],
    read: Callable[["_Total", float], Estimate],
    relative_error: float,
    absolute_error: float,
) -> Estimate:
    """Evaluate on finer and finer grids until the error is small enough or the grid too large."""
    counts = list(leaves.values())
    tail = max(tail / sum(counts), 1e-300)
    directions = list(zip(*(_pairs(leaf, tail) for leaf in leaves)))
    interval = max(max(pair.high - pair.low for pair in directions[0]) / 256, _MIN_INTERVAL)
    best: Estimate | None = None
    for _ in range(40):
        try:
            estimates = [_evaluate(pairs, counts, interval, gap, read) for pairs in directions]
        except TooFineError:
            if best is not None:
                return best
            interval *= 4
            continue
        value = max(estimate.value for estimate in estimates)
        error = value - max(estimate.value - estimate.error for estimate in estimates)
        if best is None or value < best.value:
            best = Estimate(value, error)
        if error <= relative_error * value + absolute_error or interval <= _MIN_INTERVAL or math.isinf(value):
            break
        shrink = 0.9 * math.sqrt(relative_error * value / error)
        interval = max(interval * min(0.5, max(shrink, 1 / 64)), _MIN_INTERVAL)
    assert best is not None
    return best


def _evaluate(
    pairs: Sequence[Pair],
    counts: Sequence[int],
    interval: float,
    gap: Callable[[float, "_Cumulant"], float],
    read: Callable[["_Total", float], Estimate],
) -> Estimate:
    grids = [_Grid.of(pair, interval) for pair in pairs]
    tilt = _find_tilt(grids, counts, gap)
    added = sum(count * max(map(grid.added_variance, (0.0, tilt))) for grid, count in zip(grids, counts))
    return read(_compose(grids, counts, tilt), added)


def _pairs(event: DpEvent, tail: float) -> tuple[Pair, Pair]:
    """Dominating pairs of one event for removing and for adding a unit."""
    pair = closed_form_pair(event, tail)
    if pair is not None:
        return pair, pair.reversed()
    if isinstance(event, PoissonSampledDpEvent):
        inner = canonical(event.event)
        counts = list(inner.values())
        rate = event.sampling_probability
        tail = min(0.01, tail / rate) / sum(counts)
        remove, add = zip(*(_pairs(leaf, tail) for leaf in inner))
        # Fine enough to add nothing that matters to the variance of the sum.
        spread = math.sqrt(sum(count * (pair.high - pair.low) ** 2 for pair, count in zip(remove, counts)))
        interval = max(spread / 4096, _MIN_INTERVAL)
        return sampled_pairs(rate, _atoms(remove, counts, interval), _atoms(add, counts, interval))
    raise UnsupportedError(
        f'the "pld" accountant has no privacy loss distribution for {event!r}; accountant="rdp" may know it'
    )


def _atoms(pairs: Sequence[Pair], counts: Sequence[int], interval: float) -> Atoms:
    """A composition as atoms. Positive losses from P's masses, negative ones from Q's (tilt -1): each where it is
    the larger of the two, and so the more accurate."""
    grids = [_Grid.of(pair, interval) for pair in pairs]
    by_p, by_q = (_compose(grids, counts, tilt) for tilt in (0.0, -1.0))
    right, left = by_p.loss >= 0, by_q.loss < 0
    return Atoms(
        loss=np.append(by_q.loss[left], by_p.loss[right]),
        mass=np.append(by_q.mass[left], by_p.mass[right]),
        infinite=by_p.infinite,
    )


@dataclass(frozen=True)
class _Cumulant:
    """K(tilt) = log E[e^(tilt * loss)] and its first two derivatives: mean and variance of the tilted loss."""

    value: float
    mean: float
    variance: float


@dataclass(frozen=True)
class _Grid:
    """P's masses at the losses (first + i) * interval, rounded up, and `infinite` at infinity."""

    interval: float
    first: int
    mass: Array
    infinite: float
    spread: Array  # what rounding added to the variance, over interval^2, by cell

    @classmethod
    def of(cls, pair: Pair, interval: float) -> "_Grid":
        """Split the masses of each cell between its ends so that P's and Q's are kept: the dots are connected."""
        first = math.floor(pair.low / interval) - 1
        last = math.ceil(pair.high / interval) + 1
        if last - first > _MAX_POINTS:
            raise TooFineError
        edges = interval * np.arange(first, last + 1)
        p_all, q_all = pair.masses(edges)
        p, q = p_all[1:-1], q_all[1:-1]
        upper = (p - q * np.exp(np.minimum(edges[:-1], 700.0))) / -math.expm1(-interval)
        # Up by the rounding error of p and q, which the division by the interval magnifies.
        upper = np.clip(upper + 4 * _ROUNDING / interval * p, 0.0, p)
        mass = np.append(p - upper, 0.0)
        mass[1:] += upper
        mass[0] += p_all[0]
        spread = np.divide(upper * (p - upper), p, out=np.zeros_like(p), where=p > 0)
        return cls(interval, first, mass, float(p_all[-1]), spread)

    @property
    def last(self) -> int:
        return self.first + len(self.mass) - 1

    @property
    def loss(self) -> Array:
        return self.interval * np.arange(self.first, self.last + 1)

    def tilted(self, tilt: float) -> tuple[Array, float]:
        """The masses times e^(tilt * loss), normalised, and the logarithm of their sum."""
        with np.errstate(divide="ignore"):
            log_mass = np.log(self.mass) + tilt * self.loss
        top = float(log_mass.max())
        mass = np.exp(log_mass - top)
        total = float(mass.sum())
        return mass / total, top + math.log(total)

    def cumulant(self, tilt: float) -> _Cumulant:
        mass, value = self.tilted(tilt)
        loss = self.loss
        mean = float(mass @ loss)
        return _Cumulant(value, mean, float(mass @ (loss - mean) ** 2))

    def added_variance(self, tilt: float) -> float:
        """Of the tilted loss."""
        weight = np.exp(np.minimum(tilt * self.loss[:-1] - self.tilted(tilt)[1], 700.0))
        return self.interval**2 * float(weight @ self.spread)


def _sum_cumulant(grids: Sequence[_Grid], counts: Sequence[int], tilt: float) -> _Cumulant:
    parts = [(count, grid.cumulant(tilt)) for grid, count in zip(grids, counts)]
    return _Cumulant(
        sum(count * part.value for count, part in parts),
        sum(count * part.mean for count, part in parts),
        sum(count * part.variance for count, part in parts),
    )


def _find_tilt(
    grids: Sequence[_Grid], counts: Sequence[int], gap: Callable[[float, _Cumulant], float]
) -> float:
    """The root of an increasing `gap`, roughly: any tilt is valid, one near the root is accurate."""

    def positive(tilt: float) -> bool:
        return gap(tilt, _sum_cumulant(grids, counts, tilt)) >= 0

    # At this tilt neighbouring points of the grid differ by e^40 in weight: only the largest loss is left.
    largest = 40.0 / grids[0].interval
    low = high = min(1.0, largest)
    if positive(low):
        while low > 1e-9 and positive(low := low / 8):
            high = low
    else:
        while high < largest and not positive(high := high * 8):
            low = high
    for _ in range(4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if positive(middle) else (middle, high)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class _Total:
    """The composed loss, accurate from the tilted distribution's centre upwards."""

    tilt: float
    interval: float
    first: int
    mass: Array
    infinite: float

    @property
    def loss(self) -> Array:
        return self.interval * (self.first + np.arange(len(self.mass)))

    def _tails(self) -> tuple[Array, Array]:
        """At each loss, the mass at it or above, and delta less `infinite`: sum of mass_j (1 - e^(loss - loss_j))."""
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
        slope = above[index] - deltas[index]
        epsilon = self.interval * (self.first + index)
        if index > 0:
            # Between two grid points delta is linear in e^epsilon.
            epsilon += math.log1p(-(room - deltas[index]) / slope)
        error = self._delta_error(index, added_variance) / slope if slope > 0 else 0.0
        return Estimate(max(0.0, float(epsilon)), float(error))

    def delta(self, epsilon: float, added_variance: float) -> Estimate:
        index = max(0, math.ceil(epsilon / self.interval) - self.first)
        if index >= len(self.mass):
            return Estimate(min(1.0, self.infinite), 0.0)
        above, deltas = self._tails()
        # Left of the window the mass is not known, save that it is at most one.
        mass = above[index] if index > 0 else 1.0
        share = -math.expm1(min(0.0, epsilon - self.interval * (self.first + index)))
        delta = self.infinite + mass * share + deltas[index] * (1 - share)
        return Estimate(min(1.0, float(delta)), self._delta_error(index, added_variance))

    def _delta_error(self, index: int, added_variance: float) -> float:
        """How much of delta is due to a variance v added to the loss: v/2 (delta'' - delta'), v/2 times the density."""
        return added_variance / 2 * float(self.mass[index]) / self.interval


def _compose(grids: Sequence[_Grid], counts: Sequence[int], tilt: float) -> _Total:
    """The distribution of the summed losses of `counts[i]` draws from each `grids[i]`."""
    interval = grids[0].interval
    total = _sum_cumulant(grids, counts, tilt)
    low, high = _window(grids, counts, tilt, total)
    first = max(math.floor(low / interval), sum(count * grid.first for grid, count in zip(grids, counts)))
    last = min(math.ceil(high / interval), sum(count * grid.last for grid, count in zip(grids, counts)))
    size = last - first + 1
    if size > _MAX_POINTS:
        raise TooFineError
    length = fft.next_fast_len(size, real=True)

    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    origin = 0
    for grid, count in zip(grids, counts):
        mass, _ = grid.tilted(tilt)
        # Indices relative to the mean, so that the phases that are raised to a large power stay small.
        centre = round(float(mass @ grid.loss) / interval)
        index = np.arange(grid.first - centre, grid.last - centre + 1) % length
        spectrum *= fft.rfft(np.bincount(index, weights=mass, minlength=length)) ** count
        origin += count * centre
    tilted = np.roll(fft.irfft(spectrum, length), -((first - origin) % length))[:size]
    # Upwards by more than the rounding error of the FFT.
    tilted = np.maximum(tilted, 0.0) + _ROUNDING * sum(counts) * tilted.max()

    loss = interval * (first + np.arange(size))
    mass = tilted * np.exp(np.minimum(total.value - tilt * loss, 600.0))
    outside = math.exp(min(0.0, total.value - tilt * interval * last - _TAIL))
    finite = sum(count * math.log1p(-grid.infinite) for grid, count in zip(grids, counts) if grid.infinite < 1)
    infinite = 1.0 if any(grid.infinite >= 1 for grid in grids) else -math.expm1(finite)
    return _Total(tilt, interval, first, mass, infinite + outside)


def _window(grids: Sequence[_Grid], counts: Sequence[int], tilt: float, total: _Cumulant) -> tuple[float, float]:
    """Losses between which all but e^-_TAIL of the tilted total lies on either side, by Chernoff's bound."""
    deviation = max(math.sqrt(total.variance), grids[0].interval)
    low, high = -math.inf, math.inf
    for power in range(12):
        step = 16.0 / deviation / 2**power
        up = _sum_cumulant(grids, counts, tilt + step).value - total.value
        down = _sum_cumulant(grids, counts, tilt - step).value - total.value
        high = min(high, (up + _TAIL) / step)
        low = max(low, -(down + _TAIL) / step)
    return low, high
