"""AUC against its definition, log loss against torch, and probabilities against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, precision_score, recall_score, roc_auc_score
from sklearn.metrics import log_loss as log_loss_of_scikit_learn

from sparsedp.data import auc, brier_score, calibration_error, calibration_ratio, class_scores, log_loss


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[bool, int]]) -> None:
    positive = [s for y, s in pairs if y]
    negative = [s for y, s in pairs if not y]
    value = auc([y for y, _ in pairs], [s for _, s in pairs])
    if not positive or not negative:
        assert math.isnan(value)
    else:
        wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
        assert value == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-12)


def test_auc_of_perfect_reversed_and_constant_scores() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(labels, torch.tensor([1.0, 2.0, 3.0, 4.0])) == 1.0
    assert auc(labels, torch.tensor([4.0, 3.0, 2.0, 1.0])) == 0.0
    assert auc(labels, torch.zeros(4)) == 0.5
    assert auc([0, 1], [-np.inf, np.inf]) == 1.0


def test_log_loss_is_torchs() -> None:
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 2, 500), 5 * rng.standard_normal(500)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(labels).double()
    )
    assert log_loss(labels, logits) == pytest.approx(expected.item(), rel=1e-12)


def test_log_loss_at_the_extremes() -> None:
    assert log_loss([1, 0], [1e4, -1e4]) == 0.0
    assert log_loss([0, 1], [1e4, -1e4]) == 1e4
    assert log_loss([1], [np.inf]) == 0.0
    assert log_loss([1, 1], [0.0, 0.0]) == pytest.approx(math.log(2))  # one class is fine


def test_nothing_gives_nan() -> None:
    assert math.isnan(auc([], [])) and math.isnan(log_loss([], []))


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])  # the last reaches probabilities 0 and 1
def test_probabilities_are_judged_as_scikit_learn_does(spread: float) -> None:
    rng = np.random.default_rng(1)
    logits = spread * rng.standard_normal(400)
    labels = (rng.random(400) < 0.3 + 0.4 * (logits > 0)).astype(float)
    probabilities = 1 / (1 + np.exp(-logits))
    assert brier_score(labels, logits) == pytest.approx(brier_score_loss(labels, probabilities))
    for bins in (1, 5, 15):
        shares, means = calibration_curve(labels, probabilities, n_bins=bins)
        counts = np.histogram(probabilities, np.linspace(0, 1, bins + 1))[0]
        wanted = np.abs(shares - means) @ counts[counts > 0] / len(labels)
        assert calibration_error(labels, logits, bins) == pytest.approx(wanted)
    assert calibration_ratio(labels, logits) == pytest.approx(probabilities.mean() / labels.mean())


@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_scikit_learns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, logits = rng.integers(0, 2, 700), np.round(3 * rng.standard_normal(700), 1)  # with ties
    assert auc(labels, logits) == pytest.approx(roc_auc_score(labels, logits), rel=0, abs=1e-9)
    assert log_loss(labels, logits) == pytest.approx(
        log_loss_of_scikit_learn(labels, 1 / (1 + np.exp(-logits))), rel=0, abs=1e-9
    )
    classes = rng.integers(0, 6, 300)
    predicted = np.where(rng.random(300) < 0.5, classes, rng.integers(0, 4, 300))  # 4 and 5 are seldom predicted
    predicted[predicted == 5] = 0  # and one of them never
    confusion = np.zeros((8, 8), int)  # of which 6 and 7 do not occur
    np.add.at(confusion, (classes, predicted), 1)
    scores = class_scores(confusion)
    options = {"average": "macro", "zero_division": 0}
    assert scores["accuracy"] == pytest.approx(accuracy_score(classes, predicted), rel=0, abs=1e-9)
    assert scores["precision"] == pytest.approx(precision_score(classes, predicted, **options), rel=0, abs=1e-9)
    assert scores["recall"] == pytest.approx(recall_score(classes, predicted, **options), rel=0, abs=1e-9)


def test_classes_of_nothing() -> None:
    assert all(math.isnan(score) for score in class_scores(np.zeros((3, 3))).values())


def test_calibration_of_right_and_of_doubled_probabilities() -> None:
    labels = np.repeat([1.0, 0.0], [100, 300])
    quarter, half = np.full(400, -math.log(3)), np.zeros(400)
    assert calibration_ratio(labels, quarter) == pytest.approx(1) and calibration_error(labels, quarter) < 1e-12
    assert calibration_ratio(labels, half) == pytest.approx(2)
    assert calibration_error(labels, half) == pytest.approx(0.25)
    assert math.isnan(calibration_ratio([0.0], [1.0]))
    assert math.isnan(calibration_error([], [])) and math.isnan(brier_score([], []))


@pytest.mark.parametrize("metric", [auc, log_loss, brier_score, calibration_ratio, calibration_error])
@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [0.5], "one length"),
        ([[0, 1]], [[0.5, 0.5]], "one length"),
        ([0, 2], [0.5, 0.5], "0 or 1"),
        ([0, 1], [0.5, np.nan], "1 of 2 scores are NaN"),
    ],
)
def test_bad_input_is_refused(metric, labels, scores, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        metric(labels, scores)
