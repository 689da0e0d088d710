"""Sequences from a planted model: a Markov chain over groups of items, whose popularity has a long tail."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsedp.data.sequences import Sequences
from sparsedp.errors import ConfigError

_SHORTEST = 4  # a history, a target, a validation and a test item


def require_possible(
    function: str, users: int, items: int, groups: int, structure: float, skew: float, mean_length: float
) -> None:
    """Refuses arguments of which no data can be drawn."""
    if users < 1 or not 1 <= groups <= items:
        raise ConfigError(
            f"{function}: expected at least one user and an item for each group, got users={users}, "
            f"items={items}, groups={groups}"
        )
    if not 0 <= structure <= 1 or skew < 0 or mean_length < _SHORTEST:
        raise ConfigError(
            f"{function}: expected structure in [0, 1], skew >= 0 and mean_length >= {_SHORTEST}, "
            f"got structure={structure}, skew={skew}, mean_length={mean_length}"
        )


class ItemGroups:
    """Items 0 to items - 1 in groups, by chance, with popularities rank^-skew: ids say nothing about group or popularity."""

    def __init__(self, items: int, groups: int, skew: float, random: np.random.Generator) -> None:
        self.group_of = random.permutation(np.arange(items) % groups)  # int64 [items]
        self.popularity = np.arange(1, items + 1, dtype=np.float64)[random.permutation(items)] ** -skew  # [items]
        self.mass = np.bincount(self.group_of, weights=self.popularity, minlength=groups)  # [groups]
        self._by_group = np.argsort(self.group_of, kind="stable")
        self._edges = np.concatenate([[0.0], np.cumsum(self.popularity[self._by_group])])
        last_of_group = np.cumsum(np.bincount(self.group_of, minlength=groups))
        self._bounds = self._edges[np.concatenate([[0], last_of_group])]

    def draw(self, group: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """An item of each of the groups, by popularity; int64 [n]."""
        low, high = self._bounds[group], self._bounds[group + 1]
        place = np.searchsorted(self._edges, low + random.random(len(group)) * (high - low), side="right") - 1
        return self._by_group[np.clip(place, 0, len(self._by_group) - 1)]


def geometric_lengths(users: int, mean: float, random: np.random.Generator) -> np.ndarray:
    """4 + a geometric number with mean `mean` - 4, int64 [users]."""
    return _SHORTEST + random.geometric(1 / (1 + mean - _SHORTEST), users) - 1


@dataclass(frozen=True)
class GeneratedSequences(Sequences):
    """Sequences that know the model they were drawn from."""

    group_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [items + 1]
    next_item: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [groups, items + 1]: P(item | last group)
    mean_length: float = 0.0

    def planted_scores(self, history: Tensor) -> Tensor:
        """P(next item | history) under the planted model, [n, items + 1]: what no model can beat but by luck."""
        last = history.gather(1, (history > 0).sum(1, keepdim=True) - 1)[:, 0]
        return torch.from_numpy(self.next_item[self.group_of[last.numpy()]])

    @property
    def public_frequencies(self) -> Tensor:
        """About the probability that a user has each item, [items + 1], from the planted model alone, not from the data.

        1 - (1 - share)^mean_length, where the share of an item is what the chain gives it in the long run.
        """
        groups = len(self.next_item)
        to_group = np.stack([np.bincount(self.group_of[1:], row, groups) for row in self.next_item[:, 1:]])
        share = np.full(groups, 1 / groups)
        for _ in range(200):  # half of each step stays, so that a chain with a period settles as well
            share = (share + share @ to_group) / 2
        return torch.from_numpy(1 - (1 - share @ self.next_item) ** self.mean_length).float()


def generated_sequences(
    users: int,
    items: int,
    *,
    seed: int = 0,
    groups: int = 20,
    structure: float = 0.9,
    skew: float = 0.8,
    mean_length: float = 20.0,
) -> GeneratedSequences:
    """Sequences of `users` over `items`, the same for the same arguments.

    An item's popularity is rank^-skew, and each item belongs to one of `groups`, by chance. After an item, with
    probability `structure`, comes an item of one of the three successors of its group (0.6, 0.3, 0.1), else one of any
    group; within a group items come by their popularity. Lengths are 4 + a geometric number with mean `mean_length` - 4.
    Who knows the popular items only predicts badly; who knows each item's group predicts well.
    """
    require_possible("generated_sequences", users, items, groups, structure, skew, mean_length)
    shape_random, draw_random = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    grouped = ItemGroups(items, groups, skew, shape_random)
    group_of, popularity, mass = grouped.group_of, grouped.popularity, grouped.mass
    to_group = np.tile((1 - structure) * mass / mass.sum(), (groups, 1))
    for share, successor in zip((0.6, 0.3, 0.1), (shape_random.permutation(groups) for _ in range(3))):
        to_group[np.arange(groups), successor] += structure * share
    lengths = geometric_lengths(users, mean_length, draw_random)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    actions = np.empty(starts[-1], np.int64)
    cumulative = np.cumsum(to_group, axis=1)
    group = draw_random.choice(groups, users, p=mass / mass.sum())
    for step in range(int(lengths.max())):
        going = np.flatnonzero(lengths > step)
        if step:
            above = draw_random.random(len(going))[:, None] > cumulative[group[going]]
            group[going] = np.minimum(above.sum(1), groups - 1)
        actions[starts[going] + step] = grouped.draw(group[going], draw_random) + 1
    next_item = np.zeros((groups, items + 1))
    next_item[:, 1:] = to_group[:, group_of] * (popularity / mass[group_of])
    groups_with_padding = np.concatenate([[0], group_of])
    return GeneratedSequences(
        actions, starts, items, group_of=groups_with_padding, next_item=next_item, mean_length=mean_length
    )
