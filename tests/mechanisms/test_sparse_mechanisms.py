"""FEST, AdaFEST, EANA, exponential selection: the law of each selection, its sensitivity and its cost."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import sparsedp
from sparsedp import EANA, FEST, AdaFEST, ExponentialSelection
from sparsedp.accounting import epsilon_of, get_epsilon, split_multiplier
from sparsedp.capture import RowSpace
from sparsedp.contribution import contribution_map
from sparsedp.mechanisms import Mechanism, mechanism_from_dict
from sparsedp.mechanisms.exponential import top_k_gumbel
from sparsedp.mechanisms.survivors import draw_survivors, log_survival
from sparsedp.noise import RandomKey
from support import Apply, Clicks, capture_uses, clicks, loader_of, make_private, train

MECHANISMS: dict[str, Mechanism] = {
    "adafest": AdaFEST(threshold=2.0, noise_ratio=3.0, map_clip=1.0),
    "adafest+": AdaFEST(threshold=1.0, preselect=FEST(k=20, epsilon=1.0)),
    "fest": FEST(k=20, epsilon=1.0),
    "fest gumbel": FEST(k=20, epsilon=1.0, method="gumbel", split="tables"),
    "eana": EANA(),
    "exponential": ExponentialSelection(k=15, epsilon=2.0),
}


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Embedding(50, 4), nn.Embedding(30, 3), nn.Linear(7, 1)

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        bag = self.b(torch.stack([ids % 30, (ids * 7) % 30, ids % 30], 1)).sum(1)
        return self.out(torch.cat([self.a(ids), bag], 1)).squeeze(1) + features.sum(1)


# ---------------------------------------------------------------------- the law of AdaFEST's selection


def naive(
    rows: np.ndarray, values: np.ndarray, size: int, threshold: float, std: float, g: np.random.Generator
) -> np.ndarray:
    dense = np.zeros(size)
    dense[rows] = values
    return np.flatnonzero(dense + std * g.standard_normal(size) >= threshold)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5])
def test_fast_selection_has_the_law_of_the_naive_one(threshold: float) -> None:
    """Inclusion frequencies of every row, and the distribution of the number of survivors, agree."""
    rows, values, size, std, draws = np.array([1, 4, 5, 11]), np.array([0.5, 3.0, 1.0, 2.0]), 16, 1.2, 6000
    counts = {}
    for index, draw in enumerate((draw_survivors, naive)):
        g, key = np.random.default_rng(index), RandomKey.from_seed(index)
        picked = np.zeros((draws, size), dtype=bool)
        for i in range(draws):
            if draw is naive:
                chosen = naive(rows, values, size, threshold, std, g)
            else:
                chosen = draw_survivors(rows, values, range(size), threshold, std, key.child(i))
            assert (np.diff(chosen) > 0).all()
            picked[i, chosen] = True
        counts[draw.__name__] = picked
    fast, slow = counts["draw_survivors"], counts["naive"]
    for j in range(size):
        table = [[fast[:, j].sum(), slow[:, j].sum()], [(~fast[:, j]).sum(), (~slow[:, j]).sum()]]
        if min(map(min, table)) > 0:
            assert stats.chi2_contingency(table).pvalue > 1e-5
    bins = np.arange(size + 2)
    both = np.array([np.histogram(x.sum(1), bins)[0] for x in (fast, slow)])
    both = both[:, both.sum(0) > 10]
    assert stats.chi2_contingency(both).pvalue > 1e-5
    correlation = np.corrcoef(fast[:, 2], fast[:, 3])[0, 1]  # two untouched rows are independent
    assert math.isnan(correlation) or abs(correlation) < 5 / draws**0.5


@pytest.mark.slow
@pytest.mark.parametrize("log_p", [-69.0, -40.0, -28.0])
def test_huge_vocabularies_and_tiny_probabilities(log_p: float) -> None:
    """Trap 12: 2^40 rows, survival probabilities down to 1e-30."""
    std, size, draws = 1.0, 2**40, 400
    threshold = -stats.norm.ppf(0.5)
    low, high = 0.0, 40.0
    for _ in range(200):
        threshold = (low + high) / 2
        low, high = (threshold, high) if log_survival(threshold, std) > log_p else (low, threshold)
    key = RandomKey.from_seed(0)
    rows = np.array([0, 2**39, 2**40 - 1])
    found = [draw_survivors(rows, np.full(3, 1e9), range(size), threshold, std, key.child(i)) for i in range(draws)]
    assert all(set(rows) <= set(chosen) and chosen.max() < size for chosen in found)
    total, expected = sum(len(chosen) - 3 for chosen in found), draws * size * math.exp(log_p)
    assert abs(total - expected) < 6 * math.sqrt(expected) + 1e-6
    others = np.concatenate(found)
    others = others[~np.isin(others, rows)]
    if len(others) > 100:
        assert stats.kstest(others / size, "uniform").pvalue > 1e-4


def test_survival_in_log_space() -> None:
    assert log_survival(0.0, 1.0) == pytest.approx(math.log(0.5))
    assert log_survival(30.0, 1.0) == pytest.approx(stats.norm.logsf(30.0))
    assert log_survival(1.0, 0.0) == -math.inf and log_survival(-1.0, 0.0) == 0.0
    assert log_survival(3.0, 1.5) == pytest.approx(stats.norm.logsf(2.0))  # B.2 prints the square of sigma1 C1


# ---------------------------------------------------------------------- the contribution map


def test_contribution_map_by_hand() -> None:
    """A row that a unit touches twice counts once; a unit's share is min(1, C1 / sqrt(n)) over all tables."""
    module = TwoTables()
    ids = torch.tensor([1, 1, 31, 7])
    found = capture_uses(module, [ids, torch.zeros(4, 3)])
    tables = {"a.weight": module.a.weight, "b.weight": module.b.weight}
    space = RowSpace.of(tables)
    rows, values = contribution_map([found], space, clip=0.9)
    wanted: dict[int, float] = {}
    for i in ids.tolist():
        own = {i} | {50 + i % 30, 50 + (i * 7) % 30}
        for row in own:
            wanted[row] = wanted.get(row, 0.0) + min(1.0, 0.9 / len(own) ** 0.5)
    assert rows.tolist() == sorted(wanted)
    torch.testing.assert_close(values, torch.tensor([wanted[row] for row in sorted(wanted)], dtype=torch.float64))
    split = space.split(rows)
    assert split["a.weight"].tolist() == sorted(set(ids.tolist()))
    assert space.join(split).tolist() == rows.tolist()


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=5),
    clip=st.sampled_from([0.5, 1.0, 3.0]),
    within=st.booleans(),
)
def test_neighbour_replay_of_the_map(ids: list[list[int]], clip: float, within: bool) -> None:
    """Leaving one unit out moves the map by at most C1."""
    module = Apply(lambda m, i: m.a(i[:, :3]).sum(1) + m.b(i[:, 3]), a=nn.Embedding(10, 2), b=nn.Embedding(10, 2))
    space = RowSpace.of({"a.weight": module.a.weight, "b.weight": module.b.weight})  # type: ignore[union-attr]
    inside = torch.arange(0, 20, 2) if within else None

    def dense(units: list[list[int]]) -> torch.Tensor:
        rows, values = contribution_map([capture_uses(module, [torch.tensor(units)])], space, clip, inside)
        return torch.zeros(20, dtype=torch.float64).index_add_(0, rows, values)

    whole = dense(ids)
    for unit in range(len(ids)):
        assert float((whole - dense(ids[:unit] + ids[unit + 1 :])).norm()) <= clip * (1 + 1e-9)


