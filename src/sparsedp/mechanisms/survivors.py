"""Draws which rows survive a noisy threshold, in time proportional to touched rows and survivors.

The naive way adds noise to every row of every table. Rows that nobody touched all survive with the same probability,
independently, so their survivors can be drawn directly (DP-AdaFEST, appendix B.2), as `noise.draw_rows` does.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr, xlog1py, xlogy

from sparsedp.kernels.compiler import compile_loop
from sparsedp.mechanisms.expectation import RowCounts
from sparsedp.noise import RandomKey, draw_rows, one_normal_each

# Up to this mean the law of the number of units that touch a row is summed over; beyond, it is normal.
_EXACT = 256.0
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
        first, end = within.searchsorted((first, end)).tolist()
    untouched = draw_rows(key.child(_UNTOUCHED), first, end, log_survival(threshold, std))
    if within is not None:
        untouched = within[untouched]
    return _joined(touched, untouched, rows)


@compile_loop()
def _joined(touched: np.ndarray, untouched: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Both, without those of `untouched` that are among `rows`: these have noise of their own. All are ascending and distinct."""
    out = np.empty(len(touched) + len(untouched), np.int64)
    count = k = r = 0
    for row in untouched:
        while r < len(rows) and rows[r] < row:
            r += 1
        if r < len(rows) and rows[r] == row:
            continue
        while k < len(touched) and touched[k] < row:
            out[count] = touched[k]
            count, k = count + 1, k + 1
        out[count] = row
        count += 1
    while k < len(touched):
        out[count] = touched[k]
        count, k = count + 1, k + 1
    return out[:count]


def log_survival(threshold: float, std: float) -> float:
    """log P[N(0, std^2) >= threshold]; the argument is tau / (sigma1 C1), not tau / (sigma1 C1)^2 as B.2 prints."""
    if std == 0:
        return 0.0 if threshold <= 0 else -math.inf
    return float(log_ndtr(-threshold / std))


def survival(values: np.ndarray, threshold: float, std: float | np.ndarray) -> np.ndarray:
    """P[value + N(0, std^2) >= threshold]."""
    certain = (values >= threshold - 1e-9 * abs(threshold)).astype(np.float64)  # sums of contributions are rounded
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(std) > 0, ndtr((values - threshold) / std), certain)


def survival_of_counts(rows: RowCounts, threshold: float, std: float) -> tuple[np.ndarray, np.ndarray]:
    """E[p(n)] and E[n p(n)] with p(n) = P[w n + N(0, std^2) >= threshold], n units that touch a row, w its weight."""
    mean, weights = rows.mean, rows.weights
    variance = mean * (1 - rows.rate) if rows.exact else mean
    # For a large mean n is about normal, and so is w n + N(0, std^2); and n is about its mean.
    passed = survival(weights * mean, threshold, np.sqrt(std**2 + weights**2 * variance))
    kept = mean * passed
    order = np.argsort(mean)
    order = order[: np.searchsorted(mean[order], _EXACT, side="right")]
    for begin in range(0, len(order), 4096):
        block = order[begin : begin + 4096]
        least, most = mean[block[0]], mean[block[-1]]
        n = np.arange(max(0, int(least - 9 * math.sqrt(least))), int(most + 9 * math.sqrt(most)) + 24, dtype=np.float64)
        masses = _masses(n, rows.counts[block, None], rows.rate, rows.exact)
        passing = masses * survival(weights[block, None] * n, threshold, std)
        passed[block], kept[block] = passing.sum(1), passing @ n
    return passed, kept


def _masses(n: np.ndarray, counts: np.ndarray, rate: float, exact: bool) -> np.ndarray:
    """P[n] under Binomial(count, rate), or Poisson(count rate) if counts are not `exact`; (counts, n)."""
    if not exact:
        return np.exp(xlogy(n, counts * rate) - counts * rate - gammaln(n + 1))
    left = np.maximum(counts - n, 0)
    logs = gammaln(counts + 1) - gammaln(n + 1) - gammaln(left + 1) + n * math.log(rate) + xlog1py(left, -rate)
    return np.where(n <= counts, np.exp(logs), 0.0)
