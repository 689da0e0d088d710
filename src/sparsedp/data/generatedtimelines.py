"""Timelines from a planted model: users with a taste for one group of items, and titles whose words tell the group."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsedp.data.generatedsequences import ItemGroups, geometric_lengths, require_possible
from sparsedp.data.sequences import Sequences

_WORDS = 3  # of a title: two of the item's group, one of any
_WORDS_OF_GROUP, _WORDS_OF_ALL = 30, 1000


@dataclass(frozen=True)
class GeneratedTimelines(Sequences):
    """Timelines that know the model they were drawn from."""

    group_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [items + 1]
    popularity: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [items + 1], its sum is 1; 0 for padding
    mass: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # [groups]: the popularity of a group's items together
    structure: float = 0.0
    words: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # int64 [items + 1, words]: titles

    def planted_scores(self, history: Tensor) -> Tensor:
        """P(next item | history) under the planted model, [n, items + 1]: what no model can beat but by luck.

        An item of group g is 1 + structure / ((1 - structure) mass_g) times as likely for users of that taste as for others,
        so that Bayes' rule gives the taste from how often each group stands in the history.
        """
        groups = len(self.mass)
        rest = max(1 - self.structure, 1e-9)
        counts = torch.zeros(len(history), groups + 1, dtype=torch.float64)
        group = torch.from_numpy(self.group_of)[history].masked_fill(history == 0, groups)
        counts.scatter_add_(1, group, torch.ones_like(group, dtype=torch.float64))
        gain = torch.from_numpy(np.log1p(self.structure / (rest * self.mass)))
        taste = (counts[:, :groups] * gain).softmax(1)
        lift = self.structure * taste / torch.from_numpy(self.mass) + 1 - self.structure
        return torch.from_numpy(self.popularity) * lift[:, torch.from_numpy(self.group_of)]


def generated_timelines(
    users: int,
    items: int,
    *,
    seed: int = 0,
    groups: int = 20,
    structure: float = 0.7,
    skew: float = 0.8,
    mean_length: float = 40.0,
) -> GeneratedTimelines:
    """Timelines of `users` over `items`, the same for the same arguments.

    An item's popularity is rank^-skew, and each item belongs to one of `groups`, by chance. A user has a taste, one of the
    groups. Each of their items is, with probability `structure`, of that group, else of any, by popularity; lengths are as
    in `generated_sequences`. Of an item's three title words two are its group's, so that titles tell the group.
    """
    require_possible("generated_timelines", users, items, groups, structure, skew, mean_length)
    shape_random, draw_random, word_random = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    grouped = ItemGroups(items, groups, skew, shape_random)
    total = grouped.mass.sum()
    lengths = geometric_lengths(users, mean_length, draw_random)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    taste = np.repeat(draw_random.integers(groups, size=users), lengths)
    anything = draw_random.choice(groups, len(taste), p=grouped.mass / total)
    group = np.where(draw_random.random(len(taste)) < structure, taste, anything)
    words = np.zeros((items + 1, _WORDS), np.int64)
    words[1:, : _WORDS - 1] = 1 + _WORDS_OF_ALL + grouped.group_of[:, None] * _WORDS_OF_GROUP
    words[1:, : _WORDS - 1] += word_random.integers(_WORDS_OF_GROUP, size=(items, _WORDS - 1))
    words[1:, -1] = 1 + word_random.integers(_WORDS_OF_ALL, size=items)
    return GeneratedTimelines(
        grouped.draw(group, draw_random) + 1,
        starts,
        items,
        group_of=np.concatenate([[0], grouped.group_of]),
        popularity=np.concatenate([[0.0], grouped.popularity / total]),
        mass=grouped.mass / total,
        structure=structure,
        words=words,
    )
