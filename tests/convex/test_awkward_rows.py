"""Rows of every awkward kind, through output perturbation, bias-reduced SGD and the estimators: an exact result or a clear error."""

import math

import numpy as np
import pytest
from linear_data import sparse_rows
from scipy.sparse import csc_array, csr_array, csr_matrix

from sparsedp import SparseDPError
from sparsedp.convex import BiasReducedSGD, Logistic, linear_gradients, output_perturbation

pytest.importorskip("sklearn")
from sparsedp.convex import LogisticRegression, Ridge

pytestmark = pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")


def by_output(X, y, **change) -> np.ndarray:
    settings = {"epsilon": 1.0, "delta": 1e-4, "bound": 1.0, "regularisation": 0.1, "seed": 0}
    return output_perturbation("logistic", X, y, **(settings | change)).weights


def by_bias_reduced(X, y, **change) -> np.ndarray:
    settings = {"epsilon": 1.0, "delta": 1e-4, "bound": 1.0, "sparsity": 2.0, "steps": 5, "seed": 0}
    solver = BiasReducedSGD(rows=X.shape[0], columns=X.shape[1], **(settings | change))
    return solver.minimise(linear_gradients(Logistic(), X, y)).weights


def by_estimator(method: str):
    def fit(X, y, **change) -> np.ndarray:
        settings = {"delta": 1e-4, "method": method, "steps": 5, "random_state": 0, "classes": [-1, 1]}
        return LogisticRegression(**(settings | change)).fit(X, y).coef_[0]

    return fit


WAYS = {
    "output_perturbation": by_output,
    "BiasReducedSGD": by_bias_reduced,
    **{f"LogisticRegression, {method}": by_estimator(method) for method in ("output", "sgd", "bias_reduced")},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def labels_of(n: int) -> np.ndarray:
    return np.resize([-1.0, 1.0], n)


def messy(rows: np.ndarray) -> csr_matrix:
    """The same matrix with explicit zeros, every entry in two halves, and columns in descending order."""
    places, values, ends = [], [], [0]
    for row in rows:
        for j in range(len(row))[::-1]:
            places += [j, j]
            values += [row[j] / 2, row[j] / 2]
        ends.append(len(places))
    out = csr_matrix(rows.shape)
    out.data, out.indices, out.indptr = np.array(values), np.array(places, np.int32), np.array(ends, np.int32)
    return out


@every_way
def test_forms_agree(way) -> None:
    rows = np.random.default_rng(0).integers(-1, 2, (20, 4))
    y = labels_of(20)
    wanted = way(csr_array(rows.astype(float)), y)
    for form in (
        csr_array(rows.astype(np.int8)),
        csr_array(rows.astype(np.int64)),
        csc_array(rows.astype(np.float32)),
        messy(rows.astype(float)),
    ):
        np.testing.assert_allclose(way(form, y), wanted, rtol=1e-9, atol=1e-12)


@every_way
def test_rows_beyond_the_bound_are_those_at_the_bound(way) -> None:
    rows = sparse_rows(20, 4, 2).toarray()
    rows[0], rows[1] = [0.6, -0.8, 0, 0], [0, 0, 0, 1.0]
    beyond = rows.copy()
    beyond[0] *= 1e150
    beyond[1] *= 1e9
    wanted, got = way(csr_array(rows), labels_of(20)), way(csr_array(beyond), labels_of(20))
    if way is by_bias_reduced:  # it clips gradients, not rows: no more than a bounded step comes of them
        assert np.isfinite(got).all()
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)


@every_way
def test_degenerate_shapes_have_finite_results(way) -> None:
    for rows in (
        np.zeros((10, 3)),  # nothing in any row
        np.tile([0.5, 0.0, -0.5], (10, 1)),  # one row ten times
        np.ones((10, 1)),  # one column
        np.eye(2),  # two rows
        np.full((10, 6), 0.3),  # s = d
    ):
        weights = way(csr_array(rows), labels_of(len(rows)))
        assert weights.shape == (rows.shape[1],) and np.isfinite(weights).all()


@every_way
def test_one_row_is_a_result_or_an_error(way) -> None:
    if way is by_bias_reduced or "bias_reduced" in str(way.__closure__ and way.__closure__[0].cell_contents):
        with pytest.raises((SparseDPError, ValueError), match="rows"):
            way(csr_array([[0.5, 0.5]]), np.ones(1))
    else:
        assert np.isfinite(way(csr_array([[0.5, 0.5]]), np.ones(1))).all()


@every_way
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(way, bad) -> None:
    rows = sparse_rows(20, 4, 2).toarray()
    rows[:, 0] = bad
    with pytest.raises((SparseDPError, ValueError), match=r"(?i)nan|infinit"):
        way(csr_array(rows), labels_of(20))


@every_way
def test_no_rows_and_no_columns_are_refused(way) -> None:
    for shape in ((0, 4), (5, 0)):
        with pytest.raises((SparseDPError, ValueError), match=r"row|column|sample|feature"):
            way(csr_array(shape), labels_of(shape[0]))


@every_way
def test_targets_must_fit(way) -> None:
    with pytest.raises((SparseDPError, ValueError), match=r"rows|inconsistent"):
        way(sparse_rows(20, 4, 2), labels_of(19))


def test_exact_result_of_duplicate_and_zero_rows() -> None:
    # n counts every row: twice the same rows have the same minimiser, and rows of zeros halve the pull of the others.
    rows = sparse_rows(15, 4, 2)
    y = labels_of(15)
    once = by_output(rows, y, noise_multiplier=0)
    twice = by_output(csr_array(np.vstack([rows.toarray()] * 2)), np.tile(y, 2), noise_multiplier=0)
    np.testing.assert_allclose(twice, once, atol=1e-3 / (0.1 * 15))
    padded = by_output(csr_array(np.vstack([rows.toarray(), np.zeros((15, 4))])), np.tile(y, 2), noise_multiplier=0)
    stronger = by_output(rows, y, noise_multiplier=0, regularisation=0.2)
    np.testing.assert_allclose(padded, stronger, atol=1e-3 / (0.1 * 15))


def test_ridge_clips_targets_and_takes_integers() -> None:
    rows = sparse_rows(30, 4, 2)
    y = np.resize([-1, 1], 30)
    for method in ("output", "sgd", "bias_reduced"):
        fit = lambda y, method=method: Ridge(delta=1e-4, method=method, steps=5, random_state=0).fit(rows, y).coef_  # noqa: E731
        np.testing.assert_allclose(fit(y * 1e100), fit(y.astype(float)), rtol=1e-12)
        assert np.isfinite(fit(y)).all()
    assert math.isfinite(Ridge(delta=1e-4).fit(rows, np.zeros(30)).intercept_)
