"""Exposure: how far a canary that was trained on stands out from others like it that were not.

Carlini, Liu, Erlingsson, Kos, Song 2019, "The Secret Sharer". Of N references drawn from the same space, a canary whose loss
has rank r among them has exposure log2 N - log2 r: the bits by which the model shortens a guess. By rank it ends at log2 N, which
is why the paper also extrapolates: a skew normal law is fitted to the references' losses, and the exposure is -log2 of the
share of it that lies below the canary's loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import integrate, stats
from scipy.special import log_ndtr

from sparsedp.audit.numbers import finite_vector
from sparsedp.errors import SparseDPError, suggestion

LEAST_REFERENCES = 100  # for a fit: three parameters of a tail cannot be told from fewer
_TAIL = 1e-8  # below it the logarithm of the law is integrated, because the law itself loses its digits
_FAR = 1e3  # deviations
_END = 60.0  # of an integral over exp(-u)
_METHODS = ("rank", "extrapolate")


@dataclass(frozen=True)
class ReferenceFit:
    """A skew normal law of the references' losses (`scipy.stats.skewnorm`), and how well it fits them."""

    shape: float
    location: float
    scale: float
    distance: float  # Kolmogorov and Smirnov's: the largest gap between the law and the references' own shares
    p_value: float  # of that distance; too large a number, because the law was fitted to the same references

    def exposure(self, losses: np.ndarray) -> np.ndarray:
        """-log2 P[L <= loss] of each loss."""
        return np.array([0.0 - self.log_cdf(loss) for loss in losses.tolist()]) / math.log(2)

    def log_cdf(self, loss: float) -> float:
        """ln P[L <= loss], without an end: -inf only beyond what float64 can hold."""
        x = (loss - self.location) / self.scale
        share = float(stats.skewnorm.cdf(x, self.shape))
        if share > _TAIL:
            return math.log(min(1.0, share))
        if x >= 0:  # a law with an edge at 0, of which 1/2 - arctan(shape) / pi lies below
            area, _ = integrate.quad(lambda t: math.exp(self._log_density(t)), 0, x)
            return math.log(math.atan2(1, self.shape) / math.pi + area)
        # In the lower tail the density falls off on the left: it is integrated in units of its value at x, and of how fast it
        # falls there. Its logarithm is concave, so that it lies below exp(-u) and beyond the end there is nothing.
        at, z = self._log_density(x), self.shape * x
        is_far = max(-x, -z) > _FAR
        hazard = -z if z < -_FAR else math.exp(-z * z / 2 - float(log_ndtr(z))) / math.sqrt(2 * math.pi)
        rate = max(1.0, -x + self.shape * hazard)
        if is_far:
            return at - math.log(rate)  # the density falls like an exponential there, but for a share of 1 / z^2
        area, _ = integrate.quad(lambda u: math.exp(self._log_density(x - u / rate) - at), 0, _END)
        return at + math.log(area / rate)

    def _log_density(self, x: float) -> float:
        return math.log(2 / math.sqrt(2 * math.pi)) - x * x / 2 + float(log_ndtr(self.shape * x))


def exposure(losses: Any, references: Any, method: str = "rank") -> np.ndarray:
    """The exposure of each canary in bits, float64, in the order of `losses` (n,).

    `references` (N,) are losses of others like them that were not trained on. "rank": log2 N - log2 rank, where the canary
    stands behind all references of the same loss; at most log2 N. "extrapolate": by `fit_references`, without an end.
    """
    values, others = finite_vector("losses", losses), finite_vector("references", references)
    if method == "rank":
        ranks = 1 + np.searchsorted(np.sort(others), values, side="right")
        return np.asarray(math.log2(len(others)) - np.log2(ranks))
    if method != "extrapolate":
        raise SparseDPError(
            f"method must be one of {', '.join(_METHODS)}, not {method!r}{suggestion(method, _METHODS)}"
        )
    return fit_references(others).exposure(values)


def fit_references(references: Any) -> ReferenceFit:
    """The skew normal law that makes the references' losses most likely."""
    others = finite_vector("references", references, least=LEAST_REFERENCES)
    if np.ptp(others) == 0:
        raise SparseDPError(
            f"All {len(others)} references have the loss {others[0]:g}, so that no law can be fitted to them. Is the model "
            "trained, and does its loss depend on what tells the canaries apart?"
        )
    shape, location, scale = (float(value) for value in stats.skewnorm.fit(others))
    test = stats.kstest(others, stats.skewnorm(shape, location, scale).cdf)
    return ReferenceFit(shape, location, scale, float(test.statistic), float(test.pvalue))
