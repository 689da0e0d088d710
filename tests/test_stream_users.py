"""unit="user" together with a stream: users are sampled within a span, and protected with all that they have."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import DPSGD, FEST, AdaFEST, LazyDP, Stream, UnsupportedError
from sparsedp.accounting import Ledger, epsilon_of
from sparsedp.mechanisms import Mechanism
from sparsedp.noise import RandomKey
from sparsedp.sampling import PrivateLoader, Share, Users, poisson_indices
from streams import composed
from support import Clicks, clicks, make_private, train

COUNT, BATCH = 150, 6
KEY = RandomKey.from_seed(5)
DRAW = np.random.default_rng(0)
PERIODS = DRAW.permutation(np.repeat([3, 4, 9], [40, 62, 48]))
USERS = DRAW.integers(0, 45, COUNT) * 7  # in several spans, with several examples in some
APART = (PERIODS * 100 + DRAW.integers(0, 15, COUNT)).astype(np.int64)  # each in one span
SPANS = (3, 4, 9)


def sizes(users: np.ndarray = USERS) -> tuple[int, ...]:
    return tuple(len(np.unique(users[period == PERIODS])) for period in SPANS)


def loader_of(batch_size: int = BATCH, count: int = COUNT, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*clicks(count)), batch_size=batch_size, shuffle=True, **options)


def start(mechanism: Mechanism | None = None, composition: Any = "sequential", **options: Any) -> tuple:
    torch.manual_seed(0)
    stream = options.pop("stream", Stream(PERIODS, composition))
    users = options.pop("users", APART if composition == "parallel" else USERS)
    loader = loader_of(num_workers=options.pop("workers", 0))
    return make_private(Clicks(), loader, mechanism=mechanism, unit="user", users=users, stream=stream, **options)


def taken(run: tuple, count: int) -> None:
    """Takes some steps, and stops as a killed run would."""
    engine, module, optimizer, loader = run
    for ids, x, y in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
        optimizer.step()
        count -= bool(loader.current.last)
        if not count:
            return


# ------------------------------------------------------------------ who is drawn, and what they bring


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [None, 2])
def test_users_of_a_span_are_drawn_and_bring_their_examples_in_it(limit: int | None, workers: int) -> None:
    data = TensorDataset(torch.arange(COUNT))
    users, stream = Users.of(USERS, COUNT, limit), Stream(PERIODS, "sequential")
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)
    private = PrivateLoader(loader, key=KEY, users=users, stream=stream)
    there = [np.unique(USERS[period == PERIODS]) for period in SPANS]
    steps = [math.ceil(len(ids) / BATCH) for ids in there]
    assert private.span_steps == tuple(steps) and private.dataset_size == len(np.unique(USERS))
    assert private.sample_rate == BATCH / min(map(len, there))
    spans = []
    for _ in range(2):
        for (places,) in private:
            info, where = private.current, SPANS[private.current.span]
            spans.append(info.span)
            drawn = there[info.span][
                poisson_indices(KEY.generator(info.step), len(there[info.span]), BATCH / len(there[info.span]))
            ]
            if info.stand_in:
                assert not len(drawn)
                continue
            assert info.units == len(drawn)
            assert (PERIODS[places.numpy()] == where).all()
            for unit, user in enumerate(drawn):
                own = places[info.owners == unit].tolist()
                everything = np.flatnonzero((where == PERIODS) & (user == USERS)).tolist()
                if limit is None:
                    assert own == everything
                else:
                    assert len(own) == min(limit, len(everything)) == len(set(own)) and set(own) <= set(everything)
    assert spans == [span for _ in range(2) for span, count in enumerate(steps) for _ in range(count)]
    brought = [[min(limit or 99, n) for n in Counter(USERS[p == PERIODS].tolist()).values()] for p in SPANS]
    expected = sum(count * BATCH * np.mean(each) for count, each in zip(steps, brought)) / sum(steps)
    assert private.expected_units == BATCH and private.expected_examples == pytest.approx(expected)


def test_physical_batches_hold_whole_users_of_the_span() -> None:
    most = max(Counter(zip(USERS.tolist(), PERIODS.tolist())).values())
    assert most < max(Counter(USERS.tolist()).values())  # more in all spans together
    whole, parts = start(), start(max_physical_batch=most)
    train(*whole[1:])
    infos = []
    train(*parts[1:], each=lambda: infos.append(parts[3].current))
    assert any(not info.first for info in infos) and all(info.examples <= most for info in infos)
    for name, value in whole[1].state_dict().items():
        torch.testing.assert_close(value, parts[1].state_dict()[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(UnsupportedError, match=f"of up to {most} examples"):
        start(max_physical_batch=most - 1)


@pytest.mark.parametrize("rate", [None, 0.2])
def test_ranks_divide_the_batches_and_the_counts_that_one_process_has(rate: float | None) -> None:
    def made(share: Share | None) -> PrivateLoader:
        users, stream = Users.of(USERS, COUNT, 2), Stream(PERIODS, "sequential", sample_rate=rate)
        loader = DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=BATCH, shuffle=True)
        return PrivateLoader(loader, key=KEY, users=users, stream=stream, share=share)

    def batches(loader: PrivateLoader) -> list[tuple[int, list[tuple[int, ...]]]]:
        found = []
        for (places,) in loader:
            info = loader.current
            own = [] if info.stand_in else [tuple(places[info.owners == unit].tolist()) for unit in range(info.units)]
            found.append((info.span, own))
        return found

    one, *ranks = (batches(made(share)) for share in (None, Share(0, 2), Share(1, 2)))
    assert [(span, a + b) for (span, a), (_, b) in zip(*ranks)] == one
    alone, *parts = (made(share) for share in (None, Share(0, 2), Share(1, 2)))
    for span, size in enumerate(sizes()):
        everyone = np.arange(size)
        counted = [
            [int(place) for examples, _ in loader.counted_users(everyone, 5, span) for place in examples]
            for loader in (alone, *parts)
        ]
        assert counted[0] == counted[1] + counted[2] and (PERIODS[counted[0]] == SPANS[span]).all()


def test_spans_of_users_whose_ids_are_far_apart() -> None:
    users = Users.of([50, -0, 50, 7, 7, 50], 6)
    first, second = users.in_spans([np.array([0, 1, 3]), np.array([2, 4, 5])])
    assert first.ids.tolist() == [0, 7, 50] and second.ids.tolist() == [7, 50]  # type: ignore[union-attr]
    assert [first.order[first.begin[i] : first.begin[i + 1]].tolist() for i in range(3)] == [[1], [3], [0]]
    assert [sorted(second.order[second.begin[i] : second.begin[i + 1]].tolist()) for i in range(2)] == [[4], [2, 5]]


# ------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
def test_ledger_epsilon_and_plan_against_events_built_by_hand(composition: Any) -> None:
    engine, module, optimizer, loader = start(composition=composition)
    train(module, optimizer, loader, epochs=2)
    units = sizes(APART if composition == "parallel" else USERS)
    events = [
        (PoissonSampledDpEvent(BATCH / size, GaussianDpEvent(1.0)), 2 * math.ceil(size / BATCH)) for size in units
    ]
    for span, (event, count) in enumerate(events):
        assert sum(e.count for e in engine.ledger.entries if (e.event, e.scope) == (event, span)) == count
    assert sum(entry.count for entry in engine.ledger.entries) == sum(count for _, count in events)

    def epsilon(*parts: tuple) -> float:
        ledger = Ledger()
        for event, count in parts:
            ledger.record(event, count)
        return epsilon_of(ledger, 1e-4, "pld")

    wanted = max(map(epsilon, events)) if composition == "parallel" else epsilon(*events)
    assert engine.get_epsilon(1e-4) == pytest.approx(wanted, rel=1e-6)
    assert engine.plan.epsilon(engine.ledger.steps, 1e-4) == engine.get_epsilon(1e-4)
    assert engine.plan.stream.sizes == units  # type: ignore[union-attr]


def test_calibration_meets_the_target() -> None:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader_of(), target_epsilon=3.0,
        target_delta=1e-4, epochs=2, max_grad_norm=1.0, unit="user", users=USERS, stream=Stream(PERIODS, "sequential"),
    )  # fmt: skip
    train(module, optimizer, loader, epochs=2)
    assert 2.9 < engine.get_epsilon() <= 3.0
    with pytest.raises(sparsedp.SparseDPError, match="on span 0 of the stream were taken"):
        train(module, optimizer, loader)


def test_statement_in_sequence_and_in_parallel() -> None:
    said = {}
    for composition in ("sequential", "parallel"):
        engine, module, optimizer, loader = start(composition=composition)
        train(module, optimizer, loader)
        said[composition] = engine.statement(1e-4)
    one, other = said["sequential"], said["parallel"]
    assert one.unit == other.unit == "user"
    assert one.neighbouring == "adding or removing one user, with all of their examples in all spans"
    assert other.neighbouring == "adding or removing one user, with all of their examples, which are in one span"
    assert not any("at most one" in text for text in (*one.assumptions, *one.not_covered))
    assert not any(
        "more than one" in text or "several spans" in text for text in (*other.not_covered, *one.not_covered)
    )
    assert any(text.startswith("Each user has data in one span only") for text in other.assumptions)
    assert not any("in one span only" in text for text in one.assumptions)
    in_users = f"the spans' sizes, in users ({', '.join(map(str, sizes()))}), are public"
    assert any(in_users in text for text in one.assumptions)
    assert "each with all of their examples in the span" in one.sampling and "Poisson of users" in one.sampling
    assert "sequence: the epsilon is that of all spans together" in str(one.composition)


def test_parallel_is_refused_where_a_user_is_in_several_spans() -> None:
    with pytest.raises(UnsupportedError, match=r"\d+ of 4\d users have some in several: user 0 in period 4, period 9"):
        start(stream=Stream(PERIODS, "parallel"), users=USERS)
    one = APART.copy()
    one[np.flatnonzero(PERIODS == 9)[0]] = one[np.flatnonzero(PERIODS == 4)[0]]
    user = one[np.flatnonzero(PERIODS == 4)[0]]
    with pytest.raises(
        UnsupportedError, match=rf"but 1 of \d+ users have some in several: user {user} in period 4, period 9\."
    ):
        start(stream=Stream(PERIODS, "parallel"), users=one)
    with pytest.raises(UnsupportedError, match="batch_size=6 exceeds the 1 users of span 0"):
        start(users=np.where(PERIODS == 3, 1, USERS))


# ------------------------------------------------------------------ what a user can change


def clipped_sums(
    users: np.ndarray, data: tuple[Tensor, ...], periods: np.ndarray, clip: float
) -> list[tuple[int, dict]]:
    """Span and clipped sum of every step with everybody in each batch, no noise, and weights that stay."""
    torch.manual_seed(0)
    module, found = Clicks(), []
    loader = DataLoader(TensorDataset(*data), batch_size=40, shuffle=True)
    run = make_private(
        module, loader, optimizer=torch.optim.SGD(module.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=clip,
        unit="user", users=users, stream=Stream(periods, "sequential", sample_rate=1.0),
    )  # fmt: skip

    def keep(*_: Any) -> None:
        sums = {n: p.grad.to_dense() * 40 for n, p in module.named_parameters()}
        found.append((run[3].current.span, sums))

    run[2].inner.register_step_pre_hook(keep)
    train(*run[1:])
    return found


@pytest.mark.parametrize("kept", ["two spans", "all"])
def test_neighbours_with_and_without_a_user_of_several_spans(kept: str) -> None:
    """The user has many large examples, on one row and on many. Every step moves by at most C, and those without them by nothing."""
    clip, spans = 0.4, SPANS[:2] if kept == "two spans" else SPANS
    ids, x, y = clicks(COUNT)
    more = 12 * len(spans)
    mine = (
        torch.arange(more) % 9 * (torch.arange(more) % 2),
        50 * torch.randn(more, 3, generator=torch.Generator().manual_seed(1)),
    )
    both = (torch.cat([ids, mine[0]]), torch.cat([x, mine[1]]), torch.cat([y, torch.ones(more)]))
    periods = np.append(PERIODS, np.repeat(spans, 12))
    without = clipped_sums(USERS, (ids, x, y), PERIODS, clip)
    with_them = clipped_sums(np.append(USERS, np.full(more, 10**6)), both, periods, clip)
    assert [span for span, _ in without] == [span for span, _ in with_them] == [0, 1, 2]
    for (span, before), (_, after) in zip(without, with_them):
        distance = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in before))
        if SPANS[span] in spans:
            assert 0.99 * clip < distance <= clip * (1 + 1e-5)  # 12 examples would move it by 12 C
        else:
            assert distance == 0


# ------------------------------------------------------------------ counted frequencies


def counted(frequencies: Any, users: np.ndarray, ids: Tensor, periods: np.ndarray, **options: Any) -> list[np.ndarray]:
    """What FEST was told of the data, for each choice."""
    seen: list[np.ndarray] = []

    class Watched(FEST):
        def prepare(self, tables: Any, count: Any, key: Any, memory: Any = None) -> dict[str, Tensor]:
            def watched(clip: float | None) -> dict[str, Tensor]:
                counts = count(clip)
                seen.append(counts["table.weight"].numpy().copy())
                return counts

            return super().prepare(tables, watched, key, memory)

    count = len(ids)
    loader = DataLoader(TensorDataset(ids, torch.randn(count, 3), torch.ones(count)), batch_size=BATCH, shuffle=True)
    run = make_private(
        Clicks(), loader, mechanism=Watched(k=5, epsilon=1.0, frequencies=frequencies), unit="user", users=users,
        stream=Stream(periods, "sequential"), **options,
    )  # fmt: skip
    train(*run[1:], epochs=2)
    return seen


@pytest.mark.parametrize("limit", [None, 1])
def test_what_fest_counts(limit: int | None) -> None:
    """Each user once, with what they have in what is counted: 1 / sqrt(n) for each of n rows."""
    ids = clicks(COUNT)[0]

    def wanted(mask: np.ndarray) -> np.ndarray:
        total = np.zeros(50)
        for user in np.unique(USERS[mask]):
            rows = np.unique(ids.numpy()[mask & (user == USERS)])
            total[rows] += 1 / math.sqrt(len(rows))
        return total

    options = {} if limit is None else {"max_examples_per_user": limit}
    (everything,) = counted("all", USERS, ids, PERIODS, **options)
    (first,) = counted("first", USERS, ids, PERIODS, **options)
    running = counted("running", USERS, ids, PERIODS, **options)
    if limit is None:
        np.testing.assert_allclose(everything, wanted(np.full(COUNT, True)))
        np.testing.assert_allclose(first, wanted(PERIODS == 3))
        for found, period in zip(running, SPANS):
            np.testing.assert_allclose(found, wanted(period == PERIODS))
    else:
        assert everything.sum() == len(np.unique(USERS)) and first.sum() == sizes()[0]
        assert [found.sum() for found in running] == list(sizes())
    assert len(running) == 3  # once for each span, in two passes


def test_a_user_moves_what_is_counted_by_at_most_one() -> None:
    """Their rows in all spans together, which "all" counts, and in each, which "running" pays for each time."""
    ids = clicks(COUNT)[0]
    more = 24
    users = np.append(USERS, np.full(more, 10**6))
    mine = torch.cat([ids, torch.arange(more)])
    periods = np.append(PERIODS, np.repeat(SPANS, 8))
    for frequencies, changes in (("all", 1), ("first", 1), ("running", 3)):
        before, after = counted(frequencies, USERS, ids, PERIODS), counted(frequencies, users, mine, periods)
        moved = [np.linalg.norm(b - a) for a, b in zip(before, after)]
        assert moved == pytest.approx([1.0] * changes)


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
@pytest.mark.parametrize("frequencies", ["all", "first", "running"])
def test_a_choice_is_charged_to_whom_it_counts(frequencies: Any, composition: Any) -> None:
    for chosen in (FEST(k=20, epsilon=0.7, frequencies=frequencies),):
        for mechanism in (chosen, AdaFEST(threshold=1.0, preselect=chosen)):
            engine, module, optimizer, loader = start(mechanism, composition)
            train(module, optimizer, loader, epochs=2)
            scopes = {"all": [None], "first": [0], "running": [0, 1, 2]}[frequencies]
            assert [entry.scope for entry in engine.ledger.entries if entry.setup] == scopes
            plan = engine.plan.ledger(engine.ledger.steps)
            assert epsilon_of(plan, 1e-4, "pld") == engine.get_epsilon(1e-4)
            steps = [
                (mechanism.step_event(1.0, rate), 2 * count)
                for rate, count in zip(engine.plan.sample_rates, engine.plan.stream.steps)  # type: ignore[union-attr]
            ]
            event = chosen.setup_event()
            if composition == "sequential":
                by_hand = [composed(*steps, (event, len(scopes)))]
            else:
                by_hand = [
                    composed(step, *([(event, 1)] if scopes == [None] or s in scopes else []))
                    for s, step in enumerate(steps)
                ]
            ledgers = [Ledger() for _ in by_hand]
            for ledger, found in zip(ledgers, by_hand):
                ledger.record(found)
            wanted = max(epsilon_of(ledger, 1e-4, "pld") for ledger in ledgers)
            assert engine.get_epsilon(1e-4) == pytest.approx(wanted, rel=1e-6)


# ------------------------------------------------------------------ any mechanism; resuming


@pytest.mark.parametrize(
    "mechanism",
    [
        DPSGD(), LazyDP(aggregate=False), AdaFEST(threshold=1.0, noise_ratio=2.0), FEST(k=20, epsilon=0.7, frequencies="running"),
        AdaFEST(threshold=1.0, preselect=FEST(k=20, epsilon=0.7, frequencies="first")),
    ],
    ids=lambda mechanism: mechanism.name,
)  # fmt: skip
def test_resumed_within_a_span(mechanism: Mechanism, tmp_path: Path) -> None:
    whole, first, again = (start(mechanism, max_examples_per_user=3) for _ in range(3))
    train(*whole[1:])
    taken(first, 9)  # in the second span
    assert first[3].current.span == 1 and sum(first[3].span_steps[:2]) > 9
    first[0].save_checkpoint(tmp_path / "c.pt")
    again[0].load_checkpoint(tmp_path / "c.pt")
    train(*again[1:])
    for name, value in whole[1].state_dict().items():
        torch.testing.assert_close(value, again[1].state_dict()[name], rtol=0, atol=0)
    assert whole[0].ledger.entries == again[0].ledger.entries


def test_other_users_in_the_spans_are_another_plan(tmp_path: Path) -> None:
    first = start()
    taken(first, 2)
    first[0].save_checkpoint(tmp_path / "c.pt")
    other = USERS.copy()
    other[np.flatnonzero(PERIODS == 3)[:9]] = other[np.flatnonzero(PERIODS == 3)[0]]
    with pytest.raises(sparsedp.CheckpointError, match="belongs to another plan: "):
        start(users=other)[0].load_checkpoint(tmp_path / "c.pt")


def test_a_threshold_is_found_on_users_of_each_span() -> None:
    engine, module, optimizer, loader = start(AdaFEST(threshold="auto", look_at="data"))
    assert isinstance(engine.plan.mechanism.to_dict()["found"], float)
    train(module, optimizer, loader)
    statistics = engine.touch_statistics()
    assert statistics.source == f"all {sum(sizes())} training users of all spans"
    assert [span.units for span in statistics.spans] == list(sizes())


def test_batches_without_poisson_sampling_hold_users_of_one_span() -> None:
    engine, module, optimizer, loader = start(poisson_sampling=False)
    seen: list[tuple[int, int]] = []
    train(module, optimizer, loader, each=lambda: seen.append((loader.current.span, loader.current.units)))
    for span, size in enumerate(sizes()):
        assert sum(units for at, units in seen if at == span) == size
    assert any("NOT happen" in text for text in engine.statement(1e-4).assumptions)


def test_events_are_of_users_not_of_examples() -> None:
    """The mutant that this is about: rates by examples would charge less."""
    engine = start()[0]
    assert engine.plan.sample_rates == tuple(BATCH / size for size in sizes())
    assert all(rate > BATCH / n for rate, n in zip(engine.plan.sample_rates, (40, 62, 48)))
    assert isinstance(SelfComposedDpEvent(engine.plan.step_event(1), 2).event, PoissonSampledDpEvent)
