"""Attacks on the softmax over a table, on resuming and on released frequencies that are resisted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp.models import DualEncoder
from sparsedp.nn import table_softmax_loss
from support import Apply, loader_of, make_private
from test_attacks_on_units import contribution

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
        for number, batch in enumerate(loader):
            step(run, batch)
            if number == 1:
                assert sum(engine.pending().values()) > 0
                if fails:
                    history_model(sparsedp.LazyDP(aggregate=False), seed=0)[0].save_checkpoint(path)
                    torch.save(torch.load(path) | {"loader": {"step": 1}}, path)  # found out after all else was read
                    with pytest.raises(sparsedp.CheckpointError, match="does not fit"):
                        engine.load_checkpoint(path)
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