def test_full_softmax_touches_every_row() -> None:
    module = Apply(lambda m, i: m.e(i).sin() @ m.e.weight.T, e=nn.Embedding(10, 4))
    found = capture_uses(module, [torch.tensor([1, 2, 3])])
    rows, values = contribution_map([found], RowSpace.of({"e.weight": module.e.weight}), 1.0)  # type: ignore[union-attr]
    assert rows.tolist() == list(range(10))
    torch.testing.assert_close(values, torch.full((10,), 3 / 10**0.5, dtype=torch.float64))


# ---------------------------------------------------------------------- training with each


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_training(name: str, kind: str) -> None:
    """Only selected rows change, all dense parameters do; reports add up; resume and statement work."""
    torch.manual_seed(0)
    module = TwoTables()
    engine, module, optimizer, loader = make_private(
        module, loader_of(*clicks(200), batch_size=40), mechanism=MECHANISMS[name],
        optimizer=getattr(torch.optim, kind)(module.parameters(), lr=0.1),
    )  # fmt: skip
    before = copy.deepcopy(module.state_dict())
    selected: dict[str, set[int]] = {"a.weight": set(), "b.weight": set()}
    inner_step = optimizer.inner.step

    def watched() -> None:
        for table in selected:
            grad = module.get_parameter(table).grad
            assert grad.is_sparse and grad.is_coalesced()
            selected[table] |= set(grad.indices()[0].tolist())
        inner_step()

    optimizer.inner.step = watched
    train(module, optimizer, loader, epochs=2)
    for table, rows in selected.items():
        changed = (module.state_dict()[table] != before[table]).any(1).nonzero().flatten().tolist()
        assert set(changed) == rows
    assert (module.out.weight != before["out.weight"]).all()
    report = optimizer.last_step
    assert report.gradient_size == sum(t.rows_selected * t.dim for t in report.tables.values()) <= report.dense_size
    assert all(t.rows_false <= t.rows_selected for t in report.tables.values())
    assert 0 <= report.kept_mass <= 1 + 1e-6
    statement = engine.statement(1e-5)
    assert statement.holds == (name != "eana")
    assert mechanism_from_dict(engine.plan.mechanism.to_dict()) == engine.plan.mechanism


