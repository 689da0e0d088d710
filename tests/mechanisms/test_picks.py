"""FEST never picks more rows than the ledger is charged for: for every method, split, k, number and size of tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsedp import FEST, AdaFEST, Stream
from sparsedp.accounting import ExponentialMechanismDpEvent
from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.errors import UnsupportedError
from sparsedp.mechanisms import Mechanism
from sparsedp.mechanisms.fest import _selection_event
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec, table_specs
from support import make_private

pytestmark = pytest.mark.filterwarnings("ignore:FEST selected no row")

EPSILON = 0.8


def picks_in(event: DpEvent) -> Iterator[tuple[float, int]]:
    """The epsilon of each exponential mechanism in an event, and how often it runs."""
    if isinstance(event, ExponentialMechanismDpEvent):
        yield event.epsilon, 1
    elif isinstance(event, SelfComposedDpEvent):
        yield from ((epsilon, count * event.count) for epsilon, count in picks_in(event.event))
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from picks_in(part)


def tables_of(sizes: list[int]) -> dict[str, TableSpec]:
    weights = {f"table{i}": torch.empty(size, 1) for i, size in enumerate(sizes)}
    specs = table_specs(weights, weights)
    return {name: specs[name] for name in weights}


def mechanism_of(preselect: bool, **options: Any) -> Mechanism:
    selection = FEST(epsilon=EPSILON, delta=1e-6, **options)
    return AdaFEST(preselect=selection) if preselect else selection


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    k=st.sampled_from([1, 2, 3, 7, 13, 26, 40]),
    method=st.sampled_from(["gaussian", "gumbel"]),
    split=st.sampled_from(["global", "tables"]),
    preselect=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_more_rows_are_picked_than_charged(
    sizes: list[int], k: int, method: str, split: str, preselect: bool, seed: int
) -> None:
    """Of the mechanism alone: what `prepare` picks, and what `setup_event` says."""
    mechanism, tables = mechanism_of(preselect, k=k, method=method, split=split), tables_of(sizes)
    counts = {name: torch.arange(table.rows).double() for name, table in tables.items()}

    def prepare() -> dict[str, Tensor]:
        return mechanism.prepare(tables, lambda clip: counts, RandomKey.from_seed(seed), {})

    if split == "tables" and k < len(sizes):
        for refused in (prepare, lambda: mechanism.refuse_tables(tables)):
            with pytest.raises(UnsupportedError, match=rf"k={k}.*{len(sizes)} tables"):
                refused()
        return
    mechanism.refuse_tables(tables)
    chosen = prepare()
    picked = sum(rows.numel() for rows in chosen.values())
    assert picked <= k
    assert all((rows.diff() > 0).all() and rows.max() < tables[n].rows for n, rows in chosen.items() if len(rows))
    if split == "tables":
        assert [len(chosen[name]) for name in tables] == [min(size, k // len(sizes)) for size in sizes]
    else:
        assert picked == min(k, sum(sizes))
    event = mechanism.setup_event()
    assert event is not None
    if method == "gumbel":
        ((_, charged),) = picks_in(event)
        assert picked <= charged


@pytest.mark.parametrize("split", ["global", "tables"])
@pytest.mark.parametrize("k", [1, 7, 30, 1000])
def test_the_noise_is_that_of_the_event(split: Any, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pick is an exponential mechanism with the epsilon that is charged: Gumbel noise of scale 1 / epsilon on counts."""
    selection = FEST(k=k, epsilon=EPSILON, delta=1e-6, method="gumbel", split=split)
    ((epsilon, charged),) = picks_in(selection.setup_event())  # type: ignore[arg-type]
    assert charged == k and epsilon_of(selection.setup_event(), 1e-6) <= EPSILON * 1.0001
    seen: list[float] = []
    monkeypatch.setattr("sparsedp.generator.CipherGenerator.gumbel", lambda g, size: np.ones(size))
    monkeypatch.setattr("sparsedp.mechanisms.fest._top", lambda scores, k: seen.extend(scores) or torch.arange(1))
    selection.prepare(table_specs({"a": torch.empty(3, 1)}, "a"), lambda clip: {}, RandomKey.from_seed(0))
    assert seen == pytest.approx([1 / epsilon] * 3)


# ---------------------------------------------------------------------- in whole runs


class Tables(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 2) for size in sizes)

    def forward(self, ids: Tensor) -> Tensor:
        return sum(table(ids % table.num_embeddings).sum(1) for table in self.tables)  # type: ignore[return-value]


def start(sizes: list[int], mechanism: Mechanism, seed: int | None = 0, **options: Any) -> tuple:
    data = TensorDataset(torch.arange(24), torch.zeros(24))
    return make_private(Tables(sizes), DataLoader(data, batch_size=4), mechanism=mechanism, seed=seed, **options)


