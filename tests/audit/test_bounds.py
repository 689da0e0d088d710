"""Lower bounds on epsilon from scores: recorded values of a peer, laws whose epsilon is known, and coverage without a leak."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from scipy.stats import norm

from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.audit import epsilon_lower_bound, one_run_p_value
from sparsedp.audit.one_run import epsilon_by_counts, gaussian_epsilon_by_counts
from sparsedp.errors import SparseDPError

METHODS = ["one_run", "one_run_fdp", "clopper_pearson", "clopper_pearson_gdp"]


@pytest.mark.parametrize("canaries, guesses, correct, epsilon, delta, expected", [
    (1000, 100, 90, 1.0, 0.0, 2.735813e-05),
    (1000, 100, 90, 1.0, 1e-5, 8.412886e-04),
    (1000, 200, 150, 0.5, 1e-6, 1.423844e-04),
    (100, 100, 70, 0.5, 1e-3, 7.866087e-02),
])  # fmt: skip
def test_p_values_as_jax_privacy_has_them(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float, expected: float
) -> None:
    """Recorded from JAX Privacy's auditing.py (revision 8967688) on the same counts."""
    assert one_run_p_value(canaries, guesses, correct, epsilon, delta) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("counts, plain, gaussian", [
    ((1000, 100, 95), 2.16518, 3.32330),
    ((1000, 1000, 700), 0.73174, 1.37198),
    ((5000, 500, 500), 4.97776, 7.98073),
])  # fmt: skip
def test_epsilons_as_jax_privacy_has_them(counts: tuple[int, int, int], plain: float, gaussian: float) -> None:
    """Recorded likewise, at delta 1e-5 and significance 0.05."""
    assert epsilon_by_counts(*counts, 1e-5, 0.05) == pytest.approx(plain, abs=1e-5)
    assert gaussian_epsilon_by_counts(*counts, 1e-5, 0.05) == pytest.approx(gaussian, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_below_the_truth_and_not_far_below(method: str, shift: float) -> None:
    """Scores of a Gaussian mechanism with sigma = 1 / shift, whose epsilon is exact."""
    scores = norm.ppf((np.arange(5000) + 0.5) / 5000)
    truth = epsilon_of(GaussianDpEvent(1 / shift), 1e-5)
    bound = epsilon_lower_bound(scores + shift, scores, delta=1e-5, method=method)
    assert 0.2 * truth < bound < truth


def test_randomized_response() -> None:
    """Scores of 0 and 1 that are right with probability e^epsilon / (1 + e^epsilon): theorem 5.2 is tight for it."""
    epsilon, rng = 2.0, np.random.default_rng(0)
    is_in = rng.random(4000) < 0.5
    scores = np.where(rng.random(4000) < 1 / (1 + math.exp(-epsilon)), is_in, ~is_in).astype(float)
    bound = epsilon_lower_bound(scores[is_in], scores[~is_in], delta=0.0)
    assert 0.8 * epsilon < bound < epsilon


@pytest.mark.parametrize("method", METHODS)
def test_scores_that_are_all_equal_show_nothing(method: str) -> None:
    """Whichever order they are given in."""
    assert epsilon_lower_bound(np.ones(500), np.ones(500), delta=1e-5, method=method) == 0


@pytest.mark.parametrize("method", METHODS)
def test_ties_are_not_broken_by_who_was_in(method: str) -> None:
    """Half of the scores are the same: a stable sort would put those that were in first."""
    rng = np.random.default_rng(1)
    inside, outside = rng.integers(2, size=600).astype(float), rng.integers(2, size=600).astype(float)
    assert epsilon_lower_bound(inside, outside, delta=1e-5, method=method) == 0


@pytest.mark.parametrize("method", METHODS)
def test_too_few_canaries_show_nothing(method: str) -> None:
    assert epsilon_lower_bound([1.0], [0.0], delta=1e-5, method=method) == 0
    assert epsilon_lower_bound([5.0, 6.0], [0.0, 1.0], delta=1e-5, method=method) == 0


@pytest.mark.parametrize("method", METHODS)
def test_more_confidence_shows_less(method: str) -> None:
    scores = norm.ppf((np.arange(2000) + 0.5) / 2000)
    bounds = [
        epsilon_lower_bound(scores + 1.5, scores, delta=1e-5, significance=a, method=method) for a in (0.2, 0.01, 1e-9)
    ]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("canaries", [100, 1000, 5000])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_nothing_is_found_where_nothing_leaks(method: str, canaries: int, kind: str) -> None:
    """Over 2,000 runs without a leak at most 5 % and three standard errors report an epsilon above 0."""
    rng, runs, alarms = np.random.default_rng(canaries), 2000, 0
    for _ in range(runs):
        scores = rng.normal(size=canaries) if kind == "normal" else rng.integers(5, size=canaries).astype(float)
        is_in = rng.random(canaries) < 0.5
        alarms += epsilon_lower_bound(scores[is_in], scores[~is_in], delta=1e-5, method=method) > 0
    assert alarms / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_confidence_is_kept_at_an_epsilon_that_is_true(method: str) -> None:
    """Over 200 runs of a Gaussian mechanism at most 5 % and three standard errors are above its epsilon."""
    rng, runs, canaries, sigma = np.random.default_rng(7), 200, 300, 2.0
    truth, above = epsilon_of(GaussianDpEvent(sigma), 1e-5), 0
    for _ in range(runs):
        is_in = rng.random(canaries) < 0.5
        scores = is_in + sigma * rng.normal(size=canaries)
        above += epsilon_lower_bound(scores[is_in], scores[~is_in], delta=1e-5, method=method) > truth
    assert above / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize("given, match", [
    ({"in_scores": [float("nan"), 1.0]}, "1 of the 2 in_scores are NaN"),
    ({"out_scores": []}, "out_scores must be a vector"),
    ({"delta": 1.0}, "delta must lie"),
    ({"significance": 0.0}, "significance must lie"),
    ({"method": "one-run"}, "Did you mean 'one_run'"),
    ({"in_scores": np.ones(100), "out_scores": np.zeros(900)}, "fair coin"),
    ({"method": "one_run_fdp", "delta": 0.0}, "no epsilon at delta = 0"),
])  # fmt: skip
def test_bad_input_is_told(given: dict, match: str) -> None:
    arguments = {"in_scores": np.arange(1.0, 21.0), "out_scores": -np.arange(20.0), "delta": 1e-5} | given
    with pytest.raises(SparseDPError, match=match):
        epsilon_lower_bound(**arguments)


@pytest.mark.parametrize("counts", [(0, 0, 0), (10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_counts_that_cannot_be(counts: tuple[int, int, int]) -> None:
    with pytest.raises(SparseDPError, match="at least one canary"):
        one_run_p_value(*counts, 1.0, 0.0)
