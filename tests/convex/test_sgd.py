"""Gradient descent on sparse rows: neighbours, noise, its accounting, and the rules for its steps."""

import math

import numpy as np
import pytest
from linear_data import planted_labels, sparse_rows
from scipy.sparse import csr_array
from scipy.stats import kstest

from sparsedp import SparseDPError
from sparsedp.convex.losses import Huber, Logistic, SmoothedHinge, Squared
from sparsedp.convex.release import Releases
from sparsedp.convex.sgd import SGDPlan, slopes, train
from sparsedp.noise import RandomKey

LOSSES = [Logistic(), SmoothedHinge(), Squared(2.0), Huber(0.5)]


def plan_of(rows: csr_array, **change) -> SGDPlan:
    settings = {
        "loss": Logistic(), "rows": rows.shape[0], "columns": rows.shape[1], "models": 1, "row_norm": 1.0, "epsilon": 1.0,
        "delta": 1e-5, "neighbours": "add_remove", "steps": 20, "batch_size": None, "model_norm": 10.0,
    }  # fmt: skip
    return SGDPlan(**(settings | change))


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("neighbours", ["add_remove", "replace_one"])
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_row_moves_a_sum_by_no_more_than_its_sensitivity(loss, neighbours, models, monkeypatch) -> None:
    rows = sparse_rows(12, 5, 3).toarray()
    rows[0] = [1.0, 0, 0, 0, 0]
    targets = np.where(np.arange(12)[:, None] % 2 == 0, 1.0, -1.0) * np.ones(models)
    targets[0] = 1.0
    other_rows, other_targets = rows.copy(), targets.copy()
    # A row of zeros has no gradient: as if it were not there.
    other_rows[0] = [0.0, 1, 0, 0, 0] if neighbours == "replace_one" else 0.0
    plan = plan_of(csr_array(rows), loss=loss, neighbours=neighbours, models=models, learning_rate=1e5)
    sums: list[np.ndarray] = []
    noise = iter(np.random.default_rng(0).standard_normal((40, 5 * models)) * 1e3)

    def gaussian(self, values, sensitivity, multiplier):
        assert sensitivity == plan.sensitivity and multiplier == plan.noise_multiplier
        sums.append(values)
        return next(noise)  # the same weights for both, and far out, so that slopes are at their bounds

    monkeypatch.setattr(Releases, "gaussian", gaussian)
    train(plan, csr_array(rows), targets, RandomKey.from_seed(0))
    noise = iter(np.random.default_rng(0).standard_normal((40, 5 * models)) * 1e3)
    train(plan, csr_array(other_rows), other_targets, RandomKey.from_seed(0))
    moved = [float(np.linalg.norm(one - other)) for one, other in zip(sums[:20], sums[20:])]
    assert max(moved) <= plan.sensitivity
    # One row that leaves pulls with all of L, one that comes in its place across that: the claim is no empty one.
    assert max(moved) >= (0.99 if neighbours == "add_remove" else 0.6) * plan.sensitivity


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_slopes_are_bounded_for_any_margin(loss) -> None:
    margins = np.array([-1e300, -1.0, 0.0, 1e300, np.inf, -np.inf, np.nan])
    for target in (-1.0, 1.0):
        got = slopes(loss, margins, np.full(7, target))
        assert np.isfinite(got).all() and np.abs(got).max() <= loss.slope_bound


@pytest.mark.parametrize("batch_size", [None, 25])
def test_noise_has_its_law(batch_size) -> None:
    rows = csr_array((100, 3000))
    plan = plan_of(rows, batch_size=batch_size, steps=40, regularisation=1e-3)
    weights, statement = train(plan, rows, np.ones((100, 1)), RandomKey.from_os())
    size, momentum = plan.step_size_and_momentum
    assert momentum > 0
    moved = (1 - momentum ** (np.arange(1, 41) + 1)) / (1 - momentum)
    mean_of = plan.rows if batch_size is None else batch_size
    std = size * math.sqrt((moved**2).sum()) * plan.noise_multiplier * plan.sensitivity / mean_of
    assert kstest(weights[:, 0] / std, "norm").pvalue > 1e-4
    for factor in (2 / 3, 3 / 2):
        assert kstest(weights[:, 0] / std / factor, "norm").pvalue < 1e-6
    assert 0.98 < statement.epsilon <= 1.0 and statement.delta == 1e-5 and "Seeded" not in str(statement)
    again, _ = train(plan, rows, np.ones((100, 1)), RandomKey.from_os())
    assert abs(np.corrcoef(again[:, 0], weights[:, 0])[0, 1]) < 0.1


