"""The cost of composed events by their privacy loss distributions (PLD): always an upper bound.

The loss of each event is put on a grid by connecting the dots (Doroshenko et al. 2022), which lowers delta at
no epsilon, and composing events convolves their losses (`convolution.py`). This is what `dp_accounting`'s PLD
does too. Two things differ, and are why this file exists:

- The FFT is tilted, which makes its rounding errors a small share of delta, and they are added to it. Tests compare the
  result with the closed form of Gaussians, down to a delta of 1e-12 and up to a million steps.
- The grid is as fine as the answer needs and no finer: what rounding adds to the variance is known, and from
  it the error of epsilon. A fixed grid is loose at small sampling rates (docs/accounting.md has figures).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent

from sparsedp.accounting.convolution import (
    MAX_POINTS,
    ROUNDING,
    Estimate,
    Grid,
    TooFineError,
    compose,
    sum_cumulant,
)
from sparsedp.accounting.events import canonical
from sparsedp.accounting.pairs import Atoms, Pair, closed_form_pair, sampled_pairs
from sparsedp.errors import UnsupportedError

_MIN_INTERVAL = 1e-10  # of the grid: below it, rounding errors exceed what a finer grid gains
_OUTSIDE = 1e-13  # how much of the tilted total may lie outside the window: about a share of delta, charged to it


def pld_epsilon(leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> Estimate:
    """The smallest epsilon at `delta` of composed events, as `canonical` gives them."""
    return _refine(leaves, None, delta, relative_error)


def pld_delta(leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> Estimate:
    """The smallest delta at `epsilon` of composed events, as `canonical` gives them."""
    return _refine(leaves, epsilon, None, relative_error)


def _refine(
    leaves: Mapping[DpEvent, int], epsilon: float | None, delta: float | None, relative_error: float
) -> Estimate:
    """The one of epsilon and delta that is None, on finer and finer grids until the error is small enough."""
    counts = list(leaves.values())
    negligible = 1e-20 if delta is None else 1e-6
    interval, finest, too_fine = 0.0, math.inf, 0.0
    best = Estimate(math.inf, math.inf)
    point = _Point(epsilon, delta)
    while finest > 1.3 * too_fine:
        tail = (1e-20 if point.delta is None else 1e-4 * point.delta) / sum(counts)
        directions = list(zip(*(_pairs(leaf, max(tail, 1e-300)) for leaf in leaves)))
        if interval == 0:
            interval = max(max(pair.high - pair.low for pair in directions[0]) / 256, _MIN_INTERVAL)
        try:
            estimates = [_evaluate(pairs, counts, interval, point, epsilon) for pairs in directions]
        except TooFineError:
            too_fine = interval
            interval = 4 * interval if math.isinf(finest) else math.sqrt(interval * finest)
            continue
        finest = interval
        value = max(estimate.value for estimate in estimates)
        error = value - max(estimate.value - estimate.error for estimate in estimates)
        gained = best.value - value
        if gained > 0:
            best = Estimate(value, error)
        if error <= relative_error * value + negligible or finest <= _MIN_INTERVAL or value in (0.0, math.inf):
            break
        if gained < 0.1 * relative_error * value:
            break  # what error there is does not come from the grid
        point = _Point(value, delta) if epsilon is None else _Point(epsilon, value)
        # The error goes with the square of the interval; it is itself part of the value.
        shrink = 0.9 * math.sqrt(relative_error * max(value - error, value / 10) / error)
        interval = max(interval * min(0.8, max(shrink, 1 / 16)), 1.2 * too_fine, _MIN_INTERVAL)
    return best


@dataclass(frozen=True)
class _Point:
    """What is known so far of the (epsilon, delta) that is sought."""

    epsilon: float | None
    delta: float | None


def _evaluate(
    pairs: Sequence[Pair], counts: Sequence[int], interval: float, point: _Point, epsilon: float | None
) -> Estimate:
    if sum((pair.high - pair.low) / interval for pair in pairs) > MAX_POINTS:
        raise TooFineError
    grids = [Grid.of(pair, interval) for pair in pairs]
    tilt = _find_tilt(grids, counts, point)
    added = sum(count * max(map(grid.added_variance, (0.0, tilt))) for grid, count in zip(grids, counts))
    # A rare large loss may bring most of epsilon, at once; its own rounding hardly shows in the average.
    added += interval**2 / 4
    total = compose(grids, counts, tilt, _OUTSIDE)
    if epsilon is not None:
        return total.delta(epsilon, added)
    assert point.delta is not None
    return total.epsilon(point.delta, added)


def _find_tilt(grids: Sequence[Grid], counts: Sequence[int], point: _Point) -> float:
    """A tilt at which the rounding errors of the FFT are a small share of delta.

    Any tilt gives a bound. The errors are about e^(K(tilt) - tilt * epsilon) * n * 1e-16, smallest where the
    tilted mean is epsilon. With heavy tails that is far more tilt than needed, and makes the window wide:
    take the least that is enough.
    """
    headroom = math.log(1e-4 / (ROUNDING * sum(counts)))

    def enough(tilt: float) -> bool:
        total = sum_cumulant(grids, counts, tilt)
        if point.epsilon is None:
            assert point.delta is not None
            # With the tilted mean for epsilon.
            return total.value - tilt * total.mean <= math.log(point.delta) + headroom
        if total.mean >= point.epsilon:
            return True
        return point.delta is not None and total.value - tilt * point.epsilon <= math.log(point.delta) + headroom

    # At this tilt neighbouring points of the grid differ by e^40 in weight: only the largest loss is left.
    largest = 40.0 / grids[0].interval
    low = high = min(1.0, largest)
    if enough(low):
        while low > 1e-3 and enough(low := low / 8):
            high = low
    else:
        while high < largest and not enough(high := high * 8):
            low = high
    for _ in range(4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low  # so that epsilon does not lie left of the window


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
        atoms = (_atoms(pairs, counts, interval, tail) for pairs in (remove, add))
        return sampled_pairs(rate, *atoms)
    raise UnsupportedError(
        f'the "pld" accountant has no privacy loss distribution for {event!r}; accountant="rdp" may know it'
    )


def _atoms(pairs: Sequence[Pair], counts: Sequence[int], interval: float, outside: float) -> Atoms:
    """A composition as atoms.

    Positive losses from P's masses, negative ones from Q's (a tilt of -1): the larger is the more accurate.
    """
    grids = [Grid.of(pair, interval) for pair in pairs]
    by_p, by_q = (compose(grids, counts, tilt, outside) for tilt in (0.0, -1.0))
    right, left = by_p.loss >= 0, by_q.loss < 0
    return Atoms(
        loss=np.append(by_q.loss[left], by_p.loss[right]),
        mass=np.append(by_q.mass[left], by_p.mass[right]),
        infinite=by_p.infinite,
    )
