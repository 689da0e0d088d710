"""The least l1 norm under equations: both solvers, their gaps, and what a least norm has to fulfil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp import SparseDPError
from sparsedp.convex import least_l1 as module
from sparsedp.convex.interior_point import interior_point
from sparsedp.convex.least_l1 import least_l1
from sparsedp.convex.recovery import GaussianMatrix
from sparsedp.noise import RandomKey

KEY = RandomKey.from_seed(3)


def sparse_vector(size: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(size + count)
    point = np.zeros(size)
    point[rng.choice(size, count, replace=False)] = rng.normal(size=count)
    return point


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 25),
    st.integers(2, 30),
    st.integers(0, 4),
    st.sampled_from([0.0, 1e-3, 0.3]),
    st.sampled_from([1e-9, 1.0, 1e6]),
    st.integers(0, 99),
)
def test_both_solvers_agree(m: int, factor: int, count: int, noise: float, unit: float, seed: int) -> None:
    """With and without noise, where the solution has m non-zeros and where it has fewer, in any unit."""
    d = m * factor
    matrix = GaussianMatrix(RandomKey.from_seed(seed), m, d)
    target = matrix.dense() @ sparse_vector(d, min(count, d)) + noise * np.random.default_rng(seed).normal(size=m)
    target *= unit
    exact, near = (least_l1(matrix, target, solver=solver) for solver in ("highs", "columns"))
    size = np.abs(exact.point).sum()
    for solved in (exact, near):
        assert solved.finished and solved.gap <= 1e-5
        assert np.allclose(matrix.dense() @ solved.point, target, rtol=0, atol=1e-6 * np.abs(target).max())
        assert abs(np.abs(solved.point).sum() - size) <= 1.1e-5 * size


def test_few_columns_at_a_time_lead_to_the_same_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the worst columns to begin with, and few that join in a round."""
    matrix = GaussianMatrix(KEY, 20, 1500)
    target = np.random.default_rng(0).normal(size=20)
    exact = np.abs(least_l1(matrix, target, solver="highs").point).sum()
    monkeypatch.setattr(module, "_FIRST", 1)
    monkeypatch.setattr(module, "_JOINING", 1)
    monkeypatch.setattr(module, "_MORE", 5)
    solved = least_l1(matrix, target, solver="columns")
    assert solved.finished and solved.iterations > 2
    assert np.abs(solved.point).sum() == pytest.approx(exact, rel=1e-5)


def test_the_multipliers_of_the_interior_point_method_are_feasible_and_as_good() -> None:
    rng = np.random.default_rng(1)
    A, b = rng.normal(size=(30, 200)), rng.normal(size=30)
    b /= np.abs(b).max()
    point, multipliers = interior_point(A, b, 1e-8)
    assert np.allclose(A @ point, b, atol=1e-10)
    assert np.abs(A.T @ multipliers).max() <= 1 + 1e-8
    assert float(b @ multipliers) == pytest.approx(np.abs(point).sum(), rel=1e-7)
    # m columns have |a^T y| = 1, and only they have entries.
    assert np.count_nonzero(np.abs(point) > 1e-6) <= 30


def test_a_planted_sparse_vector_is_recovered() -> None:
    for m, d, solver in ((60, 400, "highs"), (60, 400, "columns"), (120, 5000, None)):
        planted = sparse_vector(d, 5)
        matrix = GaussianMatrix(RandomKey.from_os(), m, d)
        solved = least_l1(matrix, matrix.dense() @ planted, solver=solver)
        assert solved.finished and solved.solver == (solver or "columns")
        assert np.linalg.norm(solved.point - planted) < 1e-4 * np.linalg.norm(planted)
        # Fewer measurements than non-zeros cannot do that.
        few = GaussianMatrix(RandomKey.from_os(), 4, d)
        assert np.linalg.norm(least_l1(few, few.dense() @ planted).point - planted) > 0.1 * np.linalg.norm(planted)


def test_an_unfinished_solve_is_said_and_its_gap_is_true() -> None:
    matrix = GaussianMatrix(KEY, 30, 3000)
    target = matrix.dense() @ sparse_vector(3000, 50)
    solved = least_l1(matrix, target, solver="columns", rounds=1)
    assert not solved.finished and solved.gap > 1e-3 and solved.iterations == 1
    # The least norm lies between the norm and this share below it.
    least = np.abs(least_l1(matrix, target, solver="highs").point).sum()
    norm = np.abs(solved.point).sum()
    assert norm * (1 - solved.gap) <= least * (1 + 1e-6) < norm
    assert np.allclose(matrix.dense() @ solved.point, target, atol=1e-9)


def test_what_rounding_leaves_of_the_gap_ends_the_rounds() -> None:
    matrix = GaussianMatrix(KEY, 10, 100)
    solved = least_l1(matrix, np.random.default_rng(2).normal(size=10), solver="columns", tolerance=0.0)
    assert solved.iterations < 50 and solved.gap < 1e-9


def test_nothing_measured_is_zero_and_other_solvers_are_refused() -> None:
    matrix = GaussianMatrix(KEY, 3, 9)
    assert not least_l1(matrix, np.zeros(3)).point.any()
    with pytest.raises(SparseDPError, match="solver"):
        least_l1(matrix, np.ones(3), solver="simplex")
