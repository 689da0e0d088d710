"""The estimators: scikit-learn's checks, what they predict, their statements, and neighbours."""

import math
import subprocess
import sys

import numpy as np
import pytest
from linear_data import planted_labels, sparse_rows

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from sparsedp import ConfigError, SparseDPError  # noqa: E402
from sparsedp.convex import LinearSVC, LogisticRegression, Ridge  # noqa: E402

ESTIMATORS = [LogisticRegression, LinearSVC, Ridge]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_scikit_learns_checks(estimator) -> None:
    # None is left out. The estimators' tags say that scores on a few hundred rows are poor: that is noise for epsilon = 1.
    results = check_estimator(estimator(method="output"), on_fail=None, on_skip=None)
    failed = [result["check_name"] for result in results if result["status"] == "failed"]
    assert failed == []
    assert sum(result["status"] == "passed" for result in results) >= 45


@pytest.mark.parametrize("method", ["output", "sgd"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_learns(estimator, method) -> None:
    rows = sparse_rows(4000, 30, 6)
    labels = planted_labels(rows)
    model = estimator(epsilon=4.0, delta=1e-5, method=method, epochs=5, batch_size=500)
    if estimator is Ridge:
        model.set_params(model_norm=2.0)
        accuracy = float((np.sign(model.fit(rows, labels).predict(rows)) == labels).mean())
    else:
        accuracy = model.fit(rows, labels).score(rows, labels)
    assert accuracy > 0.7  # of 0.9 that are to be had
    assert model.method_ == method
    assert model.statement_.holds and model.statement_.epsilon <= 4.0 and model.statement_.delta == 1e-5


def test_bias_reduced_is_offered() -> None:
    rows = sparse_rows(300, 5, 2)
    labels = planted_labels(rows)
    model = LogisticRegression(epsilon=2.0, delta=1e-4, method="bias_reduced", model_norm=2.0).fit(rows, labels)
    assert model.method_ == "bias_reduced" and model.statement_.mechanism == "BiasReducedSGD"
    assert model.statement_.epsilon <= 2.0 and "classes (-1.0, 1.0)" in str(model.statement_)
    with pytest.raises(SparseDPError, match="one model"):
        LogisticRegression(method="bias_reduced").fit(rows, np.arange(300) % 3)


def test_several_classes_and_probabilities() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 3)) * 0.1
    y = np.array(["a", "b", "c"])[X.argmax(axis=1)]
    model = LogisticRegression(epsilon=8.0, delta=1e-5, method="output", random_state=0).fit(X, y)
    assert model.coef_.shape == (3, 3) and list(model.classes_) == ["a", "b", "c"]
    assert model.score(X, y) > 0.8
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(X)).all()


def test_intercept_is_learned_and_can_be_left_out() -> None:
    X, y = np.zeros((2000, 2)), np.repeat([1, 1, 1, 0], 500)
    model = LogisticRegression(epsilon=5.0, delta=1e-5, method="output").fit(X, y)
    assert model.intercept_[0] > 0.3
    assert LogisticRegression(fit_intercept=False, method="output").fit(X, y).intercept_[0] == 0


def test_statement_says_where_classes_come_from() -> None:
    rows = sparse_rows(100, 5, 2)
    labels = planted_labels(rows)
    taken = LogisticRegression(method="output").fit(rows, labels)
    assert "taken from the labels, of which the set is not protected" in str(taken.statement_)
    given = LogisticRegression(method="output", classes=[-1, 1]).fit(rows, labels)
    assert "they were given" in str(given.statement_)
    # With the classes given, labels that do not occur change nothing about what is released but its numbers.
    alone = LogisticRegression(method="output", classes=[-1, 1]).fit(rows, np.ones(100))
    assert alone.coef_.shape == given.coef_.shape
    with pytest.raises(ValueError, match="none of `classes`"):
        LogisticRegression(classes=[-1, 1]).fit(rows, np.arange(100) % 3)
    assert "Seeded" in str(LogisticRegression(method="output", random_state=1).fit(rows, labels).statement_)
    assert "Seeded" not in str(taken.statement_)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_moves_what_is_released_by_no_more_than_claimed(estimator, monkeypatch) -> None:
    # Same noise, so that the difference is that of the minimisers; the row is as far out as it can be.
    rows, labels = sparse_rows(60, 6, 3).toarray(), np.tile([-1.0, 1.0], 30)
    model = estimator(method="output", regularisation=0.05, random_state=0, neighbours="replace_one", delta=1e-4)
    if estimator is not Ridge:
        model.set_params(classes=[-1, 1])
    one = clone(model).fit(rows, labels)
    changed = rows.copy()
    changed[0] = 1e9
    other = clone(model).fit(changed, np.append(-1e9 if estimator is Ridge else 1.0, labels[1:]))
    slope = 1 + math.sqrt(2) * math.sqrt(0.5 / 0.05) if estimator is Ridge else 1.0
    claimed = 2 * slope * math.sqrt(2) / (0.05 * 60) * 1.01
    moved = np.hypot(
        np.linalg.norm(one.coef_ - other.coef_), np.linalg.norm(np.subtract(one.intercept_, other.intercept_))
    )
    assert 0 < moved <= claimed


def test_auto_looks_at_no_data() -> None:
    for d in (5, 400):
        rows, others = sparse_rows(300, d, 3), sparse_rows(300, d, 1, seed=5)
        chosen = {LogisticRegression(epochs=1).fit(X, np.tile([0, 1], 150)).method_ for X in (rows, others)}
        assert len(chosen) == 1


def test_refusals() -> None:
    rows, labels = sparse_rows(50, 5, 2), np.tile([0, 1], 25)
    for change, words in (
        ({"method": "sgd", "delta": 0.0}, "delta above 0"),
        ({"method": "sgd", "neighbours": "replace_one"}, "add_remove"),
        ({"method": "best"}, "method"),
        ({"bound": 0.0}, "bound"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"intercept_scaling": 0.0}, "intercept_scaling"),
        ({"sparsity": 0.5}, "sparsity"),
    ):
        with pytest.raises(SparseDPError, match=words):
            LogisticRegression(**change).fit(rows, labels)
    with pytest.raises(ConfigError, match="bound"):
        Ridge(target_bound=0.0).fit(rows, labels)


def test_package_does_without_scikit_learn() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None; sys.modules['sklearn.base'] = None\n"
        "import sparsedp.convex as convex\n"
        "convex.output_perturbation\n"
        "try: convex.Ridge\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sparsedp[convex]" in done.stdout
