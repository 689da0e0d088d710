"""unit="user": how would I make a user exceed the bound?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sparsedp
from sparsedp import CheckpointError, SparseDPError, UnsupportedError
from sparsedp.clipping import Clipping
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import BatchInfo
from support import Apply, Clicks, clicks, make_private
from users import batch_of_users, capture_users, start, steps, with_users


def refused(match: str, loader: DataLoader | None = None, **options: Any) -> None:
    with pytest.raises((UnsupportedError, SparseDPError), match=match):
        make_private(Clicks(), with_users() if loader is None else loader, **{"unit": "user", **options})


def test_settings_that_do_not_go_together() -> None:
    plain = DataLoader(TensorDataset(*clicks(40)), batch_size=4, shuffle=True)
    refused("needs to know whose each example is", plain)  # and not: one user per example
    refused("users is for unit='user'", plain, unit="example", users=np.arange(40))
    refused("max_examples_per_user is for unit='user'", plain, unit="example", max_examples_per_user=2)
    refused("'example' or a 'user'", unit="person")
    refused(
        "of 12 users have some in several: user 0 in period 0, period 1",
        stream=sparsedp.Stream(np.arange(40) // 20, "parallel"),
    )
    refused("batch_size=16 exceeds the data set's 12 users", with_users(16))
    for most in (0, -1, 1.5, True, "3"):
        refused("max_examples_per_user must be a whole number", max_examples_per_user=most)
    with pytest.raises(UnsupportedError, match="max_examples_per_user"):
        PrivacyPlan(
            dataset_size=10, batch_size=2, shuffled=True, noise_multiplier=1.0, clipping=Clipping(1.0), parameters=(),
            max_examples_per_user=2,
        )  # fmt: skip


@pytest.mark.parametrize(
    "users, match",
    [
        (np.arange(39), "users has 39 entries, the data set has 40"),
        (np.arange(41), "users has 41 entries"),
        (np.arange(40) / 2, "one whole number per example"),
        (np.arange(40).reshape(40, 1), "one whole number per example"),
        ([str(i) for i in range(40)], "one whole number per example"),
        (np.arange(40) - 1, "negative number"),  # as pandas.factorize says for a missing user
        (torch.arange(40) > 3, "one whole number per example"),
    ],
)
def test_users_that_cannot_be_read(users: Any, match: str) -> None:
    refused(match, users=users)


@pytest.mark.parametrize("form", [list, torch.tensor, np.array, lambda ids: np.array(ids, dtype=np.uint64) + (2**63)])
def test_forms_of_users(form: Callable) -> None:
    ids = [10**9 * (i % 5) for i in range(40)]
    run = make_private(Clicks(), with_users(), unit="user", users=form(ids))
    assert run[0].plan.dataset_size == 5
    groups = [set(np.array(ids)[run[3].users.order[a:b]]) for a, b in zip(run[3].users.begin, run[3].users.begin[1:])]
    assert sorted(groups, key=min) == [{10**9 * u} for u in range(5)]


def test_a_user_larger_than_a_physical_batch() -> None:
    """A user in two physical batches would be clipped twice."""
    largest = np.bincount(with_users().dataset.users).max()  # type: ignore[attr-defined]
    refused("cannot hold a whole user", max_physical_batch=int(largest) - 1)
    refused("max_examples_per_user", max_physical_batch=3, max_examples_per_user=4)
    assert start(max_physical_batch=int(largest))[0].plan.dataset_size == 12
    assert start(max_physical_batch=3, max_examples_per_user=3)[0].plan.dataset_size == 12


def test_users_changed_afterwards_have_no_effect() -> None:
    ids = np.arange(40) % 12
    run = make_private(Clicks(), with_users(), unit="user", users=ids)
    before = run[3].users.order.copy()
    ids[:] = 0
    assert (run[3].users.order == before).all()


class OwnMechanism(sparsedp.Mechanism):
    """Selects by example, as it was written before there were users."""

    selects = True
    guarantee = "none"
    name = "own"

    def to_dict(self) -> dict:
        return {"name": "own"}


def test_mechanisms_that_look_at_examples_are_refused() -> None:
    refused("takes_users", mechanism=OwnMechanism())


def dropping(items: list) -> Any:
    return torch.utils.data.default_collate(items[:-1] or items)


def repeating(items: list) -> Any:
    return torch.utils.data.default_collate([*items, items[0]])


@pytest.mark.parametrize("collate", [dropping, repeating])
def test_collate_that_drops_or_repeats(collate: Callable) -> None:
    """The batch is then not as long as its owners: refused at the loss, before anything is written."""
    loader = with_users(8)
    run = make_private(Clicks(), DataLoader(loader.dataset, batch_size=8, collate_fn=collate), unit="user")
    before = {name: p.detach().clone() for name, p in run[1].named_parameters()}
    with pytest.raises(SparseDPError, match="must pass through the module exactly once"):
        steps(run, 1)
    for name, parameter in run[1].named_parameters():
        assert torch.equal(parameter, before[name])
    assert run[0].ledger.steps == 0
    with pytest.raises(UnsupportedError, match="must neither drop nor repeat"):
        run[0].touch_statistics()


class Words(Dataset):
    """Sequences of different lengths; `users` are two of them each."""

    def __init__(self, lengths: Sequence[int] = (3, 1, 4, 1, 5, 9, 2, 6)) -> None:
        self.users = np.arange(len(lengths)) // 2
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((self.lengths[i],), i), torch.tensor(float(i % 3))


def padded(items: list) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
    return ids, torch.stack([y for _, y in items])


def bags(items: list) -> tuple[Tensor, Tensor, Tensor]:
    offsets = torch.tensor([0, *(len(ids) for ids, _ in items)]).cumsum(0)
    return torch.cat([ids for ids, _ in items]), offsets[:-1], torch.stack([y for _, y in items])


def longest_first(items: list) -> tuple[Tensor, Tensor]:
    return padded(sorted(items, key=lambda item: -len(item[0])))


def longest_first_as_dict(items: list) -> dict[str, Tensor]:
    ids, y = longest_first(items)
    return {"ids": ids, "y": y}


@pytest.mark.parametrize("collate", [longest_first, longest_first_as_dict])
def test_collate_that_sorts_is_refused(collate: Callable) -> None:
    """With examples as units their order does not matter; here it says whose they are."""
    module = nn.Embedding(10, 2)
    loader = DataLoader(Words(), batch_size=2, collate_fn=collate)
    with pytest.raises(UnsupportedError, match="changes the order of its examples"):
        make_private(module, loader, unit="user")
    make_private(module, loader)


@pytest.mark.parametrize("collate", [padded, bags])
@pytest.mark.parametrize("lengths", [(3, 1, 4, 1, 5, 9, 2, 6), (2, 2, 2, 2), (1, 1)])
def test_collate_that_keeps_the_order_is_fine(collate: Callable, lengths: tuple[int, ...]) -> None:
    loader = DataLoader(Words(lengths), batch_size=1, collate_fn=collate)
    make_private(nn.Embedding(10, 2), loader, unit="user")


PLACES = torch.tensor([2, 0, 1, 3])
REORDERINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0)[0],
    "index": lambda x: x[PLACES],
    "index_select": lambda x: x.index_select(0, PLACES),
    "argsort": lambda x: x[x[:, 0].argsort()],
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "split": lambda x: torch.cat(x.split(2)[::-1]),
    "unbind": lambda x: torch.stack(x.unbind(0)[::-1]),
    "gather": lambda x: x.gather(0, PLACES[:, None].expand(4, 3)),
    "flatten": lambda x: x.flatten().flip(0).view(4, 3),
    "transposed": lambda x: x.T.flip(1).T,
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, PLACES, x),
    "matmul": lambda x: torch.eye(4)[PLACES] @ x,
    "einsum": lambda x: torch.einsum("ij,jk->ik", torch.eye(4)[PLACES], x),
    "data": lambda x: x.data[PLACES],
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()[PLACES.numpy()]),
    "list": lambda x: torch.tensor(x.tolist()[::-1]),
}


@pytest.mark.parametrize("case", REORDERINGS)
def test_another_order_in_forward_is_refused(case: str) -> None:
    """Examples in other places would be added up with another user's."""
    module = Apply(lambda m, x: m.l(REORDERINGS[case](x)), l=nn.Linear(3, 2))
    with pytest.raises(SparseDPError):
        capture_users(module, [torch.randn(4, 3)], [0, 0, 1, 1], 2)


