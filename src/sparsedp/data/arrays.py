"""A data set of arrays: tuples, named tuples, dicts and dataclasses of them, also within one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsedp.errors import ConfigError
from sparsedp.sampling import rows_reader


class ArrayDataset(Dataset[Any]):
    """Example i is row i of every array: `ArrayDataset({"user": users, "item": items, "label": labels})[i]["user"]`.

    `arrays` is a tensor or a numpy array, or a tuple, named tuple, dict, list or dataclass of such, also nested; all have a row
    for each example. A private loader fetches a batch with one index into each, not example by example, both with torch's
    default collate function and with `collate_fn=dataset.collate`, which also keeps tuples and dataclasses what they are.
    """

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        lengths: dict[str, int] = {}
        _map_leaves(arrays, lambda array, path: lengths.update({path: _length(array, path)}))
        if not lengths:
            raise ConfigError("ArrayDataset: there is no array in it")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{path or 'the array'}: {length}" for path, length in lengths.items())
            raise ConfigError(f"ArrayDataset: every array needs a row for each example, but they have {listed}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        return _map_leaves(self.arrays, lambda array, path: array[i])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def read_columns(self, places: np.ndarray) -> Any:
        """The examples at `places` (n,), copied: an item with n rows in each of its arrays."""
        return _map_leaves(self.arrays, lambda array, path: _rows(array, places))

    @staticmethod
    def collate(items: Sequence[Any]) -> Any:
        """The items as one, with an axis of examples in front of each of its tensors."""
        several = [iter(_leaves(item)) for item in items]
        return _map_leaves(items[0], lambda _, path: torch.stack([torch.as_tensor(next(leaves)) for leaves in several]))


def _leaves(item: Any) -> list[Any]:
    leaves: list[Any] = []
    _map_leaves(item, lambda leaf, path: leaves.append(leaf))
    return leaves


def _map_leaves(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """The same structure with `change(array, path)` in place of each array."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, change, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_leaves(getattr(value, name), change, f"{path}.{name}") for name in value._fields))
    if isinstance(value, (tuple, list)):
        return type(value)([_map_leaves(item, change, f"{path}[{place}]") for place, item in enumerate(value)])
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return type(value)(**{name: _map_leaves(getattr(value, name), change, f"{path}.{name}") for name in names})
    return change(value, path)


def _rows(array: Any, places: np.ndarray) -> Any:
    reader = rows_reader(array)
    if reader is None:  # it was another array when the data set was made
        raise ConfigError("ArrayDataset: an array was exchanged for one that cannot be read")
    return reader(places)


def _length(array: Any, path: str) -> int:
    if not isinstance(array, (Tensor, np.ndarray)) or not array.ndim:
        kind = (
            f"a {type(array).__name__} without rows"
            if isinstance(array, (Tensor, np.ndarray))
            else type(array).__name__
        )
        raise ConfigError(
            f"ArrayDataset: {path or 'the data'} is {kind}: give tensors or numpy arrays with a row for each example"
        )
    if rows_reader(array) is None:
        raise ConfigError(
            f"ArrayDataset: {path or 'the array'} has the type {array.dtype}: give numbers, in memory on the CPU"
        )
    return len(array)
