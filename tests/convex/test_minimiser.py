"""The minimiser's certificate: it is never smaller than the true distance, and the target is always met."""

import numpy as np
import pytest
from linear_data import planted_labels, sparse_rows
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize
from scipy.sparse import csr_matrix

from sparsedp.convex import Box, L1Ball, L2Ball, WholeSpace
from sparsedp.convex import minimiser as module
from sparsedp.convex.losses import Huber, Logistic, SmoothedHinge, Squared
from sparsedp.convex.minimiser import (
    NotConvergedError,
    contains_zero,
    largest_number_of_steps,
    minimise,
    radius_of,
)
from sparsedp.convex.objective import Bounds, Objective

LOSSES = [Logistic(), SmoothedHinge(), Squared(1.0), Huber(0.5)]
SETS = [WholeSpace(), L2Ball(1.5), L1Ball(3.0), Box(-0.3, 0.4)]


def objective(loss, feasible, n=200, d=40, regularisation=1e-2) -> Objective:
    rows = sparse_rows(n, d, 8)
    return Objective(Bounds(loss, n, d, 1.0, regularisation, radius_of(feasible, d)), rows, planted_labels(rows))


@pytest.mark.parametrize("feasible", SETS, ids=repr)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_certificate_covers_the_true_distance(loss, feasible) -> None:
    problem = objective(loss, feasible)
    rough, fine = minimise(problem, feasible, 1e-3), minimise(problem, feasible, 1e-9)
    assert rough.distance <= 1e-3 and fine.distance <= 1e-9
    assert np.linalg.norm(rough.point - fine.point) <= rough.distance + fine.distance
    assert feasible.contains(fine.point, 1e-12)
    assert np.linalg.norm(fine.point) <= problem.bounds.minimiser_norm + 1e-9


@pytest.mark.parametrize("feasible", SETS, ids=repr)
def test_agrees_with_scipy(feasible) -> None:
    problem = objective(Logistic(), feasible, d=6)
    constraints: list = []
    if isinstance(feasible, L2Ball):
        constraints = [NonlinearConstraint(lambda w: w @ w, -np.inf, feasible.radius**2, jac=lambda w: 2 * w[None])]
    if isinstance(feasible, L1Ball):
        signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1).T
        constraints = [LinearConstraint(signs, -np.inf, feasible.radius)]
    limits = [(feasible.low, feasible.high)] * 6 if isinstance(feasible, Box) else None
    method = "L-BFGS-B" if limits or not constraints else "trust-constr"
    theirs = minimize(
        problem.value_and_gradient, np.zeros(6), jac=True, method=method, bounds=limits, constraints=constraints,
        options={"maxiter": 3000} | ({"gtol": 1e-10} if method == "trust-constr" else {"ftol": 1e-15, "gtol": 1e-10}),
    )  # fmt: skip
    ours = minimise(problem, feasible, 1e-8)
    np.testing.assert_allclose(ours.point, theirs.x, atol=2e-4 if method == "trust-constr" else 1e-6)
    assert problem.value_and_gradient(ours.point)[0] <= theirs.fun + 1e-9


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_gradient_steps_alone_reach_the_target(loss, monkeypatch) -> None:
    problem = objective(loss, WholeSpace())
    monkeypatch.setattr(module, "_newton", lambda objective, target: (np.zeros(objective.bounds.columns), 0))
    minimum = minimise(problem, WholeSpace(), 1e-6)
    assert minimum.distance <= 1e-6
    assert minimum.evaluations <= 1.2 * largest_number_of_steps(problem, 1e-6)


def test_a_target_that_rounding_rules_out_raises() -> None:
    problem = objective(Logistic(), WholeSpace())
    with pytest.raises(NotConvergedError, match="Nothing was released but this message"):
        minimise(problem, WholeSpace(), 1e-30)


def test_degenerate_data() -> None:
    for rows in (csr_matrix((3, 2)), csr_matrix(np.ones((1, 1))), csr_matrix(np.tile([[1.0, 0.0]], (5, 1)))):
        n, d = rows.shape
        for loss in LOSSES:
            bounds = Bounds(loss, n, d, 1.0, 0.1, np.inf)
            minimum = minimise(Objective(bounds, rows, np.ones(n)), WholeSpace(), 1e-8)
            assert minimum.distance <= 1e-8
            if rows.nnz == 0:
                np.testing.assert_array_equal(minimum.point, 0.0)


def test_residual_is_above_the_gradient_in_many_digits() -> None:
    import mpmath

    mpmath.mp.dps = 50
    rows = sparse_rows(60, 10, 5)
    labels = planted_labels(rows)
    bounds = Bounds(Logistic(), 60, 10, 1.0, 1e-3, np.inf)
    problem = Objective(bounds, rows, labels)
    w = minimise(problem, WholeSpace(), 1e-9).point
    exact = [mpmath.mpf(bounds.regularisation) * mpmath.mpf(float(c)) for c in w]
    dense = rows.toarray()
    for row, label in zip(dense, labels):
        margin = mpmath.fsum(mpmath.mpf(float(a)) * mpmath.mpf(float(b)) for a, b in zip(row, w))
        slope = -label / (1 + mpmath.exp(label * margin)) / 60
        exact = [g + slope * mpmath.mpf(float(a)) for g, a in zip(exact, row)]
    norm = float(mpmath.sqrt(mpmath.fsum(g * g for g in exact)))
    computed = problem.gradient(w)
    assert norm <= problem.residual(w, computed)
    off = np.linalg.norm([float(g - mpmath.mpf(float(c))) for g, c in zip(exact, computed)])
    assert off <= bounds.rounding(float(np.linalg.norm(w)), 1.0)


def test_sets_without_zero_are_told() -> None:
    assert contains_zero(Box(-1.0, 0.0)) and not contains_zero(Box(0.5, 1.0))
    assert radius_of(Box(-1.0, 2.0), 4) == 4.0
