"""unit="user": batches hold all examples of a user or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparsedp.noise import RandomKey
from sparsedp.sampling import BatchInfo, PrivateLoader, Users, private_loader
from users import KEY

# Users 0 to 9 with 1 to 10 examples, interleaved, under ids that are neither small nor in order.
SIZES = [1 + i for i in range(10)]
IDS = np.array([10**12 - 7 * u for u in range(10)])
WHOSE = np.random.default_rng(3).permutation(np.repeat(np.arange(10), SIZES))


class Numbered(Dataset):
    """Example i is (i,), with the users of `WHOSE`."""

    def __init__(self, whose: np.ndarray = WHOSE) -> None:
        self.users = IDS[whose]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, i: int) -> tuple[Tensor]:
        return (torch.tensor(i),)


def numbered(
    batch_size: int = 3, poisson: bool = True, limit: int | None = None, most: int | None = None, shuffle: bool = True,
    key: RandomKey = KEY, **options: Any,
) -> PrivateLoader:  # fmt: skip
    data = Numbered()
    return private_loader(
        DataLoader(data, batch_size=batch_size, shuffle=shuffle, **options), key=key, poisson=poisson,
        max_physical_batch=most, users=Users.of(data.users, len(data), limit),
    )  # fmt: skip


def draws(loader: PrivateLoader, epochs: int = 1) -> list[tuple[BatchInfo, list[int]]]:
    found = []
    for _ in range(epochs):
        for (indices,) in loader:
            assert loader.current is not None
            found.append((loader.current, indices.tolist()))
    return found


@pytest.mark.parametrize("limit", [None, 1, 4, 100])
@pytest.mark.parametrize("poisson", [True, False])
def test_batches_hold_whole_users(limit: int | None, poisson: bool) -> None:
    loader = numbered(poisson=poisson, limit=limit)
    assert loader.dataset_size == 10 and len(loader) == 4 and loader.sample_rate == 0.3
    seen: list[list[int]] = [[] for _ in range(10)]
    for info, indices in draws(loader, 80):
        assert info.owners is not None and info.examples == len(indices) == len(info.owners)
        assert info.units == info.logical_units == len(set(info.owners.tolist()))
        whose = WHOSE[indices]
        for unit in range(info.units):
            own = np.array(indices)[info.owners.numpy() == unit]
            assert len(set(whose[info.owners.numpy() == unit])) == 1  # one user
            user = int(WHOSE[own[0]])
            assert len(set(own)) == len(own) == min(SIZES[user], limit or 100)
            assert (np.diff(own) > 0).all() if len(own) > 1 else True
            seen[user] += own.tolist()
        assert len(set(whose)) == info.units  # and no user twice
    for user in range(10):
        assert set(seen[user]) == set(np.flatnonzero(user == WHOSE))  # in the end everything was used
        if not poisson:
            assert len(seen[user]) == 80 * min(SIZES[user], limit or 100)


def test_users_join_independently_with_the_right_probability() -> None:
    """Counts over 2000 steps, with the chi-square statistics of single users and of pairs."""
    loader, steps = numbered(), 2000
    joined = np.zeros((steps, 10))
    for step, (_, indices) in enumerate(draws(loader, steps // 4)):
        joined[step, np.unique(WHOSE[indices])] = 1
    expected, deviation = 0.3 * steps, (0.3 * 0.7 * steps) ** 0.5
    assert (np.abs(joined.sum(0) - expected) < 4.5 * deviation).all()  # also: whether they have 1 or 10 examples
    both = joined.T @ joined
    pairs = both[np.triu_indices(10, 1)]
    assert (np.abs(pairs - 0.09 * steps) < 4.5 * (0.09 * 0.91 * steps) ** 0.5).all()


def test_the_chosen_examples_are_uniform() -> None:
    """Every set of 2 of a user's 4 examples is equally likely, and chosen anew at each draw."""
    ids = np.array([5] * 4 + [9] * 3)
    users = Users.of(ids, 7, 2)
    counts: dict[tuple[int, ...], int] = {}
    others = 0
    for step in range(3000):
        examples, sizes = users.examples(np.array([0, 1]), KEY.child(2).generator(step))
        assert sizes.tolist() == [2, 2]
        chosen = tuple(examples[:2].tolist())
        counts[chosen] = counts.get(chosen, 0) + 1
        others += 4 in examples
    assert len(counts) == 6
    statistic = sum((count - 500) ** 2 / 500 for count in counts.values())
    assert statistic < 27  # chi-square with 5 degrees of freedom: one in 20,000
    assert abs(others - 2000) < 4.5 * (3000 * 2 / 9) ** 0.5


def test_draws_are_a_function_of_key_and_step() -> None:
    plain = draws(numbered(limit=3), 3)
    assert draws(numbered(limit=3), 3) == plain
    assert [indices for _, indices in draws(numbered(limit=3, key=RandomKey.from_seed(1)), 3)] != [i for _, i in plain]
    later = numbered(limit=3)
    later.load_state_dict({"step": 5, "epoch": 1, "epoch_position": 1})
    assert [(info.step, indices) for info, indices in draws(later)] == [
        (i.step, x) for i, x in plain if 5 <= i.step < 8
    ]
    # Which users are drawn does not depend on how many of their examples they bring.
    unlimited = draws(numbered(), 3)
    assert [sorted(set(WHOSE[x])) for _, x in unlimited] == [sorted(set(WHOSE[x])) for _, x in plain]


@pytest.mark.parametrize("limit", [None, 3])
def test_workers_draw_the_same(limit: int | None) -> None:
    alone, helped = draws(numbered(limit=limit), 2), draws(numbered(limit=limit, num_workers=2), 2)
    assert alone == helped
    assert all(torch.equal(one.owners, other.owners) for (one, _), (other, _) in zip(alone, helped))


@pytest.mark.parametrize("most", [10, 11, 17])
@pytest.mark.parametrize("poisson", [True, False])
def test_physical_batches_are_parts_of_the_logical_one(most: int, poisson: bool) -> None:
    """At most `most` examples each, users never split, the same examples in the same order."""
    whole = {info.step: x for info, x in draws(numbered(5, poisson), 3)}
    parts: dict[int, list[tuple[BatchInfo, list[int]]]] = {}
    for info, x in draws(numbered(5, poisson, most=most), 3):
        parts.setdefault(info.step, []).append((info, x))
    assert parts.keys() == whole.keys()
    split = 0
    for step, found in parts.items():
        assert [i for _, x in found for i in x] == whole[step]
        assert [info.first for info, _ in found] == [True] + [False] * (len(found) - 1)
        assert [info.last for info, _ in found] == [False] * (len(found) - 1) + [True]
        assert sum(info.units for info, _ in found) == found[0][0].logical_units == len(set(WHOSE[whole[step]]))
        users = [set(WHOSE[x]) for _, x in found]
        assert all(len(x) <= most for _, x in found)
        assert sum(map(len, users)) == len(set().union(*users))  # attack: a user in two physical batches, clipped twice
        split += len(found) > 1
    assert split > 2


def test_empty_batches() -> None:
    loader = numbered(1)  # with rate 0.1 every third batch is empty
    sizes = [(info.units, info.examples, len(x)) for info, x in draws(loader, 10)]
    assert (0, 0, 0) in sizes and all(examples == length for _, examples, length in sizes)
