"""sparsedp.nn.FallbackEmbedding: ids outside of the selection share one trained row, exactly and at no cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from neighbours import largest_influence
from sparsedp import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection
from sparsedp.clipping import Clipping
from sparsedp.counting import count_rows
from sparsedp.nn import FallbackEmbedding, FallbackEmbeddingBag
from support import Apply, assert_exact, capture_uses, clicks, dense, loader_of, make_private, train

ROWS, DIM = 50, 6


class Shop(nn.Module):
    """A lookup and a bag over fallback tables, and a dense layer."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.one = FallbackEmbedding(ROWS, DIM)
        self.bag = FallbackEmbeddingBag(ROWS, DIM, mode=mode)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        several = torch.stack([ids, (ids * 7) % ROWS, (ids * 3) % ROWS, ids], 1)
        return self.out(torch.cat([self.one(ids), self.bag(several)], 1)).squeeze(1) + features.sum(1)


def shop(kept: list[int], mode: str = "sum") -> Shop:
    module = Shop(mode)
    module.one.keep(kept)
    module.bag.keep(kept)
    return module


MECHANISMS = {
    "fest": FEST(k=12, epsilon=1.0),
    "fest gumbel": FEST(k=12, epsilon=1.0, method="gumbel", split="tables"),
    "adafest+": AdaFEST(threshold=1.0, preselect=FEST(k=12, epsilon=1.0)),
}


# ---------------------------------------------------------------------- the mapping


def test_is_an_ordinary_table_until_rows_are_kept() -> None:
    table = FallbackEmbedding(5, 3)
    assert table.weight.shape == (6, 3) and table.fallback == 5
    ids = torch.tensor([[0, 4], [5, 2]])
    assert torch.equal(table(ids), F.embedding(ids, table.weight))
    table.keep([1, 4])
    assert torch.equal(table(ids), F.embedding(torch.tensor([[5, 4], [5, 5]]), table.weight))
    table.keep(torch.tensor([0]))  # a later selection takes the place of the earlier one
    assert torch.equal(table(ids), F.embedding(torch.tensor([[0, 5], [5, 5]]), table.weight))
    assert torch.equal(table(ids.int()), table(ids))
    assert "6, 3, of which the last is the fallback" in repr(table)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_offsets_weights_and_padding(mode: str) -> None:
    bag = FallbackEmbeddingBag(5, 3, mode=mode, padding_idx=-1)
    assert bag.padding_idx == 4
    bag.keep([1])
    ids, mapped = torch.tensor([0, 1, 2, 4, 1]), torch.tensor([5, 1, 5, 4, 1])
    offsets = torch.tensor([0, 3])
    wanted = F.embedding_bag(mapped, bag.weight, offsets, mode=mode, padding_idx=4)
    assert torch.equal(bag(ids, offsets), wanted)
    if mode == "sum":
        weights = torch.rand(5)
        wanted = F.embedding_bag(mapped, bag.weight, offsets, mode=mode, padding_idx=4, per_sample_weights=weights)
        assert torch.equal(bag(ids, offsets, weights), wanted)


def test_padding_stays_padding() -> None:
    table = FallbackEmbedding(5, 3, padding_idx=0)
    table.keep([2])
    assert torch.equal(table(torch.tensor([0])), torch.zeros(1, 3))
    found = capture_uses(Apply(lambda m, i: m.e(i).sum(1), e=table), [torch.tensor([[0, 2], [0, 1]])])
    assert found.uses["e.weight"].touched_rows(6).tolist() == [2, 5]


def test_rows_that_are_not_in_the_table_are_refused() -> None:
    for rows in ([-1], [6], [0, 7]):
        with pytest.raises(ValueError, match="between 0 and 5"):
            FallbackEmbedding(5, 3).keep(rows)
    with pytest.raises(ValueError, match="padding_idx"):
        FallbackEmbedding(5, 3, padding_idx=5)


# ---------------------------------------------------------------------- the guarantee


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kept", [[], [0, 3, 21], list(range(ROWS))], ids=["none", "some", "all"])
def test_norms_and_sums_are_exact(kept: list[int], mode: str) -> None:
    """Against one unit at a time in float64, with several cold ids of a bag on the one row."""
    torch.manual_seed(0)
    ids, x, _ = clicks(9)
    assert_exact(shop(kept, mode), ids, x)
    sequences = Apply(lambda m, i: m.e(i).sin().sum(1), e=FallbackEmbedding(ROWS, DIM, padding_idx=2))
    sequences.e.keep(kept)  # type: ignore[union-attr, operator]
    assert_exact(sequences, torch.randint(8, (6, 5)))


