"""Timelines: all that a user did, in order of time, and a label that is drawn from it anew whenever it is in a batch.

The data of the EANA paper (Ning et al. 2022, section 4.1.1): some users' timelines are for training, the others' for testing.
An example is a label, drawn evenly from a timeline, and its context, the `context` items before it. A user has one timeline
and, in a batch, one example of it, so that a unit is a user.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.data.sequences import HeldOutItems, Sequences, count_items
from sparsedp.errors import ConfigError, DataError, SparseDPError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey


class Timeline(NamedTuple):
    """The items of one unit, int64 [n]. The label is one of items[first:]; there must be one, and `first` at least 1."""

    items: np.ndarray
    first: int = 1


class TimelineDataset(Dataset[Timeline]):
    """The timelines of users, `actions[begins[i] : ends[i]]` each. Use it with a `LabelCollate(context)`.

    `words`, if the items have titles: codes of their words, int64 [items + 1, n] (`sparsedp.data.title_words`).
    """

    unit_is = (
        "A user is one timeline, all that they did: a batch has one example of it, a label that is drawn from it anew "
        "with the items before it."
    )

    def __init__(
        self,
        sequences: Sequences,
        begins: np.ndarray,
        ends: np.ndarray,
        context: int,
        words: np.ndarray | None = None,
    ) -> None:
        self.sequences, self.length = sequences, context
        self.items, self.vocabulary_is_private = sequences.items, sequences.vocabulary_is_private
        self.words = words
        self._begins, self._ends = begins, ends
        self.collate = LabelCollate(context)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, i: int) -> Timeline:
        return Timeline(self.sequences.actions[self._begins[i] : self._ends[i]])

    def __getitems__(self, indices: Sequence[int]) -> list[Timeline]:
        return [self[i] for i in indices]

    def __iter__(self) -> Iterator[Timeline]:
        return (self[i] for i in range(len(self)))

    def make_canary(self, generator: CipherGenerator) -> Timeline:
        """An example for audits: a label and a full context, each item drawn evenly from all. No other label is drawn of it."""
        return Timeline(1 + generator.integers(self.items, self.length + 1), first=self.length)

    @property
    def users(self) -> np.ndarray:
        """int64 [n]: 0..n-1, as every user has one timeline."""
        return np.arange(len(self))

    @property
    def item_counts(self) -> Tensor:
        """int64 [items + 1]: how often each item stands in the timelines."""
        return count_items(self.sequences, self._begins, self._ends)


class HeldOutLabels(HeldOutItems):
    """Labels of test users, drawn once: (context int64 [length], label int64 [])."""

    cutoffs: ClassVar[tuple[int, ...]] = (1, 5, 10, 20)  # the k of precision@k and recall@k, as in the paper

    @property
    def owners(self) -> np.ndarray:
        """int64 [n]: whose each label is, numbered from 0."""
        return np.unique(self._begins, return_inverse=True)[1]


class LabelCollate:
    """Makes timelines into (contexts int64 [n, context], zeros behind; labels int64 [n]).

    Each label is drawn evenly from its timeline's items from `first` on; its context is the up to `context` items before it.
    Which label it is decides what a step does with a unit, so it comes from the stream cipher, under a key of its own from the
    operating system. A `generator` of one's own, `RandomKey.from_seed(seed).generator()`, is for tests.
    """

    def __init__(self, context: int, generator: CipherGenerator | None = None) -> None:
        if context < 1:
            raise ConfigError(f"a context must have room for at least 1 item, got {context}")
        self.context = context
        self._generator = RandomKey.from_os().generator() if generator is None else generator
        self._process = os.getpid()

    def __call__(self, timelines: Sequence[Timeline]) -> tuple[Tensor, Tensor]:
        if os.getpid() != self._process:
            raise SparseDPError(
                "Labels were drawn in another process than their generator was made in (a loader's worker?): both would draw "
                "the same ones. Give the loader no workers."
            )
        firsts = np.array([timeline.first for timeline in timelines], np.int64)
        sizes = np.array([len(timeline.items) for timeline in timelines], np.int64)
        if (firsts < 1).any() or (firsts >= sizes).any():
            raise DataError("a timeline needs an item that can be the label, and one before it")
        places = firsts + self._generator.integers(sizes - firsts, len(timelines))
        contexts = np.zeros((len(timelines), self.context), np.int64)
        labels = np.zeros(len(timelines), np.int64)
        for i, (timeline, place) in enumerate(zip(timelines, places.tolist())):
            before = timeline.items[max(0, place - self.context) : place]
            contexts[i, : len(before)] = before
            labels[i] = timeline.items[place]
        return torch.from_numpy(contexts), torch.from_numpy(labels)


@dataclass(frozen=True)
class TimelineSplit:
    training: TimelineDataset
    test: HeldOutLabels | None  # None if no user is for testing


def split_timelines(
    sequences: Sequences,
    *,
    context: int = 20,
    test_share: float = 0.2,
    test_labels: int = 1,
    seed: int = 0,
    words: np.ndarray | None = None,
) -> TimelineSplit:
    """About `test_share` of the users for testing, with `test_labels` labels each, and the others for training.

    A hash of the seed and the user's own name decides where a user belongs, so that adding or removing a user changes nobody
    else's place. (Where users have no names, their numbers stand for them: then numbers must stay the same.) Users with a single
    item are in neither.
    """
    if not 0 <= test_share < 1 or test_labels < 1:
        raise ConfigError(
            f"split_timelines: expected test_share in [0, 1) and test_labels >= 1, got {test_share} and {test_labels}"
        )
    begins, ends = sequences.starts[:-1], sequences.starts[1:]
    names = sequences.user_names or range(sequences.users)
    tested = np.array([_position(name, seed) < test_share for name in names], bool)
    usable = ends - begins >= 2
    if not (usable & ~tested).any():
        raise DataError(f"none of the {sequences.users} users is left to train on: a timeline takes at least two items")
    training = TimelineDataset(sequences, begins[usable & ~tested], ends[usable & ~tested], context, words)
    test_begins, test_ends = (np.repeat(edges[usable & tested], test_labels) for edges in (begins, ends))
    if not len(test_begins):
        return TimelineSplit(training, None)
    generator = RandomKey.from_seed(seed).generator()
    places = test_begins + 1 + generator.integers(test_ends - test_begins - 1, len(test_begins))
    return TimelineSplit(training, HeldOutLabels(sequences, test_begins, places, context))


def _position(user: str | int, seed: int) -> float:
    """A number in [0, 1) that the user's name and the seed decide."""
    digest = hashlib.blake2b(f"{seed} {user}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
