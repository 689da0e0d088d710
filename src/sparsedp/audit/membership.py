"""Membership inference from losses: which examples was a model trained on?

Two attacks on a target model, each a score for every example, higher for likelier members:

- `threshold`: minus the loss (Yeom et al. 2018).
- `lira`: the likelihood ratio attack (Carlini et al. 2022, "Membership inference attacks from first principles"). Shadow
  models are trained like the target, each on examples drawn by coins. With phi = log(p / (1 - p)), p = exp(-loss), an
  example's phi under models that had it and under models that had it not is taken for normal. With few shadow models their
  deviations are pooled over all examples (the paper's "fixed variance"). Online: log N(phi; mu_in, s_in) - log N(phi; mu_out,
  s_out). Offline, by models alone that had it not: log Phi((phi - mu_out) / s_out).

An (epsilon, delta)-private model allows no attack with TPR above e^epsilon FPR + delta, nor above
1 - e^-epsilon (1 - delta - FPR).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from sparsedp.audit.bounds import epsilon_lower_bound
from sparsedp.audit.numbers import finite_vector
from sparsedp.errors import SparseDPError
from sparsedp.noise import RandomKey

Variant = Literal["online", "offline"]
LEVELS = 0.001, 0.01  # the false positive rates that are reported
# Non-members that must lie above a threshold on average, in the half that it is chosen on, or the rate would be a guess.
_ENOUGH = 5
# exp(-loss) counts as below 1 by at least this, so that phi stays finite.
_CERTAIN = 1e-12


def logit_scaled(losses: np.ndarray) -> np.ndarray:
    """phi = log(p / (1 - p)) with p = exp(-loss): closer to a normal law than losses are. Losses must not be negative."""
    losses = np.asarray(losses, np.float64)
    if not np.isfinite(losses).all():
        raise SparseDPError("Some losses are NaN or infinite, so that examples cannot be compared by them.")
    if (losses < 0).any():
        raise SparseDPError(
            "Some losses are negative, so they are no -log of a probability, which the likelihood ratio needs."
        )
    return -losses - np.log(-np.expm1(-np.maximum(losses, _CERTAIN)))


def likelihood_ratios(
    target: np.ndarray, shadows: np.ndarray, in_shadows: np.ndarray, variant: Variant = "online"
) -> np.ndarray:
    """A score for each of n units, (n,), from phi of the target (n,) and of K shadow models (K, n), bool `in_shadows` (K, n)."""
    if not in_shadows.any(0).all() and variant == "online":
        raise SparseDPError("Some units were in no shadow model: train more of them, or use the offline variant.")
    if in_shadows.all(0).any():
        raise SparseDPError("Some units were in every shadow model: train more of them.")
    mean_out, deviation_out = _fitted(shadows, ~in_shadows)
    if variant == "offline":
        return stats.norm.logcdf(target, mean_out, deviation_out)
    mean_in, deviation_in = _fitted(shadows, in_shadows)
    return stats.norm.logpdf(target, mean_in, deviation_in) - stats.norm.logpdf(target, mean_out, deviation_out)


def _fitted(values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float]:
    """The mean of each unit's chosen values (n,), and the deviation from it, pooled over all units."""
    counts = chosen.sum(0)
    means = np.where(chosen, values, 0.0).sum(0) / counts
    squares = (np.where(chosen, values - means, 0.0) ** 2).sum()
    freedom = int((counts - 1).sum())
    if freedom < 1 or squares == 0:
        raise SparseDPError(
            "No unit has two shadow models on the same side that differ in its loss, so nothing can be fitted: train more "
            "shadow models."
        )
    return means, math.sqrt(squares / freedom)


# ---------------------------------------------------------------------- what an attack reaches


