"""A privacy statement, as a dict from statement.json, in words that need no background."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparsedp.audit.membership import largest_tpr
from sparsedp.report.chart import number
from sparsedp.report.curves import finite

# How to DP-fy ML (Ponomareva et al., 2023), section 5.2, speaks of such tiers.
_TIERS = (
    (1.0, "a strong promise: the literature calls an epsilon of at most 1 strong"),
    (10.0, "a reasonable promise: the literature calls an epsilon of at most 10 realistic for training models"),
)
_WEAK = "a weak promise: above an epsilon of 10, what it rules out in the worst case is little"
_FALSE_ALARMS = (0.001, 0.01, 0.1)


def epsilon_of(statement: Mapping[str, Any]) -> float:
    """Infinite where the statement promises nothing, or does not say."""
    value = finite(statement.get("epsilon"))
    return math.inf if value is None else value


def is_seeded(statement: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    not_covered = statement.get("not_covered") or []
    return plan.get("seeded") is True or any(str(text).startswith("Seeded, do not release") for text in not_covered)


def in_words(statement: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """What the statement promises, what follows from it for an attacker, and how much that is."""
    epsilon, delta = epsilon_of(statement), finite(statement.get("delta")) or 0.0
    unit = str(statement.get("unit") or "unit")
    if math.isinf(epsilon):
        return [
            f"Nothing is promised about this model: epsilon is infinite. Whoever sees its weights may be able to tell that one "
            f"{unit} was in the training data, and what it says."
        ]
    words = [
        f"Nothing about the weights is more than {number(math.exp(min(epsilon, 700)))} times as likely with any one {unit} in "
        f"the training data as without it, nor the other way round. That factor is e to the power of epsilon, "
        f"{number(epsilon)}; delta, {number(delta)}, is the probability that is left for exceptions.",
        f"So whoever has to tell from the weights whether one {unit} was in the training data or not, where both are as "
        f"likely, is right at most {_percent(guesses(epsilon, delta))} of the time, whatever they compute and whatever else "
        "they know. Tossing a coin is right 50 % of the time.",
        f"That is {next((words for most, words in _TIERS if epsilon <= most), _WEAK)}.",
    ]
    if is_seeded(statement, plan):
        words.insert(0, "The noise was seeded: whoever knows the seed can take it away. This model is not for release.")
    if plan.get("poisson_sampling") is False:
        words.insert(
            0, "The epsilon is not proven: batches were shuffled, and accounted as if they were Poisson samples."
        )
    return words


def guesses(epsilon: float, delta: float) -> float:
    """The largest share of right guesses whether a unit was in, at even odds: (1 + (e^eps - 1 + 2 delta) / (e^eps + 1)) / 2."""
    return min(1.0, 0.5 + 0.5 * (math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 700)))))


def recognised(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    """For some rates of false alarms, the largest share of members that an attack recognises."""
    epsilon, delta = epsilon_of(statement), finite(statement.get("delta")) or 0.0
    return [(_percent(rate), _percent(float(largest_tpr(rate, epsilon, delta)))) for rate in _FALSE_ALARMS]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
