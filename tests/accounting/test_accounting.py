"""Accounting: closed forms, other libraries, calibration, ledger, and the traps that under-report epsilon."""

import copy
import itertools
import json
import math
import pathlib
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import norm

import sparsedp
import sparsedp.errors
from documentation import code_of
from sparsedp.accounting import (
    Accountant,
    ExponentialMechanismDpEvent,
    Ledger,
    accountant_names,
    calibrate,
    combined_multiplier,
    delta_of,
    epsilon_of,
    event_from_dict,
    event_to_dict,
    find_accountant,
    gaussian_step,
    get_epsilon,
    get_noise_multiplier,
    reference,
    register_accountant,
    register_event,
    split_multiplier,
    training_event,
)
from sparsedp.accounting.epsilon import dp_accounting_above
from sparsedp.accounting.events import canonical
from sparsedp.accounting.pld import pld_delta, pld_epsilon
from sparsedp.errors import CheckpointError, ConfigError, SparseDPError, UnsupportedError
from support import Clicks, clicks, loader_of, make_private

OUTSIDE = code_of("extending.md")["PlainRdp"].name  # an accountant that was registered from outside of the package


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Balle & Wang 2018, theorem 8, with sensitivity 1."""
    return norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)


def run(sigma: float, rate: float, steps: int) -> DpEvent:
    return training_event(noise_multiplier=sigma, sample_rate=rate, steps=steps)


TARGETS = [
    (1e-4, 1_000, 0.5, 1e-5),
    (1e-3, 10_000, 1.0, 1e-6),
    (1e-3, 100_000, 3.0, 1e-6),
    (1e-2, 1_000, 10.0, 1e-8),
    (1e-2, 100_000, 8.0, 1e-7),
    (0.37, 13, 0.0917, 3.3e-4),
    (1.0, 77, 2.718281828, 1e-5),
]


class AccountantTest:
    """What every accountant has to satisfy.

    `slack` is how loose it may be on Gaussians, `floor` the epsilon below which it cannot go, and `ceiling` the one above which
    its answers take too long to be asked for.
    """

    accountant: str
    slack: float
    floor = 0.0
    ceiling = math.inf

    def epsilon(self, event: DpEvent | Ledger, delta: float = 1e-6) -> float:
        return epsilon_of(event, delta, self.accountant)

    def test_nothing_costs_nothing(self):
        assert self.epsilon(Ledger()) == 0.0
        for event in (NoOpDpEvent(), ComposedDpEvent([]), run(1.0, 0.1, 0), gaussian_step(1.0, 0.0)):
            assert self.epsilon(event) == 0.0
            assert delta_of(event, 0.0, self.accountant) == 0.0

    def test_no_noise_costs_everything(self):
        for event in (
            NonPrivateDpEvent(),
            gaussian_step(0.0, 0.1),
            GaussianDpEvent(0.0),
            LaplaceDpEvent(0.0),
            PoissonSampledDpEvent(0.01, GaussianDpEvent(0.0)),
            ComposedDpEvent([run(1.0, 0.1, 10), NonPrivateDpEvent()]),
        ):
            assert self.epsilon(event) == math.inf
            assert delta_of(event, 1.0, self.accountant) == 1.0

    @pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
    @pytest.mark.parametrize("sigma", [0.05, 0.5, 1.0, 7.0, 300.0])
    def test_single_gaussian_closed_form(self, sigma, delta):
        exact = dp_accounting.get_epsilon_gaussian(sigma, delta)
        if exact > self.ceiling:
            pytest.skip(f"an epsilon above {self.ceiling}")
        epsilon = self.epsilon(GaussianDpEvent(sigma), delta)
        assert gaussian_delta(sigma, epsilon) <= delta * (1 + 1e-7)
        assert epsilon <= exact * self.slack + self.floor
        assert delta_of(GaussianDpEvent(sigma), epsilon, self.accountant) <= delta * (1 + 1e-6)

    @pytest.mark.parametrize("steps", [2, 100, 10_000])
    def test_full_batch_gaussians_are_one(self, steps):
        if dp_accounting.get_epsilon_gaussian(5.0 / math.sqrt(steps), 1e-6) > self.ceiling:
            pytest.skip(f"an epsilon above {self.ceiling}")
        composed = self.epsilon(run(5.0, 1.0, steps))
        assert composed == pytest.approx(self.epsilon(GaussianDpEvent(5.0 / math.sqrt(steps))), rel=1e-9)

    @pytest.mark.parametrize("base", [(0.7, 1e-3, 5000, 1e-6), (2.0, 0.1, 200, 1e-5), (1.0, 1e-4, 20_000, 1e-8)])
    def test_monotone(self, base):
        sigma, rate, steps, delta = base
        epsilon = self.epsilon(run(sigma, rate, steps), delta)
        assert 0 < epsilon < math.inf
        assert self.epsilon(run(1.1 * sigma, rate, steps), delta) < epsilon
        assert self.epsilon(run(sigma, 1.1 * rate, steps), delta) > epsilon
        assert self.epsilon(run(sigma, rate, 2 * steps), delta) > epsilon
        assert self.epsilon(run(sigma, rate, steps), 2 * delta) < epsilon

    def test_composition_does_not_depend_on_order_or_nesting(self):
        a, b = gaussian_step(0.8, 1e-3), gaussian_step(1.5, 1e-2)
        one = ComposedDpEvent([SelfComposedDpEvent(a, 300), SelfComposedDpEvent(b, 40)])
        other = SelfComposedDpEvent(ComposedDpEvent([*[b] * 2, SelfComposedDpEvent(a, 15), NoOpDpEvent()]), 20)
        assert self.epsilon(one) == pytest.approx(self.epsilon(other), rel=1e-9)
        assert self.epsilon(one) > max(self.epsilon(SelfComposedDpEvent(a, 300)), self.epsilon(run(1.5, 1e-2, 40)))

    def test_sampling_never_hurts(self):
        assert self.epsilon(run(1.0, 0.999, 50)) <= self.epsilon(run(1.0, 1.0, 50)) * 1.001

    @pytest.mark.parametrize("event", [
        LaplaceDpEvent(2.0),
        ZCDpEvent(0.02),
        ExponentialMechanismDpEvent(0.3),
        PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)),
        PoissonSampledDpEvent(0.1, ExponentialMechanismDpEvent(0.3)),
        dp_accounting.SampledWithReplacementDpEvent(100, 10, GaussianDpEvent(1.0)),
    ])  # fmt: skip
    def test_an_event_has_a_cost_or_is_refused(self, event):
        """And so does a run with such an event in it: what an accountant does not know is not free."""
        usual = run(2.0, 0.01, 100)
        for whole in (event, ComposedDpEvent([usual, event])):
            try:
                epsilon = self.epsilon(whole, 1e-5)
            except UnsupportedError:
                with pytest.raises(UnsupportedError):
                    delta_of(whole, 1.0, self.accountant)
                continue
            assert max(self.epsilon(usual, 1e-5) if whole is not event else 0.0, 1e-3) <= epsilon < math.inf
            assert 0 < delta_of(whole, 0.5 * epsilon, self.accountant) <= 1

    def test_the_costliest_scope_counts(self):
        ledger = Ledger(composition="parallel")
        ledger.record(gaussian_step(1.0, 0.01), 20, scope=0)
        ledger.record(gaussian_step(1.0, 0.02), 50, scope=1)
        assert self.epsilon(ledger) == self.epsilon(run(1.0, 0.02, 50)) > self.epsilon(run(1.0, 0.01, 20))

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan, math.inf, "1e-6", None, True])
    def test_delta_is_checked(self, delta):
        with pytest.raises(ConfigError, match=r"delta must be a number in \(0, 1\)"):
            epsilon_of(run(1.0, 0.1, 1), delta, self.accountant)

    @pytest.mark.parametrize(("rate", "steps", "epsilon", "delta"), TARGETS)
    def test_calibration_round_trip(self, rate, steps, epsilon, delta):
        sigma = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=self.accountant,
        )
        spent = get_epsilon(
            noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant=self.accountant
        )
        assert 0.97 * epsilon <= spent <= epsilon
        assert self.epsilon(run(sigma / 1.005, rate, steps), delta) > epsilon

    def test_calibration_says_when_the_target_is_out_of_reach(self):
        selection = GaussianDpEvent(2.0)

        def make_event(sigma: float) -> DpEvent:
            return ComposedDpEvent([selection, run(sigma, 1e-2, 100)])

        floor = self.epsilon(selection, 1e-6)
        with pytest.raises(SparseDPError, match="cannot be reached"):
            calibrate(make_event, 0.9 * floor, 1e-6, self.accountant)
        sigma = calibrate(make_event, 1.1 * floor, 1e-6, self.accountant)
        assert 0.97 * 1.1 * floor <= self.epsilon(make_event(sigma), 1e-6) <= 1.1 * floor


class TestPld(AccountantTest):
    accountant = "pld"
    slack = 1 + 1e-9


class TestRdp(AccountantTest):
    accountant = "rdp"
    slack = 1.35
    floor = 0.03  # its orders stop at 1024, which floors epsilon near log(1/delta) / 1024


class TestDpAccountingsPld(AccountantTest):
    accountant = "dp_accounting"
    slack = 1.001
    floor = 1e-3  # its grid's interval is 1e-4
    ceiling = 50.0  # on such a grid it takes millions of points, and minutes

    @pytest.mark.slow
    def test_sampling_never_hurts(self):
        super().test_sampling_never_hurts()

    @pytest.mark.slow
    @pytest.mark.parametrize(("rate", "steps", "epsilon", "delta"), TARGETS)
    def test_calibration_round_trip(self, rate, steps, epsilon, delta):
        super().test_calibration_round_trip(rate, steps, epsilon, delta)

    @pytest.mark.slow
    def test_calibration_says_when_the_target_is_out_of_reach(self):
        super().test_calibration_says_when_the_target_is_out_of_reach()


class TestDpAccountingsRdp(AccountantTest):
    accountant = OUTSIDE
    slack = 1.35
    floor = 0.03


def test_every_accountant_passes_the_contract():
    assert {test.accountant for test in AccountantTest.__subclasses__()} == set(accountant_names())


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@settings(max_examples=40, deadline=None)
@given(
    sigma=st.floats(-1.3, 3).map(lambda x: 10**x),
    rate=st.floats(-7, 0).map(lambda x: 10**x),
    steps=st.floats(0, 4.5).map(lambda x: int(10**x)),
    delta=st.floats(-12, -0.01).map(lambda x: 10**x),
)
def test_never_negative_never_nan(accountant, sigma, rate, steps, delta):
    assert epsilon_of(run(sigma, rate, steps), delta, accountant) >= 0.0


def test_unknown_accountant():
    with pytest.raises(ConfigError, match="accountant must be"):
        epsilon_of(run(1.0, 0.1, 1), 1e-6, "gdp")


@pytest.mark.parametrize("name", ["gdp", "PLD", "", None, ["pld"]])
def test_unknown_names_say_which_there_are(name):
    there_are = ", ".join(accountant_names())
    assert there_are.startswith("pld, rdp, dp_accounting")
    for ask in (
        lambda: find_accountant(name),
        lambda: epsilon_of(run(1.0, 0.1, 1), 1e-6, name),
        lambda: delta_of(run(1.0, 0.1, 1), 1.0, name),
        lambda: calibrate(lambda sigma: run(sigma, 0.1, 1), 1.0, 1e-6, name),
        lambda: sparsedp.PrivacyEngine(accountant=name),
    ):
        with pytest.raises(ConfigError, match=f"accountant must be one of {there_are}; got "):
            ask()
    with pytest.raises(ConfigError, match="Did you mean 'rdp'"):
        find_accountant("rpd")


def test_registering_an_accountant():
    known = accountant_names()

    def make(**members):
        answers = {"epsilon": lambda self, *given: 1.0, "delta": lambda self, *given: 0.1}
        return type("Mine", (Accountant,), {"name": "mine", "summary": "", **answers, **members})

    for bad in ({"name": "two words"}, {"name": 7}, {"summary": None}):
        with pytest.raises(ConfigError, match="Mine: an accountant needs a name"):
            register_accountant(make(**bad))
    with pytest.raises(ConfigError, match="another accountant, Pld, is already known as 'pld'"):
        register_accountant(make(name="pld"))
    with pytest.raises(TypeError, match="abstract"):
        register_accountant(type("Half", (Accountant,), {"name": "half", "summary": "", "epsilon": lambda self: 1.0}))
    assert accountant_names() == known
    assert register_accountant(type(find_accountant("pld"))) is type(find_accountant("pld"))  # again does no harm
    assert accountant_names() == known


def test_answers_of_accountants_are_looked_at(monkeypatch):
    """Negative ones are 0, deltas above 1 are 1, and NaN, which would pass for any cost, is refused."""
    accountant = find_accountant(OUTSIDE)
    for answer, epsilon, delta in ((-1.0, 0.0, 0.0), (3.0, 3.0, 1.0), (math.inf, math.inf, 1.0)):
        monkeypatch.setattr(type(accountant), "epsilon", lambda *_: answer)
        monkeypatch.setattr(type(accountant), "delta", lambda *_: answer)
        assert epsilon_of(run(1.0, 0.1, 1), 1e-6, OUTSIDE) == epsilon
        assert delta_of(run(1.0, 0.1, 1), 1.0, OUTSIDE) == delta
    monkeypatch.setattr(type(accountant), "epsilon", lambda *_: math.nan)
    monkeypatch.setattr(type(accountant), "delta", lambda *_: math.nan)
    with pytest.raises(SparseDPError, match="plain_rdp accountant gives NaN"):
        epsilon_of(run(1.0, 0.1, 1), 1e-6, OUTSIDE)
    with pytest.raises(SparseDPError, match="plain_rdp accountant gives NaN"):
        delta_of(run(1.0, 0.1, 1), 1.0, OUTSIDE)


# --- The grid and the tilted FFT ---


@pytest.mark.parametrize("steps", [1, 1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-9, 1e-12])
def test_convolution_is_an_upper_bound_of_the_closed_form(steps, delta):
    """Through the FFT, not the closed form: `steps` Gaussians of sigma sqrt(steps) are one of sigma 1.

    Rounding errors of the FFT must not pass for a smaller epsilon, at any number of steps.
    """
    leaves = {GaussianDpEvent(math.sqrt(steps)): steps}
    exact = dp_accounting.get_epsilon_gaussian(1.0, delta)
    assert exact <= pld_epsilon(leaves, delta, 1e-3).value <= exact * 1.002
    assert delta * (1 - 1e-9) <= pld_delta(leaves, exact, 1e-2).value <= delta * 1.05


def sampled_delta(rate: float, sigma: float, epsilon: float) -> float:
    """Of one step, for removing a unit: (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2)."""
    if math.exp(epsilon) <= 1 - rate:
        return -math.expm1(epsilon)
    x = sigma**2 * math.log1p(math.expm1(epsilon) / rate) + 0.5
    tail = norm.sf(x / sigma)
    return (1 - rate) * tail + rate * norm.sf((x - 1) / sigma) - math.exp(epsilon) * tail


def two_step_delta(rate: float, sigma: float, epsilon: float) -> float:
    """E[delta_1(epsilon - loss)] over the loss of the other step, by quadrature."""

    def integrand(x: float) -> float:
        density = (1 - rate) * norm.pdf(x, scale=sigma) + rate * norm.pdf(x, loc=1, scale=sigma)
        loss = math.log1p(rate * math.expm1((x - 0.5) / sigma**2))
        return density * sampled_delta(rate, sigma, epsilon - loss)

    points = np.linspace(-8 * sigma, 1 + 8 * sigma, 60)
    return sum(integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-9)[0] for a, b in itertools.pairwise(points))


@pytest.mark.parametrize(("rate", "sigma"), [(1e-4, 0.5), (1e-2, 0.7), (0.1, 1.5), (0.6, 1.0)])
def test_one_and_two_sampled_steps_against_quadrature(rate, sigma):
    for steps, exact_delta in ((1, sampled_delta), (2, two_step_delta)):
        for epsilon in (0.05, 0.5, 2.0):
            exact = exact_delta(rate, sigma, epsilon)
            assert exact * (1 - 1e-6) <= delta_of(run(sigma, rate, steps), epsilon) <= exact * 1.03
            assert epsilon * (1 - 1e-6) <= epsilon_of(run(sigma, rate, steps), exact) <= epsilon * 1.003


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [
    (1e-3, 0.8, 10_000, 1e-6),
    (1e-2, 1.0, 1_000, 1e-5),
    (0.2, 3.0, 100, 1e-5),
    (0.5, 1.0, 1, 1e-3),
])  # fmt: skip
def test_against_dp_accounting(rate, sigma, steps, delta):
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    theirs = accountant.compose(run(sigma, rate, steps)).get_epsilon(delta)
    assert epsilon_of(run(sigma, rate, steps), delta) == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [
    (1e-3, 0.8, 10_000, 1e-6),
    (1e-2, 1.0, 1_000, 1e-5),
    (4e-4, 0.6, 5_000, 1e-6),
    (0.1, 2.0, 500, 1e-6),
])  # fmt: skip
def test_against_opacus_prv(rate, sigma, steps, delta):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    assert epsilon_of(run(sigma, rate, steps), delta) == pytest.approx(accountant.get_epsilon(delta), rel=0.02)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [
    (1e-5, 0.7, 100_000, 1e-6),
    (1e-4, 0.8, 100_000, 1e-8),
    (1e-3, 0.8, 100_000, 1e-6),
    (1e-2, 2.0, 100_000, 1e-8),
])  # fmt: skip
def test_default_grid_is_fine_enough(rate, sigma, steps, delta):
    coarse, fine = (epsilon_of(run(sigma, rate, steps), delta, relative_error=error) for error in (1e-3, 1e-4))
    assert fine <= coarse <= 1.003 * fine


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), list(itertools.product(
    [1e-4, 1e-2, 0.5], [0.5, 2.0], [100, 10_000], [1e-5, 1e-9]
)))  # fmt: skip
def test_rdp_is_looser(rate, sigma, steps, delta):
    event = run(sigma, rate, steps)
    assert epsilon_of(event, delta) <= epsilon_of(event, delta, "rdp") * 1.001


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta", "limit"), [
    (1e-2, 0.05, 100_000, 1e-6, 3e5),  # 1000 times in the sample, about 200 each
    (1e-2, 0.05, 1_000_000, 1e-12, 3e6),
    (1e-4, 0.05, 1_000_000, 1e-12, 4e4),
    (1e-3, 1e3, 1_000_000, 1e-12, 0.0065),  # close to one Gaussian of sigma 1e3: 0.0057
    (1e-8, 1e3, 1_000_000, 1e-12, 1e-6),
    (1e-3, 1e8, 1_000, 1e-6, 1e-9),
    (1e-3, 0.8, 1_000_000, 1e-12, 15.4),
    (1.0, 0.05, 1_000_000, 1e-12, 2.002e8),
    (0.999999, 1.0, 1_000, 1e-6, 650.0),
    (1e-6, 0.3, 1, 1e-12, 7.0),
    (0.5, 20.0, 1, 0.5, 0.0),
])  # fmt: skip
def test_extremes(rate, sigma, steps, delta, limit):
    assert 0.0 <= epsilon_of(run(sigma, rate, steps), delta) <= limit


def test_delta_and_epsilon_are_inverse():
    for event in (run(0.8, 1e-3, 1000), run(3.0, 0.2, 50), SelfComposedDpEvent(LaplaceDpEvent(2.0), 20)):
        epsilon = epsilon_of(event, 1e-6)
        assert delta_of(event, epsilon) == pytest.approx(1e-6, rel=0.05)
        assert delta_of(event, epsilon, "rdp") >= 0.9e-6
        assert delta_of(event, 0.5 * epsilon) > 2e-6


# --- Laplace, the exponential mechanism, and several releases on one sample ---


@pytest.mark.parametrize("steps", [1, 3, 100])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_laplace_against_dp_accounting(scale, steps):
    event = SelfComposedDpEvent(LaplaceDpEvent(scale), steps)
    theirs = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-3)
    assert epsilon_of(event, 1e-3) == pytest.approx(theirs, rel=5e-3)
    assert epsilon_of(event, 1e-9) <= steps / scale * (1 + 1e-6)


def top_k_distribution(scores: np.ndarray, k: int, epsilon: float) -> dict[tuple[int, ...], float]:
    """Ordered k largest of scores plus Gumbel noise of scale 1/epsilon: draws without replacement."""
    out = {}
    for chosen in itertools.permutations(range(len(scores)), k):
        weight, probability = np.exp(epsilon * scores), 1.0
        for item in chosen:
            probability *= weight[item] / weight.sum()
            weight[item] = 0.0
        out[chosen] = probability
    return out


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("draw", [0.5, 2.0])
def test_exponential_mechanism_covers_noisy_top_k(k, draw):
    """Counts of neighbours differ by 0 or 1 in each place; no pair may exceed the bound, in either order."""
    rng = np.random.default_rng(k)
    event = SelfComposedDpEvent(ExponentialMechanismDpEvent(draw), k)
    bounds = {epsilon: delta_of(event, epsilon) for epsilon in (0.0, 0.3 * draw, 0.8 * draw, 1.5 * draw)}
    worst = dict.fromkeys(bounds, 0.0)
    for _ in range(60):
        scores = rng.integers(0, 3, size=5).astype(float)
        other = scores + rng.integers(0, 2, size=5)
        p, q = (np.array(list(top_k_distribution(s, k, draw).values())) for s in (scores, other))
        for epsilon in bounds:
            for a, b in ((p, q), (q, p)):
                worst[epsilon] = max(worst[epsilon], np.maximum(a - math.exp(epsilon) * b, 0).sum())
    for epsilon, delta in bounds.items():
        assert worst[epsilon] <= delta
    assert worst[0.0] > 0.25 * bounds[0.0]  # and the bound is not idle


def test_noisy_top_k_costs_more_than_its_scale_says():
    """DP-FEST's algorithm 2 with scale 1/epsilon is not epsilon-DP for k > 1 (papers' notes)."""
    event = SelfComposedDpEvent(ExponentialMechanismDpEvent(1.0), 100)
    assert 10.0 < epsilon_of(event, 1e-6) < 100.0


def test_exponential_mechanism_composes_no_worse_than_rdp():
    event = SelfComposedDpEvent(ExponentialMechanismDpEvent(0.1), 1000)
    assert epsilon_of(event, 1e-6) <= epsilon_of(event, 1e-6, "rdp")


@pytest.mark.parametrize("ratio", [0.5, 1.0, 5.0])
def test_split_and_combine(ratio):
    first, second = split_multiplier(0.9, ratio)
    assert first / second == pytest.approx(ratio)
    assert combined_multiplier(first, second) == pytest.approx(0.9)
    assert combined_multiplier(1.3) == 1.3
    assert combined_multiplier(1.0, 0.0) == 0.0
    assert combined_multiplier(*[3.0] * 9) == pytest.approx(1.0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_releases_on_one_sample_are_one_gaussian(accountant):
    """Trap 9: the map and the gradient of AdaFEST see the same sample."""
    first, second = split_multiplier(0.6, 1.0)
    joint = PoissonSampledDpEvent(1e-3, ComposedDpEvent([GaussianDpEvent(first), GaussianDpEvent(second)]))
    right = epsilon_of(run(0.6, 1e-3, 1000), 1e-6, accountant)
    assert epsilon_of(SelfComposedDpEvent(joint, 1000), 1e-6, accountant) == pytest.approx(right)


def test_releases_on_one_sample_composed_as_two_under_report():
    first, second = split_multiplier(0.5, 1.0)
    right = epsilon_of(run(0.5, 1e-4, 1000), 1e-6)
    wrong = epsilon_of(SelfComposedDpEvent(ComposedDpEvent([run(first, 1e-4, 1), run(second, 1e-4, 1)]), 1000), 1e-6)
    assert right == pytest.approx(1.164, rel=0.01)
    assert wrong < right / 10


def test_sampling_of_a_composition():
    """Poisson sampling of something that is not a Gaussian, through the general path."""
    picks = SelfComposedDpEvent(ExponentialMechanismDpEvent(0.05), 100)
    joint = PoissonSampledDpEvent(1e-2, ComposedDpEvent([GaussianDpEvent(1.0), picks]))
    epsilon = epsilon_of(SelfComposedDpEvent(joint, 1000), 1e-6)
    # 100 picks of 0.05 are as bad as a Gaussian of sigma 4 to 5; but not free, and not two samples.
    assert (
        epsilon_of(run(1.0, 1e-2, 1000), 1e-6)
        < epsilon
        < epsilon_of(run(combined_multiplier(1.0, 2.5), 1e-2, 1000), 1e-6)
    )

    sampled = SelfComposedDpEvent(PoissonSampledDpEvent(1e-2, LaplaceDpEvent(1.0)), 1000)
    theirs = dp_accounting.pld.PLDAccountant().compose(sampled).get_epsilon(1e-6)
    assert epsilon_of(sampled, 1e-6) == pytest.approx(theirs, rel=2e-3)

    with pytest.raises(UnsupportedError, match='"rdp" accountant'):
        epsilon_of(sampled, 1e-6, "rdp")


def test_general_sampling_agrees_with_the_closed_form(monkeypatch):
    from sparsedp.accounting import pld

    expected = {rate: epsilon_of(run(1.0, rate, 500), 1e-7) for rate in (1e-3, 0.3)}
    closed_form = pld.closed_form_pair
    monkeypatch.setattr(
        pld,
        "closed_form_pair",
        lambda e, tail: None if isinstance(e, PoissonSampledDpEvent) else closed_form(e, tail),
    )
    for rate, epsilon in expected.items():
        assert epsilon_of(run(1.0, rate, 500), 1e-7) == pytest.approx(epsilon, rel=1e-3)


def test_zcdp_is_for_rdp_only():
    # rho-zCDP is the Gaussian's curve with sigma = 1 / sqrt(2 rho).
    assert epsilon_of(ZCDpEvent(0.5), 1e-6, "rdp") == pytest.approx(epsilon_of(GaussianDpEvent(1.0), 1e-6, "rdp"))
    with pytest.raises(UnsupportedError, match="ZCDpEvent"):
        epsilon_of(ZCDpEvent(0.5), 1e-6)


# --- Calibration ---


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(-4, -2).map(lambda x: 10**x),
    steps=st.floats(3, 4.5).map(lambda x: int(10**x)),
    epsilon=st.floats(0.5, 10),
    delta=st.floats(-8, -5).map(lambda x: 10**x),
)
def test_calibration_never_overshoots(rate, steps, epsilon, delta):
    sigma = get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps)
    spent = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta)
    assert 0.97 * epsilon <= spent <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "steps", "epsilon", "delta"), list(itertools.product(
    [1e-4, 1e-3, 1e-2], [1_000, 100_000], [0.5, 2.0, 10.0], [1e-5, 1e-8]
)))  # fmt: skip
def test_calibration_on_recommender_settings(rate, steps, epsilon, delta):
    sigma = get_noise_multiplier(target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps)
    assert 0.97 * epsilon <= epsilon_of(run(sigma, rate, steps), delta) <= epsilon


@pytest.mark.parametrize("epsilon", [1e-3, 0.123456789, 50.0, 1e3])
def test_calibration_of_odd_targets(epsilon):
    sigma = get_noise_multiplier(target_epsilon=epsilon, target_delta=1e-6, sample_rate=1e-3, steps=5000)
    assert 0.97 * epsilon <= epsilon_of(run(sigma, 1e-3, 5000), 1e-6) <= epsilon


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_to_nothing_private(accountant):
    with pytest.raises(SparseDPError, match="epsilon=inf"):
        calibrate(lambda sigma: NonPrivateDpEvent(), 1.0, 1e-6, accountant)


# --- A whole run ---


class Mechanism:
    """AdaFEST behind a selection that costs something, as far as accounting can see."""

    def __init__(self, setup: DpEvent | None):
        self.setup = setup

    def step_event(self, noise_multiplier: float, sample_rate: float) -> DpEvent:
        return gaussian_step(combined_multiplier(*split_multiplier(noise_multiplier, 5.0)), sample_rate)

    def setup_event(self) -> DpEvent | None:
        return self.setup


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_setup_is_charged_once(accountant):
    arguments = {"noise_multiplier": 1.0, "sample_rate": 1e-2, "delta": 1e-6, "accountant": accountant}
    setup = GaussianDpEvent(4.0)
    plain = get_epsilon(**arguments, steps=100)
    assert get_epsilon(**arguments, steps=100, mechanism=Mechanism(None)) == pytest.approx(plain, rel=1e-9)
    both = get_epsilon(**arguments, steps=100, mechanism=Mechanism(setup))
    alone = epsilon_of(setup, 1e-6, accountant)
    assert max(plain, alone) < both < plain + alone
    assert get_epsilon(**arguments, steps=0, mechanism=Mechanism(setup)) == alone
    assert both == epsilon_of(ComposedDpEvent([setup, run(1.0, 1e-2, 100)]), 1e-6, accountant)


def test_noise_makes_up_for_the_setup():
    arguments = {"target_epsilon": 2.0, "target_delta": 1e-6, "sample_rate": 1e-2, "steps": 100}
    setup = GaussianDpEvent(4.0)
    plain = get_noise_multiplier(**arguments)
    more = get_noise_multiplier(**arguments, mechanism=Mechanism(setup))
    assert more > plain
    assert (
        get_epsilon(noise_multiplier=more, sample_rate=1e-2, steps=100, delta=1e-6, mechanism=Mechanism(setup)) <= 2.0
    )
    with pytest.raises(SparseDPError, match="cannot be reached"):
        get_noise_multiplier(**arguments, mechanism=Mechanism(GaussianDpEvent(0.5)))


@pytest.mark.parametrize(("change", "message"), [
    ({"noise_multiplier": -1.0}, r"noise_multiplier must be a number in \[0, inf\); got -1.0"),
    ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
    ({"noise_multiplier": math.inf}, "noise_multiplier must be"),
    ({"sample_rate": 0.0}, r"sample_rate must be a number in \(0, 1\]; got 0.0"),
    ({"sample_rate": 1.5}, "sample_rate must be"),
    ({"steps": -1}, "steps must be an integer of at least 0; got -1"),
    ({"steps": 1.5}, "steps must be an integer"),
    ({"steps": True}, "steps must be an integer"),
    ({"delta": 0}, "delta must be"),
])  # fmt: skip
def test_arguments_of_get_epsilon(change, message):
    with pytest.raises(ConfigError, match=message):
        get_epsilon(**{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5} | change)


@pytest.mark.parametrize(("change", "message"), [
    ({"target_epsilon": 0.0}, r"target_epsilon must be a number in \(0, inf\)"),
    ({"target_epsilon": math.inf}, "target_epsilon must be"),
    ({"target_delta": 1.0}, "target_delta must be"),
    ({"sample_rate": 2.0}, "sample_rate must be"),
    ({"steps": 0}, "steps must be an integer of at least 1"),
])  # fmt: skip
def test_arguments_of_get_noise_multiplier(change, message):
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10}
    with pytest.raises(ConfigError, match=message):
        get_noise_multiplier(**arguments | change)


def test_numpy_numbers_are_numbers():
    assert get_epsilon(
        noise_multiplier=np.float32(1.0), sample_rate=np.float64(0.5), steps=np.int64(3), delta=1e-5
    ) == get_epsilon(noise_multiplier=1, sample_rate=0.5, steps=3, delta=1e-5)


# --- Events and their JSON ---


def test_gaussian_step():
    assert gaussian_step(1.0, 0.1) == PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    assert gaussian_step(1.0, 1.0) == GaussianDpEvent(1.0)
    assert gaussian_step(0.0, 0.1) == NonPrivateDpEvent()
    assert gaussian_step(0.0, 0.0) == gaussian_step(1.0, 0.0) == NoOpDpEvent()
    with pytest.raises(ConfigError, match="sample_rate"):
        gaussian_step(1.0, 1.1)
    with pytest.raises(ConfigError, match="ratio"):
        split_multiplier(1.0, 0.0)
    with pytest.raises(ConfigError, match="at least one"):
        combined_multiplier()


leaf_events = st.one_of(
    st.just(NoOpDpEvent()),
    st.just(NonPrivateDpEvent()),
    st.floats(0, 100).map(GaussianDpEvent),
    st.floats(0, 100).map(LaplaceDpEvent),
    st.floats(0, 100).map(ExponentialMechanismDpEvent),
    st.builds(ZCDpEvent, st.floats(0, 10), st.floats(0, 10)),
)
events = st.recursive(
    leaf_events,
    lambda inner: st.one_of(
        st.builds(PoissonSampledDpEvent, st.floats(0, 1), inner),
        st.builds(SelfComposedDpEvent, inner, st.integers(0, 10**9)),
        st.lists(inner, max_size=3).map(ComposedDpEvent),
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(events)
def test_event_round_trip(event):
    data = json.loads(json.dumps(event_to_dict(event), allow_nan=False))
    assert event_from_dict(data) == event
    canonical(event)


NO_OP = {"event_type": "NoOpDpEvent"}


@pytest.mark.parametrize("data", [
    None,
    [],
    {},
    {"event_type": "SomethingDpEvent"},
    {"event_type": "DpEvent"},
    {"event_type": "GaussianDpEvent"},
    {"event_type": "GaussianDpEvent", "noise_multiplier": -1.0},
    {"event_type": "GaussianDpEvent", "noise_multiplier": "1"},
    {"event_type": "GaussianDpEvent", "noise_multiplier": math.nan},
    {"event_type": "GaussianDpEvent", "noise_multiplier": math.inf},
    {"event_type": "GaussianDpEvent", "noise_multiplier": True},
    {"event_type": "GaussianDpEvent", "noise_multiplier": 1.0, "scale": 2.0},
    {"event_type": "PoissonSampledDpEvent", "sampling_probability": 1.1, "event": NO_OP},
    {"event_type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": {"event_type": "Mystery"}},
    {"event_type": "SelfComposedDpEvent", "count": 1.5, "event": NO_OP},
    {"event_type": "SelfComposedDpEvent", "count": -1, "event": NO_OP},
    {"event_type": "ComposedDpEvent", "events": NO_OP},
])  # fmt: skip
def test_malformed_events_are_refused(data):
    with pytest.raises(UnsupportedError):
        event_from_dict(data)


@pytest.mark.parametrize("event", [
    dp_accounting.UnsupportedDpEvent(),
    dp_accounting.dp_event.SampledWithReplacementDpEvent(10, 2, GaussianDpEvent(1.0)),
    SelfComposedDpEvent(PoissonSampledDpEvent(0.1, dp_accounting.UnsupportedDpEvent()), 0),
    GaussianDpEvent(-1.0),
    GaussianDpEvent(math.nan),
    PoissonSampledDpEvent(-0.1, GaussianDpEvent(1.0)),
    SelfComposedDpEvent(GaussianDpEvent(1.0), -3),
    "GaussianDpEvent",
])  # fmt: skip
def test_unknown_and_impossible_events_are_refused_everywhere(event):
    for action in (
        event_to_dict,
        Ledger().record,
        lambda e: epsilon_of(e, 1e-6),
        lambda e: epsilon_of(e, 1e-6, "rdp"),
    ):
        with pytest.raises(UnsupportedError):
            action(event)


def test_events_can_be_registered(monkeypatch):
    import attr

    from sparsedp.accounting import events as module

    monkeypatch.setattr(module, "_FIELDS", dict(module._FIELDS))

    @attr.s(frozen=True, slots=True, auto_attribs=True)
    class NewDpEvent(DpEvent):
        share: float
        inner: DpEvent

    event = NewDpEvent(0.5, GaussianDpEvent(1.0))
    with pytest.raises(UnsupportedError):
        event_to_dict(event)
    with pytest.raises(ConfigError, match="fields"):
        register_event(NewDpEvent, {"share": "probability"})
    register_event(NewDpEvent, {"share": "probability", "inner": "event"})
    assert event_from_dict(event_to_dict(event)) == event
    # Recorded, but still nobody knows what it costs.
    for accountant in ("pld", "rdp"):
        with pytest.raises(UnsupportedError, match="NewDpEvent"):
            epsilon_of(event, 1e-6, accountant)


def test_canonical_merges():
    a, b = gaussian_step(1.0, 0.1), gaussian_step(2.0, 0.1)
    event = ComposedDpEvent(
        [a, SelfComposedDpEvent(b, 3), SelfComposedDpEvent(ComposedDpEvent([a, a, NoOpDpEvent()]), 5)]
    )
    assert canonical(event) == {a: 11, b: 3}
    assert canonical(SelfComposedDpEvent(GaussianDpEvent(3.0), 9)) == {GaussianDpEvent(1.0): 1}
    assert canonical(PoissonSampledDpEvent(1.0, SelfComposedDpEvent(GaussianDpEvent(2.0), 4))) == {
        GaussianDpEvent(1.0): 1
    }
    assert canonical(ComposedDpEvent([a, NonPrivateDpEvent()])) == {NonPrivateDpEvent(): 1}


# --- The ledger ---


def test_ledger_merges_equal_events():
    ledger = Ledger()
    for _ in range(1000):
        ledger.record(gaussian_step(1.0, 0.01))
    assert len(ledger.entries) == 1
    ledger.record(gaussian_step(1.1, 0.01), count=5)
    ledger.record(gaussian_step(1.0, 0.01))
    ledger.record(gaussian_step(1.0, 0.01), count=0)
    assert [entry.count for entry in ledger.entries] == [1000, 5, 1]
    assert ledger.steps == 1006
    expected = ComposedDpEvent([run(1.0, 0.01, 1001), run(1.1, 0.01, 5)])
    assert epsilon_of(ledger, 1e-6) == pytest.approx(epsilon_of(expected, 1e-6), rel=1e-9)


def test_ledger_setup_is_charged_but_is_not_a_step():
    ledger = Ledger()
    ledger.record(GaussianDpEvent(2.0), setup=True)
    ledger.record(GaussianDpEvent(2.0))
    assert ledger.steps == 1
    assert len(ledger.entries) == 2
    assert epsilon_of(ledger, 1e-6) == epsilon_of(SelfComposedDpEvent(GaussianDpEvent(2.0), 2), 1e-6)


def make_ledger() -> Ledger:
    ledger = Ledger()
    ledger.record(SelfComposedDpEvent(ExponentialMechanismDpEvent(0.1), 10), setup=True)
    ledger.record(gaussian_step(0.8, 1e-3), count=500)
    ledger.record(PoissonSampledDpEvent(1e-3, ComposedDpEvent([GaussianDpEvent(1.0), LaplaceDpEvent(3.0)])), count=7)
    return ledger


def test_ledger_round_trip():
    ledger, other = make_ledger(), Ledger()
    other.record(NonPrivateDpEvent())
    assert ledger != other
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict(), allow_nan=False)))
    assert ledger == other
    assert epsilon_of(ledger, 1e-6) == epsilon_of(other, 1e-6)
    other.record(gaussian_step(0.8, 1e-3))
    assert ledger != other
    assert other.steps == ledger.steps + 1


def corruptions():
    """Ways to break a saved ledger, each a function that changes the state in place."""

    def change(path, value):
        def apply(state):
            for key in path[:-1]:
                state = state[key]
            state[path[-1]] = value

        return apply

    yield change(["version"], 4)
    yield change(["version"], 2)  # which has no digest
    yield lambda state: state.pop("digest")
    yield lambda state: state["entries"].pop()  # cut short
    yield lambda state: state["entries"].pop(0)
    yield lambda state: state["entries"].reverse()
    yield change(["entries", 1, "count"], 499)
    yield change(["entries", 1, "abandoned"], True)
    yield change(["entries", 1, "event", "event", "noise_multiplier"], 0.9)
    yield change(["composition"], "parallel")
    yield change(["composition"], "both")
    yield change(["entries", 1, "scope"], -1)
    yield change(["entries", 1, "scope"], "0")
    yield lambda state: state["entries"][0].pop("scope")
    yield lambda state: state.pop("composition")
    yield change(["extra"], 1)
    yield change(["entries"], {})
    yield change(["entries", 2], None)
    yield change(["entries", 2, "count"], 0)
    yield change(["entries", 2, "count"], "7")
    yield change(["entries", 2, "count"], True)
    yield change(["entries", 1, "setup"], 0)
    yield change(["entries", 1, "more"], 0)
    yield change(["entries", 1, "event", "event_type"], "FreeDpEvent")
    yield change(["entries", 1, "event", "event", "noise_multiplier"], -1.0)
    yield change(["entries", 1, "event", "sampling_probability"], 2.0)
    yield lambda state: state["entries"][0].pop("setup")
    yield lambda state: state.pop("entries")


@pytest.mark.parametrize("corrupt", list(corruptions()))
def test_ledger_refuses_a_broken_state_and_stays_as_it_was(corrupt):
    ledger = make_ledger()
    state = ledger.state_dict()
    corrupt(state)
    before = copy.deepcopy(ledger)
    with pytest.raises(CheckpointError):
        ledger.load_state_dict(state)
    assert ledger == before


def test_ledger_counts_are_checked():
    for count in (-1, 1.0, True, None):
        with pytest.raises(ConfigError, match="count"):
            Ledger().record(gaussian_step(1.0, 0.1), count)


def test_accounting_needs_no_torch():
    """The files of `accounting` import nothing heavy; the package around them is left out here."""
    folder = str(pathlib.Path(sparsedp.errors.__file__).parent)
    code = """
