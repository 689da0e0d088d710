"""The coins of bias-reduced SGD and both accountings of them."""

import math

import numpy as np
import pytest

from sparsedp import ConfigError
from sparsedp.accounting import epsilon_of
from sparsedp.convex.ladder import (
    Ladder,
    composition_ledger,
    composition_multiplier,
    filter_multiplier,
    filter_rungs,
)
from sparsedp.noise import RandomKey


def test_rungs_have_their_law() -> None:
    for n in (2, 3, 4, 7, 8, 1000):
        ladder = Ladder(n)
        assert ladder.top == math.floor(math.log2(n)) - 1
        assert ladder.size(ladder.top) <= n < 2 * ladder.size(ladder.top)
        # C_M 2^-k with C_M = 1 / (2 (1 - 2^-(M+1)))
        constant = 1 / (2 * (1 - 0.5 ** (ladder.top + 1)))
        np.testing.assert_allclose(ladder.probabilities, constant * 0.5 ** np.arange(ladder.top + 1))
    drawn = Ladder(1000).draw(RandomKey.from_seed(0).generator(), 200_000)
    shares = np.bincount(drawn) / len(drawn)
    np.testing.assert_allclose(shares, Ladder(1000).probabilities, atol=5e-3)
    with pytest.raises(ConfigError, match="two rows"):
        Ladder(1)


def test_composition_is_within_its_budget_and_not_far_below() -> None:
    ladder = Ladder(1000)
    rungs = ladder.draw(RandomKey.from_seed(1).generator(), 100)
    sigma = composition_multiplier(ladder, rungs, 1.0, 1e-5)
    assert 0.99 < epsilon_of(composition_ledger(ladder, rungs, sigma), 1e-5) <= 1.0
    ledger = composition_ledger(ladder, rungs, sigma)
    assert ledger.steps == 2 * len(rungs)  # a triplet and a single row each
    triplets = [entry for entry in ledger.entries if entry.event.sampling_probability > 1 / 1000]
    assert all(entry.event.event.noise_multiplier == pytest.approx(sigma / math.sqrt(2)) for entry in triplets)
    # As if B, O and E had samples of their own, half of their privacy loss would be lost sight of.
    assert sum(entry.count for entry in triplets) == 100


def test_filter_as_printed() -> None:
    n, epsilon, delta = 1000, 1.0, 1e-7
    ladder = Ladder(n)
    rungs = filter_rungs(ladder, epsilon, delta, RandomKey.from_seed(2).generator())
    prices = np.array([(3 * 2 ** (rung + 1) + 1) / (16 * n) for rung in rungs])

    def within(taken: np.ndarray) -> bool:
        squares = (taken**2).sum()
        return math.sqrt(2 * math.log(4 / delta) * squares) + epsilon / 2 * squares <= 0.5 and taken.sum() <= 0.25

    # Every step was allowed by those before it, and the next one is not.
    assert all(within(prices[:t]) for t in range(len(prices))) and not within(prices)
    # The last step fits: half a budget by the filter, delta/4 each for its two parts, and one step's (a, a) by itself.
    assert 0.5 + prices[-1] <= 1 and 0.25 + 0.25 + prices[-1] <= 1


def test_filter_runs_as_long_as_the_paper_says() -> None:
    n, delta = 2000, 1e-7  # delta < 1/n^2
    ladder = Ladder(n)
    lengths = [len(filter_rungs(ladder, 1.0, delta, RandomKey.from_seed(seed).generator())) for seed in range(60)]
    assert n**2 / ((n + 1) * math.log(4 / delta)) - 1 <= np.mean(lengths) <= 64 * n / (9 * math.log(4 / delta))


def test_composition_needs_far_less_noise_than_the_filter() -> None:
    ladder = Ladder(10_000)
    rungs = filter_rungs(ladder, 1.0, 1e-6, RandomKey.from_seed(0).generator())
    ours, theirs = composition_multiplier(ladder, rungs, 1.0, 1e-6), 2 * filter_multiplier(1.0, 1e-6)
    assert theirs / ours > 50
    with pytest.raises(ConfigError, match="up to 10"):
        filter_rungs(ladder, 11.0, 1e-6, RandomKey.from_seed(0).generator())