@pytest.mark.parametrize("preselect", [False, True])
@pytest.mark.parametrize("sizes, k", [([5, 1, 9], 3), ([5, 1, 9], 8), ([5, 1, 9], 100), ([4] * 26, 26), ([4], 1)])
@pytest.mark.parametrize("method", ["gaussian", "gumbel"])
@pytest.mark.parametrize("split", ["global", "tables"])
@pytest.mark.parametrize("frequencies", ["all", "first", "running"])
def test_no_run_picks_more_than_its_ledger_shows(
    preselect: bool, sizes: list[int], k: int, method: str, split: str, frequencies: str
) -> None:
    """Over all spans of a stream: each scope's picks are in the ledger, under that scope."""
    if frequencies == "running" and method == "gumbel":
        with pytest.raises(ValueError, match="running"):
            mechanism_of(preselect, k=k, method=method, split=split, frequencies=frequencies)
        return
    mechanism = mechanism_of(preselect, k=k, method=method, split=split, frequencies=frequencies)
    stream = Stream(np.arange(24) // 8, "sequential")
    engine, _, optimizer, _ = start(sizes, mechanism, stream=stream)
    picked: dict[int | None, int] = {}
    for span in range(3):
        before = list(optimizer.preparation.state.scopes)
        optimizer.preparation.prepare(span)
        for scope in optimizer.preparation.state.scopes[len(before) :]:
            picked[scope] = sum(rows.numel() for rows in optimizer.prepared.values())
    setups = [entry for entry in engine.ledger.entries if entry.setup]
    assert [entry.scope for entry in setups] == list(picked)
    for entry in setups:
        assert entry.count == 1 and entry.event == mechanism.setup_event() and picked[entry.scope] <= k
        if method == "gumbel":
            assert picked[entry.scope] <= sum(count for _, count in picks_in(entry.event))
    # What a plan is calibrated to is what the ledger holds at the end.
    planned = [entry for entry in engine.plan.ledger(6).entries if entry.setup]
    assert sorted(map(repr, planned)) == sorted(map(repr, setups))


@pytest.mark.parametrize("preselect", [False, True])
@pytest.mark.parametrize("method", ["gaussian", "gumbel"])
def test_fewer_rows_than_tables_are_refused_before_anything_is_charged(preselect: bool, method: str) -> None:
    mechanism = mechanism_of(preselect, k=1, method=method, split="tables")
    with pytest.raises(UnsupportedError, match=r"FEST\(k=1, split='tables'\).*26 tables.*Raise k to 26"):
        start([4] * 26, mechanism)
    engine, *_ = start([4], mechanism)  # one table is enough for one row
    engine.prepare()


def test_frozen_tables_are_not_counted() -> None:
    """Rows are taken of trained tables alone; if more of them are trained later than k has rows for, that is refused."""
    module = Tables([4] * 3)
    for table in list(module.tables)[1:]:
        table.requires_grad_(False)
    data = DataLoader(TensorDataset(torch.arange(24), torch.zeros(24)), batch_size=4)
    mechanism = mechanism_of(False, k=1, method="gumbel", split="tables")
    engine, *_ = make_private(module, data, mechanism=mechanism)
    module.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="3 tables"):
        engine.prepare()
    assert not engine.ledger.entries


@pytest.mark.parametrize("split, k", [("global", 1), ("tables", 26)])
def test_an_audit_with_26_tables(split: Any, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that touches a row of each of 26 tables, which nobody else does: how surely its rows are picked tells of it.

    The lower bound on epsilon stays below what was promised; with 26 rows for the price of one it does not.
    """
    selection = FEST(k=k, epsilon=1.0, delta=1e-6, method="gumbel", split=split)
    assert lower_bound(selection) < 1.0
    paid = _selection_event("gumbel", 1, 1.0, 1e-6)
    monkeypatch.setattr("sparsedp.mechanisms.fest._selection_event", lambda *args: paid)
    assert split == "global" or lower_bound(selection) > 1.5


def lower_bound(selection: FEST, runs: int = 600) -> float:
    """On epsilon, at 99.9 % confidence, of guessing that the unit is there if at least 18 (of one pick: 1) rows are its own."""
    weights = {f"table{i:02}": torch.empty(2, 1) for i in range(26)}
    tables = table_specs(weights, weights)
    least = 18 if selection.split == "tables" else 1
    rates = []
    for present in (0.0, 1.0):
        counts = {name: torch.tensor([present, 0.0]).double() for name in tables}
        hits = 0
        for seed in range(runs):
            key = RandomKey.from_seed(seed).child(int(present))
            chosen = selection.prepare(tables, lambda clip: counts, key)
            hits += sum(int((rows == 0).sum()) for rows in chosen.values()) >= least
        rates.append(stats.binomtest(hits, runs).proportion_ci(0.998))
    return math.log(max(rates[1].low, 1e-9) / rates[0].high)
