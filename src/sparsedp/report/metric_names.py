"""Held-out metrics by plain names, and which direction is better."""

from __future__ import annotations

import re

_HIGHER, _LOWER = "Higher is better.", "Lower is better."
_NAMES = {
    "auc": ("AUC", _HIGHER),
    "log_loss": ("log loss", _LOWER),
    "loss": ("loss", _LOWER),
    "accuracy": ("accuracy", _HIGHER),
    "mse": ("mean squared error", _LOWER),
    "rmse": ("root mean squared error", _LOWER),
    "mae": ("mean absolute error", _LOWER),
    "calibration_error": ("calibration error", _LOWER),
    "calibration_ratio": ("positives expected per positive", "1 is right."),
    "brier_score": ("Brier score", _LOWER),
}
ONE_CLASS = "–: only one class is held out"  # in place of an AUC
_RANKINGS = {"ndcg": "NDCG", "hit": "HIT", "precision": "precision", "recall": "recall", "mrr": "MRR", "map": "MAP"}
# What else is evaluated beside a model, by the prefix of its metrics.
BASELINES = {"planted": "the model that drew the data", "popularity": "the most popular items"}


def metric_name(key: str) -> tuple[str, str]:
    """(name, which direction is better): ndcg@10 is NDCG@10. A metric that is not known keeps its name."""
    ranking = re.fullmatch(r"([a-z]+)(@\d+)?", key)
    if ranking and ranking[1] in _RANKINGS:
        return _RANKINGS[ranking[1]] + (ranking[2] or ""), _HIGHER
    return _NAMES.get(key, (key, ""))


def is_metric(key: str) -> bool:
    """Whether a value of an evaluation is about the model itself, and about all that was held out."""
    return key != "periods" and not key.startswith(tuple(f"{prefix}_" for prefix in BASELINES))
