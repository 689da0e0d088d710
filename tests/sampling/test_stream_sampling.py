"""Streams: spans in order of time, each sampled alone, and what one unit can change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sparsedp import DPSGD, FEST, AdaFEST, ConfigError, Stream, UnsupportedError
from sparsedp.mechanisms import Mechanism
from sparsedp.sampling import PrivateLoader, draws
from streams import BATCH, KEY, PERIODS, SIZES, STEPS, start, stream
from support import Clicks, clicks, loader_of, make_private, train


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
    return PrivateLoader(numbers, key=KEY, poisson=poisson, max_physical_batch=limit, stream=stream())


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


def test_spans_have_the_names_of_dates_where_it_is_known_what_a_period_is() -> None:
    days = Stream(np.array([19675, 19676, 19678]), composition="parallel", span=2, every="day")
    assert days.names == ("periods 2023-11-14 to 2023-11-15", "period 2023-11-17")
    assert Stream(np.array([472_213]), composition="parallel", every="hour").names == ("period 2023-11-14T13:00",)
    assert Stream(np.array([2810]), composition="parallel", every="week").names == ("period 2023-11-09",)
    assert Stream(np.array([2**31 - 1]), composition="parallel", every="week").names == (f"period {2**31 - 1}",)
    with pytest.raises(ConfigError, match="every must be hour, day, week or None; got 'month'"):
        Stream(np.array([1]), composition="parallel", every="month")  # type: ignore[arg-type]
