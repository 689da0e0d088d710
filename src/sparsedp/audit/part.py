"""Some of the examples of a data set, as a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class Part:
    """The examples `indices` (n,) of a set. Its `users` and `periods` are theirs; everything else is that of the whole set."""

    def __init__(self, base: Any, indices: np.ndarray) -> None:
        self.base, self.indices = base, np.asarray(indices, np.int64)
        self.users, self.periods = (self._of_part(name) for name in ("users", "periods"))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.base[int(place)] for place in self.indices[index]]
        return self.base[int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if not hasattr(self.base, "__getitems__"):
            return [self[index] for index in indices]
        return self.base.__getitems__(self.indices[np.asarray(indices, np.int64)].tolist())

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base":  # what pickle and copy ask for before there is a base
            raise AttributeError(name)
        return getattr(self.base, name)

    def _of_part(self, name: str) -> np.ndarray | None:
        numbers = getattr(self.base, name, None)
        if numbers is None:
            return None
        return (numbers.numpy() if isinstance(numbers, torch.Tensor) else np.asarray(numbers))[self.indices]
