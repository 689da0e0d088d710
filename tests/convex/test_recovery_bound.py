"""The error bound of l1 recovery: each step of its derivation on drawn matrices, and the whole beside measured errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp

from sparsedp.convex.least_l1 import least_l1
from sparsedp.convex.recovery import GaussianMatrix
from sparsedp.convex.recovery_bound import RecoveryBound, _clipped_away, _mean_length
from sparsedp.convex.rows import ExactSum
from sparsedp.noise import RandomKey

M, D = 60, 2000


def test_vectors_with_given_measurements_are_no_longer_than_said() -> None:
    """Step 2: for directions at random, and for the worst that a search finds."""
    matrix = GaussianMatrix(RandomKey.from_os(), M, D)
    counts, largest = RecoveryBound(D, 1.0, 1.0, 0.1)._largest
    tau = float((largest - (_mean_length(M) + 3.0) / np.sqrt(counts)).max())
    assert tau > 0.5
    error = np.random.default_rng(0).normal(size=M)
    lengths = []
    for _ in range(6):
        solved = least_l1(matrix, error, solver="columns")
        lengths.append(np.abs(solved.point).sum() / (math.sqrt(M) * np.linalg.norm(error)))
        assert lengths[-1] <= 1 / tau
        # Where the multipliers are as long as they can be: the next direction is no better.
        active = np.flatnonzero(np.abs(solved.point) > 1e-6 * np.abs(solved.point).max())
        error = np.linalg.lstsq(matrix.columns(active).T, np.sign(solved.point[active]), rcond=None)[0]
    assert lengths[-1] > lengths[0]  # the search does find worse ones
    assert max(lengths) > 0.3 / tau  # and the bound is not idle


def test_matrices_shorten_no_vector_by_more_than_said() -> None:
    """Step 1: for sparse vectors, spread ones, and what l1 minimisation confuses with them."""
    rng = np.random.default_rng(1)
    matrix = GaussianMatrix(RandomKey.from_os(), M, D)
    dense = matrix.dense() * math.sqrt(M)
    vectors = [rng.normal(size=D)]
    for count in (1, 5, 20, 100, 400):
        sparse = np.zeros(D)
        sparse[rng.choice(D, count, replace=False)] = rng.choice([-1.0, 1.0], count)
        vectors += [
            sparse,
            least_l1(matrix, dense @ sparse / math.sqrt(M), solver="columns").point - sparse,
        ]  # the last: in the kernel
    bound = RecoveryBound(D, 1.0, 1.0, 0.1)
    for beta, excess in zip(bound._betas[:, 0], bound._excesses[:, 0]):
        for w in vectors:
            lower = (_mean_length(M) - excess - 3.0) * np.linalg.norm(w) - beta * np.abs(w).sum()
            assert np.linalg.norm(dense @ w) >= lower - 1e-4 * np.abs(w).sum()


def test_means_in_closed_form_are_those_of_draws() -> None:
    rng = np.random.default_rng(2)
    lengths = np.linalg.norm(rng.normal(size=(20_000, 30)), axis=1)
    assert _mean_length(30) == pytest.approx(lengths.mean(), rel=0.01)
    for clip in (0.5, 1.0, 1.1):
        away = math.sqrt((np.maximum(lengths / math.sqrt(30) - clip, 0) ** 2).mean())
        assert _clipped_away(30, clip) == pytest.approx(away, rel=0.05)
    assert _clipped_away(200, 2.0) < 1e-9
    bound = RecoveryBound(400, 1.0, 1.0, 0.1)
    sizes = np.abs(rng.normal(size=(4000, 400)))
    place = len(bound._betas) // 2
    excess = np.sqrt((np.maximum(sizes - bound._betas[place], 0) ** 2).sum(axis=1).mean())
    assert bound._excesses[place, 0] == pytest.approx(excess, rel=0.03)
    for count, mean in zip(*(part[:, 0] for part in bound._largest)):
        drawn = sizes[:, : 400 // count].max(axis=1).mean()
        assert drawn * 0.9 - 0.02 < mean < drawn * 1.03


@pytest.mark.parametrize("noise, spread", [(0.005, 4), (0.02, 4), (0.02, 400), (0.1, 1)])
def test_measured_errors_are_below_the_bound(noise: float, spread: int) -> None:
    """Rows of norm 1 and l1 norm 2 at most; half of them are one and the same, the others at random places."""
    rng = np.random.default_rng(3)
    rows, clip, l1 = 40, 1.1, 2.0
    dense = np.zeros((rows, D))
    for i in range(rows):
        places = np.arange(spread) if i % 2 else rng.choice(D, spread, replace=False)
        dense[i, places] = min(1 / math.sqrt(spread), l1 / spread)
    mean = dense.mean(axis=0)
    squares = []
    for seed in range(6):
        matrix = GaussianMatrix(RandomKey.from_seed(seed), M, D)
        total = ExactSum(M, 2.0**-34)
        matrix.clipped_sum([sp.csr_array(dense)], clip, total)
        target = total.sum.values / rows + clip * noise * rng.normal(size=M)
        point = least_l1(matrix, target, solver="columns").point
        point = point if np.linalg.norm(point) <= 2 else np.zeros(D)
        squares.append(((point - mean) ** 2).sum())
    measured, bound = math.sqrt(np.mean(squares)), RecoveryBound(D, 1.0, l1, noise).at(M, clip)
    assert measured <= min(bound, 3.0)
    assert bound < 40 * measured  # it is not idle


def test_best_measurements_and_what_is_given() -> None:
    bound = RecoveryBound(20_000, 1.0, 2.0, 0.02)
    best = bound.best()
    assert best is not None
    m, clip = best
    assert 50 < m < 2000 and 1 <= clip < 1.5
    for other in (m // 2, 2 * m):
        assert bound.at(other, clip) > bound.at(m, clip)
    assert bound.best(measurements=77) == (77, min((1.0, 1.02, 1.05, 1.1), key=lambda c: bound.at(77, c)))
    given = bound.best(clip=1.5)
    assert given is not None and given[1] == 1.5 and bound.at(*given) >= bound.at(m, clip)
    assert RecoveryBound(2, 1.0, 1.0, 0.1).best() is None  # too few columns for any m
    assert bound.at(1, 1.0) == math.inf
