"""Some of the examples of a data set, as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsedp.audit.derived_set import DerivedSet


class Part(DerivedSet):
    """The examples `indices` (n,) of a set. Its `users` and `periods` are theirs; everything else is that of the whole set."""

    def __init__(self, base: Any, indices: np.ndarray) -> None:
        super().__init__(base)
        self.indices = np.asarray(indices, np.int64)
        of_base = (self.numbers_of_base(name) for name in ("users", "periods"))
        self.users, self.periods = (None if numbers is None else numbers[self.indices] for numbers in of_base)

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
