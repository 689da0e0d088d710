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
        return _shrink_to_size(point, _largest_in_l1_ball(np.abs(point), feasible_set.radius))
    if not isinstance(feasible_set, L2Ball):
        raise ConfigError(f"There is no projection onto {feasible_set!r}.")
    if norm == "l2":
        return _onto_l2_ball(point, feasible_set.radius)
    return _shrink_to_size(point, _largest_in_l2_ball(np.abs(point), feasible_set.radius))


def _shrink_to_size(point: np.ndarray, size: float | None) -> np.ndarray:
    """`point`, shrunk by what makes its largest coordinate `size`; None: as it is."""
    if size is None:
        return point
    sizes = np.abs(point)
    # Differences first: a small size keeps its digits beside large coordinates.
    return np.copysign(np.maximum((sizes - sizes.max()) + size, 0.0), point)


def _largest_in_l1_ball(sizes: np.ndarray, radius: float) -> float | None:
    """What is left of the largest size if all are shrunk by one amount until their sum is `radius`; None: it is already.

    With the k largest left: (radius + sum of (largest - size)) / k (Held, Wolfe & Crowder 1974).
    """
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or float((sizes / largest).sum()) <= radius / largest:
        return None
    # Sizes that are below the largest by the radius or more end at zero: few are left to sort.
    below = np.sort(largest - sizes[sizes > largest - radius])
    if not below.size:
        return 0.0
    left = (np.cumsum(below) + radius) / np.arange(1, len(below) + 1)
    count = max(1, int(np.count_nonzero(below < left)))
    return (float(below[:count].sum()) + radius) / count


def _largest_in_l2_ball(sizes: np.ndarray, radius: float) -> float | None:
    """The same for an l2 norm of `radius`.

    With the k largest left: mean + sqrt(radius^2 / k - variance), over the k values of (largest - size).
    """
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or float(np.linalg.norm(sizes / largest)) <= radius / largest:
        return None
    below = np.sort(largest - sizes[sizes > largest - radius])
    if not below.size:
        return 0.0
    low, high = 1, len(below)  # how many are left: so many at least, and at most
    while low < high:
        middle = (low + high + 1) // 2
        # Number `middle` is left if shrinking it to zero leaves the others within the ball.
        if float(np.linalg.norm(below[middle - 1] - below[: middle - 1])) < radius:
            low = middle
        else:
            high = middle - 1
    mean = float(below[:low].mean())
    variance = float(((below[:low] - mean) ** 2).mean())
    return mean + math.sqrt(max(0.0, radius**2 / low - variance))


def _onto_l2_ball(point: np.ndarray, radius: float) -> np.ndarray:
    largest = float(np.abs(point).max(initial=0.0))
    if largest == 0:
        return point
    norm = float(np.linalg.norm(point / largest))
    return point if norm <= radius / largest else (point / largest) * (radius / norm)
