"""Lower bounds on epsilon from one training run with many canaries, each in or out by a fair coin of its own.

The auditor looks at the model, guesses for some of the canaries whether they were in, and abstains for the others. If the
training was (epsilon, delta)-DP, it is unlikely that too many of the guesses are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy.special import betainc, ndtr, ndtri

from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.errors import SparseDPError

_LARGEST = 100.0  # of epsilon and of mu that is looked for
_STEPS = 50  # of a bisection: to 1e-13


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """An upper bound on P[at least `correct` of `guesses` are right] for a training that is (epsilon, delta)-DP.

    Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2: with W a binomial number of
    `guesses` trials at probability e^epsilon / (1 + e^epsilon),

        P <= P[W >= v] + 2 m delta max_{1 <= i <= v} P[v > W >= v - i] / i,   m canaries, v correct guesses.
    """
    _require_counts(canaries, guesses, correct)
    if not epsilon >= 0:
        raise SparseDPError(f"epsilon must not be negative, and is {epsilon}.")
    if not 0 <= delta < 1:
        raise SparseDPError(f"delta must lie from 0 up to 1, not {delta}.")
    right = 1 / (1 + math.exp(-epsilon))
    beta = float(at_least(correct, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    back = np.arange(1, correct + 1)
    alpha = float(((at_least(correct - back, guesses, right) - beta) / back).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_by_counts(canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """The largest epsilon that so many correct guesses contradict by `one_run_p_value`; 0: none."""
    _require_counts(canaries, guesses, correct)
    if not _beats_coins(guesses, correct, significance):
        return 0.0

    def contradicts(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) <= significance

    return largest(contradicts)


def gaussian_epsilon_by_counts(canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """As `epsilon_by_counts`, for a training whose trade-off curve is that of a Gaussian mechanism, as DP-SGD's nearly is.

    Mahloujifar, Melis, Chaudhuri 2024, "Auditing f-differential privacy in one run", algorithm 3. It finds the largest mu
    such that mu-GDP is contradicted, and returns the epsilon of that Gaussian mechanism at `delta`.
    """
    _require_counts(canaries, guesses, correct)
    require_delta_of_gaussian(delta)
    mu = largest(lambda mu: _contradicts_gaussian(canaries, guesses, correct, mu, significance))
    return gaussian_epsilon(mu, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of a mu-GDP mechanism at `delta`; 0 for a mu that is not positive."""
    with np.errstate(divide="ignore"):  # dp_accounting takes the logarithm of 0 on its way
        return epsilon_of(GaussianDpEvent(1 / mu), delta) if mu > 0 else 0.0


def require_delta_of_gaussian(delta: float) -> None:
    if delta <= 0:
        raise SparseDPError(
            "A Gaussian mechanism has no epsilon at delta = 0. Give a delta, or use method 'one_run' or 'clopper_pearson'."
        )


def _contradicts_gaussian(canaries: int, guesses: int, correct: int, mu: float, significance: float) -> bool:
    """Whether so many correct guesses have a probability below `significance` under mu-GDP.

    `right` and `wrong` bound the mass that the events "i guesses are right" give to right and wrong guesses, from i = v
    down: the trade-off curve f gives wrong >= f^-1(right) at each. Together they are the share of canaries that are guessed.
    """
    if not _beats_coins(guesses, correct, significance):
        return False
    right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
    share = guesses / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, float(ndtr(ndtri(right) - mu)))
        if more == wrong:
            break
        right = min(1.0, right + i / (guesses - i) * (more - wrong))
        wrong = more
        if right + wrong > share:
            return True
    return right + wrong > share


def at_least(successes: int | np.ndarray, trials: int, chance: float) -> np.ndarray:
    """P[W >= successes] for a binomial W: as `scipy.stats.binom.sf`, in a hundredth of the time."""
    some = np.maximum(successes, 1)
    return np.where(np.asarray(successes) > 0, betainc(some, trials - some + 1, chance), 1.0)


def _beats_coins(guesses: int, correct: int, significance: float) -> bool:
    """Whether coins guess so well with at most this probability: without it nothing is contradicted, and it is soon told."""
    return float(at_least(correct, guesses, 0.5)) <= significance


def largest(contradicts: Callable[[float], bool]) -> float:
    """The largest value from 0 on that is contradicted, for contradictions that end somewhere; 0: none is."""
    if not contradicts(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while contradicts(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return _LARGEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if contradicts(middle) else (low, middle)
    return low


def _require_counts(canaries: int, guesses: int, correct: int) -> None:
    if not 0 <= correct <= guesses <= canaries or canaries < 1:
        raise SparseDPError(
            f"Of {canaries} canaries {guesses} were guessed and {correct} rightly: there must be at least one canary, no "
            "more guesses than canaries, and no more correct guesses than guesses."
        )
