"""Tables as data sets: numbers, categories, columns with many values, and a label of 0 or 1."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.data import tablecache
from sparsedp.data.tablecache import ReadSummary
from sparsedp.data.tablecolumns import MISSING_INTEGER
from sparsedp.data.tablefiles import Paths, as_table, find_sources, open_frame, open_source
from sparsedp.data.tableschema import TableSchema
from sparsedp.data.vocabulary import GivenVocabulary, HashVocabulary, ValueCounter, Vocabulary
from sparsedp.errors import ConfigError, DataError, suggestion
from sparsedp.generator import CipherGenerator
from sparsedp.sampling.periods import Every, period_name

Item = tuple[Tensor, ...]  # numbers, categories, bags..., label
Self = TypeVar("Self", bound="TableDataset")


@dataclass(frozen=True)
class Bag:
    """A column with up to `length` values, which are rows of a table of so many `rows`; `padding` stands where there is none."""

    name: str
    rows: int
    padding: int
    length: int


class TableBatch(Sequence[Item]):
    """What `TableDataset.__getitems__` returns: whole tensors that also read as a list of single items."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return len(self.parts[-1])

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        parts = tuple(part[i] for part in self.parts)
        return TableBatch(parts) if isinstance(i, slice) else parts


class TableDataset(Dataset[Item]):
    """A table in arrays. Use it with `DataLoader(table, collate_fn=table.collate, ...)`.

    An item is (numbers float32 [k], categories int64 [c], an int64 [length] for each of `bags`, label float32 []).
    A missing number reads as 0. A missing category is a row of its own. `raw_numbers`: the numbers are as in
    the file, and it is the model that takes logarithms.
    """

    def __init__(
        self,
        numbers: np.ndarray,
        categories: np.ndarray,
        labels: np.ndarray,
        periods: np.ndarray | None,
        vocabulary_sizes: Sequence[int],
        vocabulary_is_private: bool = False,
        users: np.ndarray | None = None,
        *,
        bags: Sequence[Bag] = (),
        bag_rows: Sequence[np.ndarray] = (),
        times: np.ndarray | None = None,
        raw_numbers: bool = True,
        every: Every | None = None,
    ) -> None:
        self.vocabulary_sizes = list(vocabulary_sizes)
        self.vocabulary_is_private = vocabulary_is_private
        self.bags, self.raw_numbers = tuple(bags), raw_numbers
        self._numbers, self._categories, self._labels, self._periods = numbers, categories, labels, periods
        self._bag_rows, self._users, self._times = tuple(bag_rows), users, times
        self.every = every  # what a period is, counted from 1970; None: its number says nothing of time
        self._indices: np.ndarray | None = None  # of a subset, in the whole arrays

    @property
    def number_count(self) -> int:
        return self._numbers.shape[1]

    def __len__(self) -> int:
        return len(self._labels) if self._indices is None else len(self._indices)

    def __getitem__(self, i: int) -> Item:
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> TableBatch:
        """Many items at once; this is what a DataLoader calls."""
        where = np.asarray(indices, dtype=np.int64)
        if self._indices is not None:
            where = self._indices[where]
        stored = self._numbers[where]
        numbers = stored.astype(np.float32)
        numbers[np.isnan(stored) if stored.dtype.kind == "f" else stored == MISSING_INTEGER] = 0
        rows = [self._categories[where], *(bag[where] for bag in self._bag_rows)]
        return TableBatch(
            [
                torch.from_numpy(numbers),
                *(torch.from_numpy(part.astype(np.int64)) for part in rows),
                torch.from_numpy(self._labels[where].astype(np.float32)),
            ]
        )

    def read_columns(self, places: np.ndarray) -> Item:
        """Many items as one, with an axis of items in front of its tensors; this is what a private loader calls."""
        return self.__getitems__(places).parts

    def collate(self, items: Sequence[Item]) -> Item:
        """The parts of a `TableBatch`, or of a list of items, each as one tensor; there may be no item."""
        if not isinstance(items, TableBatch):
            if len(items):
                return tuple(torch.stack(parts) for parts in zip(*items))
            items = self.__getitems__([])
        return items.parts

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    @property
    def labels(self) -> np.ndarray:
        """uint8 [n]: 1 for a click, or whatever the label says."""
        return self._view(self._labels)

    @property
    def periods(self) -> np.ndarray | None:
        """int32 [n], the day or block of each item; None if the table has none."""
        return None if self._periods is None else self._view(self._periods)

    @property
    def users(self) -> np.ndarray | None:
        """int64 [n], the user of each item; None if the table has none."""
        return None if self._users is None else self._view(self._users)

    @property
    def times(self) -> np.ndarray | None:
        """int64 [n], seconds since 1970; None if the table has none."""
        return None if self._times is None else self._view(self._times)

    def make_canary(self, generator: CipherGenerator) -> Item:
        """An example for audits: the numbers of a row drawn at random, each category drawn evenly from all of its rows, as many
        values as there is room for, and a label of 1. Nearly all rows of a category are rare, so that no other example has a
        combination like it.
        """
        numbers = self[int(generator.integers(len(self), 1)[0])][0]
        sizes = np.array(self.vocabulary_sizes, np.int64)
        categories = generator.integers(sizes, len(sizes)) if len(sizes) else np.empty(0, np.int64)
        drawn = [generator.integers(bag.rows, bag.length) for bag in self.bags]
        return (numbers, *map(torch.from_numpy, (categories, *drawn)), torch.tensor(1.0))

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

        by="tail": the last share `held_out` of the rows, by their times if the table has them; "random": such a share drawn with
        `seed`; "periods": the rows whose period is one of the numbers `held_out`.
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
            there = np.unique(self.periods).tolist()
            absent = [period_name(period, self.every) for period in sorted(set(chosen) - set(there))]
            if absent:
                first, last = (period_name(there[i], self.every) for i in (0, -1))
                what = f"{self.every or 'period'}{'s' if len(absent) > 1 else ''}"
                raise ConfigError(
                    f"split: there are no rows in the {what} {', '.join(absent)}; there are some from {first} to {last}"
                )
            out = np.isin(self.periods, chosen)
        else:
            if not isinstance(held_out, (int, float)) or not 0 <= held_out <= 1:
                raise ConfigError(f"split: held_out must be a share between 0 and 1, got {held_out!r}")
            count = round(len(self) * held_out)
            if by == "random":
                out[np.random.default_rng(seed).permutation(len(self))[:count]] = True
            elif self.times is None:
                out[len(self) - count :] = True
            else:
                out[np.argsort(self.times, kind="stable")[len(self) - count :]] = True
        return self.subset(np.flatnonzero(~out)), self.subset(np.flatnonzero(out))