@pytest.mark.parametrize("name", MECHANISMS)
def test_micro_batches_give_the_same_model(name: str) -> None:
    """The selection is over the whole logical batch."""
    results = []
    for limit in (None, 7):
        torch.manual_seed(0)
        module = TwoTables().double()
        ids, x, y = clicks(120)
        engine, module, optimizer, loader = make_private(
            module,
            loader_of(ids, x.double(), y.double(), batch_size=30),
            mechanism=MECHANISMS[name],
            max_physical_batch=limit,
        )
        train(module, optimizer, loader)
        results.append(module.state_dict())
    for table, value in results[0].items():
        torch.testing.assert_close(results[1][table], value)


@pytest.mark.parametrize("name", MECHANISMS)
def test_empty_and_single_batches(name: str) -> None:
    engine, module, optimizer, loader = make_private(
        TwoTables(), loader_of(*clicks(40), batch_size=1), mechanism=MECHANISMS[name], seed=5
    )
    sizes = []
    train(module, optimizer, loader, each=lambda: sizes.append(loader.current.units))
    assert 0 in sizes and 1 in sizes and engine.ledger.steps == 40


@pytest.mark.parametrize("name", MECHANISMS)
def test_resume(name: str, tmp_path: Path) -> None:
    """FEST's rows are chosen and paid for once, also across a resume."""

    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        module = TwoTables()
        return make_private(module, loader_of(*clicks(100), batch_size=20), mechanism=MECHANISMS[name])

    whole = start()
    train(*whole[1:], epochs=2)
    first = start()
    train(*first[1:])
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start()
    second[0].load_checkpoint(tmp_path / "c.pt")
    train(*second[1:])
    assert second[0].ledger == whole[0].ledger
    for table, value in whole[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[table], value)


# ---------------------------------------------------------------------- what they cost


def test_adafest_costs_what_dpsgd_costs() -> None:
    """One Gaussian on one sample: trap 9 composes map and gradient as if each had a sample of its own."""
    mechanism = AdaFEST(noise_ratio=5.0)
    run = {"noise_multiplier": 0.7, "sample_rate": 0.001, "steps": 1000, "delta": 1e-6}
    assert get_epsilon(**run, mechanism=mechanism) == get_epsilon(**run)
    sigma1, sigma2 = split_multiplier(0.7, 5.0)
    assert mechanism.gradient_noise(0.7) == sigma2 and sigma1 == pytest.approx(5 * sigma2)
    apart = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.001, dp_accounting.GaussianDpEvent(sigma)), 1000
            )
            for sigma in (sigma1, sigma2)
        ]
    )
    assert epsilon_of(apart, 1e-6) < get_epsilon(**run)


def test_ledgers_against_events_built_by_hand() -> None:
    gaussian, sampled = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent
    step = sampled(0.2, gaussian(1.0))
    for name, mechanism in MECHANISMS.items():
        engine, module, optimizer, loader = make_private(
            TwoTables(), loader_of(*clicks(100), batch_size=20), mechanism=mechanism
        )
        assert engine.get_epsilon(1e-5) == 0.0
        train(module, optimizer, loader)
        entries = [(entry.event, entry.count) for entry in engine.ledger.entries]
        if name == "eana":
            assert entries == [(dp_accounting.NonPrivateDpEvent(), 5)] and engine.get_epsilon(1e-5) == math.inf
        elif name == "exponential":
            pick = sparsedp.accounting.ExponentialMechanismDpEvent(2.0 / 15)
            composed = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(pick, 15), gaussian(1.0)])
            assert entries == [(sampled(0.2, composed), 5)]
        elif name == "adafest":
            assert entries == [(step, 5)]
        else:
            assert entries[-1] == (step, 5) and len(entries) == 2 and entries[0][1] == 1
            own = epsilon_of(entries[0][0], 1e-7)
            assert 0.97 < own <= 1.0  # what FEST's selection was given


