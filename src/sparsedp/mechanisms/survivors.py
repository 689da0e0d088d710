"""Draws which rows survive a noisy threshold, in time proportional to touched rows and survivors.

The naive way adds noise to every row of every table. Rows that nobody touched all survive with the same probability,
independently, so their survivors can be drawn directly (DP-AdaFEST, appendix B.2), as `CipherGenerator.ones` does.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from sparsedp.generator import CipherGenerator


def draw_survivors(
    rows: np.ndarray, values: np.ndarray, size: int, threshold: float, std: float, generator: CipherGenerator
) -> np.ndarray:
    """The rows j of 0..size-1 with v[j] + N(0, std^2) >= threshold, ascending; v is `values` at `rows`, else 0.

    `rows` is ascending and distinct. The same law as noise on all rows.
    """
    noisy = values + std * generator.standard_normal(len(values))
    touched = rows[noisy >= threshold]
    untouched = generator.ones(size - len(rows), log_survival(threshold, std))
    # The k-th untouched row is k plus the number of touched rows before it.
    shift = np.searchsorted(rows - np.arange(len(rows)), untouched, side="right")
    return np.sort(np.concatenate([touched, untouched + shift]), kind="stable")


def log_survival(threshold: float, std: float) -> float:
    """log P[N(0, std^2) >= threshold]; the argument is tau / (sigma1 C1), not tau / (sigma1 C1)^2 as B.2 prints."""
    if std == 0:
        return 0.0 if threshold <= 0 else -math.inf
    return float(log_ndtr(-threshold / std))
