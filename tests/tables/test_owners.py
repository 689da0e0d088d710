"""A model does not depend on who owns the rows of its tables: one owner or seven, the same weights, bit for bit, noise on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from sparsedp.tables import Owner, Ownership, SeveralOwners
from support import loader_of

ROWS, UNITS, STEPS = 60, 240, 20
# Where owners begin and end, as shares of a table: uneven, and from three owners on one of them is empty.
CUTS: dict[int, tuple[float, ...]] = {
    1: (0, 1),
    2: (0, 0.3, 1),
    3: (0, 0.7, 0.7, 1),
    7: (0, 0.02, 0.1, 0.1, 0.5, 0.52, 0.9, 1),
}
MECHANISMS: dict[str, tuple[Callable[[], sparsedp.Mechanism], dict[str, Any]]] = {
    "dpsgd": (sparsedp.DPSGD, {}),
    "lazydp": (sparsedp.LazyDP, {"weight_decay": 0.01}),
    "lazydp, momentum": (sparsedp.LazyDP, {"momentum": 0.9}),
    "lazydp, step by step": (lambda: sparsedp.LazyDP(aggregate=False), {}),
    "lazydp, step by step, momentum": (lambda: sparsedp.LazyDP(aggregate=False), {"momentum": 0.9}),
    "eana": (sparsedp.EANA, {}),
    "eana, adagrad": (sparsedp.EANA, {"adagrad": True}),
    "fest": (lambda: sparsedp.FEST(k=40, epsilon=0.5), {}),
    "fest, gumbel": (lambda: sparsedp.FEST(k=40, epsilon=0.5, method="gumbel"), {}),
    "adafest": (lambda: sparsedp.AdaFEST(threshold=3.0), {}),
    "adafest+": (lambda: sparsedp.AdaFEST(threshold=3.0, preselect=sparsedp.FEST(k=80, epsilon=0.5)), {}),
    "exponential": (lambda: sparsedp.ExponentialSelection(k=30), {}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, 5)
        self.bag = nn.EmbeddingBag(2 * ROWS, 16, mode="sum")
        self.out = nn.Linear(21, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.cat([self.one(ids[:, 0]), self.bag(ids[:, 1:])], 1)).squeeze(1)


def cut(make: Callable[[Ownership], Owner], ownership: Ownership, shares: Sequence[float]) -> Owner:
    """Owners of parts of every table."""
    owners = []
    for begin, end in pairwise(shares):
        ranges = {
            name: range(round(begin * table.rows), round(end * table.rows)) for name, table in ownership.tables.items()
        }
        owners.append(make(replace(ownership, cut=ranges)))
    return SeveralOwners(owners)


class Run:
    """A seeded run, with all rows of one owner (0) or of so many."""

    def __init__(self, kind: str, owners: int, monkeypatch: pytest.MonkeyPatch, users: bool = False) -> None:
        torch.manual_seed(1)
        made, settings = MECHANISMS[kind]
        mechanism = made()
        self.module = Model()
        ids = (torch.rand(UNITS, 4) ** 2 * ROWS).long()
        data = loader_of(ids, torch.rand(UNITS).round(), batch_size=12)
        options: dict[str, Any] = {"unit": "user", "users": torch.arange(UNITS) // 3} if users else {}
        kind_of_optimizer = torch.optim.Adagrad if "adagrad" in settings else torch.optim.SGD
        settings = {key: value for key, value in settings.items() if key != "adagrad"}
        inner = kind_of_optimizer(self.module.parameters(), lr=0.1, **settings)
        self.engine = sparsedp.PrivacyEngine(seed=7)
        whole = type(mechanism).owner
        with monkeypatch.context() as patch:
            if owners:
                patch.setattr(
                    type(mechanism), "owner", lambda self, own: cut(lambda part: whole(self, part), own, CUTS[owners])
                )
            _, self.optimizer, self.loader = self.engine.make_private(
                module=self.module, optimizer=inner, data_loader=data, noise_multiplier=0.8, max_grad_norm=1.0, mechanism=mechanism, max_physical_batch=10,
                **options,
            )  # fmt: skip
        assert isinstance(self.optimizer.owner, SeveralOwners) == bool(owners)

    def train(self, steps: int = STEPS) -> Run:
        while self.engine.ledger.steps < steps:
            for ids, target in self.loader:
                self.optimizer.zero_grad()
                if len(ids):
                    binary_cross_entropy_with_logits(self.module(ids), target).backward()
                self.optimizer.step()
                if self.engine.ledger.steps == steps:
                    break
        return self

    def state(self) -> dict[str, Tensor]:
        found = {name: torch.Tensor(value).clone() for name, value in self.module.state_dict().items()}
        for name, kept in self.optimizer.named_state_dict()["state"].items():
            found |= {f"{name} {key}": torch.Tensor(v).clone() for key, v in kept.items() if isinstance(v, Tensor)}
        return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("users", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MECHANISMS)
def test_weights_do_not_depend_on_who_owns_the_rows(kind: str, users: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = {name: value.clone() for name, value in Run(kind, 0, monkeypatch, users).module.state_dict().items()}
    expected = Run(kind, 0, monkeypatch, users).train().state()
    for table in ("one.weight", "bag.weight"):
        assert float((expected[table] != torch.Tensor(start[table])).double().mean()) > 0.1
    for owners in CUTS:
        assert_equal(Run(kind, owners, monkeypatch, users).train().state(), expected)


@pytest.mark.parametrize(("kind", "keeps"), [("lazydp, momentum", "momentum_buffer"), ("eana, adagrad", "sum")])
def test_states_of_owners_by_name(kind: str, keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the owners of parts hold is what one owner holds, and can be put in place again."""
    whole, parts = (Run(kind, owners, monkeypatch).train() for owners in (0, 3))
    saved = whole.optimizer.owner.state()
    assert {name: sorted(kept) for name, kept in saved.items()} == {
        name: sorted([keeps, "weight"]) for name in ("bag.weight", "one.weight")
    }
    for name, kept in parts.optimizer.owner.state().items():
        assert_equal(kept, saved[name])
    first = [{name: {k: v.clone() for k, v in kept.items()} for name, kept in owner.state().items()}
             for owner in parts.optimizer.owner.owners]  # fmt: skip
    parts.train(STEPS + 5)
    for owner, state in zip(parts.optimizer.owner.owners, first):
        owner.load_state(state)
    for name, kept in parts.optimizer.owner.state().items():
        assert_equal(kept, saved[name])
    assert sum(parts.engine.pending().values()) == 0


def test_owners_of_parts_are_settled_guarded_and_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    runs = [Run("lazydp, momentum", owners, monkeypatch).train(8) for owners in (0, 7)]
    assert runs[0].engine.pending() == runs[1].engine.pending() != {}
    for read in (
        lambda run: run.module.one.weight[torch.tensor([3, 59])],
        lambda run: run.module.one.weight[-2],
        lambda run: run.module.bag.weight.data,
    ):
        one, other = (torch.Tensor(read(run)).clone() for run in runs)
        assert torch.equal(one, other)
    for run in runs:
        run.engine.save_checkpoint(tmp_path / "c.pt")
        run.train(12)
        run.engine.load_checkpoint(tmp_path / "c.pt")
        run.train(20)
        run.engine.close()
        assert type(run.module.one.weight) is nn.Parameter
    assert_equal(runs[0].state(), runs[1].state())
