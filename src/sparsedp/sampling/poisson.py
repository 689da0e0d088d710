"""Poisson sampling: every unit joins a batch independently with probability `rate`."""

from __future__ import annotations

import numpy as np


def poisson_indices(generator: np.random.Generator, size: int, rate: float) -> np.ndarray:
    """A Poisson sample of range(size), ascending, int64 [n].

    Independent coins have a Binomial(size, rate) number of heads, and given that number every set of so many
    units is equally likely. Drawing in this order costs O(n), whatever the size of the data set.
    """
    count = generator.binomial(size, rate)
    # Without shuffle `choice` is Floyd's algorithm, or a partial shuffle once n is a fixed share of N.
    return np.sort(generator.choice(size, size=count, replace=False, shuffle=False))