@pytest.mark.parametrize(
    "mechanism", [AdaFEST(preselect=FEST(k=9, epsilon=0.5)), FEST(k=9, epsilon=0.5)], ids=["adafest+", "fest"]
)
def test_selection_is_taken_off_the_budget(mechanism: Mechanism) -> None:
    noises = []
    for chosen in (None, mechanism):
        module = TwoTables()
        engine = sparsedp.PrivacyEngine()
        module, optimizer, loader = engine.make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(100), batch_size=10), target_epsilon=1.0, target_delta=1e-5, epochs=2,
            max_grad_norm=1.0, mechanism=chosen,
        )  # fmt: skip
        noises.append(engine.plan.noise_multiplier)
        train(module, optimizer, loader, epochs=2)
        assert 0.97 < engine.get_epsilon() <= 1.0
    assert noises[1] > noises[0]


# ---------------------------------------------------------------------- FEST


def test_public_counts_are_free_and_exact() -> None:
    counts = {"a.weight": torch.arange(50), "b.weight": torch.arange(30) + 100}
    engine, module, optimizer, loader = make_private(
        TwoTables(), loader_of(*clicks(60), batch_size=20), mechanism=FEST(k=33, counts=counts)
    )
    engine.prepare()
    assert engine.ledger.entries == []
    assert optimizer.prepared["a.weight"].tolist() == [47, 48, 49]
    assert optimizer.prepared["b.weight"].tolist() == list(range(30))
    with pytest.raises(ValueError, match=r"b\.weight"):
        make_private(
            TwoTables(), loader_of(*clicks(60), batch_size=20), mechanism=FEST(counts={"a.weight": torch.ones(50)})
        )[0].prepare()


