"""Streams: spans in order of time, each sampled alone, and what that costs by what is declared about units."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from scipy import stats
from torch import Tensor, nn

import sparsedp
from sparsedp import DPSGD, EANA, FEST, AdaFEST, CheckpointError, ConfigError, SparseDPError, Stream, UnsupportedError
from sparsedp.accounting import Ledger, calibrate, delta_of, epsilon_of, gaussian_step
from sparsedp.capture import Captured
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.data import generated_click_log, write_click_log
from sparsedp.mechanisms import Mechanism, Step
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import draws, private_loader
from support import Clicks, clicks, loader_of, make_private, train

KEY = RandomKey.from_seed(3)
SIZES, BATCH = (40, 61, 48), 8
STEPS = (5, 8, 6)
# Not in order of time, not from 0, and with a gap: the spans must be found, not assumed.
PERIODS = np.random.default_rng(0).permutation(np.repeat([3, 4, 9], SIZES))


def stream(composition: Any = "parallel", span: int = 1, periods: Any = PERIODS) -> Stream:
    return Stream(periods, composition, span)


def start(
    mechanism: Mechanism | None = None, composition: Any = "parallel", seed: int | None = 7, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    chosen = options.pop("stream", stream(composition))
    data = loader_of(*clicks(sum(SIZES)), batch_size=BATCH, num_workers=options.pop("workers", 0))
    return make_private(Clicks(), data, seed=seed, mechanism=mechanism, stream=chosen, **options)


def steps(run: tuple, count: int, epochs: int = 2) -> None:
    """Takes up to `count` of the steps that are left of `epochs` epochs, then stops as a killed run would."""
    engine, module, optimizer, loader = run
    while engine.ledger.steps < epochs * len(loader):
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            optimizer.step()
            if loader.current.last:
                count -= 1
                if count == 0:
                    return


def step_event(span: int, sigma: float = 1.0) -> DpEvent:
    return PoissonSampledDpEvent(BATCH / SIZES[span], GaussianDpEvent(sigma))


def composed(*parts: tuple[DpEvent, int]) -> DpEvent:
    return ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in parts])


# ---------------------------------------------------------------------- the spans


@pytest.mark.parametrize(
    ("periods", "span", "names"),
    [
        ([5, 3, 4, 9, 3], 1, {"period 3": [1, 4], "period 4": [2], "period 5": [0], "period 9": [3]}),
        ([5, 3, 4, 9, 3], 2, {"periods 3 to 4": [1, 2, 4], "period 5": [0], "period 9": [3]}),
        ([5, 3, 4, 9, 3], 7, {"periods 3 to 9": [0, 1, 2, 3, 4]}),
        (torch.tensor([-1, 0, -4]), 2, {"period -4": [2], "period -1": [0], "period 0": [1]}),
        (np.array([7, 7], dtype=np.uint8), 1, {"period 7": [0, 1]}),
        (np.array([0, 2**40]), 1, {"period 0": [0], f"period {2**40}": [1]}),
    ],
)
def test_spans_are_counted_by_value_from_the_first_period(periods: Any, span: int, names: dict) -> None:
    found = Stream(periods, "parallel", span)
    assert dict(zip(found.names, (where.tolist() for where in found.spans))) == names


def test_a_stream_keeps_its_own_periods() -> None:
    mine = np.array([0, 1])
    found = Stream(mine, "parallel")
    mine[:] = 0
    assert found.periods.tolist() == [0, 1] and len(found.spans) == 2
    with pytest.raises(ValueError, match="read-only"):
        found.periods[0] = 1


def test_composition_is_never_guessed() -> None:
    for call in (lambda: Stream([0, 1]), lambda: Stream([0, 1], None), lambda: Stream([0, 1], "both")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as refused:
            call()
        for word in (
            "composition",
            "'parallel'",
            "'sequential'",
            "one span of periods only",
            "in every span",
            "covered",
        ):
            assert word in str(refused.value)


@pytest.mark.parametrize(
    "periods",
    [[0.0, 1.0], [[0, 1]], [], [True, False], ["a"], 3, [None], [math.nan], [2**62], np.array(["2024-01-01"])],
)
def test_periods_are_whole_numbers(periods: Any) -> None:
    with pytest.raises(ConfigError, match="periods"):
        Stream(periods, "parallel")


@pytest.mark.parametrize("span", [0, -1, 1.0, True, None, "1"])
def test_span_is_a_whole_number(span: Any) -> None:
    with pytest.raises(ConfigError, match="span"):
        Stream([0], "parallel", span)


def test_what_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="periods for 3 examples, the data set has 149"):
        start(stream=Stream([0, 1, 2], "parallel"))
    thin = np.repeat([0, 5, 6], (80, 7, 62))
    with pytest.raises(
        UnsupportedError, match=r"the 7 examples of span 1 \(period 5\).*smaller batch_size.*larger span"
    ):
        start(stream=Stream(thin, "parallel"))
    assert start(stream=Stream(thin, "parallel", 7))[0].plan.stream.sizes == (149,)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"sparsedp\.Stream"):
        start(stream=PERIODS)


# ---------------------------------------------------------------------- which units meet in a batch


def loader(poisson: bool = True, limit: int | None = None, **options: Any) -> Any:
    numbers = loader_of(torch.arange(sum(SIZES)), batch_size=BATCH, **options)
    return private_loader(numbers, key=KEY, poisson=poisson, max_physical_batch=limit, stream=stream())


def batches(private: Any, epochs: int = 1) -> list[tuple[int, int, list[int]]]:
    """Step, span and indices of every physical batch."""
    return [(private.current.step, private.current.span, batch[0].tolist()) for _ in range(epochs) for batch in private]


@pytest.mark.parametrize("poisson", [True, False])
def test_spans_in_order_and_each_alone(poisson: bool) -> None:
    private = loader(poisson)
    assert len(private) == sum(STEPS) and private.span_steps == STEPS
    assert private.sample_rate == BATCH / min(SIZES)
    seen = batches(private, epochs=2)
    assert [step for step, _, _ in seen] == list(range(2 * sum(STEPS)))
    assert [span for _, span, _ in seen] == 2 * [s for s, count in enumerate(STEPS) for _ in range(count)]
    values = np.unique(PERIODS)
    for _, span, where in seen:
        assert (PERIODS[where] == values[span]).all() and len(set(where)) == len(where)
    for epoch in (seen[: sum(STEPS)], seen[sum(STEPS) :]):
        for span in range(3):
            drawn = [i for _, s, where in epoch if s == span for i in where]
            if poisson:
                assert len(set(drawn)) < len(drawn)  # with replacement over steps
            else:
                assert sorted(drawn) == np.flatnonzero(values[span] == PERIODS).tolist()  # each once an epoch
    if not poisson:
        assert seen[: sum(STEPS)] != [(step - sum(STEPS), s, where) for step, s, where in seen[sum(STEPS) :]]


def test_drop_last_is_per_span() -> None:
    private = loader(drop_last=True)
    assert private.span_steps == tuple(size // BATCH for size in SIZES) and len(batches(private)) == len(private)


def test_the_rate_is_the_spans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = draws.poisson_indices

    def watched(generator: Any, size: int, rate: float) -> Any:
        asked.append((size, rate))
        return original(generator, size, rate)

    monkeypatch.setattr(draws, "poisson_indices", watched)
    batches(loader())
    assert asked == [(SIZES[s], BATCH / SIZES[s]) for s, count in enumerate(STEPS) for _ in range(count)]


def test_every_unit_joins_at_its_spans_rate() -> None:
    private, epochs = loader(), 150
    joined = np.zeros(sum(SIZES))
    for _, _, where in batches(private, epochs):
        joined[where] += 1
    for span, period in enumerate(np.unique(PERIODS)):
        draws_of_unit, rate = epochs * STEPS[span], BATCH / SIZES[span]
        z = (joined[period == PERIODS] - draws_of_unit * rate) / np.sqrt(draws_of_unit * rate * (1 - rate))
        assert stats.chi2.sf((z**2).sum(), SIZES[span]) > 1e-3


@pytest.mark.parametrize(
    ("workers", "places"), [(0, [1, 4, 5, 6, 13, 18, 19, 20, 30]), (2, [5, 20])], ids=["alone", "workers"]
)
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_pass_goes_on_anywhere(poisson: bool, limit: int | None, workers: int, places: list[int]) -> None:
    whole = batches(loader(poisson, limit), epochs=2)
    for at in places:
        first = loader(poisson, limit, num_workers=workers)
        seen: list[Any] = []
        while first.state_dict()["step"] < at:
            for batch in first:
                seen.append((first.current.step, first.current.span, batch[0].tolist()))
                if first.current.last and first.current.step + 1 == at:
                    break
        second = loader(poisson, limit, num_workers=workers)
        second.load_state_dict(first.state_dict())
        assert second.next_span == next(span for step, span, _ in whole if step == at)
        while second.state_dict()["step"] < 2 * sum(STEPS):
            seen += batches(second)
        assert seen == whole, at


@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False}], ids=["poisson", "shuffled"])
@pytest.mark.parametrize("mechanism", [DPSGD(), FEST(k=9, epsilon=1.0)], ids=lambda m: m.name)
def test_one_period_is_no_stream(mechanism: Mechanism, options: dict) -> None:
    runs = []
    for chosen in (None, Stream(np.full(149, 6), "parallel"), Stream(np.full(149, 6), "sequential", 3)):
        run = start(mechanism, stream=chosen, **options)
        train(*run[1:], epochs=2)
        runs.append(run)
    for run in runs[1:]:
        assert run[0].get_epsilon(1e-5) == runs[0][0].get_epsilon(1e-5) > 0
        for name, value in runs[0][1].state_dict().items():
            assert torch.equal(run[1].state_dict()[name], value), name


def test_empty_batches() -> None:
    data = clicks(9)
    for mechanism in (DPSGD(), FEST(k=5, epsilon=1.0, frequencies="running"), AdaFEST(threshold=1.0)):
        engine, module, optimizer, private = make_private(
            Clicks(),
            loader_of(*data, batch_size=1),
            mechanism=mechanism,
            stream=Stream(np.repeat([0, 1], (2, 7)), "parallel"),
        )
        sizes = []
        train(
            module,
            optimizer,
            private,
            epochs=4,
            each=lambda sizes=sizes, private=private: sizes.append(private.current.units),
        )
        assert 0 in sizes and engine.ledger.steps == 36
        assert engine.ledger.taken(0) == 8 and engine.ledger.taken(1) == 28


# ---------------------------------------------------------------------- what a unit can change


def clipped_sums(run: tuple, epochs: int = 1) -> list[tuple[int, dict[str, Tensor]]]:
    """Span and clipped sums of every step, with weights that stay as they are and without noise."""
    engine, module, optimizer, private = run
    found: list[tuple[int, dict[str, Tensor]]] = []

    def keep(*_: Any) -> None:
        sums = {n: (p.grad.to_dense() * BATCH).clone() for n, p in module.named_parameters() if p.grad is not None}
        found.append((private.current.span, sums))

    optimizer.inner.register_step_pre_hook(keep)
    train(module, optimizer, private, epochs)
    return found


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_neighbour_replay(monkeypatch: pytest.MonkeyPatch, where: int, limit: int | None) -> None:
    """One unit more in a span: all other spans' sums stay bit for bit, that span's move by at most C."""
    clip = 0.3
    # The same coins for both data sets; the sizes of the spans, and so the rates, are public.
    monkeypatch.setattr(draws, "poisson_indices", lambda g, size, rate: np.flatnonzero(g.random(200)[:size] < 0.5))
    new = clicks(1, seed=5)
    found = []
    for more in (0, 1):
        torch.manual_seed(0)
        module = Clicks()
        data = (
            [torch.cat([a, 10 * b] if a.is_floating_point() else [a, b]) for a, b in zip(clicks(149), new)]
            if more
            else clicks(149)
        )
        periods = np.append(PERIODS, [3, 4, 9][where]) if more else PERIODS
        found.append(clipped_sums(make_private(
            module, loader_of(*data, batch_size=BATCH), optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            noise_multiplier=0.0, max_grad_norm=clip, stream=stream(periods=periods), max_physical_batch=limit,
        )))  # fmt: skip
    moved = []
    own = {s: [x for x in zip(*found) if x[0][0] == s] for s in range(3)}
    if where == 0:  # 41 examples are a step more than 40; the steps of later spans then have other numbers
        assert len(found[1]) == len(found[0]) + 1
        found[1] = found[1][:5]
        own = {0: list(zip(found[0][:5], found[1]))}
    for span, pairs in own.items():
        for (a, before), (b, after) in pairs:
            assert a == b == span
            distance = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in before))
            if span == where:
                moved.append(distance)
            else:
                assert all(torch.equal(before[n], after[n]) for n in before)
    assert 0.9 * clip < max(moved) <= clip * (1 + 1e-5) and min(moved) == 0


@dataclass(frozen=True)
class Watched(FEST):
    """FEST that keeps what it was told about the data."""

    name: ClassVar[str] = "watched_fest"
    seen: list[dict[str, Tensor]] = field(default_factory=list, compare=False)

    def prepare(self, tables: Any, count: Any, key: Any, memory: Any = None) -> dict[str, Tensor]:
        def watched(clip: float | None) -> dict[str, Tensor]:
            self.seen.append(count(clip))
            return self.seen[-1]

        return super().prepare(tables, watched, key, memory)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key != "seen"}


def counts_of(
    frequencies: Any, composition: Any, data: Sequence[Tensor], periods: np.ndarray, **options: Any
) -> list[Tensor]:
    mechanism = Watched(k=5, epsilon=1.0, frequencies=frequencies, **options)
    run = make_private(
        Clicks(), loader_of(*data, batch_size=BATCH), mechanism=mechanism, stream=Stream(periods, composition)
    )
    train(*run[1:], epochs=2)
    return [counts["table.weight"] for counts in mechanism.seen]


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
@pytest.mark.parametrize("method", ["gaussian", "gumbel"])
def test_what_is_counted(composition: Any, method: Any) -> None:
    ids, x, y = clicks(149)
    whole = [torch.bincount(ids[p == PERIODS], minlength=50).double() for p in (3, 4, 9)]
    share = 3 if composition == "sequential" else 1
    (everything,) = counts_of("all", composition, (ids, x, y), PERIODS, method=method)
    torch.testing.assert_close(everything, (whole[0] + whole[1] + whole[2]) / share)
    (first,) = counts_of("first", composition, (ids, x, y), PERIODS, method=method)
    assert torch.equal(first, whole[0])
    if method == "gaussian":
        each = counts_of("running", composition, (ids, x, y), PERIODS)
        assert len(each) == 3 and all(torch.equal(a, b) for a, b in zip(each, whole))  # each once in two passes


@pytest.mark.parametrize("method", ["gaussian", "gumbel"])
def test_a_unit_in_every_span_moves_all_frequencies_by_no_more_than_was_paid_for(method: Any) -> None:
    """The same row in each of three spans: counted together, an unclipped sum would move by three."""
    ids, x, y = clicks(149)
    new_ids, periods = torch.full((3,), 17), np.append(PERIODS, [3, 4, 9])
    more = (torch.cat([ids, new_ids]), torch.cat([x, x[:3]]), torch.cat([y, y[:3]]))
    before = counts_of("all", "sequential", (ids, x, y), PERIODS, method=method)[0]
    after = counts_of("all", "sequential", more, periods, method=method)[0]
    assert float((after - before).norm()) == pytest.approx(1.0)  # count_clip, or one unit
    # Running frequencies are paid for span by span.
    if method == "gaussian":
        each = zip(
            counts_of("running", "sequential", (ids, x, y), PERIODS), counts_of("running", "sequential", more, periods)
        )
        assert [float((b - a).norm()) for a, b in each] == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- what it costs


SELECTION = FEST(k=20, epsilon=0.7)
CHOICE = SELECTION.setup_event()
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


def calibrated(
    mechanism: Mechanism | None, composition: Any, epochs: int = 1, target: float = 2.0, **options: Any
) -> tuple:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(seed=options.pop("seed", 7))
    module, optimizer, private = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(149), batch_size=BATCH), target_epsilon=target, target_delta=1e-5, epochs=epochs,
        max_grad_norm=1.0, mechanism=mechanism, stream=stream(composition), **options,
    )  # fmt: skip
    return engine, module, optimizer, private


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


# ---------------------------------------------------------------------- FEST's frequencies


def test_running_frequencies_follow_the_spans() -> None:
    """With a generous budget: the most frequent rows of the data so far. Rows that leave keep their values."""
    ids = torch.cat([torch.arange(5).repeat(12), torch.arange(10, 15).repeat(40), torch.arange(20, 25).repeat(80)])
    periods = np.repeat([0, 1, 2], (60, 200, 400))
    rare = torch.randint(50, (660,), generator=torch.Generator().manual_seed(0))
    ids = torch.where(torch.arange(660) % 12 == 0, rare, ids)
    for mechanism in (
        FEST(k=10, epsilon=30.0, frequencies="running"),
        AdaFEST(threshold=-100.0, preselect=FEST(k=10, epsilon=30.0, frequencies="running")),
    ):
        engine, module, optimizer, private = make_private(
            Clicks(), loader_of(ids, torch.randn(660, 3), torch.ones(660), batch_size=20), mechanism=mechanism,
            stream=Stream(periods, "parallel"),
        )  # fmt: skip
        engine.prepare()
        assert set(range(5)) < set(optimizer.prepared["table.weight"].tolist())
        chosen: list[tuple[int, list[int]]] = []
        tables: list[Tensor] = []

        def note(
            chosen: Any = chosen, tables: Any = tables, o: Any = optimizer, p: Any = private, m: Any = module
        ) -> None:
            rows = o.prepared["table.weight"].tolist()
            tables.append(m.table.weight.detach().clone())
            if not chosen or chosen[-1] != (p.current.span, rows):
                chosen.append((p.current.span, rows))

        train(module, optimizer, private, epochs=2, each=note)
        spans = [span for span, _ in chosen]
        assert spans == [0, 1, 2, 0, 1, 2]  # one selection a span, and in the second pass the last one throughout
        assert set(range(5)) | set(range(10, 15)) == set(chosen[1][1])
        assert set(range(10, 15)) | set(range(20, 25)) == set(chosen[2][1])
        assert chosen[3][1] == chosen[4][1] == chosen[5][1] == chosen[2][1]
        assert [entry.scope for entry in engine.ledger.entries if entry.setup] == [0, 1, 2]
        # Row 0 was trained in the first two spans (13 steps) and never after.
        assert not torch.equal(tables[11][0], tables[12][0]) and torch.equal(tables[12][0], tables[-1][0])
        assert torch.equal(tables[2][20], tables[0][20]) and not torch.equal(tables[12][20], tables[-1][20])
        assert optimizer.preparation.state.released["table.weight"].shape == (50,)


def test_noise_is_fresh_in_every_span_and_has_the_scale_that_was_paid_for() -> None:
    data = (torch.zeros(60, dtype=torch.long), torch.randn(60, 3), torch.ones(60))
    mechanism = FEST(k=5, epsilon=0.7, frequencies="running")
    run = make_private(
        Clicks(rows=4000), loader_of(*data, batch_size=10), mechanism=mechanism,
        stream=Stream(np.repeat([0, 1, 2], 20), "sequential"),
    )  # fmt: skip
    sums = [torch.zeros(4000, dtype=torch.float64)]

    def note() -> None:
        if not torch.equal(sums[-1], run[2].preparation.state.released["table.weight"]):
            sums.append(run[2].preparation.state.released["table.weight"].clone())

    train(*run[1:], epochs=2, each=note)
    scale = CHOICE.noise_multiplier  # type: ignore[union-attr]
    noise = [(b - a)[1:].numpy() / scale for a, b in pairwise(sums)]  # nobody touches rows from 1 on
    assert len(noise) == 3
    for part in noise:
        assert stats.kstest(part, "norm").pvalue > 1e-3
        assert stats.kstest(part * 1.2, "norm").pvalue < 1e-3
    assert abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frequencies": "daily"}, "'all', 'first' or 'running'"),
        ({"frequencies": "running", "method": "gumbel"}, "Gumbel noise pays for the names"),
        ({"frequencies": "first", "counts": {"a": torch.ones(3)}}, "leave it out"),
        ({"frequencies": "running", "counts": {"a": torch.ones(3)}}, "leave it out"),
    ],
)
def test_frequencies_that_make_no_sense(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FEST(**options)


@pytest.mark.parametrize("frequencies", ["first", "running"])
def test_frequencies_of_spans_need_a_stream(frequencies: Any) -> None:
    chosen = FEST(k=5, frequencies=frequencies)
    for mechanism in (chosen, AdaFEST(preselect=chosen)):
        with pytest.raises(UnsupportedError, match=r"needs data in periods.*sparsedp\.Stream"):
            start(mechanism, stream=None)


@dataclass(frozen=True)
class Rows(Mechanism):
    """A mechanism from before there were streams: it knows nothing of them."""

    name: ClassVar[str] = "rows_of_old"
    selects: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy"

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        return {name: torch.tensor([1, 2]) for name in step.tables}


def test_any_mechanism_works_on_a_stream() -> None:
    run = start(Rows(), "sequential")
    train(*run[1:])
    assert run[0].get_epsilon(1e-5) == start(DPSGD(), "sequential")[0].plan.epsilon(sum(STEPS), 1e-5)


# ---------------------------------------------------------------------- checkpoints


RESUMED: dict[str, Any] = {
    "dpsgd": (DPSGD(), {}),
    "first": (FEST(k=12, epsilon=1.0, frequencies="first"), {}),
    "running": (FEST(k=12, epsilon=1.0, frequencies="running"), {}),
    "running, parts": (FEST(k=12, epsilon=1.0, frequencies="running"), {"max_physical_batch": 3}),
    "running, shuffled": (FEST(k=12, epsilon=1.0, frequencies="running"), {"poisson_sampling": False}),
    "adafest+ running": (AdaFEST(threshold=1.0, preselect=FEST(k=12, epsilon=1.0, frequencies="running")), {}),
}


@pytest.mark.parametrize("name", list(RESUMED))
def test_resumed_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    mechanism, options = RESUMED[name]
    whole = start(mechanism, **options)
    steps(whole, 38)
    for at in (3, 5, 19, 24):  # within a span, at a border, at the end of a pass, in the second
        first, second = (start(mechanism, **options) for _ in range(2))
        steps(first, at)
        first[0].save_checkpoint(tmp_path / "c.pt")
        second[0].load_checkpoint(tmp_path / "c.pt")
        assert second[0].ledger == first[0].ledger
        steps(second, 38 - at)
        assert second[0].ledger == whole[0].ledger and second[0].ledger.steps == 38
        assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)
        for one, other in (
            (whole[1].state_dict(), second[1].state_dict()),
            (whole[2].preparation.state.released, second[2].preparation.state.released),
        ):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        assert whole[2].preparation.state.scopes == second[2].preparation.state.scopes


def test_resumed_with_workers(tmp_path: Path) -> None:
    whole = start(RESUMED["running"][0])
    steps(whole, 38)
    first = start(RESUMED["running"][0], workers=2)
    steps(first, 6)
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start(RESUMED["running"][0], workers=2)
    second[0].load_checkpoint(tmp_path / "c.pt")
    steps(second, 32)
    assert second[0].ledger == whole[0].ledger
    assert torch.equal(second[1].state_dict()["table.weight"], whole[1].state_dict()["table.weight"])


def test_an_unseeded_run_goes_on_with_fresh_noise_and_pays_no_release_twice(tmp_path: Path) -> None:
    mechanism = FEST(k=12, epsilon=1.0, frequencies="running")
    first = start(mechanism, seed=None)
    steps(first, 7)
    first[0].save_checkpoint(tmp_path / "c.pt")
    sums = []
    for _ in range(2):
        again = start(mechanism, seed=None)
        again[0].load_checkpoint(tmp_path / "c.pt")
        steps(again, 31)
        assert [entry.scope for entry in again[0].ledger.entries if entry.setup] == [0, 1, 2]
        assert again[0].get_epsilon(1e-5) == again[0].plan.epsilon(38, 1e-5)
        sums.append(
            again[2].preparation.state.released["table.weight"] - first[2].preparation.state.released["table.weight"]
        )
    assert not torch.equal(*sums)  # the third span's noise is drawn anew


def test_going_back_keeps_what_was_seen_in_its_scope(tmp_path: Path) -> None:
    run = start(FEST(k=12, epsilon=1.0, frequencies="running"), seed=None)
    engine = run[0]
    steps(run, 4)
    engine.save_checkpoint(tmp_path / "c.pt")
    steps(run, 5)  # the first span anew, as after a break
    steps(run, 7)  # and once more, into the second
    before = engine.get_epsilon(1e-5)
    engine.load_checkpoint(tmp_path / "c.pt")
    assert engine.ledger.steps == 4 and engine.ledger.abandoned == 12
    assert [engine.ledger.taken(s) for s in range(3)] == [14, 2, 0]
    assert engine.get_epsilon(1e-5) == before
    old = run[2].preparation.state.released["table.weight"].clone()
    steps(run, 3)  # comes to the second span again, which is counted again, with other noise, and paid for again
    assert engine.ledger.setups(1) == 2 and not torch.equal(run[2].preparation.state.released["table.weight"], old)
    wanted = [
        composed((step_event(0), 15), (FEST(epsilon=1.0).setup_event(), 1)),  # type: ignore[arg-type]
        composed((step_event(1), 4), (FEST(epsilon=1.0).setup_event(), 2)),  # type: ignore[arg-type]
    ]
    assert engine.get_epsilon(1e-5) == max(epsilon_of(event, 1e-5) for event in wanted)


def test_a_budget_does_not_pay_for_a_second_count(tmp_path: Path) -> None:
    run = calibrated(FEST(k=12, epsilon=0.5, frequencies="running"), "parallel", epochs=3, seed=None)
    engine = run[0]
    steps(run, 4, epochs=9)
    engine.save_checkpoint(tmp_path / "c.pt")
    for _ in range(2):
        engine.load_checkpoint(tmp_path / "c.pt")
        steps(run, 1, epochs=9)  # within the first span, which was counted before the checkpoint
    engine.load_checkpoint(tmp_path / "c.pt")
    steps(run, 2, epochs=9)
    engine.load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(SparseDPError, match=r"already counted these data.*exceed its privacy budget"):
        steps(run, 2, epochs=9)
    assert engine.get_epsilon() <= 2.0


def test_checkpoints_belong_to_their_stream(tmp_path: Path) -> None:
    first = start()
    steps(first, 3)
    first[0].save_checkpoint(tmp_path / "c.pt")
    moved = PERIODS.copy()
    moved[np.flatnonzero(PERIODS == 3)[0]] = 4
    for other in (stream("sequential"), stream(span=2), stream(periods=moved), None):
        with pytest.raises(CheckpointError, match="stream"):
            start(stream=other)[0].load_checkpoint(tmp_path / "c.pt")
    renamed = start(stream=stream(periods=PERIODS * 2 + 100))  # the same spans under other names
    renamed[0].load_checkpoint(tmp_path / "c.pt")
    assert renamed[0].ledger == first[0].ledger


def test_plan_round_trip() -> None:
    for options in ({}, {"composition": "sequential"}, {"stream": None}):
        plan = start(FEST(k=3), **options)[0].plan
        again = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan and again.hash == plan.hash
    text = json.dumps(start()[0].plan.to_dict())
    assert '"sizes": [40, 61, 48]' in text and len(text) < 2000  # no list of everybody's periods


# ---------------------------------------------------------------------- the statement


def test_statement() -> None:
    said = {}
    for composition in ("parallel", "sequential"):
        run = start(FEST(k=9, epsilon=1.0, frequencies="running"), composition)
        train(*run[1:])
        said[composition] = str(run[0].statement(1e-5))
        values = run[0].statement(1e-5).to_dict()
        assert values["epsilon"] == run[0].get_epsilon(1e-5) and values["settings"]["frequencies"] == "running"
        for words in (
            "3 spans of 1 period(s)",
            "sizes (40, 61, 48), are public",
            "more than one example in a span",
            "0.131 to 0.2",
        ):
            assert words in said[composition], words
    assert "composed in parallel" in said["parallel"] and "one span only, as was declared" in said["parallel"]
    assert "protects:     one example;" in said["parallel"] and "Units with data in several spans" in said["parallel"]
    assert "composed in sequence" in said["sequential"] and "at most one example in each span" in said["sequential"]
    assert "one example in every span" in said["sequential"] and "in several spans" not in said["sequential"]
    assert "period" not in str(start(stream=None)[0].statement(1e-5))


# ---------------------------------------------------------------------- the command line


TINY = """
data: {kind: generated, rows: 1200, scale: 0.01, days: 6, drift: 0.2, held_out: [4, 5]}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 100, log_every: 1, evaluate_every: 6, seed: 1, check: false, threads: 1}
privacy: {target_epsilon: 5, max_grad_norm: 2, mechanism: {name: fest, k: 300, epsilon: 1.0, split: tables, frequencies: running}}
stream: {composition: parallel, evaluate_next: true}
"""
OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Days(TensorDataset):
    def __init__(self, first, days, each=40):
        ids = torch.arange(days * each) % 20
        super().__init__(ids, (ids % 2).float())
        self.periods = [first + i // each for i in range(days * each)]

def data(first=3):
    return Days(0, 3), Days(first, 2)

def no_periods():
    ids = torch.arange(100) % 20
    return TensorDataset(ids, (ids % 2).float())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 1)
    def forward(self, ids):
        return self.table(ids).squeeze(1)

def model(training):
    return Model()

def squared(output, target):
    return (output - target).square().mean()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("tiny.yaml").write_text(TINY)
    Path("mine.py").write_text(OWN)
    return tmp_path


def logged(run: str, kind: str) -> list[dict[str, Any]]:
    lines = Path(run, "private/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_a_run_over_days(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    out = capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["steps"] == 16 and 4.8 < result["epsilon"] <= 5
    assert set(result["periods"]) == {"4", "5"}
    for values in result["periods"].values():
        assert values["examples"] == 200 and 0 < values["auc"] < 1 and values["log_loss"] > 0
    assert [row["span"] for row in logged("run", "step")] == 2 * [0, 0, 1, 1, 2, 2, 3, 3]
    evaluations = logged("run", "evaluation")
    before = [(row["step"], row["period"]) for row in evaluations if "period" in row]
    assert before == [(2, 1), (4, 2), (6, 3)]  # in the first pass only
    held_out = [row for row in evaluations if "period" not in row]
    assert [row["step"] for row in held_out] == [6, 12, 16] and held_out[-1]["periods"] == result["periods"]
    for shown in ("Stream: periods 0 to 3, 1 at a time; the 4 spans compose in parallel", "period 3  loss", "Period 2, before",
                  "composed in parallel", "period 5"):  # fmt: skip
        assert shown in out
    plan = json.loads(Path("run/release/plan.json").read_text())["stream"]
    assert plan["sizes"] == [200] * 4 and plan["steps"] == [2] * 4


def test_metrics_by_period_are_those_of_the_period(folder: Path) -> None:
    from sparsedp.cli.evaluation import evaluate, evaluate_on
    from sparsedp.cli.prepare import load_data, make_model

    config = load_config("tiny.yaml")
    data = load_data(config)
    model, loss = make_model(config, data.training), config.make_loss()
    found = evaluate(config, model, loss, data)
    whole = evaluate_on(config, model, loss, data.held_out, data.collate)
    assert found["auc"] == pytest.approx(whole["auc"]) and found["log_loss"] == pytest.approx(whole["log_loss"])
    for period in (4, 5):
        alone = data.held_out.subset(np.flatnonzero(data.held_out.periods == period))  # type: ignore[union-attr]
        wanted = evaluate_on(config, model, loss, alone, data.collate)
        assert {**wanted, "examples": 200} == found["periods"][str(period)]


@pytest.mark.parametrize("at", [3, 4])  # within a day, and between two
def test_a_resumed_run_equals_the_whole_one(folder: Path, at: int) -> None:
    config = load_config("tiny.yaml", ["training.epochs=1", "training.evaluate_every=3"])
    run_training(config, Path("whole"))
    assert not run_training(config, Path("run"), should_stop=lambda step: step == at).finished
    assert run_training(config, Path("run"), resume=True).finished
    weights = [torch.load(f"{run}/release/model.pt", weights_only=True) for run in ("whole", "run")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    for kind in ("step", "evaluation"):
        rows = [
            [{k: v for k, v in row.items() if k != "seconds"} for row in logged(run, kind)] for run in ("whole", "run")
        ]
        assert rows[0] == rows[1]
    said = [json.loads(Path(f"{run}/release/statement.json").read_text()) for run in ("whole", "run")]
    assert "went on from" in said[1]["assumptions"].pop() and said[0] == said[1]


def test_composition_changes_the_noise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = {}
    for composition in ("parallel", "sequential"):
        changes = [f"--set=stream.composition={composition}", "--set=privacy.mechanism={name: dpsgd}"]
        assert main(["plan", "tiny.yaml", "--no-measure", "--json", *changes]) == 0
        report = json.loads(capsys.readouterr().out)
        noise[composition] = report["noise_multiplier"]
        assert 4.9 < report["epsilon"] <= 5 and report["steps"] == 16 and report["sample_rate"] == 0.5
        assert report["stream"]["composition"] == composition and report["stream"]["sizes"] == [200] * 4
    assert noise["parallel"] < 0.8 * noise["sequential"]
    assert main(["plan", "tiny.yaml"]) == 0
    assert "4 spans of 1 period(s), composed in parallel" in " ".join(capsys.readouterr().out.split())


def test_several_days_at_a_time(folder: Path) -> None:
    result = run_training(load_config("tiny.yaml", ["stream.span=2"]), Path("run"))
    assert result.finished and [row["span"] for row in logged("run", "step")] == 2 * [0, 0, 0, 0, 1, 1, 1, 1]
    before = [(row["step"], row["period"]) for row in logged("run", "evaluation") if "period" in row]
    assert before == [(4, 2), (4, 3)]


def test_a_click_log_of_several_files_has_periods(folder: Path) -> None:
    write_click_log(generated_click_log(1000, scale=0.01, days=5), "day_{day}.tsv")
    data = "{kind: clicklog, paths: day_*.tsv, cache_dir: cache, vocabulary: {kind: hash, buckets: 50}, held_out: [4]}"
    changes = [f"data={data}", "stream.composition=sequential", "training.epochs=1", "privacy.mechanism={name: dpsgd}"]
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert result.finished and set(result.metrics["periods"]) == {"4"}
    assert [row["span"] for row in logged("run", "step")] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "composed in sequence" in Path("run/release/statement.txt").read_text()


def test_own_data_have_periods(folder: Path) -> None:
    changes = ["data={kind: 'mine:data'}", "model={kind: 'mine:model'}", "loss=mine:squared", "training.batch_size=20",
               "privacy.mechanism={name: dpsgd}"]  # fmt: skip
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert result.finished and set(result.metrics["periods"]) == {"3", "4"}
    each = [values["loss"] for values in result.metrics["periods"].values()]
    assert result.metrics["loss"] == pytest.approx(sum(each) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["stream={}"], "stream.composition: missing; say 'parallel' if each unit has data in one span"),
        (["stream={span: 2}"], "Nothing in the data tells which it is"),
        (["stream.composition=both"], "expected parallel or sequential"),
        (["stream.span=0"], "stream.span"),
        (["data.days=1", "data.held_out=0.1"], "stream: the data have no periods"),
        (["data={kind: 'mine:no_periods'}", "model={kind: 'mine:model'}"], "an attribute `periods`"),
        (["data={kind: 'mine:data', options: {first: 2}}", "model={kind: 'mine:model'}"], "period 2 is held out"),
        (["data.held_out=[2]"], "data.held_out: period 2 is held out, and the stream trains on periods up to 5"),
        (["data.held_out=0.1"], "data.held_out: period 5 is held out, and the stream trains on periods up to 5"),
        (["training.batch_size=300"], "exceeds the 200 examples of span 0 (period 0)"),
        (["stream=null"], "frequencies='running' needs data in periods"),
    ],
)
def test_refusals_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str], changes: list, message: str) -> None:
    assert main(["train", "tiny.yaml", "--quiet", *[f"--set={change}" for change in changes]]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("sparsedp: error: ") and err.count("\n") == 1 and message in err
    assert not Path("runs").exists()


def test_resuming_may_change_what_is_logged_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(load_config("tiny.yaml"), Path("run"), should_stop=lambda step: step == 1)
    assert main(["train", "--resume", "run", "--set", "stream.composition=sequential"]) == 2
    assert "another stream.composition" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--quiet", "--set", "stream.evaluate_next=false"]) == 0
    assert all("period" not in row for row in logged("run", "evaluation"))
