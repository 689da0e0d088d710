"""Sequence data: what each user did, in order of time, and the next item to predict.

Items are numbered 1..items; 0 is padding. Histories are padded on the right. One sequence is all that a user has in the
training set, so that a unit is a user.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.data.sequencefiles import Actions, read_action_columns, read_actions
from sparsedp.data.tablecache import ReadSummary
from sparsedp.data.tablefiles import Paths
from sparsedp.errors import ConfigError, DataError
from sparsedp.generator import CipherGenerator

Item = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SequenceSplit:
    """`validation` is None unless it was asked for."""

    training: SequenceDataset
    validation: HeldOutItems | None
    test: HeldOutItems


@dataclass(frozen=True)
class Sequences:
    """User u has the items `actions[starts[u] : starts[u + 1]]`, in order of time; ids from 1 to `items`.

    `vocabulary_is_private` is true where the items, and how many there are, were found in the private data, which the
    accounting does not cover. Item i is called `item_names[i - 1]` in the file, and user u `user_names[u]`. `summary` tells how
    many lines of the file were malformed.
    """

    actions: np.ndarray  # int64 [actions]
    starts: np.ndarray  # int64 [users + 1]
    items: int
    vocabulary_is_private: bool = False
    item_names: tuple[str, ...] = ()
    user_names: tuple[str, ...] = ()
    summary: ReadSummary = field(default_factory=ReadSummary)

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    def split(self, length: int, *, validation: bool = False) -> SequenceSplit:
        """Holds out each user's last item for test and, with `validation`, the one before it for validation.

        Training has the items before these, so that `validation` costs it one item of each user; the history
        of a test item has them all, the validation item too. Histories are the last `length` items.
        A user who would be left with fewer than two items to train on is trained on whole and not evaluated, as in
        SASRec; a user with one item is in neither.
        """
        if length < 1:
            raise ConfigError(f"split: length must be at least 1, got {length}")
        begins, ends = self.starts[:-1], self.starts[1:]
        counts, held = ends - begins, 2 if validation else 1
        evaluated = counts - held >= 2
        trained = counts >= 2
        if not trained.any() or not evaluated.any():
            raise DataError(
                f"none of the {self.users} users has the {held + 2} items that a history, a target and {held} held-out "
                "item(s) take"
            )
        stops = np.where(evaluated, ends - held, ends)
        training = SequenceDataset(self, begins[trained], stops[trained], length)

        def held_out(back: int) -> HeldOutItems:
            return HeldOutItems(self, begins[evaluated], ends[evaluated] - back, length)

        return SequenceSplit(training, held_out(2) if validation else None, held_out(1))


def open_sequences(
    path: Paths,
    format: str = "auto",
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    min_actions: int = 5,
    until_stable: bool = False,
    max_malformed: float = 0.001,
) -> Sequences:
    """Reads a log (formats: `sparsedp.data.read_actions`) and makes it into sequences (`make_sequences`).

    With the names of the columns `user` and `item`, and `time` if there is one, the log is read as tables are: one file or many,
    text, Parquet or Arrow (`sparsedp.data.read_action_columns`).
    Malformed lines are left out; more than the share `max_malformed` of them is a DataError.
    Files that hold sequences already ("pairs", "lists") have mostly been filtered before: min_actions=1 takes all.
    """
    if user is None and item is None and time is None:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError("sequences: several files are read by the names of their columns: give user and item")
        actions = read_actions(path, format, max_malformed=max_malformed)
    elif user is None or item is None or format != "auto":
        raise ConfigError("sequences: give the names of both columns, user and item, and no format beside them")
    else:
        actions = read_action_columns(path, user=user, item=item, time=time, max_malformed=max_malformed)
    try:
        return make_sequences(actions, min_actions=min_actions, until_stable=until_stable)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def make_sequences(actions: Actions, *, min_actions: int = 5, until_stable: bool = False) -> Sequences:
    """Drops users and items with fewer than `min_actions` actions and orders the rest by time, ties as in the file.

    Users and items are counted once, both on the raw log, as SASRec does: a user or an item that is kept may then be left
    with fewer. With `until_stable` counting and dropping are repeated until nobody is dropped (the "5-core").
    """
    if min_actions < 1:
        raise ConfigError(f"sequences: min_actions must be at least 1, got {min_actions}")
    users, items = actions.users, actions.items
    kept = np.arange(len(users))
    while True:
        of_user, of_item = np.bincount(users[kept]), np.bincount(items[kept])
        enough = (of_user[users[kept]] >= min_actions) & (of_item[items[kept]] >= min_actions)
        kept = kept[enough]
        if not until_stable or enough.all():
            break
    if not len(kept):
        raise DataError(f"none of the {len(users)} actions is left with min_actions={min_actions}")
    item_codes, item_ids = np.unique(items[kept], return_inverse=True)
    user_codes, user_ids = np.unique(users[kept], return_inverse=True)
    # lexsort is stable, and its last key is the first to sort by.
    order = np.lexsort((user_ids,) if actions.times is None else (actions.times[kept], user_ids))
    starts = np.concatenate([[0], np.cumsum(np.bincount(user_ids))])
    names = tuple(actions.item_names[code] for code in item_codes)
    return Sequences(
        item_ids[order] + 1,
        starts,
        len(item_codes),
        vocabulary_is_private=True,
        item_names=names,
        user_names=tuple(actions.user_names[code] for code in user_codes) if actions.user_names else (),
        summary=actions.summary,
    )


class SequenceBatch(Sequence[Item]):
    """What `__getitems__` returns: two whole tensors that also read as a list of single items."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return SequenceBatch(self.first[i], self.second[i]) if isinstance(i, slice) else (self.first[i], self.second[i])


