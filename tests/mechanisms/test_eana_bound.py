"""Theorem 3.1 of the EANA paper against the Renyi divergence computed directly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from sparsedp.mechanisms import (
    eana_advisory_epsilon,
    eana_renyi_bound,
    eana_renyi_bound_as_printed,
    eana_renyi_bound_by_row,
    eana_renyi_bound_of_unit,
    eana_renyi_divergences,
)


def gaussian_renyi(alpha: int, shift: float, variance: float, other: float) -> float:
    """D_alpha(N(0, variance) || N(shift, other)) in closed form."""
    mixed = alpha * other + (1 - alpha) * variance
    assert mixed > 0
    squares = alpha * shift**2 / (2 * mixed)
    return squares + math.log(other / variance) / 2 + math.log(other / mixed) / (2 * (alpha - 1))


def test_closed_form_against_quadrature() -> None:
    p, q = stats.norm(0, math.sqrt(3.0)), stats.norm(0.7, 2.0)
    value, _ = integrate.quad(lambda x: math.exp(3 * p.logpdf(x) - 2 * q.logpdf(x)), -40, 40)
    assert gaussian_renyi(3, 0.7, 3.0, 4.0) == pytest.approx(math.log(value) / 2)


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(5, 60), min_size=1, max_size=6),
    alpha=st.integers(2, 5),
    std=st.floats(0.1, 5.0),
    seed=st.integers(0, 1000),
)
def test_bound_covers_both_directions(counts: list[int], alpha: int, std: float, seed: int) -> None:
    """A unit x* with |x*| <= L joins: coordinate j's model has noise C_j sigma^2 before and (C_j + 1) sigma^2 after."""
    x = np.random.default_rng(seed).normal(size=len(counts))
    x = x / np.linalg.norm(x)
    bound = eana_renyi_bound(alpha, min_count=min(counts), max_rows=len(counts), gradient_bound=1.0, noise_std=std)
    without, joined = [c * std**2 for c in counts], [(c + 1) * std**2 for c in counts]
    for one, other in ((without, joined), (joined, without)):
        exact = sum(gaussian_renyi(alpha, shift, v, w) for shift, v, w in zip(x, one, other))
        assert exact <= bound + 1e-9


