"""Attacks on the softmax over a table, on resuming and on released frequencies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsedp
from neighbours import contribution
from sparsedp.models import DualEncoder
from sparsedp.nn import table_softmax_loss
from support import Apply, loader_of, make_private

ROWS, DIM = 9, 4
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax(change: Change = lambda hidden, target: (hidden, target)) -> nn.Module:
    torch.manual_seed(0)
    return Apply(
        lambda m, h, t: table_softmax_loss((found := change(h, t))[0], m.table.weight, found[1], ignore=-100),
        table=nn.Embedding(ROWS, DIM),
    )


def states(units: int = 6, size: float = 5.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return (
        size * torch.randn(units, 3, DIM, generator=random),
        torch.randint(0, ROWS, (units, 3), generator=random),
    )


# ---------------------------------------------------------------------- norms from the forward pass


@pytest.mark.parametrize("again", [-3.0, -1 + 1e-6, 1.0])
def test_backward_twice(again: float) -> None:
    """The forward pass knows the norm at a gradient of 1: both backward passes together say what it is multiplied by."""

    def loop(module: nn.Module, batch: Any) -> Tensor:
        loss = 1e6 * module(*batch).sum()
        loss.backward(retain_graph=True)
        return again * loss

    reached = contribution(softmax(), states(), loop)
    assert 0.1 < reached <= 1.0001


@pytest.mark.parametrize("weight", [-1e4, 1e20])
def test_one_unit_with_a_loss_weight_of_its_own(weight: float) -> None:
    """It is clipped by its own norm, and takes nothing away from the others, whose terms are 20 digits smaller."""
    weights = torch.ones(6)
    weights[0] = weight
    reached = contribution(softmax(), (*states(), weights), lambda m, b: (m(b[0], b[1]) * b[2]).sum())
    assert 0.9 < reached <= 1.0001


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("physical", [None, 3])
def test_users_of_a_dual_encoder(tied: bool, physical: int | None) -> None:
    """Examples of a user share rows of both towers: what they add up to is bounded, not each of them."""
    torch.manual_seed(0)
    model = DualEncoder(12, 5, (6,), tied=tied)
    history, target = torch.randint(0, 4, (7, 3)), torch.tensor([1, 1, 1, 0, 2, 3, 1])
    reached = contribution(
        model, (history, target), lambda m, b: 10 * m(b[0], target=b[1]).sum(), users=np.array([0, 0, 0, 1, 1, 2, 3]),
        max_physical_batch=physical,
    )  # fmt: skip
    assert 0.9 < reached <= 1.0001


# ---------------------------------------------------------------------- logits that are rounded twice


class Encoded(nn.Module):
    """Features through a layer, then a softmax over a table."""

    def __init__(self, rows: int = 100, dim: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.table = nn.Linear(dim, dim), nn.Embedding(rows, dim)

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return table_softmax_loss(self.encoder(features), self.table.weight, target, ignore=-100)


@pytest.mark.parametrize("size", [1e6, 1e8, 1e9, 1e12])
def test_large_states_that_score_nothing(size: float) -> None:
    """They are orthogonal to the table: logits are small, and their rounding is not, as norm and sum round them apart."""
    model = Encoded()
    scored = (model.table.weight.double() @ model.encoder.weight.double()).detach()
    basis, _ = torch.linalg.qr(scored.T)
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        feature = torch.randn(128, dtype=torch.float64, generator=random)
        feature -= basis @ (basis.T @ feature)
        features = torch.randn(4, 5, 128, generator=random)
        features[0] = 0
        features[0, :2] = (size * feature / feature.norm()).float()
        target = torch.randint(0, 100, (4, 5), generator=random)
        target[0, 2:] = -100
        assert contribution(model, (features, target), lambda m, b: m(*b).sum()) <= 1.0001


@pytest.mark.parametrize(("logit", "left"), [(300.0, 0.01), (1000.0, 0.015), (3000.0, 0.03)])
def test_a_lookup_that_cancels_the_softmax(logit: float, left: float) -> None:
    """Little is left of them, but the rounding of their inner product is that of its large factors."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = Apply(
            lambda m, h, t, ids, c: (
                table_softmax_loss(h, m.table.weight, t, ignore=-100) + (m.table(ids) * c).sum((1, 2))
            ),
            table=nn.Embedding(3, 16),
        )
        table, random = model.table.weight.detach(), torch.Generator().manual_seed(seed)
        state = logit * table[0] / table[0].norm() ** 2
        state += 0.3 * logit / table[0].norm() * torch.randn(16, generator=random)
        ranked = (table @ state).argsort()
        rest = torch.randn(16, generator=random)
        rest -= state * (rest @ state) / (state @ state)
        hidden, target = 0.01 * torch.randn(4, 6, 16, generator=random), torch.full((4, 6), 2)
        target[0] = -100
        hidden[0, 0], target[0, 0] = state, ranked[0]
        ids, weights = torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, 16)
        ids[0], weights[0, 1] = ranked[[-1, 0]], state
        weights[0, 0] = -state + left * state.norm() * rest / rest.norm()
        assert contribution(model, (hidden, target, ids, weights), lambda m, b: m(*b).sum()) <= 1.0001