def test_all_rows_cost_what_one_release_costs() -> None:
    rows = sparse_rows(50, 4, 2)
    few, many = (plan_of(rows, steps=steps) for steps in (1, 400))
    assert many.noise_multiplier == pytest.approx(20 * few.noise_multiplier)
    assert many.best_regularisation == pytest.approx(few.best_regularisation)
    replaced = plan_of(rows, neighbours="replace_one")
    assert replaced.sensitivity == pytest.approx(2 * few.sensitivity)


def test_steps_follow_their_rule() -> None:
    rows = sparse_rows(50, 4, 2)
    for regularisation in (10.0, 0.1, 1e-2, 3e-3):
        plan = plan_of(rows, steps=50, regularisation=regularisation)
        size, momentum = plan.step_size_and_momentum
        smoothness = 0.25
        assert size <= 1 / smoothness and momentum <= 1 - 10 / 50
        moved = size * ((1 - momentum ** (np.arange(1, 51) + 1)) / (1 - momentum)).sum()
        assert moved == pytest.approx(1 / regularisation, rel=0.2)
    capped = plan_of(rows, steps=50, regularisation=1e-9)
    assert capped.step_size_and_momentum == (4.0, pytest.approx(0.8))
    assert plan_of(rows, learning_rate=0.3).step_size_and_momentum == (0.3, 0.0)
    # The closed form is where the bound is least.
    plan = plan_of(csr_array((5000, 4)), model_norm=3.0)
    grid = np.geomspace(1e-6, 1e2, 4000)
    assert plan.excess_risk(plan.best_regularisation) <= 1.0001 * min(plan.excess_risk(lam) for lam in grid)


def test_a_step_is_a_gradient_step(monkeypatch) -> None:
    rows = sparse_rows(30, 4, 2)
    labels = planted_labels(rows)
    monkeypatch.setattr(Releases, "gaussian", lambda self, values, sensitivity, multiplier: values)
    plan = plan_of(rows, steps=1, learning_rate=0.5)
    weights, _ = train(plan, rows, labels[:, None], RandomKey.from_seed(0))
    np.testing.assert_allclose(weights[:, 0], 0.5 * 0.5 * rows.T @ labels / 30, atol=1e-12)
    # Samples are divided by the number of rows that is expected: on average they give the same.
    sampled = plan_of(rows, steps=1, learning_rate=0.5, batch_size=10)
    runs = [train(sampled, rows, labels[:, None], RandomKey.from_seed(seed))[0][:, 0] for seed in range(144)]
    off = np.abs(np.mean(runs, axis=0) - weights[:, 0])
    assert (off < 4.5 * np.std(runs, axis=0) / 12).all() and np.std(runs, axis=0).min() > 0


def test_gradient_descent_finds_the_minimiser_where_noise_is_small(monkeypatch) -> None:
    rows = sparse_rows(200, 4, 2)
    labels = planted_labels(rows)
    monkeypatch.setattr(Releases, "gaussian", lambda self, values, sensitivity, multiplier: values)
    plan = plan_of(rows, steps=200, regularisation=1e-4)
    weights, _ = train(plan, rows, labels[:, None], RandomKey.from_seed(0))
    gradient = rows.T @ Logistic().slope(rows @ weights[:, 0], labels) / 200
    assert np.linalg.norm(gradient) < 1e-3


def test_refusals() -> None:
    with pytest.raises(SparseDPError, match="batch_size"):
        plan_of(sparse_rows(10, 2, 1), batch_size=3, neighbours="replace_one")
