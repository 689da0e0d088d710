"""A lower bound on epsilon from scores of canaries that were in and of canaries that were out.

What is guessed may depend on the scores, but not on who was in. Where several ways of guessing are tried and the best one is
kept, each must pay for all: their number is fixed ahead and the significance divided by it, or the choice is made on other
scores than the test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtri

from sparsedp.audit.numbers import finite_vector, probability
from sparsedp.audit.one_run import (
    at_least,
    epsilon_by_counts,
    gaussian_epsilon,
    gaussian_epsilon_by_counts,
    require_delta_of_gaussian,
)
from sparsedp.errors import SparseDPError, suggestion
from sparsedp.noise import RandomKey

# Ways of guessing in one run: the share of the canaries that is guessed, and from how many ends of the order of scores: of
# the highest scores "in", and of the lowest as well "out". They are tried one after another, and paid for.
Way = tuple[float, int]
WAYS: tuple[Way, ...] = tuple((share, ends) for share in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125) for ends in (1, 2))
# All canaries by the sign of their scores: for scores that are logarithms of how much likelier in is than out.
BY_SIGN: Way = (1.0, 0)
# The shares of the scores below which thresholds of independent scores may lie; finer at the ends, where the bounds are.
_LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 101), np.linspace(0, 0.05, 51), np.linspace(0.95, 1, 51)]))
# Fewer would be in, or more, with this probability if fair coins had decided.
_UNFAIR = 1e-9
_MANY = 100_000  # canaries; if so many that are all told apart show nothing, more of them do not either


def epsilon_lower_bound(
    in_scores: Any, out_scores: Any, *, delta: float, significance: float = 0.05, method: str = "one_run"
) -> float:
    """An epsilon that the training does not keep below at `delta`, with confidence 1 - `significance`; 0: nothing is shown.

    `in_scores` belong to the canaries that were trained on and `out_scores` to those that were not; higher means more likely
    in. "one_run": all are of one run, each was in by a fair coin (Steinke et al. 2023). "one_run_fdp": likewise, if the
    training's trade-off curve is a Gaussian mechanism's (Mahloujifar et al. 2024), a tighter bound. "clopper_pearson": the
    scores are independent, one of each run. "clopper_pearson_gdp": likewise, under the same condition as "one_run_fdp"
    (Nasr et al. 2023). Of all scores together only their order counts.
    """
    inside, outside = finite_vector("in_scores", in_scores), finite_vector("out_scores", out_scores)
    delta, significance = probability("delta", delta, zero=True), probability("significance", significance)
    if method not in _METHODS:
        allowed = ", ".join(_METHODS)
        raise SparseDPError(f"method must be one of {allowed}, not {method!r}{suggestion(method, _METHODS)}")
    if method in _OF_COUNTS:
        return one_run_bound(inside, outside, delta, significance, method, WAYS)
    return _OF_RUNS[method](inside, outside, delta, significance)


def one_run_bound(
    inside: np.ndarray, outside: np.ndarray, delta: float, significance: float, method: str, ways: Sequence[Way]
) -> float:
    """The largest bound of all ways of guessing, each at its share of the significance."""
    count = len(inside) + len(outside)
    if at_least(max(len(inside), len(outside)), count, 0.5) < _UNFAIR:
        raise SparseDPError(
            f"{len(inside)} of {count} canaries were in. In one run each must be in by a fair coin, and these were not: "
            "the bound would mean nothing. For scores of independent runs use method 'clopper_pearson'."
        )
    best = 0.0
    for way in ways:
        guesses, correct = _guesses(inside, outside, *way)
        best = max(best, _OF_COUNTS[method](count, guesses, correct, delta, significance / len(ways)))
    return best


def _guesses(inside: np.ndarray, outside: np.ndarray, share: float, ends: int) -> tuple[int, int]:
    """How many guesses a way makes, and how many of them are right."""
    if (share, ends) == BY_SIGN:
        return int((inside != 0).sum() + (outside != 0).sum()), int((inside > 0).sum() + (outside < 0).sum())
    both = np.sort(np.concatenate([inside, outside]))
    wanted = int(share * len(both) / ends)
    high = _number_of_highest(both, wanted)
    low = _number_of_highest(-both[::-1], wanted) if ends == 2 else 0
    high = min(high, len(both) - low)
    guesses, correct = 0, 0
    if high:
        least = both[len(both) - high]
        guesses, correct = high, int((inside >= least).sum())
    if low:
        most = both[low - 1]
        guesses, correct = guesses + low, correct + int((outside <= most).sum())
    return guesses, correct


def _number_of_highest(ascending: np.ndarray, wanted: int) -> int:
    """How many of the highest are above all others, at most `wanted`: equal scores are all guessed, or none of them.

    Where they came from would otherwise decide, and with it who was in.
    """
    if wanted <= 0:
        return 0
    if wanted >= len(ascending):
        return len(ascending)
    edge = ascending[len(ascending) - wanted]
    if ascending[len(ascending) - wanted - 1] < edge:
        return wanted
    return len(ascending) - int(np.searchsorted(ascending, edge, side="right"))


def _clopper_pearson(inside: np.ndarray, outside: np.ndarray, delta: float, significance: float) -> float:
    """The best threshold of one half of the scores, tested on the other.

    (epsilon, delta)-DP bounds P[in >= t] by e^epsilon P[out >= t] + delta, and P[out < t] by P[in < t] likewise. Both
    probabilities are bounded by Clopper and Pearson's intervals, at half of the significance each.
    """

    def bound(least: np.ndarray, most: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(least > delta, np.log((least - delta) / most), -np.inf)

    return max(0.0, _on_other_half(inside, outside, significance, bound))


def _clopper_pearson_gdp(inside: np.ndarray, outside: np.ndarray, delta: float, significance: float) -> float:
    """As `_clopper_pearson`, for a training whose trade-off curve is that of a Gaussian mechanism.

    mu-GDP bounds Phi^-1(P[in >= t]) - Phi^-1(P[out >= t]) by mu (Nasr et al. 2023, "Tight auditing of differentially private
    machine learning"); the bound is the epsilon of that mu at `delta`.
    """
    require_delta_of_gaussian(delta)
    # mu is the same at every threshold, and known best in the middle: a few scores say where that is.
    (first_in, second_in), (first_out, second_out) = _parts(inside, 0.1), _parts(outside, 0.1)
    if not len(first_in) or not len(first_out):
        return 0.0
    middle = np.median(np.concatenate([first_in, first_out]), keepdims=True)
    least, most = _probabilities(second_in, second_out, middle, True, significance / 2)
    return gaussian_epsilon(float((ndtri(least) - ndtri(most))[0]), delta)


def _on_other_half(
    inside: np.ndarray, outside: np.ndarray, significance: float,
    bound: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> float:  # fmt: skip
    """The threshold whose `bound` is largest on one half of the scores, and its bound on the other half.

    `bound(least, most)` takes a lower bound of the probability of an event on one side, in or out, and an upper bound of its
    probability on the other.
    """
    (first_in, second_in), (first_out, second_out) = _parts(inside, 0.5), _parts(outside, 0.5)
    if not len(first_in) or not len(first_out):
        return -np.inf
    first = np.concatenate([first_in, first_out])
    thresholds = np.unique(np.quantile(first, _LEVELS, method="nearest"))
    choices = []
    for is_above in (True, False):
        chosen_by = bound(*_probabilities(first_in, first_out, thresholds, is_above, significance / 2))
        best = int(np.argmax(chosen_by))
        choices.append((float(chosen_by[best]), thresholds[best : best + 1], is_above))
    _, threshold, is_above = max(choices, key=lambda choice: choice[0])
    return float(bound(*_probabilities(second_in, second_out, threshold, is_above, significance / 2))[0])


def _probabilities(
    inside: np.ndarray, outside: np.ndarray, thresholds: np.ndarray, is_above: bool, each: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each threshold, (n,): at least how likely is an "in" score not below it, and at most an "out" score.

    Otherwise, at least how likely is an "out" score below it, and at most an "in" score.
    """
    hits, false_alarms = (len(scores) - np.searchsorted(np.sort(scores), thresholds) for scores in (inside, outside))
    counts, other_counts = (hits, len(inside)), (false_alarms, len(outside))
    if not is_above:
        counts, other_counts = (len(outside) - false_alarms, len(outside)), (len(inside) - hits, len(inside))
    return _lower(*counts, each), 1 - _lower(other_counts[1] - other_counts[0], other_counts[1], each)


def _lower(successes: np.ndarray, trials: int, significance: float) -> np.ndarray:
    """Clopper and Pearson's lower bound on a probability."""
    return np.where(successes > 0, betaincinv(np.maximum(successes, 1), trials - successes + 1, significance), 0.0)


def _parts(scores: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """A share of the scores, and the rest, in an order of their own: whoever gives scores may have sorted them."""
    order = RandomKey.from_seed(0).generator(len(scores)).permutation(len(scores))
    first = int(share * len(scores))
    return scores[order[:first]], scores[order[first:]]


def largest_bound(method: str, canaries: int, delta: float, significance: float, ways: Sequence[Way] = WAYS) -> float:
    """What the bound would be if so many canaries, half of them in, were all told apart."""
    if canaries < 2:
        return 0.0
    half = canaries // 2
    scores = np.arange(canaries) - half + 0.5
    if method in _OF_COUNTS:
        return one_run_bound(scores[half:], scores[:half], delta, significance, method, ways)
    return epsilon_lower_bound(scores[half:], scores[:half], delta=delta, significance=significance, method=method)


def fewest_canaries(method: str, delta: float, significance: float, ways: Sequence[Way] = WAYS) -> int | None:
    """How few canaries can show an epsilon above 0, if they are all told apart; None: no number can."""
    few = 2
    while few <= _MANY:
        if largest_bound(method, few, delta, significance, ways) > 0:
            return few
        few += max(2, few // 16 * 2)
    return None


# Epsilons of one run from (canaries, guesses, correct guesses, delta, significance).
_OF_COUNTS = {"one_run": epsilon_by_counts, "one_run_fdp": gaussian_epsilon_by_counts}
# Epsilons from the scores of many runs, (in, out, delta, significance).
_OF_RUNS = {"clopper_pearson": _clopper_pearson, "clopper_pearson_gdp": _clopper_pearson_gdp}
_METHODS = (*_OF_COUNTS, *_OF_RUNS)
