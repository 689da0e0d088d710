"""Streams: what they cost by what is declared about units, calibration and the budget."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    SelfComposedDpEvent,
)

import sparsedp
from sparsedp import DPSGD, EANA, FEST, AdaFEST, SparseDPError, Stream
from sparsedp.accounting import Ledger, calibrate, delta_of, epsilon_of, gaussian_step
from sparsedp.mechanisms import Mechanism
from sparsedp.plan import PrivacyPlan
from streams import BATCH, CHOICE, SIZES, STEPS, calibrated, composed, start, step_event, steps
from support import train

assert CHOICE is not None
FREQUENCIES = {
    None: (None, []),
    "all": (None, [None]),
    "first": (0, [0]),
    "running": (0, [0, 1, 2]),
}


def by_hand(composition: str, frequencies: str | None, taken: Sequence[int], sigma: float = 1.0) -> list[DpEvent]:
    """The events of which the costliest counts, built without the ledger."""
    parts: dict[int, list[tuple[DpEvent, int]]] = {s: [(step_event(s, sigma), n)] for s, n in enumerate(taken) if n}
    for scope in FREQUENCIES[frequencies][1]:
        for span in parts if scope is None else [s for s in [scope] if s in parts]:
            parts[span].append((CHOICE, 1))  # type: ignore[arg-type]
    if composition == "parallel":
        return [composed(*own) for own in parts.values()]
    steps_alone = [(step_event(s, sigma), n) for s, n in enumerate(taken) if n]
    releases = {None: 0, "all": 1, "first": 1, "running": len(steps_alone)}[frequencies]
    return [composed(*steps_alone, (CHOICE, releases))]  # type: ignore[arg-type]


def mechanisms(frequencies: str | None) -> list[Mechanism]:
    if frequencies is None:
        return [DPSGD(), AdaFEST(threshold=1.0)]
    chosen = FEST(k=20, epsilon=0.7, frequencies=frequencies)  # type: ignore[arg-type]
    return [chosen, AdaFEST(threshold=1.0, preselect=chosen)]


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
@pytest.mark.parametrize("frequencies", list(FREQUENCIES))
@pytest.mark.parametrize("taken", [(3, 0, 0), (5, 1, 0), (5, 8, 6), (10, 12, 6)])
def test_ledger_and_plan_against_events_built_by_hand(composition: str, frequencies: str | None, taken: tuple) -> None:
    for mechanism in mechanisms(frequencies):
        run = start(mechanism, composition)
        assert run[0].get_epsilon(1e-5) == 0
        steps(run, sum(taken))
        engine = run[0]
        assert tuple(engine.ledger.taken(s) for s in range(3)) == taken and engine.ledger.taken(None) == 0
        wanted = max(epsilon_of(event, 1e-5) for event in by_hand(composition, frequencies, taken))
        assert engine.get_epsilon(1e-5) == wanted > 0
        assert engine.plan.epsilon(sum(taken), 1e-5) == wanted
        assert {(e.scope, e.count) for e in engine.ledger.entries if e.setup} == {
            (scope, 1) for scope in FREQUENCIES[frequencies][1] if scope is None or taken[scope]
        }
        assert delta_of(engine.ledger, 1.0) == max(
            delta_of(event, 1.0) for event in by_hand(composition, frequencies, taken)
        )


def test_parallel_costs_the_costliest_span_and_sequential_all_of_them() -> None:
    alone = [
        sparsedp.accounting.get_epsilon(noise_multiplier=1.0, sample_rate=BATCH / n, steps=count, delta=1e-5)
        for n, count in zip(SIZES, STEPS)
    ]
    found = {}
    for composition in ("parallel", "sequential"):
        run = start(DPSGD(), composition)
        train(*run[1:])
        found[composition] = run[0].get_epsilon(1e-5)
    assert found["parallel"] == max(alone)
    assert max(alone) < found["sequential"] < sum(alone)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "dp_accounting"])
def test_every_accountant_takes_the_costliest_scope(accountant: Any) -> None:
    ledger = Ledger(composition="parallel")
    ledger.record(GaussianDpEvent(5.0), setup=True)
    ledger.record(GaussianDpEvent(3.0), 2, scope=0)
    ledger.record(GaussianDpEvent(2.5), 3, scope=1)
    ledger.record(GaussianDpEvent(3.0), 2, scope=2)
    scopes = [composed((GaussianDpEvent(5.0), 1), (GaussianDpEvent(s), n)) for s, n in ((3.0, 2), (2.5, 3))]
    each = [epsilon_of(event, 1e-5, accountant) for event in scopes]
    assert each[0] < each[1] == epsilon_of(ledger, 1e-5, accountant)
    ledger.composition = "sequential"
    assert epsilon_of(ledger, 1e-5, accountant) > 1.2 * each[1]


def test_one_scope_without_noise_is_no_privacy() -> None:
    ledger = Ledger(composition="parallel")
    ledger.record(gaussian_step(1.0, 0.1), 5, scope=0)
    ledger.record(NonPrivateDpEvent(), scope=1)
    assert epsilon_of(ledger, 1e-5) == math.inf and delta_of(ledger, 1.0) == 1.0
    run = start(EANA())
    steps(run, 1)
    assert run[0].get_epsilon() == math.inf


def test_equal_events_of_different_scopes_do_not_merge() -> None:
    ledger = Ledger(composition="parallel")
    for scope in (0, 0, 1, None, 0):
        ledger.record(gaussian_step(1.0, 0.1), scope=scope)
    assert [(entry.scope, entry.count) for entry in ledger.entries] == [(0, 2), (1, 1), (None, 1), (0, 1)]
    assert epsilon_of(ledger, 1e-5) == epsilon_of(SelfComposedDpEvent(gaussian_step(1.0, 0.1), 4), 1e-5)
    other = Ledger()
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert other == ledger and other.composition == "parallel"


# ---------------------------------------------------------------------- calibration and the budget


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
@pytest.mark.parametrize("frequencies", list(FREQUENCIES))
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_target_is_met_and_never_exceeded(composition: str, frequencies: str | None, epochs: int) -> None:
    # Sequentially the three running releases share the budget with the steps.
    target = 3.0 if composition == "sequential" else 2.0
    run = calibrated(mechanisms(frequencies)[0], composition, epochs, target)
    engine, taken = run[0], [epochs * n for n in STEPS]
    sigma = engine.plan.noise_multiplier
    assert engine.plan.epsilon(epochs * sum(STEPS), 1e-5) <= target
    # Independently of plan and ledger: within the target, and with 1 % less noise not.
    for noise, within in ((sigma, True), (0.99 * sigma, False)):
        cost = max(epsilon_of(event, 1e-5) for event in by_hand(composition, frequencies, taken, noise))
        assert (cost <= target) == within
    for _ in range(epochs):
        train(*run[1:], each=lambda: None)
        assert engine.get_epsilon() <= target
    assert engine.get_epsilon() > 0.97 * target
    with pytest.raises(SparseDPError, match=f"The plan's {epochs * STEPS[0]} steps on span 0"):
        train(*run[1:])
    assert engine.get_epsilon() <= target


def test_parallel_needs_less_noise_than_sequential() -> None:
    parallel, sequential = (calibrated(None, c)[0].plan.noise_multiplier for c in ("parallel", "sequential"))
    assert parallel < 0.9 * sequential


def test_calibration_goes_on_to_the_scope_that_turns_out_to_cost_most() -> None:
    """At noise 1 the first scope costs most; at the noise that it needs, the second one does."""
    target, asked = 1.0, []

    def make(sigma: float) -> Ledger:
        asked.append(sigma)
        ledger = Ledger(composition="parallel")
        ledger.record(gaussian_step(sigma, 0.02), 3000, scope=0)
        ledger.record(gaussian_step(sigma, 0.5), 2, scope=1)
        ledger.record(GaussianDpEvent(4.2), scope=1)
        ledger.record(gaussian_step(sigma, 0.01), 10, scope=2)
        return ledger

    costs = [epsilon_of(event, 1e-5) for event in make(1.0).events()]
    assert costs[0] == max(costs)
    alone = calibrate(lambda s: make(s).events()[0], target, 1e-5)
    assert epsilon_of(make(alone).events()[1], 1e-5) > target  # so that there is something to find
    asked.clear()
    noise = calibrate(make, target, 1e-5)
    assert max(epsilon_of(event, 1e-5) for event in make(noise).events()) <= target
    assert epsilon_of(make(noise / 1.005), 1e-5) > target


@pytest.mark.parametrize("seed", range(3))
def test_calibration_over_many_uneven_spans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1000, 60_000, 12)
    plan = start()[0].plan
    batch = 500
    made = Stream(np.repeat(np.arange(12), sizes), "parallel").plan(tuple(-(-int(n) // batch) for n in sizes))
    plan = PrivacyPlan(**{**vars(plan), "stream": made, "dataset_size": int(sizes.sum()), "batch_size": batch})
    steps_in_all = 2 * sum(made.steps)
    found = plan.calibrated(target_epsilon=1.0, target_delta=1e-6, steps=steps_in_all)
    each = [
        sparsedp.accounting.get_epsilon(
            noise_multiplier=found.noise_multiplier, sample_rate=batch / n, steps=2 * s, delta=1e-6
        )
        for n, s in zip(made.sizes, made.steps)
    ]
    assert 0.99 < max(each) <= 1.0
    assert found.epsilon(steps_in_all, 1e-6) == max(each)


def test_a_target_that_the_selections_alone_exceed() -> None:
    with pytest.raises(SparseDPError, match="cannot be reached"):
        calibrated(FEST(k=9, epsilon=1.0, frequencies="running"), "sequential", target=1.0)
    assert (
        calibrated(FEST(k=9, epsilon=0.8, frequencies="running"), "parallel", target=1.0)[0].plan.noise_multiplier > 0
    )


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
def test_starting_the_stream_again_does_not_overrun_a_span(composition: str) -> None:
    """`break` starts a new pass: the steps on the first span would exceed its share of the budget long before the total."""
    run = calibrated(None, composition, epochs=2)
    engine = run[0]
    with pytest.raises(SparseDPError, match="10 steps on span 0"):
        for _ in range(4):
            steps(run, 4)
    assert engine.ledger.steps == 10 < engine.plan.steps  # type: ignore[operator]
    assert engine.get_epsilon() <= 2.0
