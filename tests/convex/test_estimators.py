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
from sparsedp.convex.release import Releases  # noqa: E402

ESTIMATORS = [LogisticRegression, LinearSVC, Ridge]
METHODS = ["output", "sgd", "bias_reduced"]


@pytest.mark.parametrize(
    "method",
    ["output", "sgd", pytest.param("bias_reduced", marks=pytest.mark.slow)],  # hundreds of steps a fit
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_scikit_learns_checks(estimator, method) -> None:
    # The estimators' tags say that scores on a few hundred rows are poor: that is noise for epsilon = 1.
    results = check_estimator(estimator(method=method, steps=20), on_fail=None, on_skip=None)
    failed = [(result["check_name"], result["exception"]) for result in results if result["status"] == "failed"]
    assert failed == []  # none is left out
    assert sum(result["status"] == "passed" for result in results) >= 45


@pytest.mark.parametrize(("method", "batch_size"), [("output", None), ("sgd", None), ("sgd", 500)])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_learns(estimator, method, batch_size) -> None:
    rows = sparse_rows(4000, 30, 6)
    labels = planted_labels(rows)
    model = estimator(epsilon=4.0, delta=1e-5, method=method, batch_size=batch_size)
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
    paper = LogisticRegression(method="bias_reduced", delta=1e-4, neighbours="replace_one").fit(rows, labels)
    assert "the paper's filter" in str(paper.statement_) and "replacing one row" in str(paper.statement_)
    pure = LogisticRegression(method="bias_reduced", delta=0.0).fit(rows, labels)
    assert pure.statement_.delta == 0 and pure.statement_.epsilon <= 1.0


@pytest.mark.parametrize("method", METHODS)
def test_several_classes_by_every_method(method) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 3)) * 0.3
    y = X.argmax(axis=1)
    # A huge budget: what is tested is that each class gets a model, not how much noise there is.
    for estimator in (LogisticRegression, LinearSVC):
        model = estimator(epsilon=1000.0, delta=1e-5, method=method, model_norm=5.0, random_state=0).fit(X, y)
        assert model.coef_.shape == (3, 3) and model.intercept_.shape == (3,) and model.method_ == method
        assert (model.coef_.argmax(axis=0) == np.arange(3)).all()
        assert model.score(X, y) > (
            0.7 if method == "bias_reduced" else 0.8
        )  # of the first there are some 50 steps of few rows


def test_several_classes_cost_their_root() -> None:
    # Each row moves every class's model: all k are released together, with the noise of sqrt(k) times the sensitivity.
    rows = sparse_rows(200, 5, 2)
    noise = {}
    for k in (2, 3, 12):
        model = LogisticRegression(method="sgd", delta=1e-4, steps=2).fit(rows, np.arange(200) % k)
        noise[k] = float(model.statement_.noise.split("sensitivity ")[1].split(",")[0])
    assert noise[3] == pytest.approx(math.sqrt(3) * noise[2], rel=1e-3)
    assert noise[12] == pytest.approx(math.sqrt(12) * noise[2], rel=1e-3)


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
    model = estimator(
        method="output",
        regularisation=0.05,
        random_state=0,
        neighbours="replace_one",
        delta=1e-4,
        intercept_scaling=1.0,
    )
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_moves_every_step_by_no_more_than_claimed(estimator, monkeypatch) -> None:
    # The whole way, a row and a target far beyond their bounds included.
    rows, labels = sparse_rows(60, 6, 3).toarray(), np.tile([-1.0, 1.0], 30)
    changed, other_labels = rows.copy(), labels.copy()
    changed[0], other_labels[0] = 1e9, -1e9 if estimator is Ridge else 1.0
    sums: list[np.ndarray] = []
    claimed: set[float] = set()

    def gaussian(self, values, sensitivity, multiplier):
        sums.append(values)
        claimed.add(sensitivity)
        return np.random.default_rng(len(sums) % 10).standard_normal(len(values)) * 100  # the same for both

    monkeypatch.setattr(Releases, "gaussian", gaussian)
    for X, y in ((rows, labels), (changed, other_labels)):
        model = estimator(method="sgd", neighbours="replace_one", delta=1e-4, steps=10)
        if estimator is not Ridge:
            model.set_params(classes=[-1, 1])
        model.fit(X, y)
    moved = [float(np.linalg.norm(one - other)) for one, other in zip(sums[:10], sums[10:])]
    assert len(claimed) == 1 and 0 < max(moved) <= claimed.pop()


def test_auto_follows_its_rule() -> None:
    rows, labels = sparse_rows(300, 5, 3), np.tile([0, 1], 150)
    assert LogisticRegression(steps=1).fit(rows, labels).method_ == "sgd"
    assert LogisticRegression(steps=1, neighbours="replace_one").fit(rows, labels).method_ == "sgd"
    assert LogisticRegression(delta=0.0).fit(rows, labels).method_ == "output"


def test_refusals() -> None:
    rows, labels = sparse_rows(50, 5, 2), np.tile([0, 1], 25)
    for change, words in (
        ({"method": "sgd", "delta": 0.0}, "delta above 0"),
        ({"method": "sgd", "neighbours": "replace_one", "batch_size": 10}, "add_remove"),
        ({"method": "sgd", "steps": 0}, "steps"),
        ({"method": "sgd", "batch_size": 0}, "batch_size"),
        ({"method": "sgd", "learning_rate": -1.0}, "learning_rate"),
        ({"method": "bias_reduced", "neighbours": "replace_one", "delta": 0.0}, "delta above 0"),
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
