"""Noise on vectors: its law, its grid, its cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent
from scipy import stats

from sparsedp import ConfigError, SparseDPError
from sparsedp.accounting import epsilon_of
from sparsedp.convex.laplace import discrete_laplace
from sparsedp.convex.release import FixedPoint, Releases, gaussian_multiplier, units_moved
from sparsedp.grid import grid_of
from sparsedp.noise import RandomKey


def releases() -> Releases:
    return Releases(RandomKey.from_os())


def accepts(sample: np.ndarray, law: stats.rv_continuous) -> bool:
    return stats.kstest(sample, law.cdf).pvalue > 1e-3


def accepts_only_its_scale(sample: np.ndarray, law: type, scale: float) -> bool:
    return accepts(sample, law(scale=scale)) and not any(
        accepts(sample, law(scale=scale * factor)) for factor in (2 / 3, 1.5)
    )


@pytest.mark.parametrize("scale", [1, 2, 3, 7])
def test_discrete_laplace_has_exactly_its_law(scale: int) -> None:
    drawn = discrete_laplace(RandomKey.from_os().generator(), scale, 40_000)
    values = np.arange(-6 * scale, 6 * scale + 1)
    chance = np.exp(-np.abs(values) / scale) * math.tanh(0.5 / scale)
    counts = np.array([np.count_nonzero(drawn == value) for value in values])
    counts, chance = np.append(counts, len(drawn) - counts.sum()), np.append(chance, 1 - chance.sum())
    assert stats.chisquare(counts, chance * len(drawn)).pvalue > 1e-3
    wrong = np.exp(-np.abs(values) / (scale * 1.1)) * math.tanh(0.5 / (scale * 1.1))
    wrong = np.append(wrong, 1 - wrong.sum())
    assert stats.chisquare(counts, wrong * len(drawn)).pvalue < 1e-3


def test_discrete_laplace_of_a_large_scale_is_laplace() -> None:
    drawn = discrete_laplace(RandomKey.from_os().generator(), 1 << 50, 20_000)
    assert accepts_only_its_scale(drawn / 2.0**50, stats.laplace, 1.0)
    assert discrete_laplace(RandomKey.from_os().generator(), 5, 0).shape == (0,)


@pytest.mark.parametrize("scale", [0, -1, 1 << 60])
def test_scales_that_do_not_fit_are_refused(scale: int) -> None:
    with pytest.raises(SparseDPError, match="scale"):
        discrete_laplace(RandomKey.from_os().generator(), scale, 3)


@pytest.mark.parametrize("sensitivity", [1e-30, 0.3, 1.0, 2e40])
@pytest.mark.parametrize("kind", ["float", "fixed"])
def test_gaussian_noise_has_its_scale_and_grid(sensitivity: float, kind: str) -> None:
    step = math.ldexp(1.0, math.frexp(sensitivity)[1] - 34)
    whole = np.random.default_rng(0).integers(-(1 << 40), 1 << 40, 20_000)
    values = FixedPoint(whole, step)
    noisy = releases().gaussian(values if kind == "fixed" else values.values, sensitivity, 2.5)
    std = 2.5 * sensitivity
    assert accepts_only_its_scale((noisy - whole * step) / std, stats.norm, 1.0)
    multiples = noisy / grid_of(std)
    assert (multiples == np.rint(multiples)).all()


@pytest.mark.parametrize("kind", ["float", "fixed"])
def test_laplace_noise_has_its_scale(kind: str) -> None:
    whole = np.random.default_rng(0).integers(-(1 << 40), 1 << 40, 20_000)
    values = FixedPoint(whole, 2.0**-34)
    noisy = releases().laplace(values if kind == "fixed" else values.values, 3.0, 0.5)
    assert accepts_only_its_scale(noisy - values.values, stats.laplace, 6.0)
    if kind == "fixed":
        assert (np.rint(noisy / values.step) == noisy / values.step).all()


def test_integers_beyond_float64_lose_nothing() -> None:
    """Two sums that differ by one step, too large for float64 to tell apart, get the same noise and stay apart."""
    one = FixedPoint(np.array([(1 << 61) + 1]), 1.0)
    other = FixedPoint(np.array([1]), 1.0)
    noisy = [Releases(RandomKey.from_seed(1)).gaussian(values, 1.0, 2.0**12)[0] for values in (one, other)]
    assert noisy[0] - noisy[1] == 2.0**61


def test_each_release_has_noise_of_its_own() -> None:
    made = releases()
    first, second = (made.gaussian(np.zeros(50), 1.0, 1.0) for _ in range(2))
    assert not np.isin(first, second).all()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6
    again = Releases(RandomKey.from_seed(5)).gaussian(np.zeros(50), 1.0, 1.0)
    assert (again == Releases(RandomKey.from_seed(5)).gaussian(np.zeros(50), 1.0, 1.0)).all()


def test_costs_come_from_the_ledger() -> None:
    made = releases()
    made.gaussian(np.zeros(3), 1.0, 4.0)
    made.gaussian(np.zeros(3), 7.0, 3.0)
    assert [entry.event for entry in made.ledger.entries] == [GaussianDpEvent(4.0), GaussianDpEvent(3.0)]
    assert made.epsilon(1e-6) == epsilon_of(GaussianDpEvent(2.4), 1e-6)
    assert made.epsilon(0) == math.inf
    pure = releases()
    pure.laplace(np.zeros(3), 1.0, 0.25)
    pure.laplace(np.zeros(3), 1.0, 0.5)
    assert 0.75 - 1e-12 < pure.epsilon(0) <= 0.75
    assert pure.epsilon(1e-6) == pure.epsilon(0)
    mixed = releases()
    mixed.gaussian(np.zeros(3), 1.0, 4.0)
    mixed.laplace(np.zeros(3), 1.0, 0.25)
    assert mixed.epsilon(1e-6) > releases_epsilon(4.0)
    assert any(isinstance(entry.event, LaplaceDpEvent) for entry in mixed.ledger.entries)


def releases_epsilon(multiplier: float) -> float:
    return epsilon_of(GaussianDpEvent(multiplier), 1e-6)


def test_without_noise_nothing_is_private() -> None:
    made = Releases(RandomKey.from_seed(1), noiseless=True)
    assert (made.gaussian(np.array([1.5]), 1.0, 1.0) == [1.5]).all()
    assert (made.laplace(FixedPoint(np.array([3]), 0.5), 1.0, 1.0) == [1.5]).all()
    assert made.ledger.entries[0].event == NonPrivateDpEvent()
    assert made.epsilon(1e-6) == math.inf and made.epsilon(0) == math.inf


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 20.0])
def test_calibration(epsilon: float) -> None:
    noise = gaussian_multiplier(epsilon, 1e-6)
    assert epsilon_of(GaussianDpEvent(noise), 1e-6) <= epsilon
    assert epsilon_of(GaussianDpEvent(noise * (1 - 1e-4)), 1e-6) > epsilon
    if epsilon > 1:
        with pytest.raises(ConfigError, match="epsilon up to 1"):
            gaussian_multiplier(epsilon, 1e-6, "paper")
        return
    printed = gaussian_multiplier(epsilon, 1e-6, "paper")
    assert printed**2 == pytest.approx(2 * math.log(1.25 / 1e-6) / epsilon**2)
    assert gaussian_multiplier(epsilon, 1e-6, "paper", halved=True) > printed > noise


def test_wrong_values_are_refused() -> None:
    for call in (
        lambda: releases().gaussian(np.array([np.nan]), 1.0, 1.0),
        lambda: releases().laplace(np.array([np.inf]), 1.0, 1.0),
        lambda: releases().gaussian(np.zeros(1), 0.0, 1.0),
        lambda: releases().gaussian(np.zeros(1), 1.0, 0.0),
        lambda: releases().laplace(np.zeros(1), 1.0, 0.0),
        lambda: releases().laplace(FixedPoint(np.array([1]), 2.0**-34), 1.0, 1e-9),
        lambda: releases().gaussian(FixedPoint(np.array([1 << 61]), 1.0), 1.0, 1.0),
        lambda: FixedPoint(np.zeros(1), 1.0),
        lambda: FixedPoint(np.array([1]), 0.3),
        lambda: units_moved("both"),
        lambda: gaussian_multiplier(1.0, 1e-6, "printed"),
    ):
        with pytest.raises(SparseDPError):
            call()
    assert units_moved("add_remove") == 1 and units_moved("replace_one") == 2