def test_conditions_are_checked() -> None:
    fine = {"min_count": 10, "max_rows": 3, "gradient_bound": 1.0, "noise_std": 1.0}
    for alpha in (1, 11, 2.5):
        with pytest.raises(ValueError, match="alpha"):
            eana_renyi_bound(alpha, **fine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise_std"):
        eana_renyi_bound(2, **{**fine, "noise_std": 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delta"):
        eana_advisory_epsilon(0.0, **fine)  # type: ignore[arg-type]


def test_advisory_epsilon_falls_with_noise_and_counts() -> None:
    base = {"min_count": 100, "max_rows": 5, "gradient_bound": 1.0, "noise_std": 0.5}
    epsilon = eana_advisory_epsilon(1e-5, **base)  # type: ignore[arg-type]
    assert 0 < eana_advisory_epsilon(1e-5, **{**base, "noise_std": 2.0}) < epsilon  # type: ignore[arg-type]
    assert 0 < eana_advisory_epsilon(1e-5, **{**base, "min_count": 1000}) < epsilon  # type: ignore[arg-type]


# ---------------------------------------------------------------------- both directions, against integrals


def integrated_renyi(alpha: float, mean: float, variance: float, other_mean: float, other_variance: float) -> float:
    """D_alpha(N(mean, variance) || N(other_mean, other_variance)) = ln(integral of p^alpha q^(1 - alpha)) / (alpha - 1).

    The integrand is a bell: its peak is found, divided out and added again, so that nothing overflows.
    """

    def log_integrand(x: float) -> float:
        p = -math.log(2 * math.pi * variance) / 2 - (x - mean) ** 2 / (2 * variance)
        q = -math.log(2 * math.pi * other_variance) / 2 - (x - other_mean) ** 2 / (2 * other_variance)
        return alpha * p + (1 - alpha) * q

    curvature = alpha / variance + (1 - alpha) / other_variance
    assert curvature > 0, "the integral diverges"
    peak = (alpha * mean / variance + (1 - alpha) * other_mean / other_variance) / curvature
    reach, top = 12 / math.sqrt(curvature), log_integrand(peak)
    value, _ = integrate.quad(
        lambda x: math.exp(log_integrand(x) - top), peak - reach, peak + reach, points=[peak], epsabs=0, epsrel=1e-13
    )
    return (math.log(value) + top) / (alpha - 1)


CASES = [
    (alpha, count, shift, std)
    for alpha in (1.01, 1.5, 2, 3, 10, 17.3)
    for count in (1, 2, 11, 60, 1000)
    for shift in (0.0, 0.3, 2.0)
    for std in (0.2, 1.0, 4.0)
    if alpha < count + 0.9
]


@pytest.mark.parametrize(("alpha", "count", "shift", "std"), CASES)
def test_both_directions_against_integrals(alpha: float, count: int, shift: float, std: float) -> None:
    """P = N(0, C s^2) and Q = N(x, (C + 1) s^2): a coordinate without and with the unit."""
    without, joined = (0.0, count * std**2), (shift, (count + 1) * std**2)
    forth, back = eana_renyi_divergences(alpha, count=count, row_norm=abs(shift), noise_std=std)
    tolerance = 1e-11 / (alpha - 1)
    assert forth == pytest.approx(integrated_renyi(alpha, *without, *joined), rel=1e-8, abs=tolerance)
    assert back == pytest.approx(integrated_renyi(alpha, *joined, *without), rel=1e-8, abs=tolerance)
    assert 0 < forth < back


def test_a_row_of_several_coordinates_is_their_sum() -> None:
    x, count, std, alpha = np.array([0.5, -1.2, 0.0, 0.3]), 7, 0.8, 4
    without, joined = count * std**2, (count + 1) * std**2
    found = eana_renyi_divergences(alpha, count=count, row_norm=float(np.linalg.norm(x)), noise_std=std, dim=4)
    assert found[0] == pytest.approx(sum(integrated_renyi(alpha, 0.0, without, float(v), joined) for v in x), rel=1e-8)
    assert found[1] == pytest.approx(sum(integrated_renyi(alpha, float(v), joined, 0.0, without) for v in x), rel=1e-8)


def test_beyond_the_pole_one_direction_is_infinite() -> None:
    """alpha = C + 1: p^alpha q^(1 - alpha) does not fall off."""
    for alpha in (6, 6.5, 40):
        forth, back = eana_renyi_divergences(alpha, count=5, row_norm=1.0, noise_std=1.0)
        assert math.isfinite(forth) and back == math.inf
        assert forth == pytest.approx(integrated_renyi(alpha, 0.0, 5.0, 1.0, 6.0), rel=1e-8)
    assert eana_renyi_divergences(2, count=0, row_norm=1.0, noise_std=1.0) == (math.inf, math.inf)


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(1, 10**7),
    share=st.floats(1e-6, 1 - 1e-6),
    shift=st.floats(0, 5),
    std=st.floats(0.05, 20),
    dim=st.integers(1, 256),
)
def test_larger_direction_and_growth(count: int, share: float, shift: float, std: float, dim: int) -> None:
    """The unit's own model is the costlier side, more noises cost less, and the printed bound is above: for every order."""
    alpha = 1 + share * count
    given = {"row_norm": shift, "noise_std": std, "dim": dim}
    forth, back = eana_renyi_divergences(alpha, count=count, **given)  # type: ignore[arg-type]
    rounding = 1e-15 * dim / share
    assert -rounding <= forth <= back + rounding
    more = eana_renyi_divergences(alpha, count=count + 1, **given)  # type: ignore[arg-type]
    assert more[0] <= forth + rounding and more[1] <= back + rounding


# ---------------------------------------------------------------------- the theorem, as printed and as it is

EXAMPLE = {"min_count": 1000, "max_rows": 10, "noise_std": 1.0}


def test_printed_and_exact_figures() -> None:
    """C0 = 1000, d0 = 10, alpha = 10: what the variances add is printed as 0.0106, and is 2.5e-5."""
    printed = eana_renyi_bound_as_printed(10, gradient_bound=0.0, **EXAMPLE)  # type: ignore[arg-type]
    exact = eana_renyi_bound(10, gradient_bound=0.0, **EXAMPLE)  # type: ignore[arg-type]
    assert printed == pytest.approx(0.0106, abs=5e-5)
    assert exact == pytest.approx(2.5e-5, rel=0.02)
    assert exact == pytest.approx(10 * integrated_renyi(10, 0.0, 1001.0, 0.0, 1000.0), rel=1e-6)
    assert exact == pytest.approx(10 * 10 / (4 * 1000**2), rel=0.02)  # d0 alpha / (4 C0^2)


def printed_equation_3(alpha: float, count: float, x: float, std: float) -> float:
    logs = (1 - alpha) * math.log(count) + alpha * math.log(count + 1) - math.log(count + 1 - alpha)
    return alpha * x**2 / (2 * (count + 1 - alpha) * std**2) + logs / (2 * (alpha - 1))


def printed_equation_7(alpha: float, count: float, x: float, std: float) -> float:
    logs = (1 - alpha) * math.log(count + 1) + alpha * math.log(count) - math.log(alpha + count)
    return alpha * x**2 / (2 * (alpha + count) * std**2) + logs / (2 * (alpha - 1))


def test_the_papers_equations_swap_the_variances() -> None:
    """Equation 3 has the logarithms of D(P || Q) with the middle variance of D(Q || P), and equation 7 the reverse."""
    alpha, count, std = 3, 20, 1.3
    assert printed_equation_7(alpha, count, 0.0, std) < 0  # which no divergence is
    forth, back = eana_renyi_divergences(alpha, count=count, row_norm=0.7, noise_std=std)
    assert printed_equation_3(alpha, count, 0.7, std) > 1.1 * max(forth, back)
    # With the middle variances exchanged, they are the exact ones.
    swapped = math.log((count + alpha) / (count + 1 - alpha)) / (2 * (alpha - 1))
    assert printed_equation_3(alpha, count, 0.0, std) - swapped == pytest.approx(
        eana_renyi_divergences(alpha, count=count, row_norm=0.0, noise_std=std)[0], rel=1e-9
    )
    assert printed_equation_7(alpha, count, 0.0, std) + swapped == pytest.approx(
        eana_renyi_divergences(alpha, count=count, row_norm=0.0, noise_std=std)[1], rel=1e-9
    )


@pytest.mark.parametrize("alpha", [2, 5, 40])
def test_the_printed_bound_is_equations_3_to_6(alpha: int) -> None:
    """Summed over d0 coordinates, with |x| = L."""
    x = np.array([0.6, 0.0, 0.8])
    printed = eana_renyi_bound_as_printed(alpha, min_count=50, max_rows=3, gradient_bound=1.0, noise_std=0.4)
    assert printed == pytest.approx(sum(printed_equation_3(alpha, 50, float(v), 0.4) for v in x))


@pytest.mark.parametrize("alpha", [2, 3, 10, 50])
@pytest.mark.parametrize("dim", [1, 4])
def test_the_bound_is_reached_and_below_the_printed_one(alpha: int, dim: int) -> None:
    given = {"min_count": 50, "max_rows": 6, "gradient_bound": 1.5, "noise_std": 0.7, "dim": dim}
    bound = eana_renyi_bound(alpha, **given)  # type: ignore[arg-type]
    norms = np.full(6, 1.5 / math.sqrt(6))
    unit = eana_renyi_bound_of_unit(alpha, np.full(6, 50), norms, noise_std=0.7, dim=dim)
    assert unit == pytest.approx(bound, rel=1e-12)
    assert bound < eana_renyi_bound_as_printed(alpha, **given)  # type: ignore[arg-type]


def test_coordinates_count_not_rows() -> None:
    """A table of width 64: each of a row's 64 coordinates has its own noise."""
    wide = eana_renyi_bound(10, gradient_bound=0.0, dim=64, **EXAMPLE)  # type: ignore[arg-type]
    assert wide == pytest.approx(64 * eana_renyi_bound(10, gradient_bound=0.0, **EXAMPLE))  # type: ignore[arg-type]


def test_remark_1_dp_sgd_is_better_and_the_gap_closes() -> None:
    """DP-SGD with the same noise, sigma_g^2 = C0 sigma^2, is (alpha, alpha L^2 / (2 sigma_g^2))-RDP: d0 = 10, L = 1."""

    def ratio(count: int, std: float, alpha: int = 8) -> float:
        bound = eana_renyi_bound(alpha, min_count=count, max_rows=10, gradient_bound=1.0, noise_std=std)
        return bound / (alpha / (2 * count * std**2))

    assert ratio(100, 1.0) > 1 and ratio(1000, 1.0) > 1 and ratio(100, 0.1) > 1
    assert ratio(1000, 1.0) < ratio(100, 1.0)  # as C0 increases
    assert ratio(100, 0.1) < ratio(100, 1.0)  # as sigma decreases


# ---------------------------------------------------------------------- equations 8 and 9


def test_equation_8_by_row() -> None:
    counts = np.array([0, 1, 3, 4, 10, 500])
    found = eana_renyi_bound_by_row(4, counts, gradient_bound=0.9, noise_std=0.5, dim=3)
    assert found.shape == (6,) and np.isinf(found[:3]).all() and np.isfinite(found[3:]).all()
    for count, value in zip(counts[3:], found[3:]):
        shifted = integrated_renyi(4, 0.9, (count + 1) * 0.25, 0.0, count * 0.25)
        still = integrated_renyi(4, 0.0, (count + 1) * 0.25, 0.0, count * 0.25)
        assert value == pytest.approx(shifted + 2 * still, rel=1e-8)  # all of the gradient in one coordinate of three
    assert (np.diff(found[3:]) < 0).all()  # "coordinate with larger C will have less privacy risk"
    assert eana_renyi_bound_by_row(4, [], gradient_bound=0.9, noise_std=0.5).shape == (0,)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(6, 500), min_size=1, max_size=8),
    alpha=st.floats(1.1, 6.0),
    std=st.floats(0.1, 5.0),
    seed=st.integers(0, 1000),
)
def test_equation_9_of_a_unit(counts: list[int], alpha: float, std: float, seed: int) -> None:
    """From a unit's own row norms, both directions, coordinate by coordinate with integrals; and it implies equation 1."""
    x = np.random.default_rng(seed).normal(size=(len(counts), 2)) / 3
    norms = np.linalg.norm(x, axis=1)
    found = eana_renyi_bound_of_unit(alpha, counts, norms, noise_std=std, dim=2)
    forth = back = 0.0
    for row, count in zip(x, counts):
        without, joined = count * std**2, (count + 1) * std**2
        forth += sum(integrated_renyi(alpha, 0.0, without, float(v), joined) for v in row)
        back += sum(integrated_renyi(alpha, float(v), joined, 0.0, without) for v in row)
    assert found == pytest.approx(max(forth, back), rel=1e-7, abs=1e-9)
    rows = eana_renyi_bound_by_row(alpha, counts, gradient_bound=float(np.linalg.norm(x)), noise_std=std, dim=2)
    assert found <= rows.sum() * (1 + 1e-12)
    whole = max(2, math.floor(alpha))
    bound = eana_renyi_bound(
        whole,
        min_count=min(counts),
        max_rows=len(counts),
        gradient_bound=float(np.linalg.norm(x)),
        noise_std=std,
        dim=2,
    )
    assert eana_renyi_bound_of_unit(whole, counts, norms, noise_std=std, dim=2) <= bound * (1 + 1e-12)


