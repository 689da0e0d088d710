"""A data set that is made of another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class DerivedSet(ABC):
    """A set out of the examples of `base`. What it has not itself (`vocabulary_sizes`, `items`, `collate` ...) is base's."""

    def __init__(self, base: Any) -> None:
        self.base = base

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base":  # what pickle and copy ask for before there is a base
            raise AttributeError(name)
        return getattr(self.base, name)

    def numbers_of_base(self, name: str) -> np.ndarray | None:
        """One number for each example of base, such as `users`; None if it has none."""
        numbers = getattr(self.base, name, None)
        return (
            numbers.numpy() if isinstance(numbers, torch.Tensor) else None if numbers is None else np.asarray(numbers)
        )