class _Slices(Dataset[Item], ABC):
    """Example i is made of `actions[begins[i] : ends[i]]`. Use it with `DataLoader(data, collate_fn=data.collate, ...)`."""

    def __init__(self, sequences: Sequences, begins: np.ndarray, ends: np.ndarray, length: int) -> None:
        self.sequences, self.length = sequences, length
        self.items, self.vocabulary_is_private = sequences.items, sequences.vocabulary_is_private
        self._actions, self._begins, self._ends = sequences.actions, begins, ends

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, i: int) -> Item:
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        return self.__getitems__([i])[0]

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    @abstractmethod
    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> SequenceBatch:
        """Both parts of some examples, as tensors."""

    def collate(self, items: Sequence[Item]) -> Item:
        """Both parts of the examples as tensors; there may be none."""
        if not isinstance(items, SequenceBatch):
            if not items:
                items = self.__getitems__([])
            else:
                firsts, seconds = zip(*items)
                return torch.stack(firsts), torch.stack(seconds)
        return items.first, items.second

    def _bounds(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = np.asarray(indices, dtype=np.int64)
        return self._begins[where], self._ends[where]

    def _padded(self, begins: np.ndarray, ends: np.ndarray, length: int) -> Tensor:
        """The slices, [n, length], with zeros behind; none is longer than `length`."""
        places = begins[:, None] + np.arange(length)
        inside = places < ends[:, None]
        values = self._actions[np.where(inside, places, 0)]
        return torch.from_numpy(np.where(inside, values, 0).astype(np.int64))


class SequenceDataset(_Slices):
    """Training examples: (history, target), both int64 [length], of one user each.

    Of a user's last length + 1 items s_1..s_n, the history is s_1..s_(n-1) and the target s_2..s_n. `users` tells whose
    each example is.
    """

    @property
    def users(self) -> np.ndarray:
        """int64 [n]: 0..n-1, as every user has one example."""
        return np.arange(len(self))

    @property
    def item_counts(self) -> Tensor:
        """int64 [items + 1]: how often each item stands in the examples (each user's last length + 1 items)."""
        return count_items(self.sequences, np.maximum(self._begins, self._ends - self.length - 1), self._ends)

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> SequenceBatch:
        begins, ends = self._bounds(indices)
        begins = np.maximum(begins, ends - self.length - 1)
        return SequenceBatch(self._padded(begins, ends - 1, self.length), self._padded(begins + 1, ends, self.length))

    def read_columns(self, places: np.ndarray) -> Item:
        """Both parts of some examples, [n, length] each; this is what a private loader calls."""
        return self.collate(self.__getitems__(places))

    def make_canary(self, generator: CipherGenerator) -> Item:
        """An example for audits: length + 1 items, each drawn evenly from all."""
        items = torch.from_numpy(1 + generator.integers(self.items, self.length + 1))
        return items[:-1].clone(), items[1:].clone()


def count_items(sequences: Sequences, begins: np.ndarray, ends: np.ndarray) -> Tensor:
    """int64 [items + 1]: how often each item stands in the slices `actions[begins[i] : ends[i]]`, which do not overlap."""
    inside = np.zeros(len(sequences.actions) + 1, np.int64)
    np.add.at(inside, begins, 1)
    np.add.at(inside, ends, -1)
    seen = sequences.actions[np.cumsum(inside[:-1]) > 0]
    return torch.from_numpy(np.bincount(seen, minlength=sequences.items + 1))


class HeldOutItems(_Slices):
    """What to predict: (history int64 [length], the item that came next, int64 [])."""

    cutoffs: ClassVar[tuple[int, ...]] = ()  # the k for which precision@k and recall@k are reported

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> SequenceBatch:
        begins, ends = self._bounds(indices)
        history = self._padded(np.maximum(begins, ends - self.length), ends, self.length)
        return SequenceBatch(history, torch.from_numpy(self._actions[ends].astype(np.int64)))

    def seen(self, indices: Sequence[int]) -> Tensor:
        """All items before the held-out one, also those that the history is too short for; [n, longest], zeros behind."""
        begins, ends = self._bounds(indices)
        return self._padded(begins, ends, int((ends - begins).max(initial=1)))