def test_a_unit_of_popular_rows_has_less_risk() -> None:
    norms = np.array([0.5, 0.5])
    popular, rare, unique = (
        eana_renyi_bound_of_unit(3, counts, norms, noise_std=1.0) for counts in ([900, 800], [900, 4], [900, 0])
    )
    assert popular < rare < unique == math.inf
    assert eana_renyi_bound_of_unit(3, [], [], noise_std=1.0) == 0.0


def test_a_step_that_others_noise_too_costs_less() -> None:
    """With larger batches a row that somebody else of the batch uses has its noise anyway: P and Q differ in the mean alone."""
    count, x, alpha = 12, 0.8, 5
    forth, back = eana_renyi_divergences(alpha, count=count, row_norm=x, noise_std=1.0)
    assert alpha * x**2 / (2 * count) < back


def test_rows_of_units_are_checked() -> None:
    with pytest.raises(ValueError, match="shapes"):
        eana_renyi_bound_of_unit(2, [3, 4], [1.0], noise_std=1.0)
    for counts in ([2.5], [-1], [math.nan]):
        with pytest.raises(ValueError, match="whole numbers"):
            eana_renyi_bound_of_unit(2, counts, [1.0], noise_std=1.0)
    for norm in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite and not negative"):
            eana_renyi_bound_of_unit(2, [5], [norm], noise_std=1.0)
        with pytest.raises(ValueError, match="finite and not negative"):
            eana_renyi_bound_by_row(2, [5], gradient_bound=norm, noise_std=1.0)
    for alpha in (1, 0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            eana_renyi_bound_of_unit(alpha, [5], [1.0], noise_std=1.0)
    for std in (0.0, math.nan):
        with pytest.raises(ValueError, match="noise_std positive"):
            eana_renyi_divergences(2, count=5, row_norm=1.0, noise_std=std)


def test_the_printed_bound_checks_its_conditions() -> None:
    given = {"min_count": 10, "max_rows": 3, "gradient_bound": 1.0, "noise_std": 1.0}
    for alpha in (1, 11, 2.5):
        with pytest.raises(ValueError, match="alpha"):
            eana_renyi_bound_as_printed(alpha, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim"):
        eana_renyi_bound_as_printed(2, dim=0, **given)  # type: ignore[arg-type]
