"""The secret sharer test on losses: by repetitions, what it says, and what it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from sparsedp.audit import SecretSharer, exposure, planned_repetitions, secret_sharer
from sparsedp.errors import SparseDPError


def losses_of(repetitions: tuple[int, ...], gain: float) -> np.ndarray:
    """Normal losses around 10 that fall by `gain` with each doubling of the repetitions."""
    counts = np.array(repetitions)
    falls = np.where(counts > 0, np.log2(np.maximum(counts, 1)), 0)
    return 10 + np.random.default_rng(0).normal(size=len(counts)) - gain * falls


def test_the_defaults_are_the_papers() -> None:
    repetitions = planned_repetitions()
    assert sum(repetitions) == 9750 and repetitions.count(0) == 16384 and repetitions.count(100) == 50


def test_more_canaries_than_can_be_made_are_refused() -> None:
    with pytest.raises(SparseDPError, match="9,000,016,384 canaries and references are too many"):
        planned_repetitions(canaries=1_000_000_000)


def test_exposures_by_repetitions() -> None:
    repetitions = planned_repetitions((1, 8, 64), 40, 2000)
    losses = losses_of(repetitions, 1.0)
    result = secret_sharer(losses, repetitions)
    assert [(entry.repetitions, entry.canaries) for entry in result.exposures] == [(1, 40), (8, 40), (64, 40)]
    counts = np.array(repetitions)
    for entry in result.exposures:
        for method, quartiles in (("rank", entry.rank), ("extrapolate", entry.extrapolated)):
            values = exposure(losses[counts == entry.repetitions], losses[counts == 0], method)
            np.testing.assert_allclose(
                [quartiles.low, quartiles.median, quartiles.high], np.quantile(values, [0.25, 0.5, 0.75])
            )
    once, some, often = result.exposures
    assert once.p_value > 0.01 and abs(once.rank.median - 1) < 0.6, "nothing was remembered"
    assert some.p_value < 1e-6 and often.rank.median == pytest.approx(result.most) == pytest.approx(math.log2(2000))
    # A loss six deviations below the mean of normal references.
    assert often.extrapolated.median == pytest.approx(-stats.norm.logcdf(-6) / math.log(2), rel=0.15)
    assert not result.fits_poorly and "from 8 repetitions on; with 64 the median canary" in str(result)
    assert SecretSharer.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_nothing_remembered_and_a_poor_fit() -> None:
    repetitions = planned_repetitions((1, 100), 50, 500)
    assert str(secret_sharer(losses_of(repetitions, 0.0), repetitions)) == (
        "No canary stands out, however often it was inserted."
    )
    two_heaps = losses_of(repetitions, 0.0) + 20 * (np.arange(len(repetitions)) % 2)
    assert secret_sharer(two_heaps, repetitions).fits_poorly
    # Losses that begin with an edge: the law is half a normal one, and below the edge its exposures are without measure.
    with_edge = np.abs(losses_of(repetitions, 0.0) - 10) - 3.0 * (np.array(repetitions) == 100)
    result = secret_sharer(with_edge, repetitions)
    assert result.fits_poorly and np.isfinite(result.exposures[-1].extrapolated.median)
    assert "from 100 repetitions on" in str(result) and "extrapolation" not in str(result)


def test_references_are_told_apart_in_few_runs_without_a_leak() -> None:
    """Null coverage: of 100 runs without a leak about 1 % have a p-value below 0.01."""
    rng = np.random.default_rng(3)
    repetitions = planned_repetitions((5,), 50, 200)
    p_values = [secret_sharer(rng.normal(size=250), repetitions).exposures[0].p_value for _ in range(100)]
    assert np.mean(np.array(p_values) < 0.01) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / 100)


@pytest.mark.parametrize(
    ("losses", "repetitions", "match"),
    [
        ([1.0, float("nan")], [1, 0], "1 of the 2 losses of canaries are NaN"),
        ([1.0, 2.0], [1, 1], "2 were inserted: some must be, and some not"),
        ([1.0, 2.0], [0, 0], "0 were inserted"),
        ([1.0, 2.0], [0], "give one for each"),
        ([1.0] * 150, [1] + [0] * 149, "All 149 references have the loss 1"),
    ],
)
def test_losses_that_say_nothing(losses: list[float], repetitions: list[int], match: str) -> None:
    with pytest.raises(SparseDPError, match=match):
        secret_sharer(losses, repetitions)
