"""Gaussian l1 recovery: few random measurements of the mean, and the vector of least l1 norm that has them.

The matrix A, m x d with N(0, 1/m) entries, is public. It is a function of a key, made in blocks of columns, and only kept
where it is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse

from sparsedp.convex.projections import shrink
from sparsedp.convex.rows import ExactSum
from sparsedp.errors import SparseDPError
from sparsedp.kernels import row_noise
from sparsedp.kernels.threads import on_all_cores
from sparsedp.noise import RandomKey

_KEPT = 1 << 27  # elements of a matrix that is kept, 512 MB
_BLOCK = 1 << 22  # elements of a block of columns
_EXACT = 400_000  # elements of a matrix for which HiGHS takes seconds
_ROWS = 1 << 24  # elements of some rows' measurements, 128 MB
_OVER = 1.6  # over-relaxation of ADMM
_BETWEEN_GUESSES = 50  # iterations


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

    def times(self, point: np.ndarray) -> np.ndarray:
        """A x, (m,) float64."""
        out = np.zeros(self.shape[0])
        for columns, block in self.blocks():
            out += point[columns].astype(np.float32) @ block
        return out

    def transposed_times(self, weights: np.ndarray) -> np.ndarray:
        """A^T y, (d,) float64."""
        out, narrow = np.empty(self.shape[1]), weights.astype(np.float32)
        for columns, block in self.blocks():
            out[columns] = block @ narrow
        return out

    def gram(self) -> np.ndarray:
        """A A^T, (m, m) float64."""
        out = np.zeros((self.shape[0], self.shape[0]))
        for _, block in self.blocks():
            out += block.T @ block
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


@dataclass(frozen=True)
class Solved:
    """A vector z, and how near it is to the least |z|_1 with A z = b."""

    point: np.ndarray  # (d,)
    solver: str  # "highs" or "admm"
    iterations: int
    gap: float  # |z|_1 is above the least by this share at most, where A z = b to rounding
    finished: bool


def least_l1(
    matrix: GaussianMatrix, target: np.ndarray, *, solver: str | None = None, tolerance: float = 1e-3,
    iterations: int = 3000,
) -> Solved:  # fmt: skip
    """argmin |z|_1 subject to A z = b: by HiGHS (exact) where A is small, by ADMM until its duality gap is small elsewhere."""
    if not target.any():
        return Solved(np.zeros(matrix.shape[1]), "none", 0, 0.0, True)
    small = matrix.shape[0] * matrix.shape[1] <= _EXACT
    solver = solver or ("highs" if small else "admm")
    if solver == "highs":
        return _by_highs(matrix, target)
    if solver == "admm":
        return _by_admm(matrix, target, tolerance, iterations)
    raise SparseDPError(f"solver must be highs or admm, not {solver!r}")


def _by_highs(matrix: GaussianMatrix, target: np.ndarray) -> Solved:
    """z = u - v with u, v >= 0 and the least sum. Its units are those of b's size, as the solver's tolerances are absolute."""
    dense, size = matrix.dense(), float(np.abs(target).max())
    columns = dense.shape[1]
    answer = scipy.optimize.linprog(
        np.ones(2 * columns), A_eq=np.hstack([dense, -dense]), b_eq=target / size, bounds=(0, None), method="highs"
    )
    if answer.x is None:
        return Solved(np.zeros(columns), "highs", int(answer.nit), math.inf, False)
    point = (answer.x[:columns] - answer.x[columns:]) * size
    return Solved(point, "highs", int(answer.nit), 0.0 if answer.status == 0 else math.inf, answer.status == 0)


def _by_admm(matrix: GaussianMatrix, target: np.ndarray, tolerance: float, iterations: int) -> Solved:
    """Basis pursuit by ADMM (Boyd et al. 2011, section 6.2), with two products with A in each iteration.

    x = v - A^T w, w = (A A^T)^-1 (A v - b), is the point of A x = b that is nearest to v. The multipliers -w / threshold, scaled
    until |A^T y|_inf <= 1, are feasible for the dual problem, max b^T y: the difference is the gap. Now and then the non-zeros
    that it has found are tried.
    """
    factors = scipy.linalg.cho_factor(matrix.gram())

    def onto_solutions(near: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = scipy.linalg.cho_solve(factors, matrix.times(near) - target)
        moved = matrix.transposed_times(weights)
        return near - moved, weights, moved

    point, _, _ = onto_solutions(np.zeros(matrix.shape[1]))
    threshold = 2 * float(np.abs(point).mean())
    sparse, dual = np.zeros_like(point), np.zeros_like(point)
    best, best_norm, bound, gap = point, float(np.abs(point).sum()), 0.0, math.inf
    for iteration in range(1, iterations + 1):
        point, weights, moved = onto_solutions(sparse - dual)
        norm = float(np.abs(point).sum())
        if norm < best_norm:
            best, best_norm = point, norm
        largest = float(np.abs(moved).max())
        if largest > 0:
            bound = max(bound, -float(target @ weights) / largest)
        if iteration % _BETWEEN_GUESSES == 0:
            guess, guessed_bound = _vertex(matrix, target, sparse)
            bound = max(bound, guessed_bound)
            if guess is not None and float(np.abs(guess).sum()) < best_norm:
                best, best_norm = guess, float(np.abs(guess).sum())
        gap = (best_norm - bound) / max(best_norm, np.finfo(float).tiny)
        if gap <= tolerance:
            return Solved(best, "admm", iteration, max(0.0, gap), True)
        relaxed = _OVER * point + (1 - _OVER) * sparse
        sparse = shrink(relaxed + dual, threshold)
        dual = relaxed + dual - sparse
    return Solved(best, "admm", iterations, gap, False)


def _vertex(matrix: GaussianMatrix, target: np.ndarray, sparse: np.ndarray) -> tuple[np.ndarray | None, float]:
    """The solution with the non-zeros of `sparse`, and a lower bound on the least l1 norm from their signs.

    The least norm is that of a solution with m non-zeros at most. Once ADMM has found which, both are exact.
    """
    places = np.flatnonzero(sparse)
    if len(places) > len(target):
        places = np.sort(np.argsort(-np.abs(sparse))[: len(target)])
    if not places.size:
        return None, 0.0
    columns = matrix.columns(places)
    values = np.linalg.lstsq(columns, target, rcond=None)[0]
    weights = np.linalg.lstsq(columns.T, np.sign(sparse[places]), rcond=None)[0]
    largest = float(np.abs(matrix.transposed_times(weights)).max())
    bound = float(target @ weights) / largest if largest > 0 else 0.0
    if np.linalg.norm(columns @ values - target) > 1e-6 * np.linalg.norm(target):
        return None, bound
    point = np.zeros(matrix.shape[1])
    point[places] = values
    return point, bound
