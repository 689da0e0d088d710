"""Membership inference: likelihood ratios, rates with honest thresholds, and what epsilon allows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sparsedp.audit.membership import largest_tpr, likelihood_ratios, logit_scaled, measure_attack
from sparsedp.audit.part import Part
from sparsedp.errors import SparseDPError


def test_logit_scaled_losses() -> None:
    probability = np.array([0.5, 0.9, 0.1, 1 - 1e-6])
    assert logit_scaled(-np.log(probability)) == pytest.approx(np.log(probability / (1 - probability)), rel=1e-6)
    assert np.isfinite(logit_scaled(np.array([0.0, 1e-300, 800.0]))).all()
    with pytest.raises(SparseDPError, match="negative"):
        logit_scaled(np.array([-0.1]))
    with pytest.raises(SparseDPError, match="NaN"):
        logit_scaled(np.array([np.nan]))


def shadow_world(gap: float, units: int = 4000, shadows: int = 8) -> tuple[np.ndarray, ...]:
    """phi = difficulty of the unit + gap if it was in + noise: (target, who was in, shadows, who was in those)."""
    rng = np.random.default_rng(0)
    coins = np.array([rng.random(units) < 0.5 for _ in range(1 + shadows // 2)])
    inside = np.concatenate([coins[:1], *(np.array([coin, ~coin]) for coin in coins[1:])])
    phi = 5 * rng.normal(size=units) + gap * inside + rng.normal(size=inside.shape)
    return phi[0], inside[0], phi[1:], inside[1:]


def test_likelihood_ratios_see_through_how_hard_a_unit_is() -> None:
    """A threshold on the loss alone cannot: units differ by more than membership does."""
    target, is_member, shadows, in_shadows = shadow_world(gap=2.0)
    threshold = measure_attack("threshold", target, is_member, np.inf, 1e-5)
    assert threshold.area < 0.65
    for variant in ("online", "offline"):
        ratios = likelihood_ratios(target, shadows, in_shadows, variant)  # type: ignore[arg-type]
        lira = measure_attack(variant, ratios, is_member, np.inf, 1e-5)
        assert lira.area > 0.87 and lira.epsilon_bound > 1
        rate = lira.rates[1]
        assert rate.tpr is not None and rate.fpr is not None
        assert rate.tpr.low > 0.1 and rate.fpr.low <= 0.01 <= rate.fpr.high


def test_the_ratio_is_that_of_the_fitted_laws() -> None:
    """By hand, for one unit of two: means by unit, and a deviation that all units share."""
    shadows = np.array([[1.0, 5.0], [3.0, 5.0], [0.0, 2.0], [0.0, 4.0]])
    inside = np.array([[True, True], [True, True], [False, False], [False, False]])
    target = np.array([2.5, 3.0])
    ratios = likelihood_ratios(target, shadows, inside)
    deviation_in, deviation_out = np.sqrt((1 + 1 + 0 + 0) / 2), np.sqrt((0 + 0 + 1 + 1) / 2)
    expected = stats.norm.logpdf(2.5, 2.0, deviation_in) - stats.norm.logpdf(2.5, 0.0, deviation_out)
    assert ratios[0] == pytest.approx(expected)
    offline = likelihood_ratios(target, shadows, inside, "offline")
    assert offline[1] == pytest.approx(stats.norm.logcdf(3.0, 3.0, deviation_out))


def test_too_few_shadow_models() -> None:
    one = np.array([[1.0, 2.0]])
    with pytest.raises(SparseDPError, match="in no shadow model"):
        likelihood_ratios(np.zeros(2), one, np.array([[True, False]]))
    with pytest.raises(SparseDPError, match="in every shadow model"):
        likelihood_ratios(np.zeros(2), one, np.array([[True, False]]), "offline")
    pair = np.array([[1.0, 2.0], [1.5, 2.5]])
    with pytest.raises(SparseDPError, match="train more"):
        likelihood_ratios(np.zeros(2), pair, np.array([[True, False], [False, True]]))


def test_what_epsilon_allows() -> None:
    assert largest_tpr(0.01, 1.0, 1e-5) == pytest.approx(np.e * 0.01 + 1e-5)
    assert largest_tpr(0.9, 1.0, 1e-5) == pytest.approx(1 - np.exp(-1) * (1 - 1e-5 - 0.9))
    assert largest_tpr(0.0, 0.0, 0.0) == 0 and largest_tpr(1.0, 3.0, 0.1) == 1
    assert (largest_tpr(np.linspace(0, 1, 5), np.inf, 1e-5) == 1).all()
    # The Gaussian mechanism's own curve stays below its (epsilon, delta).
    fpr = np.geomspace(1e-6, 0.999, 200)
    tpr = stats.norm.cdf(stats.norm.ppf(fpr) + 1)
    delta = stats.norm.cdf(0.5 - 2.0) - np.exp(2.0) * stats.norm.cdf(-0.5 - 2.0)
    assert (tpr <= largest_tpr(fpr, 2.0, delta) + 1e-12).all()


def test_too_few_non_members_for_a_small_rate() -> None:
    rng = np.random.default_rng(0)
    scores, is_member = rng.normal(size=4000), rng.random(4000) < 0.5
    small, large = measure_attack("none", scores, is_member, 1.0, 1e-5).rates
    assert small.tpr is None and small.fpr is None and small.allowed is None and small.needed == 10_000
    assert large.tpr is not None and large.needed == 1000


def test_without_a_leak_rates_are_what_they_are_called() -> None:
    """Thresholds that were chosen and measured on the same units would have an FPR below its level, and TPRs too high."""
    rng = np.random.default_rng(1)
    fpr, tpr, above = [], [], 0
    for _ in range(60):
        scores, is_member = rng.normal(size=3000), rng.random(3000) < 0.5
        result = measure_attack("none", scores, is_member, 0.1, 1e-5)
        rate = result.rates[1]
        assert rate.tpr is not None and rate.fpr is not None
        fpr.append(rate.fpr.value)
        tpr.append(rate.tpr.value)
        above += result.epsilon_bound > 0
    assert abs(np.mean(tpr) - 0.01) < 0.002 and abs(np.mean(fpr) - 0.01) < 0.002
    assert above <= 0.05 * 60 + 3 * np.sqrt(60 * 0.05 * 0.95)


def test_the_curve_ends_where_curves_end() -> None:
    rng = np.random.default_rng(0)
    is_member = rng.random(1000) < 0.5
    for scores in (rng.normal(size=1000), np.round(rng.normal(size=1000)), np.zeros(1000)):  # ties, and nothing else
        roc = measure_attack("any", scores, is_member, 1.0, 1e-5).roc
        assert roc["fpr"][-1] == 1 and roc["tpr"][-1] == 1
        assert np.all(np.diff(roc["fpr"]) >= 0) and np.all(np.diff(roc["tpr"]) >= 0)
        assert all(low <= value <= high for low, value, high in zip(roc["low"], roc["tpr"], roc["high"]))


def test_what_cannot_be_attacked() -> None:
    with pytest.raises(SparseDPError, match="too few to attack"):
        measure_attack("none", np.zeros(3), np.array([True, False, False]), 1.0, 1e-5)
    with pytest.raises(SparseDPError, match=r"finite|NaN"):
        measure_attack("none", np.full(100, np.nan), np.arange(100) % 2 == 0, 1.0, 1e-5)


class Base:
    items = 7
    users = np.array([3, 3, 1, 2, 1])

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_a_part_of_a_data_set() -> None:
    part = Part(Base(), np.array([1, 3, 4]))
    assert len(part) == 3 and list(part) == [10, 30, 40] and part[1] == 30 and part[1:] == [30, 40]
    assert part.__getitems__([2, 0]) == [40, 10]
    assert part.users is not None and part.users.tolist() == [3, 2, 1]
    assert part.periods is None and part.items == 7
    with pytest.raises(AttributeError):
        part.colour  # noqa: B018
