"""Poisson sampling: every unit joins a batch independently with probability `rate`."""

from __future__ import annotations

import math

import numpy as np

from sparsedp.generator import CipherGenerator


def poisson_indices(generator: CipherGenerator, size: int, rate: float) -> np.ndarray:
    """A Poisson sample of range(size), ascending, int64 [n]; the cost is O(n), whatever the size of the data set."""
    return generator.ones(size, math.log(rate))