class Table(TableDataset):
    """A table that was read, memory-mapped from its cache; `open_table` makes it.

    `vocabulary_is_private` is true where the rows of the tables were chosen by looking at the private data,
    which the accounting does not cover. `summary` tells how many lines were malformed.
    """

    def __init__(self, directory: Path, indices: np.ndarray | None = None, *, in_memory: bool = False) -> None:
        header = tablecache.read_header(directory)
        arrays = tablecache.open_arrays(directory, header)
        if in_memory:
            arrays = {name: np.array(array) for name, array in arrays.items()}
        super().__init__(
            arrays["numbers"],
            arrays["categories"],
            arrays["labels"],
            arrays.get("periods"),
            header["vocabulary_sizes"],
            bool(header["private"]),
            arrays.get("users"),
            bags=[Bag(**bag) for bag in header["bags"]],
            bag_rows=[arrays[f"bag_{i}"] for i in range(len(header["bags"]))],
            times=arrays.get("times"),
            raw_numbers=header["raw_numbers"],
            every=header["every"],
        )
        self.summary: ReadSummary = tablecache.read_summary(header)
        self.category_names: list[str] = header["categories"]
        self.number_names: list[str] = header["numbers"]
        self._indices = indices
        self._directory = None if in_memory else directory
        self._vocabularies = _vocabularies(directory, header) if in_memory else None

    @property
    def vocabularies(self) -> dict[str, HashVocabulary | GivenVocabulary]:
        """What to read other files with, so that rows mean the same there: `open_table(..., vocabularies=...)`."""
        if self._vocabularies is not None:
            return self._vocabularies
        assert self._directory is not None
        return _vocabularies(self._directory, tablecache.read_header(self._directory))

    def __reduce__(self) -> Any:
        if self._directory is None:
            return super().__reduce__()
        return type(self), (self._directory, self._indices)  # a worker maps the files again: no rows are copied


def _vocabularies(directory: Path, header: dict[str, Any]) -> dict[str, HashVocabulary | GivenVocabulary]:
    hashed = {name: HashVocabulary(size) for name, size in header["hashed"].items()}
    given = {
        name: GivenVocabulary({name: entry}, private=name in header["private"])
        for name, entry in tablecache.read_vocabulary(directory).items()
    }
    return {**hashed, **given}