@pytest.mark.parametrize("method", ["gaussian", "gumbel"])
def test_private_selection_finds_frequent_rows(method: str) -> None:
    """With a generous budget the counted top k is the true one."""
    ids = torch.cat([torch.full((300 + 50 * row,), row) for row in range(6)] + [torch.arange(6, 50)])
    module = Clicks()
    data = loader_of(ids, torch.randn(len(ids), 3), torch.ones(len(ids)), batch_size=64)
    engine, module, optimizer, loader = make_private(
        module,
        data,
        mechanism=FEST(k=6, epsilon=20.0, method=method),  # type: ignore[arg-type]
    )
    engine.prepare()
    assert optimizer.prepared["table.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(engine.ledger.entries) == 1 and engine.ledger.steps == 0
    engine.prepare()
    assert len(engine.ledger.entries) == 1


def test_counts_on_data() -> None:
    from sparsedp.counting import count_rows

    ids, x, y = clicks(100)
    engine, module, optimizer, loader = make_private(
        TwoTables(), loader_of(ids, x, y, batch_size=20), mechanism=FEST(k=5)
    )
    counts = count_rows(module, optimizer._capture, loader, ["a.weight", "b.weight"], None, None)
    assert torch.equal(counts["a.weight"], torch.bincount(ids, minlength=50).double())
    assert float(counts["b.weight"].sum()) == sum(len({i % 30, (i * 7) % 30}) for i in ids.tolist())
    clipped = count_rows(module, optimizer._capture, loader, ["a.weight", "b.weight"], None, 1.0)
    total = sum(float((value**2).sum()) for value in clipped.values())
    assert total < sum(float((value**2).sum()) for value in counts.values())


def test_gumbel_selection_costs_more_than_algorithm_2_says() -> None:
    """Algorithm 2's scale 1/epsilon is not epsilon-DP for k > 1; ours is calibrated for k picks."""
    single, many = (FEST(k=k, epsilon=1.0, method="gumbel").setup_event() for k in (1, 100))
    assert isinstance(single, dp_accounting.SelfComposedDpEvent) and isinstance(many, dp_accounting.SelfComposedDpEvent)
    assert many.count == 100
    assert many.event.epsilon < single.event.epsilon / 5
    naive_cost = epsilon_of(
        dp_accounting.SelfComposedDpEvent(sparsedp.accounting.ExponentialMechanismDpEvent(1.0), 100), 1e-7
    )
    assert naive_cost > 10


def test_gumbel_top_k_by_enumeration() -> None:
    """On a tiny vocabulary, the exact loss between neighbours stays within what the event allows."""
    from itertools import permutations

    epsilon0, k = 0.8, 2

    def law(counts: list[int]) -> dict[frozenset[int], float]:
        weights = np.exp(epsilon0 * np.array(counts))
        found: dict[frozenset[int], float] = {}
        for order in permutations(range(len(counts)), k):
            p, left = 1.0, weights.sum()
            for j in order:
                p, left = p * weights[j] / left, left - weights[j]
            found[frozenset(order)] = found.get(frozenset(order), 0.0) + p
        return found

    event = dp_accounting.SelfComposedDpEvent(sparsedp.accounting.ExponentialMechanismDpEvent(epsilon0), k)
    for base in ([5, 3, 1, 0], [2, 2, 2, 2], [9, 0, 0, 0]):
        for touched in ([0], [1, 2], [3], [0, 1, 2]):
            neighbour = [c + (j in touched) for j, c in enumerate(base)]
            for one, other in ((law(base), law(neighbour)), (law(neighbour), law(base))):
                for epsilon in (0.2, 0.7, 1.2):
                    delta = sum(max(0.0, p - math.exp(epsilon) * other[key]) for key, p in one.items())
                    assert delta <= sparsedp.accounting.delta_of(event, epsilon) + 1e-9


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"k": 0}, "k"), ({"epsilon": -1.0}, "epsilon"), ({"delta": 2.0}, "delta"), ({"method": "laplace"}, "method"),
        ({"split": "both"}, "split"),
    ],
)  # fmt: skip
def test_fest_settings(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        FEST(**options)


def test_optimizers_that_take_no_sparse_gradients() -> None:
    """Refused before training, by name, not in the middle of a step that is already paid for."""
    cases: list[tuple[Any, str]] = [
        (lambda m: torch.optim.Adam(m.parameters()), "Adam does not"),
        (lambda m: torch.optim.SparseAdam(list(m.parameters())), "dense parameters"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1), "weight_decay"),
    ]
    for make, word in cases:
        module = TwoTables()
        with pytest.raises(sparsedp.UnsupportedError, match=word.replace("Adam does not", "which Adam does not take")):
            make_private(module, loader_of(*clicks(60), batch_size=20), mechanism=AdaFEST(), optimizer=make(module))


def test_tied_table_is_touched_as_a_whole() -> None:
    module = Apply(lambda m, i: (m.e(i).sin() @ m.e.weight.T).sum(1), e=nn.Embedding(10, 4))
    engine, module, optimizer, loader = make_private(
        module, loader_of(torch.randint(10, (60,)), batch_size=20), mechanism=AdaFEST(threshold=-100.0)
    )
    (ids,) = next(iter(loader))
    module(ids).mean().backward()
    with pytest.warns(sparsedp.SparseDPWarning, match="used whole"):
        optimizer.step()
    table = optimizer.last_step.tables["e.weight"]
    assert (table.rows_touched, table.rows_selected, table.rows_false) == (10, 10, 0)


def test_fest_warns_of_tables_without_rows() -> None:
    counts = {"a.weight": torch.ones(50), "b.weight": torch.zeros(30)}
    engine, *_ = make_private(TwoTables(), loader_of(*clicks(60), batch_size=20), mechanism=FEST(k=5, counts=counts))
    with pytest.warns(sparsedp.SparseDPWarning, match=r"b\.weight"):
        engine.prepare()


def test_statement_names_the_settings() -> None:
    engine, *_ = make_private(TwoTables(), loader_of(*clicks(60), batch_size=20), mechanism=AdaFEST(threshold=7.5))
    assert (
        "threshold=7.5" in str(engine.statement(1e-5))
        and engine.statement(1e-5).to_dict()["settings"]["threshold"] == 7.5
    )


