"""Integers with exactly the discrete Laplace law: what a pure guarantee (delta = 0) needs.

A Laplace number in floating point ends somewhere, and neighbours end at different places: that is a small delta. Here
every integer can occur, with exactly its probability, by comparisons of uniform integers alone.
"""

from __future__ import annotations

import numpy as np

from sparsedp.errors import SparseDPError
from sparsedp.generator import CipherGenerator

LARGEST_SCALE = 1 << 54  # so that nothing below overflows 63 bits, save with probability below e^-200


def discrete_laplace(generator: CipherGenerator, scale: int, count: int) -> np.ndarray:
    """P[X = k] proportional to exp(-|k| / scale), int64 (count,) (Canonne, Kamath & Steinke 2020, algorithm 2)."""
    if not 1 <= scale <= LARGEST_SCALE:
        raise SparseDPError(f"The scale of discrete Laplace noise lies between 1 and 2^54, not at {scale}.")
    out = np.empty(count, np.int64)
    missing = np.arange(count)
    while missing.size:
        low = generator.integers(scale, missing.size)
        kept = _with_probability_exp(generator, low, scale)
        size = low + scale * _runs(generator, missing.size)
        negative = generator.integers(2, missing.size) == 1
        kept &= ~(negative & (size == 0))  # zero would otherwise have two ways to occur
        out[missing[kept]] = np.where(negative, -size, size)[kept]
        missing = missing[~kept]
    return out


def _with_probability_exp(generator: CipherGenerator, numerators: np.ndarray, denominator: int) -> np.ndarray:
    """True with probability exp(-numerator / denominator), for fractions up to 1; bool (n,).

    By the exponential series: of trials with probabilities fraction / 1, fraction / 2, ... the first to fail is odd.
    """
    out = np.zeros(len(numerators), bool)
    undecided, trial = np.arange(len(numerators)), 1
    while undecided.size:
        succeeded = generator.integers(trial * denominator, undecided.size) < numerators[undecided]
        out[undecided[~succeeded]] = trial % 2 == 1
        undecided, trial = undecided[succeeded], trial + 1
    return out


def _runs(generator: CipherGenerator, count: int) -> np.ndarray:
    """How many trials of probability 1/e succeed before one fails, int64 (count,)."""
    out = np.zeros(count, np.int64)
    going = np.arange(count)
    while going.size:
        going = going[_with_probability_exp(generator, np.ones(going.size, np.int64), 1)]
        out[going] += 1
    return out