# ---------------------------------------------------------------------- what is changed on the way


@pytest.mark.parametrize("inside", [True, False])
def test_states_changed_behind_torchs_back(inside: bool) -> None:
    """Norm and sum are of the states as they were."""
    kept: list[Tensor] = []

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, DIM)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            state = hidden * 1.0
            loss = table_softmax_loss(state, self.table.weight, target, ignore=-100)
            kept[:] = [state]
            if inside:
                state.data *= 30
            return loss

    def loop(module: nn.Module, batch: Any) -> Tensor:
        loss = module(*batch).sum()
        if not inside:
            kept[0].data *= 30
        return loss

    assert contribution(Changed(), states(), loop) <= 1.0001


def test_rows_that_change_places() -> None:
    def loop(module: Any, batch: Any) -> Tensor:
        loss = module(*batch).sum()
        module.table.weight.data[[0, 1]] = module.table.weight.data[[1, 0]]
        return loss

    with pytest.raises(sparsedp.SparseDPError, match="changed between forward and step"):
        contribution(softmax(), states(), loop)


def test_the_softmax_is_over_the_same_rows_for_everybody() -> None:
    for part, refusal in (
        (lambda m, h, t: table_softmax_loss(h, m.table.weight[: t.amax() + 1], t, ignore=-100), "whole batch"),
        (lambda m, h, t: (h @ m.table.weight[: t.amax() + 1].T).logsumexp(2).sum(1), "whole batch"),
        (lambda m, h, t: table_softmax_loss(h, m.table.weight, t, ignore=t.amax()), "must be an int"),
        (lambda m, h, t: table_softmax_loss(h, m.table.weight.view(-1)[1:33].view(8, 4), t % 8), "unusual view"),
    ):
        with pytest.raises((sparsedp.SparseDPError, ValueError), match=refusal):
            contribution(Apply(part, table=nn.Embedding(ROWS, DIM)), states(), lambda m, b: m(*b).sum())


def test_numbers_that_vanish_or_lose_digits() -> None:
    def refused(match: str) -> None:
        with pytest.raises(sparsedp.SparseDPError, match=match):
            contribution(softmax(), states(), lambda m, b: m(*b).sum())

    if torch.set_flush_denormal(True):  # if the processor can
        try:
            refused("set_flush_denormal")
        finally:
            torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("medium")
    try:
        refused("set_float32_matmul_precision")
    finally:
        torch.set_float32_matmul_precision("highest")


# ---------------------------------------------------------------------- what belongs to other units


@torch.no_grad()
def _mean(hidden: Tensor) -> Tensor:
    return hidden.mean(0)


