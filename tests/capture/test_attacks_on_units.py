"""How one unit was made to exceed its clip bound, and is not any more: cancelling terms, repeated and reordered units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sparsedp
from neighbours import contribution, step_without_noise
from sparsedp.nn import table_softmax_loss

# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("width", [256, 4096, 65_536])
def test_a_user_cannot_hide_small_features_behind_large_ones_that_cancel(width: int) -> None:
    """In float32, squares of 1.7e-4 are lost beside 1; four examples let the ones cancel, and thousands of small ones stay."""
    module = nn.Linear(width, 16)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    one = torch.full((width,), 1.7e-4)
    one[:4] = 1.0
    other = one.clone()
    other[:4] = -1.0
    inputs = 3000 * torch.stack([one, other, one, other, torch.zeros(width)])
    data = inputs, torch.tensor([0, 0, 0, 0, 1])
    reached = contribution(
        module, data, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), np.array([0, 0, 0, 0, 1])
    )
    assert 0.1 < reached <= 1.0001


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_positions_cannot_hide_small_gradients_either(scale: float) -> None:
    outputs, positions = 65_536, 4
    one = torch.full((outputs,), 1.7e-4)
    one[:4] = 1.0
    other = one.clone()
    other[:4] = -1.0
    weights = scale * torch.stack([torch.stack([one, other, one, other]), torch.zeros(positions, outputs)])
    inputs = torch.cat([torch.ones(1, positions, 64), torch.zeros(1, positions, 64)])
    reached = contribution(nn.Linear(64, outputs, bias=False), (inputs, weights), lambda m, b: (m(b[0]) * b[1]).sum())
    assert 0.1 < reached <= 1.0001


class Softmax(nn.Module):
    """A frozen encoder and a table; `change` does something to the hidden states and targets before the loss."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Embedding(9, 4)
        self.change = change

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        if self.change is not None:
            hidden, target = self.change(hidden, target)
        return table_softmax_loss(hidden, self.out.weight, target, ignore=-100)


def states(units: int = 5) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(units, 3, 4, generator=random), torch.randint(0, 9, (units, 3), generator=random)


@pytest.mark.parametrize("size", [1e-24, 1e-22, 1e-10])
def test_tiny_states_with_huge_loss_weights(size: float) -> None:
    hidden, target = states()
    reached = contribution(
        Softmax(), (size * hidden, target), lambda m, b: (m(*b) * (100 / size)).sum(), users=np.array([0, 1, 2, 3, 4])
    )
    assert 0.1 < reached <= 1.0001


def test_gradients_too_large_for_an_exact_factor_are_refused() -> None:
    data = torch.tensor([[3e38], [0.0]]), torch.tensor([1.0, 1.0])
    with pytest.raises(sparsedp.NonFiniteGradientError, match="larger than 1e"):
        step_without_noise(nn.Linear(1, 1, bias=False), data, lambda m, b: (m(b[0]).squeeze(1) * b[1] * 1e7).sum())


# ---------------------------------------------------------------------- repeated and reordered units


REPEATS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "repeat": lambda h, t: (h.repeat(10, 1, 1), t.repeat(10, 1)),
    "cat": lambda h, t: (torch.cat([h, h]), torch.cat([t, t])),
}


@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("options", [{}, {"users": np.array([0, 0, 1, 2, 2]), "max_physical_batch": 2}])
def test_units_repeated_along_the_batch_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(sparsedp.UnsupportedError, match="units are not on axis 0"):
        contribution(Softmax(REPEATS[name]), states(), lambda m, b: m(*b).sum(), **options)


def test_a_siamese_convolution_is_refused() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.conv(torch.cat([x, y], 0))

    with pytest.raises(sparsedp.UnsupportedError, match="units are not on axis 0"):
        contribution(Siamese(), (torch.randn(4, 2, 5), torch.randn(4, 2, 5)), lambda m, b: m(*b).sum())


def test_rows_of_the_batch_as_a_table_are_refused() -> None:
    class InBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            own = torch.arange(len(x))[:, None]
            return table_softmax_loss(self.user(x)[:, None], self.item(y), own, ignore=-100)

    with pytest.raises(sparsedp.UnitsMixedError, match="table_softmax_loss"):
        contribution(InBatch(), (torch.randn(6, 4), torch.randn(6, 4)), lambda m, b: m(*b).sum())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "transpose": lambda x: x.T,
    "permutation": lambda x: x[torch.tensor([2, 0, 1, 3])],
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_bags_look_where_the_units_of_their_ids_are(name: str, weighted: bool) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, mode="sum")

        def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
            if weighted:
                return self.bag(ids, per_sample_weights=CHANGES[name](weights))
            return self.bag(CHANGES[name](ids))

    data = torch.randint(0, 7, (4, 4)), torch.rand(4, 4)
    with pytest.raises((sparsedp.UnsupportedError, sparsedp.UnitsMixedError)):
        contribution(Bags(), data, lambda m, b: m(*b).sum())


NEIGHBOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda v, n: F.embedding(n, v),
    "index_select": lambda v, n: v.index_select(0, n),
    "gather": lambda v, n: v.gather(0, n[:, None].expand(-1, 4)),
    "getitem": lambda v, n: v[n],
    "roll": lambda v, n: v.roll(1, 0),
    "flip": lambda v, n: v.flip(0),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_activations_of_other_units_do_not_leave_forward(name: str) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            item = self.item(y)
            return self.user(x), item, NEIGHBOURS[name](item, n)

    def triplet(module: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        user, item, other = module(x, y, (torch.arange(len(x)) + 1) % len(x))
        return F.softplus((user * other).sum(1) - (user * item).sum(1)).sum()

    with pytest.raises(sparsedp.UnitsMixedError, match=name):
        contribution(Towers(), (torch.randn(6, 4), torch.randn(6, 4)), triplet)


def test_a_loss_over_units_in_different_places_is_refused() -> None:
    """Sequences first in the logits, users first in the targets: flattened, they look alike."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 9)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            logits = self.out(hidden).transpose(0, 1).reshape(-1, 9)
            return F.cross_entropy(logits, target.reshape(-1), reduction="sum")

    with pytest.raises(sparsedp.UnitsMixedError, match="different places"):
        contribution(Model(), states(), lambda m, b: m(*b))


def test_a_table_that_changes_before_the_step_is_noticed() -> None:
    def change(module: nn.Module, batch: Any) -> Tensor:
        loss = module(*batch).sum()
        module.out.weight.data.mul_(2.0)
        return loss

    with pytest.raises(sparsedp.UnsupportedError, match="changed between forward and step"):
        step_without_noise(Softmax(), states(), change)


# ---------------------------------------------------------------------- whose examples are whose


class Owned(Dataset[Any]):
    def __init__(self, size: int = 12) -> None:
        self.x, self.users = torch.randn(size, 4), np.arange(size) // 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.x[place], self.x[place, 0]


def private_users(data: Owned, collate: Any = None) -> Any:
    module = nn.Linear(4, 1)
    return sparsedp.PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=2, collate_fn=collate), unit="user",
    )  # fmt: skip


def test_a_collate_function_that_sorts_and_says_how_is_refused() -> None:
    """As for packed sequences: the order that undoes the sorting turns around with the examples."""

    def collate(examples: list[Any]) -> tuple[Tensor, ...]:
        x = torch.stack([x for x, _ in examples])
        order = x[:, 0].argsort()
        return x[order], order.argsort()

    with pytest.raises(sparsedp.UnsupportedError, match="collate_fn changes the order"):
        private_users(Owned(), collate)


def test_users_that_change_after_make_private_are_noticed() -> None:
    data = Owned()
    _, _, loader = private_users(data)
    list(loader)
    data.x, data.users = data.x.flip(0), data.users[::-1]
    with pytest.raises(sparsedp.SparseDPError, match="`users` changed"):
        list(loader)


@pytest.mark.parametrize("kind", ["release", "fest"])
def test_counting_goes_by_unit_whatever_inputs_does(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum((1, 2))

    def as_many_units(batch: Any) -> tuple[Tensor]:
        return (batch[0].reshape(-1, 1),)

    module = Model()
    release = sparsedp.FrequencyRelease(inputs=as_many_units)
    fest = sparsedp.FEST(k=3, inputs=as_many_units)
    engine = sparsedp.PrivacyEngine()
    engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randint(0, 9, (10, 20)), torch.zeros(10)), batch_size=5),
        **({"frequencies": release} if kind == "release" else {"mechanism": fest}),
    )  # fmt: skip
    with pytest.raises(sparsedp.UnsupportedError, match="200 examples instead of the 10"):
        engine.release_frequencies() if kind == "release" else engine.prepare()


def test_a_resumed_run_does_not_pay_for_its_frequencies_twice(tmp_path: Any) -> None:
    def make() -> sparsedp.PrivacyEngine:
        module = nn.Sequential(nn.Embedding(9, 3))
        engine = sparsedp.PrivacyEngine()
        engine.make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), max_grad_norm=1.0, epochs=2,
            data_loader=DataLoader(TensorDataset(torch.randint(0, 9, (10,)), torch.zeros(10)), batch_size=5),
            target_epsilon=2.0, target_delta=1e-5, frequencies=sparsedp.FrequencyRelease(),
        )  # fmt: skip
        return engine

    first, again = make(), make()
    first.release_frequencies()
    first.save_checkpoint(tmp_path / "c.pt")
    again.release_frequencies()
    with pytest.raises(sparsedp.CheckpointError, match="before release_frequencies"):
        again.load_checkpoint(tmp_path / "c.pt")
    assert again.ledger.setups(None) == 1
