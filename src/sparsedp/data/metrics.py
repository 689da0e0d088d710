"""How good predictions are: area under the ROC curve, log loss, whether probabilities are what they say, and classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """P(score of a positive > score of a negative) + P(equal) / 2, exactly. labels 0 or 1, scores, both [n].

    NaN if there is only one class (or nothing): the probability is then undefined.
    """
    y, s = _checked(labels, scores)
    _, group = np.unique(s, return_inverse=True)
    positives = np.bincount(group, weights=y)
    negatives = np.bincount(group, weights=1 - y)
    if y.sum() in (0, len(y)):
        return float("nan")
    below = np.cumsum(negatives) - negatives
    return float(positives @ (below + negatives / 2) / (positives.sum() * negatives.sum()))


def log_loss(labels: ArrayLike, logits: ArrayLike) -> float:
    """Mean of log(1 + exp(-z)) over the positives and log(1 + exp(z)) over the negatives, in nats; both [n].

    One class is fine; NaN only if there is nothing. Finite for every finite logit.
    """
    y, z = _checked(labels, logits)
    return float(np.logaddexp(0, np.where(y == 1, -z, z)).mean()) if len(y) else float("nan")


def brier_score(labels: ArrayLike, logits: ArrayLike) -> float:
    """The mean squared error of the probabilities; NaN if there is nothing."""
    y, z = _checked(labels, logits)
    return float(np.square(expit(z) - y).mean()) if len(y) else float("nan")


def calibration_ratio(labels: ArrayLike, logits: ArrayLike) -> float:
    """The sum of the probabilities over the number of positives: 1 where neither too many nor too few are expected.

    NaN if there is no positive.
    """
    y, z = _checked(labels, logits)
    return float(expit(z).sum() / y.sum()) if y.any() else float("nan")


def calibration_error(labels: ArrayLike, logits: ArrayLike, bins: int = 15) -> float:
    """Over `bins` equal intervals of probability, how far the mean probability is from the share of positives, on average.

    The average is over the examples, also known as ECE; NaN if there is nothing.
    """
    y, z = _checked(labels, logits)
    if not len(y):
        return float("nan")
    probabilities = expit(z)
    of_bin = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(of_bin, weights=probabilities - y)).sum() / len(y))


def class_scores(confusion: ArrayLike) -> dict[str, float]:
    """Of counts [label, prediction]: the share that is right, and precision and recall, each a mean over the classes that occur.

    A class that is never predicted has precision 0, and one that no label names recall 0. All NaN if there is nothing.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    right, labelled, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    if not counts.sum():
        return dict.fromkeys(("accuracy", "precision", "recall"), float("nan"))
    there = (labelled > 0) | (predicted > 0)
    precision = right[there] / np.maximum(predicted[there], 1)
    recall = right[there] / np.maximum(labelled[there], 1)
    accuracy = right.sum() / counts.sum()
    return {"accuracy": float(accuracy), "precision": float(precision.mean()), "recall": float(recall.mean())}


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    y, s = np.asarray(labels, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if y.ndim != 1 or y.shape != s.shape:
        raise ValueError(f"labels and scores must be vectors of one length, got {y.shape} and {s.shape}")
    if not np.isin(y, (0, 1)).all():
        raise ValueError("labels must be 0 or 1")
    if np.isnan(s).any():
        raise ValueError(f"{np.isnan(s).sum()} of {len(s)} scores are NaN")
    return y, s
