"""Draws which rows survive a noisy threshold, in time proportional to touched rows and survivors.

The naive way adds noise to every row of every table. Rows that nobody touched all survive with the same probability,
independently, so their survivors can be drawn directly (DP-AdaFEST, appendix B.2): the gaps between them are geometric.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr


def draw_survivors(
    rows: np.ndarray, values: np.ndarray, size: int, threshold: float, std: float, generator: np.random.Generator
) -> np.ndarray:
    """The rows j of 0..size-1 with v[j] + N(0, std^2) >= threshold, ascending; v is `values` at `rows`, else 0.

    `rows` is ascending and distinct. The same law as noise on all rows.
    """
    noisy = values + std * generator.standard_normal(len(values))
    touched = rows[noisy >= threshold]
    untouched = _bernoulli_ones(size - len(rows), log_survival(threshold, std), generator)
    # The k-th untouched row is k plus the number of touched rows before it.
    shift = np.searchsorted(rows - np.arange(len(rows)), untouched, side="right")
    return np.sort(np.concatenate([touched, untouched + shift]), kind="stable")


def log_survival(threshold: float, std: float) -> float:
    """log P[N(0, std^2) >= threshold]; the argument is tau / (sigma1 C1), not tau / (sigma1 C1)^2 as B.2 prints."""
    if std == 0:
        return 0.0 if threshold <= 0 else -math.inf
    return float(log_ndtr(-threshold / std))


def _bernoulli_ones(count: int, log_p: float, generator: np.random.Generator) -> np.ndarray:
    """The positions of the ones among `count` independent bits that are 1 with probability e^log_p, ascending.

    Gaps G between ones have P[G >= g] = (1 - p)^g, so G = floor(E / -log(1 - p)) with E exponential. They are kept as
    float64, which is exact up to 2^53: for a tiny p a gap is far beyond any integer type.
    """
    if count <= 0 or log_p < -700:  # e^-700 times 2^62 rows is nothing
        return np.empty(0, dtype=np.int64)
    if log_p >= 0:
        return np.arange(count)
    # -log(1 - p), in a form that is exact for small p and for p near 1.
    rate = -math.log1p(-math.exp(log_p)) if log_p < -0.5 else -math.log(-math.expm1(log_p))
    found: list[np.ndarray] = []
    position = -1.0
    while position < count:
        expected = (count - position) * math.exp(log_p)
        gaps = np.floor(generator.standard_exponential(int(expected + 6 * math.sqrt(expected) + 8)) / rate)
        positions = position + np.cumsum(gaps + 1)
        found.append(positions[positions < count])
        position = float(positions[-1])
    return np.concatenate(found).astype(np.int64)