def test_the_norm_is_that_of_the_summed_gradient() -> None:
    """Three cold ids of one unit: three times the gradient on one row, not three rows with one each."""
    bag = FallbackEmbeddingBag(10, 4, mode="sum")
    bag.keep([0])
    found = capture_uses(Apply(lambda m, i: m.b(i), b=bag), [torch.tensor([[0, 5, 6, 7]])], lambda out: out.sum())
    uses = found.uses["b.weight"]
    torch.testing.assert_close(
        uses.squared_norms(1), torch.tensor([4 * (1 + 9.0)], dtype=torch.float64), rtol=1e-4, atol=0
    )
    total = dense(uses.weighted_sum(torch.ones(1), bag.weight.shape), bag.weight.shape)
    assert torch.equal(total[10], torch.full((4,), 3.0)) and torch.equal(total[0], torch.ones(4))
    assert float(total.sum()) == 16


def test_neighbour_replay() -> None:
    torch.manual_seed(0)
    ids, x, _ = clicks(6)
    for size in (1e-2, 1.0, 1e3):
        loss = lambda out, size=size: size * (out.sin() + out.square()).sum()  # noqa: E731
        worst = largest_influence(shop([1, 2, 30]), [ids, x], Clipping(0.5), loss)
        assert worst <= 0.5 * (1 + 1e-4)
    assert worst > 0.45


@pytest.mark.parametrize("kept", [None, [0, 3, 21]], ids=["before", "after"])
def test_check_passes(kept: list[int] | None) -> None:
    module = Shop() if kept is None else shop(kept)
    report = sparsedp.check(module, F.binary_cross_entropy_with_logits, clicks(8))
    assert report.largest_difference < 1e-9


# ---------------------------------------------------------------------- with mechanisms


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_selection_contains_the_fallback_rows(name: str) -> None:
    engine, module, optimizer, loader = make_private(
        Shop(), loader_of(*clicks(200), batch_size=40), mechanism=MECHANISMS[name], seed=4
    )
    engine.prepare()
    tables = [f"{part}.weight" for part in ("bag", "one")]
    assert sorted(optimizer.prepared) == tables
    for part in (module.one, module.bag):
        rows = optimizer.prepared["one.weight" if part is module.one else "bag.weight"].tolist()
        assert rows[-1] == ROWS and rows == sorted(set(rows))
        assert part.kept.nonzero().flatten().tolist() == rows
    assert 12 <= sum(len(rows) for rows in optimizer.prepared.values()) <= 14
    before = copy.deepcopy(module.state_dict())
    train(module, optimizer, loader, epochs=2)
    for table in tables:
        changed = (module.state_dict()[table] != before[table]).any(1).nonzero().flatten().tolist()
        assert ROWS in changed and set(changed) <= set(optimizer.prepared[table].tolist())


def test_the_fallback_costs_nothing() -> None:
    """The ledger of a run is that of the same run on ordinary tables."""

    class Plain(Shop):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.bag = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM)  # type: ignore[assignment]

    ledgers = []
    for module in (Shop(), Plain()):
        engine, module, optimizer, loader = make_private(
            module, loader_of(*clicks(100), batch_size=20), mechanism=FEST(k=40, epsilon=1.0, split="tables")
        )
        train(module, optimizer, loader)
        ledgers.append(engine.ledger)
    assert ledgers[0] == ledgers[1]


def test_counting_sees_real_ids_also_after_a_selection() -> None:
    ids, x, y = clicks(100)
    engine, module, optimizer, loader = make_private(
        Shop(), loader_of(ids, x, y, batch_size=20), mechanism=MECHANISMS["fest"], seed=4
    )
    wanted = torch.bincount(ids, minlength=ROWS + 1).double()
    for _ in range(2):
        counts = count_rows(module, optimizer._capture, loader, ["one.weight"], None, None)
        assert torch.equal(counts["one.weight"], wanted)
        engine.prepare()
    assert not module.one.kept.all()
    cold = (~module.one.kept).nonzero()[0]
    with torch.no_grad():
        assert torch.equal(module.one(cold)[0], module.one.weight[ROWS])  # the mapping is back


