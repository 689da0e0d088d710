"""Batches in one go: whole columns of a data set by one index, fetched while the step before runs if that takes long.

`default_collate` makes a batch of 1,024 examples of 1,024 items, one call of the data set each, which takes several times as
long as a step of a small model. Where a data set is arrays and nothing else, one index into each of them gives the same batch.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from sparsedp.errors import SparseDPError
from sparsedp.sampling.layout import same

T = TypeVar("T")
# Gives the examples at places (n,), int64: an item's tuples and dicts, with n rows in each array.
Reader = Callable[[np.ndarray], Any]

_TRIED = 3  # examples that are read in both ways before a pass
# Seconds below which a batch is not worth a thread: to start one takes a tenth of a millisecond, and it competes with the step
# for the interpreter.
_QUICK = 0.0005


def column_reader(dataset: Any, collate: Callable[[Any], Any]) -> Reader | None:
    """What gives the batch of the examples at given places, (n,) int64, n > 0, as `collate` makes it of single items.

    None where only single items tell: data sets, subclasses and collate functions that the user wrote, and whatever some
    examples, read in both ways, show to be another batch. So code of the user runs as often and as late as without this.
    """
    reader = _reader(dataset, collate)
    if reader is None:
        return None
    finish = _as_collated if collate is default_collate else _as_tensors

    def read(places: np.ndarray) -> Any:
        return finish(reader(places))

    places = np.unique(np.linspace(0, len(dataset) - 1, _TRIED).astype(np.int64))
    try:
        return read if _equal(read(places), collate([dataset[int(place)] for place in places])) else None
    except Exception:  # an item that cannot be collated, say: the loop shall meet it as it would have
        return None


def one_ahead(source: Iterator[T], quick: float = _QUICK) -> Iterator[T]:
    """What `source` gives, each made by a thread while the one before it is in use.

    The thread is a new one for each, and ends with it: none is left, asleep or not, by a loop that was broken off, that
    failed, or whose process forked. What it raises is raised where its item would have been given. After an item that took
    less than `quick` seconds the next is made when it is asked for, without a thread.
    """
    ahead: _Ahead | None = None
    try:
        while True:
            begin = time.perf_counter()
            item = next(source, _END) if ahead is None else ahead.result()
            if item is _END:
                return
            seconds = time.perf_counter() - begin if ahead is None else ahead.seconds
            ahead = None if seconds < quick else _Ahead(source)
            yield item
    finally:
        # Not in the thread itself, in which the garbage collector may close this.
        if ahead is not None and ahead.thread is not threading.current_thread():
            ahead.thread.join()


_END: Any = object()


class _Ahead:
    """The next item of a source, which a thread makes."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._outcome: tuple[Any, BaseException | None] | None = None
        self.seconds = 0.0  # that it took
        self.thread = threading.Thread(target=self._make, name="sparsedp-batch")
        self.thread.start()

    def _make(self) -> None:
        begin = time.perf_counter()
        try:
            item = next(self._source, _END)
            self.seconds = time.perf_counter() - begin
            self._outcome = item, None
        except BaseException as failure:
            self._outcome = None, failure

    def result(self) -> Any:
        self.thread.join()
        if self._outcome is None:
            raise SparseDPError(
                "The process was forked while a batch was fetched, and the copy of the loop goes on in the child: it would "
                "train on the same samples. Loop over the private loader in the process that made it."
            )
        item, failure = self._outcome
        if failure is not None:
            raise failure
        return item


# ---------------------------------------------------------------------- data sets


def _reader(dataset: Any, collate: Callable[[Any], Any]) -> Reader | None:
    """As `column_reader`, for the structure alone: its tuples stay tuples, its arrays arrays."""
    kind = type(dataset)
    if collate is default_collate:
        if kind is Tensor or kind in (np.ndarray, np.memmap):
            return rows_reader(dataset)
        if _reads_as(dataset, TensorDataset):
            return _each(dataset.tensors, collate, tuple)
        if _reads_as(dataset, StackDataset):
            parts = dataset.datasets
            if isinstance(parts, dict):
                return _each(tuple(parts.values()), collate, lambda columns: dict(zip(parts, columns)))
            return _each(parts, collate, tuple)
        if f"{kind.__module__}.{kind.__name__}" == "datasets.arrow_dataset.Dataset":
            return _hugging_face_reader(dataset)
    if _reads_as(dataset, Subset):
        whole, where = _reader(dataset.dataset, collate), _places(dataset.indices)
        return None if whole is None or where is None else lambda places: whole(where[places])
    if _reads_as(dataset, ConcatDataset):
        return _concatenated(dataset, collate)
    return dataset.read_columns if _reads_columns(dataset, collate) else None


def _reads_as(dataset: Any, kind: type) -> bool:
    """Whether it is one of torch's data sets, or a subclass that leaves to it what an item is."""
    names = ("__getitem__", "__getitems__", "__getattribute__")
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names
    )