def test_adafest_settings() -> None:
    with pytest.raises(ValueError, match="noise_ratio"):
        AdaFEST(noise_ratio=0.0)
    with pytest.raises(TypeError, match="preselect"):
        AdaFEST(preselect=5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- exponential selection


@pytest.mark.slow
def test_top_k_gumbel_has_the_law_of_the_naive_one() -> None:
    rows, scores, size, k, draws = np.array([2, 5, 6]), np.array([1.0, 2.0, 0.3]), 9, 3, 8000
    dense = np.zeros(size)
    dense[rows] = scores
    counts = np.zeros((2, size))
    key, other = RandomKey.from_seed(0), np.random.default_rng(0)
    for i in range(draws):
        fast = top_k_gumbel(rows, scores, (4, 0, size - 4), k, [key.child(i, table) for table in range(3)])
        assert len(set(fast)) == k
        counts[0, fast] += 1
        counts[1, np.argsort(-(dense + other.gumbel(size=size)))[:k]] += 1
    assert stats.chi2_contingency(counts).pvalue > 1e-5


def test_top_k_of_few_rows() -> None:
    keys = [RandomKey.from_seed(0)]
    assert top_k_gumbel(np.array([0, 1]), np.zeros(2), (2,), 5, keys).tolist() == [0, 1]
    assert len(top_k_gumbel(np.empty(0, np.int64), np.empty(0), (10,), 4, keys)) == 4


def test_scores_of_neighbours_move_apart_by_at_most_twice_the_clip() -> None:
    """The sensitivity that exponential selection is calibrated to."""
    from sparsedp.clipping import Clipping
    from sparsedp.mechanisms import Step
    from sparsedp.mechanisms.exponential import _row_norms, _row_sums
    from sparsedp.tables import LocalExchange, table_specs

    torch.manual_seed(0)
    module = TwoTables()
    clip = 0.3
    tables = table_specs(dict(module.named_parameters()), ("a.weight", "b.weight"))
    step = Step(tables, 1.0, Clipping(clip), lambda captured: 1.0, RandomKey.from_seed(0), {})
    space = RowSpace.of(tables)
    ids = torch.randint(50, (12,))

    def scores(units: torch.Tensor) -> np.ndarray:
        dense = np.zeros(space.size)
        sums = _row_sums([capture_uses(module, [units, torch.zeros(len(units), 3)])], space, step)
        exchange = LocalExchange(space, space.join({name: total.rows for name, total in sums.items()}))
        rows, norms = _row_norms(exchange, sums)
        dense[rows] = norms
        return dense

    whole = scores(ids)
    for unit in range(len(ids)):
        moved = whole - scores(torch.cat([ids[:unit], ids[unit + 1 :]]))
        assert np.abs(moved).max() <= clip * (1 + 1e-4)
        assert moved.max() - moved.min() <= 2 * clip * (1 + 1e-4)


@pytest.mark.parametrize("rows", [100, 70_000])
@pytest.mark.parametrize("chosen", [slice(0, 5), slice(5, 10)])
def test_a_table_of_width_1_that_is_multiplied(rows: int, chosen: slice) -> None:
    """x @ table.weight: its one row of all elements is no row of the table."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.table.weight).squeeze(1)

    torch.manual_seed(0)
    counts = torch.zeros(rows)
    counts[chosen] = 10.0
    x = (torch.rand(16, rows) < 0.3).float()
    module = Wide()
    before = module.table.weight.detach().clone()
    engine, module, optimizer, loader = make_private(
        module, loader_of(x, batch_size=16), noise_multiplier=0.0, max_grad_norm=100.0, poisson_sampling=False,
        mechanism=sparsedp.FEST(k=5, counts={"table.weight": counts}),
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the whole table is used
        for (own,) in loader:
            optimizer.zero_grad()
            module(own).mean().backward()
            optimizer.step()
    wanted = torch.zeros(rows, 1)
    wanted[chosen] = x.mean(0)[chosen, None]
    torch.testing.assert_close(before - module.table.weight.detach(), wanted)
    assert optimizer.last_step.kept_mass == pytest.approx(float(x[:, chosen].sum() / x.sum()), rel=1e-4)
    assert optimizer.last_step.mean_norm == pytest.approx(float(x[:, chosen].sum(1).sqrt().mean()), rel=1e-4)


def test_public_counts_without_nan() -> None:
    """NaN sorts as the largest: rows that nobody counted would be selected."""
    counts = torch.arange(50.0)
    counts[3] = float("nan")
    run = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), mechanism=sparsedp.FEST(k=5, counts={"table.weight": counts})
    )
    with pytest.raises(ValueError, match=r"NaN.*table\.weight"):
        run[0].prepare()
