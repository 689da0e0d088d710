"""Gaussian l1 recovery: few random measurements of the mean, and the vector of least l1 norm that has them.

The matrix A, m x d with N(0, 1/m) entries, is public. It is a function of a key, made in blocks of columns, and only kept
where it is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import scipy.sparse

from sparsedp.convex.rows import ExactSum
from sparsedp.kernels import row_noise
from sparsedp.kernels.threads import on_all_cores
from sparsedp.noise import RandomKey

_KEPT = 1 << 27  # elements of a matrix that is kept, 512 MB
_BLOCK = 1 << 22  # elements of a block of columns
_ROWS = 1 << 24  # elements of some rows' measurements, 128 MB


def measurements_for(rows: int, columns: int, sparsity: float, epsilon: float, delta: float) -> float:
    """m = n epsilon sqrt(s ln(d/s) / ln(1/delta)) (the paper leaves a constant open: it is 1 here). Round it up.

    Where s is near to d, 1 stands for the logarithm.
    """
    logarithm = max(1.0, math.log(columns / sparsity))
    return rows * epsilon * math.sqrt(sparsity * logarithm / math.log(1 / delta))


def needs_no_recovery(measurements: int, columns: int) -> bool:
    """Whether d < m ln^2 m: noise on every coordinate is then as good. So it is where m >= d, which leaves nothing to recover."""
    return columns < measurements * math.log(measurements) ** 2 or measurements >= columns


class GaussianMatrix:
    """A (m, d), float32. Column j is a function of the key, j and m alone."""

    def __init__(self, key: RandomKey, measurements: int, columns: int) -> None:
        self.shape = measurements, columns
        self._key = key.stream()
        self._width = max(1, _BLOCK // measurements)  # columns of a block
        self._kept: list[np.ndarray] | None = None
        if measurements * columns <= _KEPT:
            self._kept = list(self._draw_all())

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The columns of each block, and the transposed block, (columns of the block, m)."""
        made = self._draw_all() if self._kept is None else iter(self._kept)
        for first, block in zip(range(0, self.shape[1], self._width), made):
            yield slice(first, first + len(block)), block

    def measure(self, rows: scipy.sparse.csr_array) -> np.ndarray:
        """A z for each row z, (n, m) float64. Row by row and block by block: no row's digits depend on another row."""
        out = np.zeros((rows.shape[0], self.shape[0]))
        by_column = rows.tocsc()
        for columns, block in self.blocks():
            part = by_column[:, columns]
            if part.nnz:
                out += part.tocsr() @ block.astype(np.float64)
        return out

    def clipped_sum(self, chunks: Iterable[scipy.sparse.csr_array], clip: float, total: ExactSum) -> int:
        """Adds A z, scaled down to norm `clip`, to the total for every row z of the chunks. Returns how many were scaled down.

        So the sum's sensitivity is certain, whatever A is: the paper's rests on a property of A that no program can verify.
        """
        clipped = 0
        size = max(1, _ROWS // self.shape[0])
        rounding = 1 + (self.shape[0] + 8) * 2.0**-51  # as much as there can be in a computed norm
        for chunk in chunks:
            for first in range(0, chunk.shape[0], size):
                measured = self.measure(chunk[first : first + size])
                norms = np.sqrt((measured * measured).sum(axis=1)) * rounding
                over = norms > clip
                measured[over] *= (clip / norms[over])[:, None] * (1 - 2.0**-50)
                clipped += int(np.count_nonzero(over))
                total.add_dense(measured)
        return clipped

    def transposed_times(self, weights: np.ndarray) -> np.ndarray:
        """A^T y, (d,) float64, computed in float64: a gap of 1e-6 rests on it."""
        out = np.empty(self.shape[1])
        for columns, block in self.blocks():
            out[columns] = block.astype(np.float64) @ weights
        return out

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        """Some of A's columns, (m, len(numbers)) float64."""
        block = np.empty((len(numbers), self.shape[0]), np.float32)
        row_noise.fill_rows(block, numbers, 1 / math.sqrt(self.shape[0]), self._key)
        return block.T.astype(np.float64)

    def dense(self) -> np.ndarray:
        """A itself, (m, d) float64."""
        return np.concatenate([block for _, block in self.blocks()]).T.astype(np.float64)

    def _draw_all(self) -> Iterator[np.ndarray]:
        measurements, columns = self.shape
        std = 1 / math.sqrt(measurements)
        for first in range(0, columns, self._width):
            numbers = np.arange(first, min(columns, first + self._width))
            block = np.empty((len(numbers), measurements), np.float32)
            parts = np.array_split(np.arange(len(numbers)), 8)

            def draw(part: np.ndarray, block: np.ndarray = block, numbers: np.ndarray = numbers) -> None:
                row_noise.fill_rows(block[part[0] : part[-1] + 1], numbers[part], std, self._key)

            on_all_cores(draw, [part for part in parts if part.size])
            yield block