@dataclass(frozen=True)
class Interval:
    """A share and its Clopper-Pearson interval at 95 %."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(count: int, total: int) -> Interval:
        interval = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        return Interval(count / total, float(interval.low), float(interval.high))


@dataclass(frozen=True)
class RateAt:
    """TPR and FPR of a threshold that was chosen for the FPR `level` on one half of the units, measured on the other."""

    level: float
    tpr: Interval | None  # None: there are too few non-members for this level
    fpr: Interval | None
    needed: int  # non-members that the level needs
    allowed: float | None = None  # the largest TPR that the claim allows at the upper end of the FPR


@dataclass(frozen=True)
class AttackResult:
    """One attack on one target model."""

    name: str
    members: int
    non_members: int
    area: float  # under the ROC curve
    rates: tuple[RateAt, ...]
    epsilon_bound: (
        float  # epsilon is at least that, with the confidence that was asked for (one run, Steinke et al. 2023)
    )
    roc: dict[str, list[float]]  # fpr, tpr, low, high: the whole curve, and its intervals

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def largest_tpr(fpr: np.ndarray | float, epsilon: float, delta: float) -> np.ndarray:
    """What (epsilon, delta) allows: min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR)), at most 1."""
    fpr = np.asarray(fpr, np.float64)
    if math.isinf(epsilon):
        return np.ones_like(fpr)
    return np.clip(np.minimum(np.exp(epsilon) * fpr + delta, 1 - np.exp(-epsilon) * (1 - delta - fpr)), 0.0, 1.0)


def measure_attack(
    name: str, scores: np.ndarray, is_member: np.ndarray, epsilon: float, delta: float, significance: float = 0.05
) -> AttackResult:
    """What the scores (n,) tell about `is_member` (n,), against the claimed epsilon and delta.

    Fair coins must have decided who is a member. `significance` is that of the bound on epsilon.
    """
    scores = finite_vector("scores", scores)
    members, others = scores[is_member], scores[~is_member]
    if len(members) < 2 or len(others) < 2:
        raise SparseDPError(
            f"{len(members)} members and {len(others)} non-members are too few to attack: at least 2 of each."
        )
    return AttackResult(
        name, len(members), len(others), _area(members, others),
        tuple(_rate_at(level, members, others, epsilon, delta) for level in LEVELS),
        epsilon_lower_bound(members, others, delta=delta, significance=significance), _roc(members, others),
    )  # fmt: skip


def _area(members: np.ndarray, others: np.ndarray) -> float:
    return float(stats.mannwhitneyu(members, others).statistic / (len(members) * len(others)))


def _rate_at(level: float, members: np.ndarray, others: np.ndarray, epsilon: float, delta: float) -> RateAt:
    needed = 2 * math.ceil(_ENOUGH / level)
    if len(others) < needed:
        return RateAt(level, None, None, needed)
    generator = RandomKey.from_seed(0).generator(0)  # any split that the scores do not decide
    (_, test_members), (chosen_on, test_others) = (
        _halves(values, generator.permutation(len(values))) for values in (members, others)
    )
    allowed_above = math.floor(level * len(chosen_on))
    threshold = np.sort(chosen_on)[len(chosen_on) - allowed_above - 1]  # so many lie strictly above it, or fewer
    tpr = Interval.of(int((test_members > threshold).sum()), len(test_members))
    fpr = Interval.of(int((test_others > threshold).sum()), len(test_others))
    return RateAt(level, tpr, fpr, needed, float(largest_tpr(fpr.high, epsilon, delta)))


def _halves(values: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values[order[: len(values) // 2]], values[order[len(values) // 2 :]]


def _roc(members: np.ndarray, others: np.ndarray, points: int = 200) -> dict[str, list[float]]:
    """The curve at so many false positive rates, evenly on a log axis, with pointwise intervals of the TPR."""
    above = np.unique(np.concatenate([[0], np.geomspace(1, len(others), points)]).astype(int))
    thresholds = np.concatenate([np.sort(others)[::-1], [-np.inf]])[above]
    counts = len(members) - np.searchsorted(np.sort(members), thresholds, side="right")
    reached = len(others) - np.searchsorted(np.sort(others), thresholds, side="right")
    intervals = [Interval.of(int(count), len(members)) for count in counts]
    return {
        "fpr": (reached / len(others)).tolist(),
        "tpr": [interval.value for interval in intervals],
        "low": [interval.low for interval in intervals],
        "high": [interval.high for interval in intervals],
    }