def _reads_columns(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Whether a data set has a `read_columns`, which holds: no class below the one that has it says what an item is."""
    classes = type(dataset).__mro__

    def owner(name: str) -> int:
        return next((number for number, kind in enumerate(classes) if name in vars(kind)), len(classes))

    if owner("read_columns") > min(owner("__getitem__"), owner("__getitems__"), owner("collate"), len(classes) - 1):
        return False
    return collate is default_collate or collate == getattr(dataset, "collate", None)


def _each(parts: Sequence[Any], collate: Callable[[Any], Any], join: Callable[[Iterator[Any]], Any]) -> Reader | None:
    readers = [_reader(part, collate) for part in parts]
    whole = [reader for reader in readers if reader is not None]
    return None if len(whole) < len(readers) else lambda places: join(reader(places) for reader in whole)


def _concatenated(dataset: ConcatDataset, collate: Callable[[Any], Any]) -> Reader | None:
    readers = [_reader(part, collate) for part in dataset.datasets]
    whole = [reader for reader in readers if reader is not None]
    if len(whole) < len(readers):
        return None
    ends = np.array(dataset.cumulative_sizes)
    begins = np.concatenate([[0], ends[:-1]])
    # A batch of examples of several parts has their common type, one of a single part has that part's own.
    filled = [place for place in range(len(ends)) if ends[place] > begins[place]]
    kinds = [
        _each_leaf(whole[place](np.zeros(1, np.int64)), lambda leaf: (type(leaf), leaf.dtype, leaf.shape))
        for place in filled
    ]
    if any(kind != kinds[0] for kind in kinds):
        return None

    def read(places: np.ndarray) -> Any:
        parts = np.searchsorted(ends, places, side="right")
        present = np.unique(parts).tolist()
        pieces = [whole[part](places[parts == part] - begins[part]) for part in present]
        if len(pieces) == 1:
            return pieces[0]
        # The examples are part by part in the pieces: where each of the batch is among them.
        order = np.empty(len(places), np.int64)
        order[np.argsort(parts, kind="stable")] = np.arange(len(places))
        return _join(pieces, order)

    return read


def _join(pieces: list[Any], order: np.ndarray) -> Any:
    leaves: list[list[Any]] = [[] for _ in pieces]
    for piece, column in zip(pieces, leaves):
        _each_leaf(piece, column.append)
    joined = iter(
        [
            torch.from_numpy(np.concatenate([_raw(part) for part in parts])[order]).view(parts[0].dtype)
            if isinstance(parts[0], Tensor)
            else np.concatenate(parts)[order]
            for parts in zip(*leaves)
        ]
    )
    return _each_leaf(pieces[0], lambda leaf: next(joined))


def rows_reader(array: Any) -> Reader | None:
    """What copies rows of an array or a tensor; None for those that only torch can read, or numpy, example by example."""
    if isinstance(array, Tensor):
        if array.layout != torch.strided or array.device.type != "cpu" or array.requires_grad or not array.ndim:
            return None
        if array.is_nested or array.is_quantized or array.is_conj() or array.is_neg():
            return None
        raw, kind = _raw(array), array.dtype
        return lambda places: torch.from_numpy(_rows(raw, places)).view(kind)
    if not array.ndim or not array.dtype.isnative or array.dtype.kind not in "biufc":
        return None
    return lambda places: _rows(array, places)


def _raw(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as an array, of whole numbers of the same size if numpy does not have its type."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        ).numpy()


def _rows(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A copy of some rows. By numpy: torch would use OpenMP's threads, which spin while they wait."""
    if array.flags.c_contiguous:
        return np.asarray(array).take(places, axis=0)
    rows = np.empty(
        (len(places), *array.shape[1:]), array.dtype
    )  # its strides are torch's, also of axes of one element
    rows[...] = np.asarray(array)[places]  # take would copy all of it first
    return rows


def _hugging_face_reader(dataset: Any) -> Reader | None:
    """Of a `datasets.Dataset`, which reads columns, and would divide them into items; a transform may draw at random."""
    if dataset.format["type"] not in (None, "torch", "numpy"):
        return None

    def read(places: np.ndarray) -> Any:
        columns = dataset[places.tolist()]
        return {
            name: column if isinstance(column, (Tensor, np.ndarray)) else default_collate(list(column))
            for name, column in columns.items()
        }

    return read


def _places(indices: Any) -> np.ndarray | None:
    """A subset's indices as an array; None if they are no whole numbers, or count from the end."""
    where = np.asarray(indices)
    return where.astype(np.int64) if where.ndim == 1 and where.dtype.kind in "iu" and (where >= 0).all() else None


# ---------------------------------------------------------------------- batches


def _each_leaf(value: Any, change: Callable[[Any], Any], tuples: Callable[[list[Any]], Any] = tuple) -> Any:
    """The same structure with `change` of each array; plain tuples become `tuples`."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _each_leaf(item, change, tuples)) for key, item in value.items())
    if isinstance(value, tuple):
        items = [_each_leaf(item, change, tuples) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuples(items)
    if type(value) is list:
        return [_each_leaf(item, change, tuples) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _each_leaf(getattr(value, field.name), change, tuples) for field in fields(value)}
        return type(value)(**parts)
    return change(value)


def _as_collated(columns: Any) -> Any:
    """As default_collate returns them: tuples are lists, and numbers of numpy's have the type that torch gives them."""
    return _each_leaf(columns, _collated_array, list)


def _collated_array(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    tensor = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    return tensor if array.ndim > 1 else tensor.to(torch.as_tensor([array.dtype.type(0)]).dtype)


def _as_tensors(columns: Any) -> Any:
    return _each_leaf(columns, torch.as_tensor)


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same to whoever gets them: containers, types, strides and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if is_dataclass(one):
        return all(_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return same(one, other) and (not isinstance(one, Tensor) or one.stride() == other.stride())