import sys, types
sys.modules["sparsedp"] = package = types.ModuleType("sparsedp")
package.__path__ = sys.argv[1:]
import sparsedp.accounting
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, folder], check=True)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.01, 1.0, 1000), (1.0, 5.0, 20), (0.001, 0.8, 5000)])
def test_dp_accounting_itself_is_selectable_and_agrees(rate, sigma, steps):
    run = {"noise_multiplier": sigma, "sample_rate": rate, "steps": steps, "delta": 1e-6}
    own, reference = (get_epsilon(**run, accountant=name) for name in ("pld", "dp_accounting"))
    assert own == pytest.approx(reference, rel=0.02)
    event = training_event(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    assert delta_of(event, reference, "dp_accounting") == pytest.approx(1e-6, rel=0.1)


def test_dp_accounting_refuses_what_it_does_not_know():
    with pytest.raises(UnsupportedError, match="pld"):
        epsilon_of(ExponentialMechanismDpEvent(0.1), 1e-6, "dp_accounting")


# ---------------------------------------------------------------------- dp_accounting's word beside ours

SMALL_RATE = run(0.8, 1e-5, 100_000)


@pytest.mark.parametrize(
    "event",
    [
        run(0.6, 0.002, 500),
        run(1.0, 0.01, 2000),
        SMALL_RATE,
        run(50.0, 0.1, 10_000),
        GaussianDpEvent(2.0),
        run(1, 1e-3, 1),
    ],
)
def test_a_coarser_grid_of_dp_accounting_costs_no_less(event):
    """So that a coarse one may say that there is nothing to tell."""
    leaves = tuple(canonical(event).items())
    found = [reference._epsilon(leaves, 1e-6, interval) for interval in (1e-2, 1e-3, 1e-4)]
    assert found[0] >= found[1] * (1 - 1e-9) and found[1] >= found[2] * (1 - 1e-9)


def test_dp_accounting_is_asked_where_it_may_differ():
    ours, theirs = (epsilon_of(SMALL_RATE, 1e-6, accountant) for accountant in ("pld", "dp_accounting"))
    assert ours < 0.9 * theirs
    assert dp_accounting_above(SMALL_RATE, 1e-6, ours / 0.9) == theirs
    assert dp_accounting_above(SMALL_RATE, 1e-6, theirs) is None
    same = run(0.6, 0.002, 500)
    assert dp_accounting_above(same, 1e-6, epsilon_of(same, 1e-6) / 0.9) is None
    for nothing in (ExponentialMechanismDpEvent(0.1), NonPrivateDpEvent(), ComposedDpEvent([])):
        assert dp_accounting_above(nothing, 1e-6, 0.0) is None
    ledger = Ledger(composition="parallel")
    ledger.record(gaussian_step(0.8, 1e-5), 100_000, scope=0)
    ledger.record(gaussian_step(0.8, 1e-5), 10, scope=1)
    assert dp_accounting_above(ledger, 1e-6, ours / 0.9) == theirs


def test_the_statement_prints_both_where_they_differ():
    engine = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))[0]
    for event, both in ((SMALL_RATE.event, True), (gaussian_step(0.6, 0.002), False)):
        engine.ledger.entries.clear()
        engine.ledger.record(event, 100_000 if both else 500)
        statement = engine.statement(1e-6)
        assert (statement.dp_accounting_epsilon is not None) == both == ("dp_accounting's PLD" in str(statement))
        if both:
            assert statement.dp_accounting_epsilon == epsilon_of(engine.ledger, 1e-6, "dp_accounting")
            assert statement.epsilon < 0.9 * statement.dp_accounting_epsilon
            assert "gives epsilon = 0.03499" in str(statement)
            assert json.loads(statement.to_json())["dp_accounting_epsilon"] == statement.dp_accounting_epsilon
    for accountant in ("rdp", "dp_accounting"):
        engine.accountant = accountant
        assert engine.statement(1e-6).dp_accounting_epsilon is None