@pytest.mark.parametrize("owners", [[0, 0, 1, 1, 2], [0, 1], None])
def test_owners_of_another_length(owners: list[int] | None) -> None:
    """A batch whose owners are not its examples' is not the batch of the forward pass."""
    engine, module, optimizer, loader = start()
    ids, x, y = clicks(3)
    units = 3 if owners is None else 2
    loader.current = BatchInfo(units, units, True, True, 0, owners=None if owners is None else torch.tensor(owners))
    if owners is None:  # examples for users: what capture saw is not what the loader says
        seen = module(ids, x)
        seen.sum().backward()
        loader.current = batch_of_users(torch.tensor([0, 1, 2]), 3)
        with pytest.raises(SparseDPError, match="not the loader's current batch"):
            optimizer.step()
    else:
        with pytest.raises(SparseDPError, match="must pass through the module exactly once"):
            module(ids, x).sum().backward()
    assert engine.ledger.steps == 0


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_loss_from_before_the_first_batch(unit: Any) -> None:
    """Nobody sampled its examples, although there are as many of them as in the batch that is drawn then: everybody's."""
    loader = with_users(40 if unit == "example" else 12)
    engine, module, optimizer, loader = make_private(Clicks(), loader, unit=unit)
    ids, x, _ = clicks(40, seed=1)
    module(ids, x).sum().backward()
    next(iter(loader))
    assert loader.current.examples == 40
    with pytest.raises(SparseDPError, match="not the loader's current batch"):
        optimizer.step()
    assert engine.ledger.steps == 0


def test_a_checkpoint_of_other_units_is_refused(tmp_path: Path) -> None:
    run = start(max_examples_per_user=3)
    steps(run, 2)
    run[0].save_checkpoint(tmp_path / "c.pt")
    others = {
        "unit": make_private(Clicks(), DataLoader(TensorDataset(*clicks(12)), batch_size=4, shuffle=True))[0],
        "max_examples_per_user": start()[0],
        "dataset_size": make_private(
            Clicks(), with_users(4, users=11), unit="user", users=np.arange(40) % 11, max_examples_per_user=3
        )[0],
    }
    for name, engine in others.items():
        with pytest.raises(CheckpointError, match=f"another plan.*{name}"):
            engine.load_checkpoint(tmp_path / "c.pt")


def test_checkpoints_say_nothing_about_single_users(tmp_path: Path) -> None:
    """Two data sets in which the same number of users have other examples: nothing of the plan tells which is which.

    A digest of who has which examples would tell, to whoever knows everybody else's.
    """
    plans = [
        make_private(Clicks(), with_users(), unit="user", users=ids)[0].plan
        for ids in (np.arange(40) % 12, np.minimum(np.arange(40), 11))
    ]
    assert plans[0] == plans[1] and plans[0].hash == plans[1].hash
