"""Gaussian l1 recovery: the matrix, the clip, the solvers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparsedp import SparseDPError
from sparsedp.convex import recovery
from sparsedp.convex.recovery import GaussianMatrix, least_l1, measurements_for, needs_no_recovery
from sparsedp.convex.rows import ExactSum
from sparsedp.noise import RandomKey

KEY = RandomKey.from_seed(3)


def sparse_vector(size: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(size + count)
    point = np.zeros(size)
    point[rng.choice(size, count, replace=False)] = rng.normal(size=count)
    return point


def test_entries_of_the_matrix() -> None:
    dense = GaussianMatrix(RandomKey.from_os(), 40, 500).dense()
    assert dense.shape == (40, 500)
    assert stats.kstest(dense.ravel() * math.sqrt(40), stats.norm.cdf).pvalue > 1e-3
    assert stats.kstest(dense.ravel() * math.sqrt(40), stats.norm(scale=1.1).cdf).pvalue < 1e-3


def test_the_matrix_is_a_function_of_its_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is cut into blocks, and whether it is kept or made anew."""
    dense = GaussianMatrix(KEY, 7, 50).dense()
    assert (dense[:, :20] == GaussianMatrix(KEY, 7, 20).dense()).all()
    assert (dense != GaussianMatrix(RandomKey.from_seed(4), 7, 50).dense()).any()
    point, weights, rows = np.random.randn(50), np.random.randn(7), sp.random_array((30, 50), density=0.1, format="csr")
    for kept in (0, 1 << 27):
        monkeypatch.setattr(recovery, "_KEPT", kept)
        monkeypatch.setattr(recovery, "_BLOCK", 70)
        matrix = GaussianMatrix(KEY, 7, 50)
        assert (matrix.dense() == dense).all()
        assert np.allclose(matrix.times(point), dense @ point, rtol=1e-5, atol=1e-5)
        assert np.allclose(matrix.transposed_times(weights), dense.T @ weights, rtol=1e-5, atol=1e-5)
        assert np.allclose(matrix.gram(), dense @ dense.T, rtol=1e-5, atol=1e-5)
        assert np.allclose(matrix.measure(rows), rows.toarray() @ dense.T, rtol=1e-12, atol=1e-14)


def test_measurements_of_a_row_do_not_depend_on_other_rows() -> None:
    rows = sp.random_array((40, 300), density=0.1, rng=np.random.default_rng(0), format="csr")
    matrix = GaussianMatrix(KEY, 11, 300)
    together = matrix.measure(rows)
    for i in (0, 17, 39):
        assert (matrix.measure(rows[i : i + 1]) == together[i]).all()
        assert (matrix.measure(rows[i:]) == together[i:]).all()


@pytest.mark.parametrize("clip", [0.3, 1.0, 1.5])
def test_one_row_moves_the_clipped_sum_by_the_clip_at_most(clip: float) -> None:
    """Whatever the row: the matrix is public, and somebody may have chosen a row that it stretches most."""
    matrix = GaussianMatrix(KEY, 20, 200)
    _, _, directions = np.linalg.svd(matrix.dense(), full_matrices=False)
    rows = sp.csr_array(
        np.vstack([directions[0], directions[0] * 1e5, np.eye(200)[:5], np.zeros((1, 200)), directions[1]])
    )

    def total(of: sp.csr_array) -> np.ndarray:
        out = ExactSum(20, 2.0**-34)
        total.clipped = matrix.clipped_sum([of], clip, out)
        return out.sum.values

    everything = total(rows)
    assert total.clipped >= 2
    for i in range(rows.shape[0]):
        rest = np.delete(np.arange(rows.shape[0]), i)
        moved = everything - total(rows[rest])
        assert np.linalg.norm(moved) <= clip
        assert (moved == total(rows[[i]])).all()
    assert np.linalg.norm(total(rows[[0]])) == pytest.approx(clip, rel=1e-6)


