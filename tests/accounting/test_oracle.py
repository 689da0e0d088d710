"""The PLD accountant against exact costs: never below them, and at most 0.2 % above (`oracle.py` says how they are found)."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from oracle import (
    composed_delta,
    exponential,
    gaussian,
    one_step_delta,
    sampled_delta,
    sampled_gaussian,
    steps_delta,
)

from sparsedp.accounting import ExponentialMechanismDpEvent, epsilon_of
from sparsedp.accounting.events import canonical, gaussian_step
from sparsedp.accounting.pld import pld_epsilon

ABOVE = 1.002  # epsilon is at most so many times the exact one
EXACT = 1 + 1e-9  # and delta at it at most so many times the one that was asked for


# ---------------------------------------------------------------------- the oracle itself


@pytest.mark.parametrize("shift", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (5.0, 0.5), (0.5, 10.0), (2.0, 4.0)])
def test_inversion_against_the_closed_form(sigma: float, epsilon: float, shift: float) -> None:
    with mpmath.workdps(40):
        s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
        wanted = mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - e * s)
    assert composed_delta([(gaussian(sigma), 1)], epsilon, shift) == pytest.approx(float(wanted), rel=1e-10)


@pytest.mark.parametrize(("sigma", "rate", "steps", "epsilon"), [(0.8, 0.1, 50, 8.0), (2.0, 0.01, 10_000, 3.4)])
def test_inversion_does_not_depend_on_its_line(sigma: float, rate: float, steps: int, epsilon: float) -> None:
    found = [steps_delta(sigma, rate, steps, epsilon, shift) for shift in (0.8, 0.9, 1.0)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-8)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_transforms_are_those_of_distributions(direction) -> None:
    """M(0) = 1, and M(-1) = 1, the mass of Q."""
    for transform in (sampled_gaussian(0.7, 0.2, direction), exponential(0.8), gaussian(0.7)):
        ends = np.array([0.0, -1.0], dtype=complex)
        assert [complex(transform(np.array([s]))[0]) for s in ends] == pytest.approx([0, 0], abs=1e-12)


def test_the_pair_of_the_exponential_mechanism_is_the_worst_one() -> None:
    """Of all binary pairs whose losses are t and t - epsilon0 (Dong, Durfee & Rogers 2020)."""
    for own in (0.1, 1.0, 3.0):
        t = np.linspace(0, own, 200_001)[1:]
        q = -np.expm1(t - own) / (np.exp(t) - np.exp(t - own))
        for epsilon in (0.0, own / 3, 0.9 * own):
            worst = float(((np.exp(t) - math.exp(epsilon)) * q).max())
            assert worst == pytest.approx(math.expm1((epsilon - own) / 2) ** 2 / -math.expm1(-own), rel=1e-7)


# ---------------------------------------------------------------------- one step


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("rate", [1e-4, 1e-2, 0.3, 0.9])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
def test_one_step(sigma: float, rate: float, delta: float) -> None:
    def exact(epsilon: float) -> float:
        return float(max(one_step_delta(sigma, rate, epsilon, direction) for direction in ("remove", "add")))

    epsilon = epsilon_of(gaussian_step(sigma, rate), delta)
    assert exact(epsilon) <= delta * EXACT
    if epsilon > 2e-6:  # below it counts as nothing
        assert exact((epsilon - 1e-6) / ABOVE) > delta


def test_one_step_of_exponential_selection() -> None:
    """k picks and a Gaussian, on one Poisson sample."""
    for picks, own, sigma, rate, delta in ((4, 0.25, 1.0, 0.01, 1e-6), (10, 0.1, 0.8, 0.1, 1e-5)):
        inside = ComposedDpEvent([SelfComposedDpEvent(ExponentialMechanismDpEvent(own), picks), GaussianDpEvent(sigma)])
        event = PoissonSampledDpEvent(rate, inside)

        def exact(epsilon: float, picks=picks, own=own, sigma=sigma, rate=rate) -> float:
            def inner(at: float) -> float:
                return composed_delta([(exponential(own), picks), (gaussian(sigma), 1)], at)

            return max(sampled_delta(rate, epsilon, direction, inner) for direction in ("remove", "add"))

        epsilon = pld_epsilon(canonical(event), delta, 1e-3).value
        assert exact(epsilon) <= delta * EXACT
        assert exact(epsilon / 1.005) > delta  # its inner composition has a grid of its own


# ---------------------------------------------------------------------- many steps


def _compare(sigma: float, rate: float, steps: int, delta: float) -> None:
    event: DpEvent = SelfComposedDpEvent(gaussian_step(sigma, rate), steps)
    epsilon = epsilon_of(event, delta)
    assert steps_delta(sigma, rate, steps, epsilon) <= delta * EXACT
    assert steps_delta(sigma, rate, steps, epsilon / ABOVE) > delta


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (0.6, 0.002, 500, 1e-6),
        (0.8, 0.1, 50, 1e-5),
        (1.0, 1e-4, 1_000_000, 1e-8),
        (2.0, 0.01, 10_000, 1e-10),
        (10.0, 0.5, 10_000, 1e-6),
        (20.0, 0.001, 100_000, 1e-5),
        (4.0, 0.001, 100, 1e-11),
    ],
)
def test_many_steps(sigma: float, rate: float, steps: int, delta: float) -> None:
    _compare(sigma, rate, steps, delta)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-4, 1e-7, 1e-11])
@pytest.mark.parametrize("steps", [100, 3000, 100_000])
@pytest.mark.parametrize("rate", [1e-3, 1e-2, 0.2])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 4.0])
def test_many_steps_on_a_grid(sigma: float, rate: float, steps: int, delta: float) -> None:
    _compare(sigma, rate, steps, delta)


def test_steps_and_a_release_ahead_of_them() -> None:
    """As FEST's frequencies and its steps."""
    sigma, rate, steps, first, delta = 0.9, 0.01, 400, 6.0, 1e-6
    event = ComposedDpEvent([GaussianDpEvent(first), SelfComposedDpEvent(gaussian_step(sigma, rate), steps)])
    epsilon = epsilon_of(event, delta)

    def exact(at: float) -> float:
        return max(
            composed_delta([(sampled_gaussian(sigma, rate, direction), steps), (gaussian(first), 1)], at)
            for direction in ("remove", "add")
        )

    assert exact(epsilon) <= delta * EXACT and exact(epsilon / ABOVE) > delta


def test_an_accountant_that_is_a_thousandth_too_low_is_found() -> None:
    """What these tests can see."""
    sigma, rate, steps, delta = 0.6, 0.002, 500, 1e-6
    epsilon = epsilon_of(SelfComposedDpEvent(gaussian_step(sigma, rate), steps), delta)
    assert steps_delta(sigma, rate, steps, 0.998 * epsilon) > delta * EXACT