def open_table(
    data: Paths | Any,
    schema: TableSchema,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
    max_malformed: float = 0.001,
    progress: Callable[[int], None] | None = None,
) -> Table:
    """Reads a table, or opens the cache that an earlier call left in `cache_dir`.

    `data`: one file, a list of files, a directory or a glob pattern: text with separators, plain, gzipped or in zstd,
    Parquet, Arrow or Feather, by their first bytes. Or a pandas or polars frame, a Hugging Face data set, an Arrow table.
    Without a column for it, the period is the number of the file, if there are several. Without `cache_dir`, and for frames, the
    arrays are kept in memory. `vocabularies` go before those of the schema.
    Malformed lines are left out; more than the share `max_malformed` of them is a DataError. `progress` is
    called with the number of rows read so far.
    """
    return _open(Table, data, schema, cache_dir, vocabularies, max_malformed, progress)


def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Any, schema: TableSchema, vocabularies: Mapping[str, Vocabulary] | None = None
) -> Item:
    """What a model takes of rows with raw values, such as requests, as `open_table` made it in training: without a target.

    `rows`: mappings from columns to values, or a frame as `open_table` takes it. Columns of the label, user, time and period need
    not be there. A value that is missing, or that a vocabulary lacks, has the row that it has in training. `vocabularies` are the
    `Table.vocabularies` of what was trained on, with what was counted there. A value that does not fit is a DataError.
    """
    others = (schema.label, schema.user, schema.time, schema.period)
    schema = _with_vocabularies(schema, vocabularies or {})
    no_label: dict[str, Any] = {"label": _NO_LABEL, "positive": (), "negative": (), "label_above": None}
    schema = replace(schema, **no_label, user=None, time=None, period=None)
    counted = [name for name, column in schema.vocabularies().items() if isinstance(column, ValueCounter)]
    if counted:
        raise ConfigError(
            f"encode_rows: the vocabulary of {', '.join(counted)} was counted in training: give vocabularies=table.vocabularies"
        )
    names = [name for use, name in schema.wanted().names.items() if name != _NO_LABEL]
    if isinstance(rows, (list, tuple)):
        for number, row in enumerate(rows, 1):
            for name in row:
                if name not in names and name not in others:
                    raise DataError(
                        f"encode_rows: row {number} has no column {name!r} to be read{suggestion(name, names)}"
                    )
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(names)}
    frame = as_table(rows)
    for place, column in enumerate(frame.columns):
        if pa.types.is_null(column.type):  # nobody has a value, which says nothing of its type
            frame = frame.set_column(place, frame.column_names[place], column.cast(pa.string()))
    frame = frame.append_column(_NO_LABEL, pa.array(np.zeros(frame.num_rows, np.int64)))
    table = open_table(frame, schema, max_malformed=0.0)
    return table.read_columns(np.arange(len(table)))[:-1]


_NO_LABEL = "@no label"
T = TypeVar("T", bound=Table)


def _open(
    kind: type[T],
    data: Paths | Any,
    schema: TableSchema,
    cache_dir: str | os.PathLike[str] | None,
    vocabularies: Mapping[str, Vocabulary] | None,
    max_malformed: float,
    progress: Callable[[int], None] | None,
) -> T:
    if not 0 <= max_malformed <= 1:
        raise ConfigError(f"max_malformed must be a share between 0 and 1, got {max_malformed!r}")
    if vocabularies:
        schema = _with_vocabularies(schema, vocabularies)
    is_paths = isinstance(data, (str, os.PathLike)) or (
        isinstance(data, (list, tuple)) and all(isinstance(path, (str, os.PathLike)) for path in data)
    )
    if is_paths and cache_dir is not None:
        directory = tablecache.cached(find_sources(data), Path(cache_dir).absolute(), schema, max_malformed, progress)
        table = kind(directory)
    else:
        sources = (
            [open_source(path, schema.wanted()) for path in find_sources(data)]
            if is_paths
            else [open_frame(data, schema.wanted())]
        )
        with tempfile.TemporaryDirectory() as folder:
            tablecache.build(sources, Path(folder), schema, max_malformed, progress)
            table = kind(Path(folder), in_memory=True)
    table.summary.check(max_malformed)  # the cache may stem from a more lenient call
    return table


def _with_vocabularies(schema: TableSchema, vocabularies: Mapping[str, Vocabulary]) -> TableSchema:
    def given(columns: Any) -> Any:
        return tuple(replace(c, vocabulary=vocabularies.get(c.name, c.vocabulary)) for c in columns)

    return replace(schema, categorical=given(schema.categorical), sequence=given(schema.sequence))
