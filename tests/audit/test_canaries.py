"""Canaries: made by the data set, all different, the same again from the same plan, and inserted beside the examples."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from sparsedp.audit import CanaryPlan, MakesCanaries, WithCanaries, make_canaries
from sparsedp.data import generated_click_log, generated_sequences
from sparsedp.errors import SparseDPError
from sparsedp.generator import CipherGenerator


class Pairs:
    """A data set of somebody else's, without __getitems__."""

    def __init__(self, size: int = 5, space: int = 1000) -> None:
        self.size, self.space = size, space
        self.users = torch.arange(size) // 2
        self.colour = "red"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.tensor(index), 0.0

    def make_canary(self, generator: CipherGenerator) -> tuple[torch.Tensor, float]:
        return torch.tensor(int(generator.integers(self.space, 1)[0])), 1.0


def plan(*repetitions: int, owner: Any = None, seed: int = 0) -> CanaryPlan:
    return CanaryPlan.make("secret-sharer", repetitions, owner, seed)


def test_a_plan_makes_the_same_different_canaries_again() -> None:
    data = Pairs(space=30)
    first, again = (
        make_canaries(data, plan(*[1] * 20)),
        make_canaries(data, CanaryPlan.from_dict(plan(*[1] * 20).to_dict())),
    )
    ids = [int(example[0]) for example in first]
    assert ids == [int(example[0]) for example in again] and len(set(ids)) == 20
    assert ids != [int(example[0]) for example in make_canaries(data, plan(*[1] * 20, seed=1))]
    keys = {CanaryPlan.make("secret-sharer", [1], None).key for _ in range(3)}
    assert len(keys) == 3, "without a seed the key is a new secret each time"


def test_canaries_that_cannot_be_made() -> None:
    assert isinstance(Pairs(), MakesCanaries)
    with pytest.raises(SparseDPError, match=r"list has no method make_canary\(generator\)"):
        make_canaries([1, 2], plan(1))
    with pytest.raises(SparseDPError, match=r"12 different canaries .* makes 10 only"):
        make_canaries(Pairs(space=10), plan(*[1] * 4, *[0] * 8))
    with pytest.raises(SparseDPError, match="at least one canary"):
        plan()
    with pytest.raises(SparseDPError, match="less often than never"):
        plan(-1)
    with pytest.raises(SparseDPError, match="one, each, existing, not 'mine'"):
        plan(1, owner="mine")
    for broken in ({}, {**plan(1).to_dict(), "key": "xyz"}, {**plan(1).to_dict(), "repetitions": 3}):
        with pytest.raises(SparseDPError, match="no plan of canaries"):
            CanaryPlan.from_dict(broken)


def test_a_set_with_canaries() -> None:
    data = Pairs()
    with_canaries = WithCanaries(data, plan(2, 0, 3))
    assert len(with_canaries) == 10 and with_canaries.colour == "red"
    ids = [int(example[0]) for example in with_canaries]
    made = [int(example[0]) for example in with_canaries.canaries]
    assert ids == [*range(5), made[0], made[0], made[2], made[2], made[2]]
    assert [int(example[0]) for example in with_canaries.__getitems__([7, 1, -1 % 10])] == [made[2], 1, made[2]]
    assert with_canaries[-1] == with_canaries[9] and with_canaries.users is None  # examples are units
    for copied in (copy.copy(with_canaries), pickle.loads(pickle.dumps(with_canaries))):
        assert len(copied) == 10 and copied.colour == "red"
    with pytest.raises(IndexError):
        with_canaries[10]
    with pytest.raises(AttributeError):
        with_canaries.nothing  # noqa: B018


def test_whose_a_canary_is() -> None:
    data = Pairs()
    users = {owner: WithCanaries(data, plan(2, 0, 3, owner=owner)).users for owner in ("one", "each", "existing")}
    assert all(owners[:5].tolist() == [0, 0, 1, 1, 2] for owners in users.values())
    assert users["one"][5:].tolist() == [3, 3, 5, 5, 5]
    assert users["each"][5:].tolist() == [3, 4, 5, 6, 7]
    hosts = users["existing"][5:].tolist()
    assert set(hosts) <= {0, 1, 2} and hosts[0] == hosts[1] and hosts[2] == hosts[3] == hosts[4]
    with pytest.raises(SparseDPError, match="has no attribute users"):
        WithCanaries(generated_click_log(10, scale=0.01), plan(1, owner="one"))


def test_click_logs() -> None:
    log = generated_click_log(60, scale=0.01, days=3, users=7)
    with_canaries = WithCanaries(log, plan(*[3] * 10, owner="one"))
    integers, categories, labels = log.collate(with_canaries.__getitems__([2, 60, 5, 89]))
    assert integers.shape == (4, 13) and categories.dtype == torch.int64 and labels.tolist()[1::2] == [1.0, 1.0]
    assert torch.equal(categories[0], log[2][1]) and torch.equal(categories[2], log[5][1])
    assert (torch.stack([canary[1] for canary in with_canaries.canaries]) < torch.tensor(log.vocabulary_sizes)).all()
    assert with_canaries.vocabulary_sizes == log.vocabulary_sizes
    assert with_canaries.periods is not None and set(with_canaries.periods[60:]) <= {0, 1, 2}
    assert (np.diff(with_canaries.periods[60:].reshape(10, 3), axis=1) == 0).all(), "all repetitions in one period"
    assert type(with_canaries.__getitems__([1, 2])) is type(log.__getitems__([1, 2]))


def test_sequences() -> None:
    training = generated_sequences(30, 50, seed=1).split(6).training
    with_canaries = WithCanaries(training, plan(*[1] * 40, owner="each"))
    history, target = training.collate(with_canaries.__getitems__([len(training), 0]))
    assert history.shape == target.shape == (2, 6) and torch.equal(history[0, 1:], target[0, :-1])
    every = torch.cat([canary[0] for canary in with_canaries.canaries])
    assert every.min() >= 1 and every.max() <= 50 and len(every.unique()) > 40
    assert with_canaries.items == 50 and with_canaries.length == 6 and with_canaries.sequences is training.sequences
    assert with_canaries.users is not None and len(set(with_canaries.users)) == len(with_canaries)
