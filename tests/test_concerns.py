"""Warnings of runs that will learn little: each where it is true, and not where it is not."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import concerns
from sparsedp.prediction import predict

AdaFEST = sparsedp.AdaFEST


class Pair(nn.Module):
    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users, self.items, self.out = nn.Embedding(users, 2), nn.Embedding(items, 2), nn.Linear(4, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.out(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)


def run(
    mechanism: sparsedp.Mechanism, *, users: int = 10, items: int = 10, count: int = 1000, batch: int = 100,
    noise_multiplier: float = 1.0, steps: int = 0, own_users: bool = False, **settings: Any,
) -> tuple[list[str], sparsedp.PrivacyEngine]:  # fmt: skip
    """What was warned of in make_private and in some steps."""
    random = np.random.default_rng(0)
    user = np.arange(count) % users if own_users else random.integers(0, users, count)
    data = TensorDataset(
        torch.from_numpy(user), torch.from_numpy(random.integers(0, items, count)),
        torch.from_numpy(random.integers(0, 2, count)).float(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Pair(users, items)
    engine = sparsedp.PrivacyEngine(seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            data_loader=DataLoader(data, batch_size=batch, shuffle=True), mechanism=mechanism,
            **{"max_grad_norm": 0.5, **settings}, noise_multiplier=noise_multiplier,
        )  # fmt: skip
        while engine.ledger.steps < steps:
            for *inputs, target in loader:
                optimizer.zero_grad()
                if len(target):
                    F.binary_cross_entropy_with_logits(model(*inputs), target).backward()
                optimizer.step()
                if engine.ledger.steps == steps:
                    break
    return [str(w.message) for w in caught if issubclass(w.category, sparsedp.UtilityWarning)], engine


def predicted(mechanism: sparsedp.Mechanism, **data: Any) -> list[str]:
    engine = run(mechanism, **data)[1]
    statistics = engine.touch_statistics()
    return concerns.of_prediction(engine.plan, predict(engine.plan, statistics), statistics)


def one(texts: list[str], part: str) -> None:
    assert sum(part in text for text in texts) == 1, texts


def test_a_run_that_is_well_has_no_warning() -> None:
    for mechanism in (sparsedp.DPSGD(), sparsedp.LazyDP(), AdaFEST(threshold=1.0, noise_ratio=1.0)):
        assert run(mechanism, steps=30)[0] == []
        assert predicted(mechanism) == []


def test_most_rows_are_selected_by_noise() -> None:
    mechanism = AdaFEST(threshold=0.1)
    one(predicted(mechanism, items=5000), "touched by no unit of the batch")
    one(run(mechanism, items=5000, steps=concerns.WATCHED)[0], "In the first 20 steps: ")
    assert not any("In the first" in text for text in run(mechanism, items=5000, steps=concerns.WATCHED - 1)[0])
    assert predicted(mechanism, items=5000, noise_multiplier=0.0) == []  # nobody asked for privacy


def test_little_is_kept() -> None:
    mechanism = AdaFEST(threshold=1000.0, noise_ratio=1.0)
    one(predicted(mechanism), "the tables will learn little")
    one(run(mechanism, steps=25)[0], "the selection kept 0.0%")
    mechanism = AdaFEST(threshold=5.0, noise_ratio=0.2)
    one(predicted(mechanism, items=5000), "'items.weight' less than 5%")


def test_auto_warns_in_make_private() -> None:
    one(run(AdaFEST(threshold="auto", look_at="data"), items=5000)[0], "touched by no unit of the batch")
    counts = {"users.weight": np.full(10, 100.0), "items.weight": np.full(5000, 0.2)}
    auto = AdaFEST(threshold="auto", look_at=sparsedp.PublicCounts(counts, 1000.0))
    one(run(auto, items=5000)[0], "touched by no unit of the batch")


def test_fests_k() -> None:
    one(predicted(sparsedp.FEST(k=4500, epsilon=5.0), items=5000), "they are chosen by noise")
    one(predicted(sparsedp.FEST(k=4, epsilon=50.0, split="tables"), users=200, items=200), "Raise k")
    assert predicted(sparsedp.FEST(k=20, epsilon=50.0)) == []


@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP(), AdaFEST(threshold=1.0, noise_ratio=1.0)])
def test_a_table_that_no_two_units_share(mechanism: sparsedp.Mechanism) -> None:
    own = {"users": 500, "count": 500, "own_users": True}
    texts = predicted(mechanism, **own)
    one(texts, "No two units that were counted share a row of table 'users.weight'")
    one(run(mechanism, steps=25, **own)[0], "no two units of a batch touched the same row of table 'users.weight'")


def test_users_own_rows_at_user_level() -> None:
    """Each user has several examples, all of them on the user's own row: no two units share it."""
    random = np.random.default_rng(0)
    user = torch.arange(400) % 100
    data = TensorDataset(user, torch.from_numpy(random.integers(0, 10, 400)), torch.zeros(400))
    model = Pair(100, 10)
    engine = sparsedp.PrivacyEngine(seed=0)
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=50, shuffle=True), unit="user", users=user,
    )  # fmt: skip
    statistics = engine.touch_statistics()
    texts = concerns.of_prediction(engine.plan, predict(engine.plan, statistics), statistics)
    one(texts, "'users.weight'")
    one(texts, "make what stands for a user of the items that they had")


