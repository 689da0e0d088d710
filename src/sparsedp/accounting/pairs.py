"""Dominating pairs: distributions (P, Q) at least as far apart as an event's outputs on any two neighbours.

See Zhu, Dong & Wang 2022. A pair is given by the masses that P and Q put on intervals of the privacy loss
log(P/Q). That is all that composing events needs, and has full relative accuracy in both tails.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from sparsedp.accounting.events import ExponentialMechanismDpEvent

Array = NDArray[Any]
# Increasing edges e_0, .., e_n -> the masses of P and of Q on (-inf, e_0], (e_0, e_1], .., (e_n, inf).
Masses = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Pair:
    """`masses` as above; but for a tail of small mass, the loss lies between `low` and `high`."""

    low: float
    high: float
    masses: Masses

    def reversed(self) -> "Pair":
        """(Q, P): the loss changes its sign, and the masses their roles."""

        def masses(edges: Array) -> tuple[Array, Array]:
            p, q = self.masses(-edges[::-1])
            return q[::-1], p[::-1]

        return Pair(-self.high, -self.low, masses)


def closed_form_pair(event: DpEvent, tail: float) -> Pair | None:
    """The pair for removing a unit; adding one is its reverse. None if the event has no closed form.

    At most `tail` of P lies above `high` and at most `tail` of Q below `low`.
    """
    if isinstance(event, GaussianDpEvent):
        return _gaussian(event.noise_multiplier, 1.0, tail)
    if isinstance(event, PoissonSampledDpEvent) and isinstance(event.event, GaussianDpEvent):
        return _gaussian(event.event.noise_multiplier, event.sampling_probability, tail)
    if isinstance(event, LaplaceDpEvent):
        return _laplace(1.0 / event.noise_multiplier)
    if isinstance(event, ExponentialMechanismDpEvent):
        return _exponential(event.epsilon)
    return None


def _gaussian(sigma: float, rate: float, tail: float) -> Pair:
    """P = (1-q) N(0, sigma^2) + q N(1, sigma^2) against Q = N(0, sigma^2): the Poisson-sampled Gaussian."""

    def loss(x: float) -> float:
        without_sampling = (x - 0.5) / sigma**2
        if rate == 1:
            return without_sampling
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + without_sampling))

    def location(edges: Array) -> Array:
        """The x at which the loss reaches each edge; -inf below the smallest loss, log(1-q)."""
        if rate == 1:
            return sigma**2 * edges + 0.5
        with np.errstate(divide="ignore"):
            small = np.log1p(np.maximum(np.expm1(np.minimum(edges, 1.0)) / rate, -1.0))
            # The same without overflow: log((e^loss - (1-q)) / q).
            large = edges - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(edges, 1.0)))
        return sigma**2 * np.where(edges < 1.0, small, large) + 0.5

    def masses(edges: Array) -> tuple[Array, Array]:
        x = location(edges)
        q = _interval_masses(ndtr(x / sigma), ndtr(-x / sigma))
        shifted = _interval_masses(ndtr((x - 1) / sigma), ndtr((1 - x) / sigma))
        return (1 - rate) * q + rate * shifted, q

    def quantile(mass: float) -> float:
        return float(-ndtri(min(0.5, mass)))

    low = loss(-sigma * quantile(tail / 2))
    high = loss(max(sigma * quantile(tail / 2), 1 + sigma * quantile(tail / (2 * rate))))
    return Pair(low, high, masses)


def _laplace(epsilon: float) -> Pair:
    """Two Laplace distributions of scale 1/epsilon, one apart. The loss has atoms at -epsilon and epsilon."""

    def cdf(x: Array) -> Array:
        inside = 0.5 * np.exp((np.minimum(x, epsilon) - epsilon) / 2)
        return np.where(x < -epsilon, 0.0, np.where(x >= epsilon, 1.0, inside))

    return _symmetric(epsilon, cdf, lambda x: 1.0 - cdf(x))


def _exponential(epsilon: float) -> Pair:
    """The exponential mechanism, whose loss lies in [t - epsilon, t] for a t that depends on the neighbours.

    For each t the worst pair is binary (Dong, Durfee & Rogers 2020); the largest divergence over t is
    delta(x) = (1 - e^((x - epsilon)/2))^2 / (1 - e^-epsilon), and P[loss > x] = delta - delta'.
    """
    scale = -math.expm1(-epsilon)

    def above(x: Array) -> Array:
        """P[loss > x] for x >= 0."""
        return -np.expm1((np.clip(x, 0.0, epsilon) - epsilon) / 2) / scale

    def below(x: Array) -> Array:
        """P[loss <= x] for x <= 0: the density at -y is e^-y times the one at y."""
        y = np.clip(x, -epsilon, 0.0)
        return math.exp(-epsilon) * np.expm1((y + epsilon) / 2) / scale

    return _symmetric(
        epsilon,
        lambda x: np.where(x < 0, below(x), 1.0 - above(x)),
        lambda x: np.where(x < 0, 1.0 - below(x), above(x)),
    )


def _symmetric(bound: float, cdf: Callable[[Array], Array], survival: Callable[[Array], Array]) -> Pair:
    """A pair whose reverse is itself: Q[loss <= x] = P[loss >= -x]. Losses lie in [-bound, bound]."""

    def masses(edges: Array) -> tuple[Array, Array]:
        just_below = np.nextafter(-edges, -np.inf)
        return _interval_masses(cdf(edges), survival(edges)), _interval_masses(survival(just_below), cdf(just_below))

    return Pair(-bound, bound, masses)


def sampled_pairs(rate: float, remove: "Atoms", add: "Atoms") -> tuple[Pair, Pair]:
    """Poisson sampling of an event that is known by its loss atoms: (1-q) Q + q P against Q, and the reverse.

    The two directions start from pairs of their own, since each was rounded up.
    """
    # Removing: Q has mass e^-loss where P has mass p; what is left of Q lies where P has none.
    p, q = remove.mass, remove.mass * np.exp(-remove.loss)
    rest = max(0.0, 1.0 - float(q.sum()))
    removed = Atoms(
        loss=np.append(np.logaddexp(math.log1p(-rate), math.log(rate) + remove.loss), math.log1p(-rate)),
        mass=np.append((1 - rate) * q + rate * p, (1 - rate) * rest),
        infinite=rate * remove.infinite,
    )
    # Adding: Q comes first. It is at most 1/(1-q) times the mixture, also where P has no mass.
    added = Atoms(
        loss=np.append(-np.logaddexp(math.log1p(-rate), math.log(rate) - add.loss), -math.log1p(-rate)),
        mass=np.append(add.mass, add.infinite),
        infinite=0.0,
    )
    return removed.pair(), added.pair()


@dataclass(frozen=True)
class Atoms:
    """A discrete pair: P has the given mass at each loss, and mass `infinite` where Q has none."""

    loss: Array
    mass: Array
    infinite: float

    def pair(self) -> Pair:
        other = self.mass * np.exp(-self.loss)

        def masses(edges: Array) -> tuple[Array, Array]:
            index = np.searchsorted(edges, self.loss, side="left")
            p = np.bincount(index, weights=self.mass, minlength=len(edges) + 1)
            p[-1] += self.infinite
            return p, np.bincount(index, weights=other, minlength=len(edges) + 1)

        return Pair(float(self.loss.min()), float(self.loss.max()), masses)


def _interval_masses(cdf: Array, survival: Array) -> Array:
    """Masses between neighbouring points, each from the smaller tail, so that no digits cancel."""
    from_left = np.diff(cdf, prepend=0.0, append=1.0)
    from_right = -np.diff(survival, prepend=1.0, append=0.0)
    return np.where(np.append(cdf, 1.0) < 0.5, from_left, from_right)