def test_a_running_selection_moves_the_mapping_along() -> None:
    """The second span's ids were cold in the first: they are counted as themselves, and get rows of their own."""
    ids = torch.cat([torch.arange(5).repeat(12), torch.arange(10, 15).repeat(30)])
    data = loader_of(ids, torch.zeros(len(ids), 3), torch.ones(len(ids)), batch_size=20)
    module: Any = Apply(lambda m, i, x: m.e(i).sum(1) + x.sum(1), e=FallbackEmbedding(ROWS, DIM))
    mechanism = FEST(k=5, epsilon=50.0, frequencies="running")
    stream = sparsedp.Stream((ids >= 10).long(), "parallel")
    engine, module, optimizer, loader = make_private(module, data, mechanism=mechanism, stream=stream)
    seen: list[list[int]] = []
    train(module, optimizer, loader, each=lambda: seen.append(module.e.kept.nonzero().flatten().tolist()))
    assert seen[0] == [0, 1, 2, 3, 4, ROWS] and seen[-1] == [10, 11, 12, 13, 14, ROWS]
    assert optimizer.prepared["e.weight"].tolist() == seen[-1]


def test_tables_that_are_not_trained_or_tied() -> None:
    """A frozen table has no selection, so nothing is mapped; modules that share a weight share the mapping."""
    module = Shop()
    module.bag.requires_grad_(False)
    module.twin = FallbackEmbedding(ROWS, DIM)
    module.twin.weight = module.one.weight
    trained = [p for p in module.parameters() if p.requires_grad]
    engine, module, optimizer, loader = make_private(
        module, loader_of(*clicks(100), batch_size=20), optimizer=torch.optim.SGD(trained, lr=0.1),
        mechanism=FEST(k=5, epsilon=1.0),
    )  # fmt: skip
    engine.prepare()
    assert list(optimizer.prepared) == ["one.weight"] and module.bag.kept.all()
    assert torch.equal(module.twin.kept, module.one.kept) and 5 <= int(module.one.kept.sum()) <= 6


@pytest.mark.parametrize("mechanism", [DPSGD(), EANA(), AdaFEST(threshold=1.0), ExponentialSelection(k=5)])
def test_mechanisms_that_select_nothing_beforehand_leave_ids_alone(mechanism: Any) -> None:
    module = Shop()
    module.bag.keep([1, 2])  # public rows, chosen by the user
    engine, module, optimizer, loader = make_private(module, loader_of(*clicks(60), batch_size=20), mechanism=mechanism)
    train(module, optimizer, loader)
    assert module.one.kept.all() and module.bag.kept.nonzero().flatten().tolist() == [1, 2, ROWS]


# ---------------------------------------------------------------------- saving


def test_a_state_dict_restores_the_mapping() -> None:
    module, other = shop([1, 2, 30]), Shop()
    other.load_state_dict(module.state_dict())
    ids, x, _ = clicks(40)
    assert torch.equal(other(ids, x), module(ids, x))
    assert torch.equal(other.one.kept, module.one.kept)
    assert not torch.equal(Shop()(ids, x), module(ids, x))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return make_private(Shop(), loader_of(*clicks(100), batch_size=20), mechanism=MECHANISMS[name], seed=4)

    whole = start()
    train(*whole[1:], epochs=2)
    first = start()
    train(*first[1:])
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start()
    second[0].load_checkpoint(tmp_path / "c.pt")
    assert not second[1].one.kept.all()
    train(*second[1:])
    assert second[0].ledger == whole[0].ledger
    assert "one.kept" in whole[1].state_dict()
    for key, value in whole[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[key], value), key


# ---------------------------------------------------------------------- what it is for


def test_cold_ids_learn_from_each_other() -> None:
    """Half of the units have one of 500 rare ids, whose label is 1: an id that was never seen is predicted from them."""

    def cold_loss(table: nn.Embedding) -> float:
        """Of ids that no unit had, after training with FEST on the ten frequent ones."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        ids = torch.cat([torch.randint(10, (500,), generator=generator), torch.randperm(500, generator=generator) + 10])
        labels = torch.cat([torch.zeros(500), torch.ones(500)])
        counts = {"e.weight": torch.cat([torch.full((10,), 50.0), torch.zeros(len(table.weight) - 10)])}
        module: Any = Apply(lambda m, i: m.e(i).squeeze(1), e=table)
        optimizer = torch.optim.SGD(module.parameters(), lr=20.0)
        engine, module, optimizer, loader = make_private(
            module, loader_of(ids, labels, batch_size=100), optimizer=optimizer, noise_multiplier=0.5,
            mechanism=FEST(k=10, counts=counts),
        )  # fmt: skip
        for _ in range(3):
            for batch, wanted in loader:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(module(batch), wanted).backward()
                optimizer.step()
        with torch.no_grad():
            unseen = torch.arange(510, 600)
            return float(F.binary_cross_entropy_with_logits(module(unseen), torch.ones(90)))

    assert cold_loss(FallbackEmbedding(600, 1)) < 0.05
    assert cold_loss(nn.Embedding(600, 1)) > 0.5
