"""The cost of a search whose best run alone is shown: against dp_accounting, the theorem, and an exact case."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import PoissonSampledDpEvent, RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from sparsedp.accounting.rdp import ORDERS
from sparsedp.accounting.search import draw_poisson, search_epsilon
from sparsedp.errors import SparseDPError
from sparsedp.noise import RandomKey

STEPS = SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 500)


@pytest.mark.parametrize("event", [GaussianDpEvent(5.0), STEPS], ids=["gaussian", "steps"])
@pytest.mark.parametrize("mean", [1.0, 200.0])
def test_it_is_dp_accountings(event: object, mean: float) -> None:
    accountant = RdpAccountant(ORDERS).compose(RepeatAndSelectDpEvent(event, mean, math.inf))
    assert search_epsilon([event], mean, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-6)


def test_it_is_the_theorem_by_hand() -> None:
    """A Gaussian has divergence a / (2 sigma^2) at order a, and an exact delta at every epsilon."""
    sigma, mean, delta = 8.0, 20.0, 1e-5
    a = np.linspace(1.01, 400, 40_000)
    hat = np.log1p(1 / (a - 1))
    mu = 1 / sigma
    exact = norm.cdf(mu / 2 - hat / mu) - np.exp(hat) * norm.cdf(-mu / 2 - hat / mu)
    searched = a / (2 * sigma**2) + mean * exact + np.log(mean) / (a - 1)
    tight = np.min(searched + np.log1p(-1 / a) - np.log(delta * a) / (a - 1))
    ours = search_epsilon([GaussianDpEvent(sigma)], mean, delta)
    assert tight <= ours <= 1.3 * tight + 0.1  # the delta' of the accountant is a bound, on a grid of orders


def test_a_search_costs_more_than_a_run_and_less_than_all_of_them() -> None:
    def of(event: object) -> float:
        return RdpAccountant(ORDERS).compose(event).get_epsilon(1e-6)

    one, ten, many = of(STEPS), of(SelfComposedDpEvent(STEPS, 10)), search_epsilon([STEPS], 10, 1e-6)
    assert one < many < ten and many < search_epsilon([STEPS], 100, 1e-6)


def test_of_several_settings_the_costliest_counts_at_every_order() -> None:
    cheap, dear = GaussianDpEvent(9.0), GaussianDpEvent(4.0)
    assert (
        search_epsilon([cheap, dear], 10, 1e-6) == search_epsilon([dear], 10, 1e-6) > search_epsilon([cheap], 10, 1e-6)
    )
    both = search_epsilon([GaussianDpEvent(4.0), STEPS], 10, 1e-6)
    assert both >= max(search_epsilon([GaussianDpEvent(4.0)], 10, 1e-6), search_epsilon([STEPS], 10, 1e-6))


def test_no_epsilon_is_below_that_of_an_attack() -> None:
    """The best of K runs of a Gaussian release, the score being the release: the chance that the best is above t is
    1 - exp(-mean P[release > t]), and no (epsilon, delta) may be below what these two chances give."""
    sigma, mean, delta = 2.0, 10.0, 1e-5
    t = np.linspace(-10, 20, 4001)
    above, without = (-np.expm1(-mean * norm.sf(t, shift, sigma)) for shift in (1.0, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        attack = np.nanmax(np.log((above - delta) / without))
    assert attack > 0.1
    assert search_epsilon([GaussianDpEvent(sigma)], mean, delta) >= attack


def test_the_number_of_runs_has_the_poisson_law() -> None:
    random = RandomKey.from_seed(0).generator()
    draws = np.array([draw_poisson(3.0, random) for _ in range(4000)])
    assert draws.mean() == pytest.approx(3, abs=0.12) and draws.var() == pytest.approx(3, abs=0.35)
    assert (draws == 0).mean() == pytest.approx(math.exp(-3), abs=0.015)


def test_fewer_than_one_run_on_average_is_refused() -> None:
    with pytest.raises(SparseDPError, match="mean"):
        search_epsilon([STEPS], 0.5, 1e-6)
