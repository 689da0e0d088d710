"""Exact projections onto a feasible set, in the l2 and in the l-infinity norm. O(d log d) at most."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from sparsedp.convex.feasible import Box, FeasibleSet, L1Ball, L2Ball, WholeSpace
from sparsedp.errors import ConfigError, SparseDPError

Norm = Literal["l2", "linf"]


def project(point: np.ndarray, feasible_set: FeasibleSet, *, norm: Norm) -> np.ndarray:
    """A point of the set that is nearest to `point` (d,) in the l2 norm, or the l-infinity norm ("linf"); float64, new.

    In the l2 norm there is one such point. In the l-infinity norm there may be many: this is the one that moves every
    coordinate towards the centre of the ball by the same distance, or to zero (of a box, the one that is nearest in l2).
    """
    point = np.array(point, np.float64)
    if point.ndim != 1 or not np.isfinite(point).all():
        raise SparseDPError("A point to be projected is a vector of finite numbers.")
    if norm not in ("l2", "linf"):
        raise ConfigError(f"norm must be 'l2' or 'linf'; got {norm!r}")
    if isinstance(feasible_set, WholeSpace):
        return point
    if isinstance(feasible_set, Box):
        # Every coordinate has its own nearest number, so each distance is the least there is, and so is any norm of them.
        return np.clip(point, feasible_set.low, feasible_set.high)
    if isinstance(feasible_set, L1Ball):
        # In both norms the nearest point has every coordinate moved towards zero by one amount.
        return shrink(point, l1_threshold(point, feasible_set.radius))
    if not isinstance(feasible_set, L2Ball):
        raise ConfigError(f"There is no projection onto {feasible_set!r}.")
    if norm == "l2":
        return _onto_l2_ball(point, feasible_set.radius)
    return shrink(point, l2_threshold(point, feasible_set.radius))


def shrink(point: np.ndarray, threshold: float) -> np.ndarray:
    """Every coordinate moved towards zero by `threshold`, and no further than zero (soft thresholding)."""
    if threshold == 0:
        return point
    return np.copysign(np.maximum(np.abs(point) - threshold, 0.0), point)


def l1_threshold(point: np.ndarray, radius: float) -> float:
    """The least t >= 0 with sum_i max(|x_i| - t, 0) <= radius: the amount by which the projection shrinks coordinates.

    With the k largest sizes left above t, t = (their sum - radius) / k (Held, Wolfe & Crowder 1974).
    """
    sizes = np.abs(point)
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or sizes.sum() <= radius:
        return 0.0
    if radius == 0:
        return largest
    # A size below the largest by the radius or more ends at zero: few are left to sort.
    sizes = np.sort(sizes[sizes > largest - radius])[::-1]
    excess = (np.cumsum(sizes - largest) + (largest * np.arange(1, len(sizes) + 1) - radius)) / np.arange(
        1, len(sizes) + 1
    )
    count = int(np.count_nonzero(sizes > excess))
    kept = sizes[: max(1, count)]
    # The mean of differences: digits of small radii are not lost beside large sizes.
    return max(0.0, largest + (float((kept - largest).sum()) - radius) / len(kept))


def l2_threshold(point: np.ndarray, radius: float) -> float:
    """The least t >= 0 with sum_i max(|x_i| - t, 0)^2 <= radius^2.

    With the k largest sizes left above t: t = mean - sqrt(radius^2 / k - variance), over these k.
    """
    sizes = np.abs(point)
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or float(np.linalg.norm(sizes / largest)) <= radius / largest:
        return 0.0
    if radius == 0:
        return largest
    sizes = np.sort(sizes[sizes > largest - radius])[::-1]
    low, high = 1, len(sizes)  # how many are left: with `low` there is a t below them; more than `high` cannot be
    while low < high:
        middle = (low + high + 1) // 2
        # Is the threshold below the size number `middle`? Then what is above that size does not fill the ball.
        if float(np.linalg.norm(sizes[: middle - 1] - sizes[middle - 1])) < radius:
            low = middle
        else:
            high = middle - 1
    kept = largest - sizes[:low]
    mean = float(kept.mean())
    variance = float(((kept - mean) ** 2).mean())
    return max(0.0, largest - (mean + math.sqrt(max(0.0, radius**2 / low - variance))))


def _onto_l2_ball(point: np.ndarray, radius: float) -> np.ndarray:
    largest = float(np.abs(point).max(initial=0.0))
    if largest == 0:
        return point
    norm = float(np.linalg.norm(point / largest))
    return point if norm <= radius / largest else (point / largest) * (radius / norm)