OTHERS: dict[str, Change] = {
    "targets of the next unit": lambda h, t: (h, t.roll(1, 0)),
    "sorted targets": lambda h, t: (h, t.sort(0)[0]),
    "targets so far": lambda h, t: (h, t.cummax(0)[0]),
    "targets below the largest": lambda h, t: (h, torch.where(t == t.amax(), -100, t)),
    "less the mean": lambda h, t: (h - _mean(h), t),
    "in place, by the largest": lambda h, t: (h.clone().div_(h.abs().amax()), t),
    "added up": lambda h, t: (h.clone().index_add_(0, torch.arange(len(h)).roll(1), h), t),
    "the first unit's": lambda h, t: (h[:1].expand(len(h), -1, -1), t),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_and_targets_of_other_units_are_refused(name: str) -> None:
    with pytest.raises((sparsedp.UnsupportedError, sparsedp.UnitsMixedError), match="unit"):
        contribution(softmax(OTHERS[name]), states(), lambda m, b: m(*b).sum())


# ---------------------------------------------------------------------- resuming


def history_model(mechanism: sparsedp.Mechanism, seed: int | None, **options: Any) -> Any:
    torch.manual_seed(0)
    items = torch.randint(1, 30, (24, 3), generator=torch.Generator().manual_seed(3))
    model = DualEncoder(29, 4, (4,))
    return make_private(
        model, loader_of(items, items[:, 0], batch_size=6), seed=seed, mechanism=mechanism, **options
    )  # fmt: skip


def step(run: Any, batch: Any) -> None:
    _, module, optimizer, _ = run
    optimizer.zero_grad()
    if len(batch[0]):
        module(batch[0], target=batch[1]).mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_a_load_that_fails_takes_no_noise_away(tmp_path: Path) -> None:
    """Rows that LazyDP owes noise, when a checkpoint is refused: they must still get it."""
    path = tmp_path / "c.pt"
    ends = []
    for fails in (False, True):
        run = history_model(sparsedp.LazyDP(aggregate=False), seed=0)
        engine, module, _, loader = run
        batches = iter(loader)
        for _ in range(2):
            step(run, next(batches))
        assert sum(engine.pending().values()) > 0
        if fails:
            history_model(sparsedp.LazyDP(aggregate=False), seed=0)[0].save_checkpoint(path)
            torch.save(torch.load(path) | {"loader": {"step": 1}}, path)  # found out after all else was read
            with pytest.raises(sparsedp.CheckpointError, match="does not fit"):
                engine.load_checkpoint(path)
            batches = iter(loader)
        for batch in batches:
            step(run, batch)
        assert engine.ledger.steps == 4
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-5, atol=1e-7)


def test_gradients_from_before_a_load_do_not_join_the_next_step(tmp_path: Path) -> None:
    engine, module, optimizer, loader = history_model(sparsedp.DPSGD(), seed=None)
    engine.save_checkpoint(tmp_path / "c.pt")
    history, target = next(batch for batch in loader if len(batch[0]))
    module(history, target=target).mean().backward()
    engine.load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(sparsedp.SparseDPError, match="No batch was drawn"):
        optimizer.step()
    next(batch for batch in loader if len(batch[0]))
    with pytest.raises(sparsedp.SparseDPError, match="without a backward"):
        optimizer.step()
    assert engine.ledger.steps == 0


def test_a_release_that_a_run_went_back_from_is_paid_for(tmp_path: Path) -> None:
    """Without a target a second release is allowed: with other noise, and at its own cost."""
    engine = history_model(sparsedp.DPSGD(), seed=None, frequencies=sparsedp.FrequencyRelease())[0]
    engine.save_checkpoint(tmp_path / "before.pt")
    first = engine.release_frequencies()
    once = engine.get_epsilon(1e-5)
    engine.load_checkpoint(tmp_path / "before.pt")
    assert engine.get_epsilon(1e-5) == once
    second = engine.release_frequencies()
    assert engine.ledger.setups(None) == 2 and engine.get_epsilon(1e-5) > once
    assert not any(torch.equal(first[name], second[name]) for name in first)
