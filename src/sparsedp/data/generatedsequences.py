"""Sequences from a planted model: a Markov chain over groups of items, whose popularity has a long tail."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsedp.data.sequences import Sequences
from sparsedp.errors import ConfigError

_SHORTEST = 4  # a history, a target, a validation and a test item


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
    if users < 1 or not 1 <= groups <= items:
        raise ConfigError(
            f"generated_sequences: expected at least one user and an item for each group, got users={users}, "
            f"items={items}, groups={groups}"
        )
    if not 0 <= structure <= 1 or skew < 0 or mean_length < _SHORTEST:
        raise ConfigError(
            f"generated_sequences: expected structure in [0, 1], skew >= 0 and mean_length >= {_SHORTEST}, "
            f"got structure={structure}, skew={skew}, mean_length={mean_length}"
        )
    shape_random, draw_random = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    # Ids say nothing about popularity or group.
    group_of = shape_random.permutation(np.arange(items) % groups)
    popularity = np.arange(1, items + 1, dtype=np.float64)[shape_random.permutation(items)] ** -skew
    mass = np.bincount(group_of, weights=popularity, minlength=groups)
    to_group = np.tile((1 - structure) * mass / mass.sum(), (groups, 1))
    for share, successor in zip((0.6, 0.3, 0.1), (shape_random.permutation(groups) for _ in range(3))):
        to_group[np.arange(groups), successor] += structure * share

    by_group = np.argsort(group_of, kind="stable")
    edges = np.concatenate([[0.0], np.cumsum(popularity[by_group])])
    bounds = edges[np.concatenate([[0], np.cumsum(np.bincount(group_of, minlength=groups))])]

    def draw_items(group: np.ndarray) -> np.ndarray:
        low, high = bounds[group], bounds[group + 1]
        place = np.searchsorted(edges, low + draw_random.random(len(group)) * (high - low), side="right") - 1
        return by_group[np.clip(place, 0, items - 1)]

    extra = mean_length - _SHORTEST
    lengths = _SHORTEST + draw_random.geometric(1 / (1 + extra), users) - 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    actions = np.empty(starts[-1], np.int64)
    cumulative = np.cumsum(to_group, axis=1)
    group = draw_random.choice(groups, users, p=mass / mass.sum())
    for step in range(int(lengths.max())):
        going = np.flatnonzero(lengths > step)
        if step:
            above = draw_random.random(len(going))[:, None] > cumulative[group[going]]
            group[going] = np.minimum(above.sum(1), groups - 1)
        actions[starts[going] + step] = draw_items(group[going]) + 1
    next_item = np.zeros((groups, items + 1))
    next_item[:, 1:] = to_group[:, group_of] * (popularity / mass[group_of])
    groups_with_padding = np.concatenate([[0], group_of])
    return GeneratedSequences(
        actions, starts, items, group_of=groups_with_padding, next_item=next_item, mean_length=mean_length
    )
