"""Draws which rows survive a noisy threshold, in time proportional to touched rows and survivors.

The naive way adds noise to every row of every table. Rows that nobody touched all survive with the same probability,
independently, so their survivors can be drawn directly (DP-AdaFEST, appendix B.2), as `noise.draw_rows` does.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from sparsedp.noise import RandomKey, draw_rows, one_normal_each

# Purposes of a table's key.
_TOUCHED, _UNTOUCHED = 0, 1


def draw_survivors(
    rows: np.ndarray, values: np.ndarray, owned: range, threshold: float, std: float, key: RandomKey,
    within: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rows j of `owned` with v[j] + N(0, std^2) >= threshold, ascending; v is `values` at `rows`, else 0.

    `rows` is ascending and distinct. The same law as noise on all rows. `within`, ascending, are the only rows that can
    survive. Whether a row does is a function of the key, of the row's own value and number and of `within`: it does not
    depend on who else was touched, nor on how the rows of a table are divided into `owned` ranges.
    """
    noisy = values + std * one_normal_each(key.child(_TOUCHED), rows)
    touched = rows[noisy >= threshold]
    first, end = owned.start, owned.stop
    if within is not None:
        first, end = np.searchsorted(within, (first, end)).tolist()
    untouched = draw_rows(key.child(_UNTOUCHED), first, end, log_survival(threshold, std))
    if within is not None:
        untouched = within[untouched]
    if len(rows):
        at = np.minimum(np.searchsorted(rows, untouched), len(rows) - 1)
        untouched = untouched[rows[at] != untouched]  # those have noise of their own
    return np.sort(np.concatenate([touched, untouched]), kind="stable")


def log_survival(threshold: float, std: float) -> float:
    """log P[N(0, std^2) >= threshold]; the argument is tau / (sigma1 C1), not tau / (sigma1 C1)^2 as B.2 prints."""
    if std == 0:
        return 0.0 if threshold <= 0 else -math.inf
    return float(log_ndtr(-threshold / std))