def test_a_batch_of_three() -> None:
    texts = run(sparsedp.DPSGD(), batch=3)[0]
    one(texts, "A batch is expected to have 3 examples")
    assert run(sparsedp.DPSGD(), batch=3, noise_multiplier=0.0)[0] == []
    assert run(sparsedp.DPSGD(), batch=100)[0] == []


def test_a_clip_that_clips_everybody_or_nobody() -> None:
    one(run(sparsedp.DPSGD(), steps=25, max_grad_norm=1e-3)[0], "every unit was clipped")
    one(run(sparsedp.DPSGD(), steps=25, max_grad_norm=100.0)[0], "no unit was clipped")
    assert run(sparsedp.DPSGD(), steps=25, max_grad_norm=1e-3, clipping="automatic")[0] == []
    assert run(sparsedp.DPSGD(), steps=25, max_grad_norm=1e9, noise_multiplier=0.0)[0] == []


def test_every_warning_comes_once() -> None:
    texts = run(sparsedp.DPSGD(), steps=90, max_grad_norm=100.0)[0]
    assert len(texts) == len(set(texts)) == 1


def test_empty_batches_are_no_steps_to_judge_by() -> None:
    texts, engine = run(sparsedp.DPSGD(), count=30, batch=1, steps=60, max_grad_norm=100.0, noise_multiplier=0.05)
    assert engine.ledger.steps == 60
    one(texts, "In the first 20 steps no unit was clipped")


def test_watching_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = run(AdaFEST(threshold=2.0), items=300, steps=25)[1]
    monkeypatch.setattr(concerns.FirstSteps, "watching", False)
    unwatched = run(AdaFEST(threshold=2.0), items=300, steps=25)[1]
    pairs = zip(watched._module.parameters(), unwatched._module.parameters())  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in pairs)


class TestPublicCountsAreGiven:
    """A number of the user's own is judged in make_private, before anything is spent."""

    COUNTS: ClassVar = {"users.weight": np.full(10, 100.0), "items.weight": np.full(500, 2.0)}  # of 1000 units
    PUBLIC = sparsedp.PublicCounts(COUNTS, 1000)

    def test_a_fixed_threshold(self) -> None:
        one(run(AdaFEST(threshold=50.0, look_at=self.PUBLIC), items=500)[0], "the tables will learn little")
        assert run(AdaFEST(threshold=50.0), items=500)[0] == [], "nothing was said of what may be looked at"
        few = sparsedp.PublicCounts({**self.COUNTS, "items.weight": np.full(10, 100.0)}, 1000)
        engine = run(AdaFEST(threshold=1.0, noise_ratio=1.0, look_at=few))
        assert engine[0] == [] and engine[1].plan.mechanism.tau == 1.0

    def test_it_changes_neither_the_plan_nor_the_promise(self) -> None:
        judged, other = (run(AdaFEST(threshold=50.0, look_at=look), items=500)[1] for look in (self.PUBLIC, None))
        assert judged.plan.to_dict() == other.plan.to_dict()
        assert judged.statement(1e-5).to_dict() == other.statement(1e-5).to_dict()

    def test_the_k_of_fest(self) -> None:
        one(
            run(sparsedp.FEST(k=12, counts=self.COUNTS), items=500)[0],
            "'items.weight' less than 5% is in the selection",
        )
        one(run(sparsedp.FEST(k=4, counts=self.COUNTS), items=500)[0], "Raise k, or take another mechanism")
        tensors = {name: torch.from_numpy(counts) for name, counts in self.COUNTS.items()}
        assert run(sparsedp.FEST(k=510, counts=tensors), items=500)[0] == []
        popular = {"users.weight": np.full(10, 1.0), "items.weight": np.eye(1, 500)[0]}  # shares
        one(run(sparsedp.FEST(k=400, counts=popular), items=500)[0], "nothing speaks for them. Lower k.")

    def test_what_only_the_data_could_tell_is_not_asked(self) -> None:
        with pytest.raises(ValueError, match="look_at is for threshold"):
            AdaFEST(threshold=50.0, look_at="data")