def test_rows_in_pieces_give_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sp.random_array((40, 300), density=0.1, rng=np.random.default_rng(0), format="csr")
    matrix, sums = GaussianMatrix(KEY, 11, 300), []
    for size in (1 << 24, 11, 33):
        monkeypatch.setattr(recovery, "_ROWS", size)
        total = ExactSum(11, 2.0**-34)
        matrix.clipped_sum([rows[:7], rows[7:]], 1.0, total)
        sums.append(total.sum.whole)
    assert (sums[0] == sums[1]).all() and (sums[0] == sums[2]).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 25), st.integers(2, 6), st.integers(0, 4), st.sampled_from([0.0, 1e-3, 0.3]), st.integers(0, 99))
def test_both_solvers_agree(m: int, factor: int, count: int, noise: float, seed: int) -> None:
    d = m * factor
    matrix = GaussianMatrix(RandomKey.from_seed(seed), m, d)
    target = matrix.dense() @ sparse_vector(d, min(count, d)) + noise * np.random.default_rng(seed).normal(size=m)
    exact = least_l1(matrix, target, solver="highs")
    near = least_l1(matrix, target, solver="admm", tolerance=1e-4, iterations=20_000)
    assert exact.finished and near.finished
    size = np.abs(exact.point).sum()
    for solved in (exact, near):
        assert np.allclose(matrix.dense() @ solved.point, target, atol=1e-4 * (1 + np.abs(target).max()))
    assert abs(np.abs(near.point).sum() - size) <= 1.1e-4 * size + 1e-5


def test_a_planted_sparse_vector_is_recovered() -> None:
    for m, d, solver in ((60, 400, "highs"), (60, 400, "admm"), (120, 5000, None)):
        planted = sparse_vector(d, 5)
        matrix = GaussianMatrix(RandomKey.from_os(), m, d)
        solved = least_l1(matrix, matrix.dense() @ planted, solver=solver)
        assert solved.finished and solved.solver == (solver or "admm")
        assert np.linalg.norm(solved.point - planted) < 1e-2 * np.linalg.norm(planted)
        # Fewer measurements than non-zeros cannot do that.
        few = GaussianMatrix(RandomKey.from_os(), 4, d)
        assert np.linalg.norm(least_l1(few, few.dense() @ planted).point - planted) > 0.1 * np.linalg.norm(planted)


def test_an_unfinished_solve_is_said() -> None:
    matrix = GaussianMatrix(KEY, 30, 300)
    solved = least_l1(matrix, matrix.dense() @ sparse_vector(300, 5), solver="admm", iterations=3)
    assert not solved.finished and solved.gap > 1e-3 and solved.iterations == 3
    # The gap is what it says: the least norm lies between the norm and this share below it.
    least = np.abs(least_l1(matrix, matrix.dense() @ sparse_vector(300, 5), solver="highs").point).sum()
    norm = np.abs(solved.point).sum()
    assert norm * (1 - solved.gap) <= least * (1 + 1e-6) <= norm * (1 + 1e-6)


def test_nothing_measured_is_zero_and_other_solvers_are_refused() -> None:
    matrix = GaussianMatrix(KEY, 3, 9)
    assert not least_l1(matrix, np.zeros(3)).point.any()
    with pytest.raises(SparseDPError, match="solver"):
        least_l1(matrix, np.ones(3), solver="simplex")


def test_numbers_of_measurements() -> None:
    expected = 1000 * math.sqrt(10 * math.log(1000) / math.log(1e6))
    assert measurements_for(1000, 10_000, 10, 1.0, 1e-6) == pytest.approx(expected)
    assert 0 < measurements_for(1, 1, 1, 1e-9, 1e-6) < 1  # s = d has no logarithm
    assert needs_no_recovery(100, 2000) and not needs_no_recovery(100, 2200)  # 100 ln(100)^2 = 2121
    assert needs_no_recovery(2, 2) and needs_no_recovery(1, 1) and not needs_no_recovery(1, 2)
