"""Click logs as data sets: 13 integers, 26 categories and a click (Criteo's format)."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.data import clickcache
from sparsedp.data.clickcache import Paths, ReadSummary
from sparsedp.data.clickparse import CATEGORIES, INTEGERS, MISSING_INTEGER
from sparsedp.data.vocabulary import GivenVocabulary, HashVocabulary, Vocabulary
from sparsedp.errors import ConfigError
from sparsedp.generator import CipherGenerator

# Vocabulary sizes of Criteo's categorical features 14 to 39 (DP-AdaFEST, Table 3).
# fmt: off
CRITEO_VOCABULARY = (
    1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207,
    27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934,
)
# fmt: on

Item = tuple[Tensor, Tensor, Tensor]
Self = TypeVar("Self", bound="ClickDataset")


class ClickBatch(Sequence[Item]):
    """What `ClickDataset.__getitems__` returns: whole tensors that also read as a list of single items.

    integers float32 [n, 13], categories int64 [n, 26], labels float32 [n].
    """

    def __init__(self, integers: Tensor, categories: Tensor, labels: Tensor) -> None:
        self.integers, self.categories, self.labels = integers, categories, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        if isinstance(i, slice):
            return ClickBatch(self.integers[i], self.categories[i], self.labels[i])
        return self.integers[i], self.categories[i], self.labels[i]


def collate_clicks(items: Sequence[Item]) -> Item:
    """(integers [n, 13], categories [n, 26], labels [n]) of a `ClickBatch` or a list of items; n may be 0."""
    if isinstance(items, ClickBatch):
        return items.integers, items.categories, items.labels
    if len(items) == 0:
        return (
            torch.empty(0, INTEGERS),
            torch.empty(0, CATEGORIES, dtype=torch.int64),
            torch.empty(0),
        )
    integers, categories, labels = zip(*items)
    return torch.stack(integers), torch.stack(categories), torch.stack(labels)


class ClickDataset(Dataset[Item]):
    """A click log in arrays. Use it with `DataLoader(log, collate_fn=log.collate, ...)`.

    An item is (integers float32 [13], categories int64 [26], label float32 []). A missing integer is stored
    as MISSING_INTEGER and reads as 0, like a true 0. A missing category is a row of its own.
    """

    collate = staticmethod(collate_clicks)

    def __init__(
        self,
        integers: np.ndarray,
        categories: np.ndarray,
        labels: np.ndarray,
        periods: np.ndarray | None,
        vocabulary_sizes: Sequence[int],
        vocabulary_is_private: bool = False,
        users: np.ndarray | None = None,
    ) -> None:
        self.vocabulary_sizes = list(vocabulary_sizes)
        self.vocabulary_is_private = vocabulary_is_private
        self._integers, self._categories, self._labels, self._periods = integers, categories, labels, periods
        self._users = users
        self._indices: np.ndarray | None = None  # of a subset, in the whole arrays

    def __len__(self) -> int:
        return len(self._labels) if self._indices is None else len(self._indices)

    def __getitem__(self, i: int) -> Item:
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> ClickBatch:
        """Many items at once; this is what a DataLoader calls."""
        where = np.asarray(indices, dtype=np.int64)
        if self._indices is not None:
            where = self._indices[where]
        stored = self._integers[where]
        integers = stored.astype(np.float32)
        integers[stored == MISSING_INTEGER] = 0
        return ClickBatch(
            torch.from_numpy(integers),
            torch.from_numpy(self._categories[where].astype(np.int64)),
            torch.from_numpy(self._labels[where].astype(np.float32)),
        )

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    @property
    def labels(self) -> np.ndarray:
        """uint8 [n]: 1 for a click."""
        return self._view(self._labels)

    @property
    def periods(self) -> np.ndarray | None:
        """int32 [n], the day or block of each item; None if the log has none."""
        return None if self._periods is None else self._view(self._periods)

    @property
    def users(self) -> np.ndarray | None:
        """int64 [n], the user of each item; None if the log has none."""
        return None if self._users is None else self._view(self._users)

    def make_canary(self, generator: CipherGenerator) -> Item:
        """An example for audits: the integers of a row drawn at random, each category drawn evenly from all of its rows, and a
        click. Nearly all rows of a category are rare, so that no other example has a combination like it.
        """
        integers, _, _ = self[int(generator.integers(len(self), 1)[0])]
        categories = generator.integers(np.array(self.vocabulary_sizes), len(self.vocabulary_sizes))
        return integers, torch.from_numpy(categories), torch.tensor(1.0)

    def _view(self, array: np.ndarray) -> np.ndarray:
        return array if self._indices is None else array[self._indices]

    def subset(self: Self, indices: Sequence[int] | np.ndarray) -> Self:
        """The items at `indices`, in that order, with every attribute of this set. Shares the arrays."""
        where = np.asarray(indices)
        if where.dtype == bool:
            raise ConfigError("subset: give indices, not a mask (np.flatnonzero makes them)")
        where = where.astype(np.int64)
        if where.size and not -len(self) <= where.min() <= where.max() < len(self):
            raise IndexError(f"subset: an index is outside the {len(self)} items")
        where = np.where(where < 0, where + len(self), where)
        out = copy.copy(self)
        out._indices = where if self._indices is None else self._indices[where]
        return out

    def split(
        self: Self,
        held_out: float | Iterable[int] = 0.1,
        by: Literal["tail", "random", "periods"] = "tail",
        seed: int | None = None,
    ) -> tuple[Self, Self]:
        """(training, held out). Order is kept.

        by="tail": the last share `held_out` of the rows; "random": such a share drawn with `seed`;
        "periods": the rows whose period is one of the numbers `held_out`.
        """
        if by not in ("tail", "random", "periods"):
            raise ConfigError(f'split: by must be "tail", "random" or "periods", got {by!r}')
        if (by == "random") != (seed is not None):
            raise ConfigError('split: by="random" needs a seed, and only it takes one')
        out = np.zeros(len(self), bool)
        if by == "periods":
            if self.periods is None or isinstance(held_out, float):
                raise ConfigError('split: by="periods" needs a log with periods, and held_out=[the periods]')
            chosen = [held_out] if isinstance(held_out, int) else list(held_out)
            absent = sorted(set(chosen) - set(np.unique(self.periods).tolist()))
            if absent:
                raise ConfigError(f"split: no rows in the periods {absent}")
            out = np.isin(self.periods, chosen)
        else:
            if not isinstance(held_out, (int, float)) or not 0 <= held_out <= 1:
                raise ConfigError(f"split: held_out must be a share between 0 and 1, got {held_out!r}")
            count = round(len(self) * held_out)
            if by == "tail":
                out[len(self) - count :] = True
            else:
                out[np.random.default_rng(seed).permutation(len(self))[:count]] = True
        return self.subset(np.flatnonzero(~out)), self.subset(np.flatnonzero(out))


class ClickLog(ClickDataset):
    """A click log read from text, memory-mapped from its cache; `open_click_log` makes it.

    `vocabulary_is_private` is true where the rows of the tables were chosen by looking at the private data,
    which the accounting does not cover. `summary` tells how many lines were malformed.
    """

    def __init__(self, directory: Path, indices: np.ndarray | None = None) -> None:
        header = clickcache.read_header(directory)
        arrays = clickcache.open_arrays(directory, header)
        super().__init__(
            arrays["integers"],
            arrays["categories"],
            arrays["labels"],
            arrays.get("periods"),
            header["vocabulary_sizes"],
            header["vocabulary_is_private"],
            arrays.get("users"),
        )
        self.summary: ReadSummary = clickcache.read_summary(header)
        self._indices = indices
        self._directory = directory
        self._header = header

    @property
    def vocabulary(self) -> HashVocabulary | GivenVocabulary:
        """What to read another log with, so that rows mean the same there."""
        return clickcache.read_vocabulary(self._directory, self._header)

    def __reduce__(self) -> tuple[type[ClickLog], tuple[Path, np.ndarray | None]]:
        return ClickLog, (self._directory, self._indices)  # a worker maps the files again: no rows are copied


def open_click_log(
    paths: Paths,
    *,
    cache_dir: str | os.PathLike[str],
    vocabulary: Vocabulary | None = None,
    max_malformed: float = 0.001,
    progress: Callable[[int], None] | None = None,
    user_column: str | None = None,
) -> ClickLog:
    """Reads a click log in Criteo's text format, or opens the cache that an earlier call left in `cache_dir`.

    `paths`: one file, a list of files, or a directory or glob pattern; plain or gzipped, separated by tabs or
    commas. Without a header the columns are label, I1..I13, C1..C26; with one they are found by these names,
    and a column `period`, `day` or `block` gives the periods. Otherwise the period is the number of the file,
    if there are several. `vocabulary` is `HashVocabulary()` unless given. `user_column` names a further column of the
    header, of whole numbers with at most 18 digits: the users of the rows, for `unit="user"`.
    Malformed lines are left out; more than the share `max_malformed` of them is a DataError. `progress` is
    called with the number of rows read so far.
    """
    if not 0 <= max_malformed <= 1:
        raise ConfigError(f"open_click_log: max_malformed must be a share between 0 and 1, got {max_malformed!r}")
    directory = clickcache.cached(
        clickcache.find_sources(paths),
        Path(cache_dir).absolute(),
        HashVocabulary() if vocabulary is None else vocabulary,
        max_malformed,
        progress,
        user_column,
    )
    log = ClickLog(directory)
    log.summary.check(max_malformed)  # the cache may stem from a more lenient call
    return log
