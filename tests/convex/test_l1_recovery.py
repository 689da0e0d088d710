"""Gaussian l1 recovery: the matrix, the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
from scipy import stats

from sparsedp.convex import recovery
from sparsedp.convex.recovery import GaussianMatrix, measurements_for, needs_no_recovery
from sparsedp.convex.rows import ExactSum
from sparsedp.noise import RandomKey

KEY = RandomKey.from_seed(3)


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
    weights, rows = np.random.randn(7), sp.random_array((30, 50), density=0.1, format="csr")
    for kept in (0, 1 << 27):
        monkeypatch.setattr(recovery, "_KEPT", kept)
        monkeypatch.setattr(recovery, "_BLOCK", 70)
        matrix = GaussianMatrix(KEY, 7, 50)
        assert (matrix.dense() == dense).all()
        assert np.allclose(matrix.transposed_times(weights), dense.T @ weights, rtol=1e-13, atol=1e-13)
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


def test_numbers_of_measurements() -> None:
    expected = 1000 * math.sqrt(10 * math.log(1000) / math.log(1e6))
    assert measurements_for(1000, 10_000, 10, 1.0, 1e-6) == pytest.approx(expected)
    assert 0 < measurements_for(1, 1, 1, 1e-9, 1e-6) < 1  # s = d has no logarithm
    assert needs_no_recovery(100, 2000) and not needs_no_recovery(100, 2200)  # 100 ln(100)^2 = 2121
    assert needs_no_recovery(2, 2) and needs_no_recovery(1, 1) and not needs_no_recovery(1, 2)
