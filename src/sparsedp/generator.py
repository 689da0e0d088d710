"""Random numbers of every law that a private path draws, all of them from the stream cipher under a secret key.

numpy's and torch's generators can be run backwards from a few of their outputs, so that whoever sees some of the noise can
subtract all of it. A stream cipher cannot: what it gives out tells nothing about the rest (`kernels.cipher`).

Each number is made of 64 bits of the stream. Where a law has a tail, all of them count there: an exponential number lies
between 2^-65 and 45.05, and one of the true law lies outside with probability 2^-64. Integers, permutations and samples have
exactly their laws.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, uint64

from sparsedp.errors import SparseDPError
from sparsedp.kernels import cipher, normals
from sparsedp.kernels.compiler import compile_loop
from sparsedp.kernels.threads import on_all_cores

# Numbers that one thread draws at a time, and how many it takes for several threads to be worth it.
_CHUNK, _MANY = 1 << 15, 1 << 17
_SWAPS = 1 << 20  # places of a permutation that are drawn at a time
_LARGEST = np.uint64(2**64 - 1)

Size = int | tuple[int, ...]


class CipherGenerator:
    """A sequence of random numbers that the key (8,) uint32 alone decides; each call goes on where the last one ended."""

    def __init__(self, key: np.ndarray) -> None:
        self._key = key
        self._words = 0  # of the stream that were used
        self._normals = 0

    def state(self) -> list[int]:
        """The place in the sequence. It is no secret: the key is."""
        return [self._words, self._normals]

    def restore(self, state: list[int]) -> None:
        self._words, self._normals = state

    def words(self, count: int) -> np.ndarray:
        """Uniform uint64, (count,)."""
        out = np.empty(2 * count, np.uint32)
        cipher.fill_words(out, self._key, self._words)
        self._words += 2 * count
        return out.view(np.uint64)

    def random(self, size: Size) -> np.ndarray:
        """Uniform on the multiples of 2^-53 in [0, 1), float64."""
        return ((self.words(_count(size)) >> np.uint64(11)) * 2.0**-53).reshape(size)

    def standard_normal(self, size: Size) -> np.ndarray:
        """N(0, 1), float64; as far as 9.49 (`kernels.normals`)."""
        out = np.empty(_count(size))
        first = self._normals
        self._normals += out.size

        def draw(begin: int) -> None:
            normals.fill_normal(out[begin : begin + step], 1.0, self._key, first + begin)

        step = out.size if out.size < _MANY else _CHUNK
        on_all_cores(draw, range(0, out.size, max(1, step)))
        return out.reshape(size)

    def standard_exponential(self, size: Size) -> np.ndarray:
        """P[E > e] = exp(-e), float64."""
        return exponentials(self.words(_count(size))).reshape(size)

    def gumbel(self, size: Size) -> np.ndarray:
        """P[G < g] = exp(-exp(-g)), float64: -log of an exponential number."""
        return -np.log(self.standard_exponential(size))

    def integers(self, high: int | np.ndarray, count: int) -> np.ndarray:
        """Uniform on 0 to high - 1, int64 (count,); `high` is one number or (count,), from 1 to 2^63."""
        limits = np.broadcast_to(np.atleast_1d(np.asarray(high, np.uint64)), count)
        if (limits == 0).any():
            raise SparseDPError("integers: high must be at least 1.")
        # 2^64 mod high words are too many for all remainders to be equally likely: these are drawn again.
        last = _LARGEST - (np.uint64(0) - limits) % limits
        words = self.words(count)
        while (again := np.flatnonzero(words > last)).size:
            words[again] = self.words(again.size)
        return (words % limits).astype(np.int64)

    def permutation(self, size: int) -> np.ndarray:
        """0 to size - 1 in random order, int64 (Fisher and Yates)."""
        order = np.arange(size)
        for left in range(size, 1, -_SWAPS):  # so many have no place yet
            choices = np.arange(left, max(left - _SWAPS, 1), -1)
            _swap(order, left - 1, self.integers(choices, len(choices)))
        return order

    def choice(self, size: int, count: int) -> np.ndarray:
        """`count` of 0 to size - 1, each set of so many equally likely, int64 ascending.

        Numbers are drawn one after another, and those that were there before are drawn again; of more than half of all, those
        that are left out. The cost is proportional to `count`, save in that case.
        """
        if not 0 <= count <= size:
            raise SparseDPError(f"choice: {count} of {size} different numbers cannot be taken.")
        if count > size // 2:
            taken = np.ones(size, bool)
            taken[self.choice(size, size - count)] = False
            return np.flatnonzero(taken)
        drawn = np.empty(0, np.int64)
        while missing := count - len(drawn):
            drawn = np.unique(np.concatenate([drawn, self.integers(size, missing)]))
        return drawn

    def ones(self, count: int, log_p: float) -> np.ndarray:
        """The positions of the ones among `count` independent bits that are 1 with probability e^log_p, int64 ascending.

        Gaps G between ones have P[G >= g] = (1 - p)^g, so G = floor(E / -log(1 - p)) with E exponential: the cost is
        proportional to the number of ones. Gaps are kept as float64, which is exact up to 2^53: for a tiny p a gap is far
        beyond any integer type.
        """
        if count <= 0 or log_p < -700:  # e^-700 times 2^62 bits is nothing
            return np.empty(0, dtype=np.int64)
        if log_p >= 0:
            return np.arange(count)
        # -log(1 - p), in a form that is exact for small p and for p near 1.
        rate = -math.log1p(-math.exp(log_p)) if log_p < -0.5 else -math.log(-math.expm1(log_p))
        ones: list[np.ndarray] = []
        position = -1.0
        while position < count:
            expected = (count - position) * math.exp(log_p)
            words = self.words(int(expected + 6 * math.sqrt(expected) + 8))
            positions, position = _positions(words, rate, position, float(count))
            ones.append(positions)
        return ones[0] if len(ones) == 1 else np.concatenate(ones)


def _count(size: Size) -> int:
    return math.prod(size) if isinstance(size, tuple) else size


@compile_loop()
def _positions(words: np.ndarray, rate: float, before: float, count: float) -> tuple[np.ndarray, float]:
    """Behind the position `before`, at gaps floor(E / rate) for each word: the positions below `count`, and the last of all."""
    out, ones, behind = np.empty(len(words), np.int64), 0, 0.0
    for word in words:
        behind += np.floor(_exponential(word) / rate) + 1
        if before + behind < count:
            out[ones] = int64(before + behind)
            ones += 1
    return out[:ones], before + behind


@compile_loop()
def exponentials(words: np.ndarray) -> np.ndarray:
    """-log u for u = (word + 1/2) / 2^64, from the end that is nearer: small and large numbers are as exact as float64 is."""
    out = np.empty(len(words))
    for i in range(len(words)):
        out[i] = _exponential(words[i])
    return out


@compile_loop()
def _exponential(word: np.uint64) -> float:
    if word >> uint64(63):
        return -math.log1p(-(float64(uint64(~word)) + 0.5) * 2.0**-64)
    return -math.log((float64(word) + 0.5) * 2.0**-64)


@compile_loop()
def _swap(order: np.ndarray, last: int, places: np.ndarray) -> None:
    """Exchanges the elements at `last`, at the one before it and so on with those at `places`."""
    for k in range(len(places)):
        one, other = last - k, places[k]
        order[one], order[other] = order[other], order[one]
