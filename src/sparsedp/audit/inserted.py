"""A data set with canaries in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsedp.audit.canaries import CanaryPlan, make_canaries
from sparsedp.audit.derived_set import DerivedSet
from sparsedp.errors import SparseDPError


class WithCanaries(DerivedSet):
    """A training set, and behind it the canaries of a plan, each as often as the plan says.

    Everything else that the set has (`vocabulary_sizes`, `items`, `length`, `collate` ...) is that of the set itself. A canary's
    period is that of an example drawn at random, for all its repetitions; whose it is, the plan says.
    """

    def __init__(self, base: Any, plan: CanaryPlan) -> None:
        super().__init__(base)
        self.plan = plan
        self.canaries = make_canaries(base, plan)  # all of the plan, those that are not inserted as well
        self.inserted = np.repeat(np.arange(len(self.canaries)), plan.repetitions)  # by their numbers
        hosts = plan.hosts(len(base))[self.inserted]
        self.periods = self._joined("periods", lambda periods: periods[hosts])
        self.users = None if plan.owner is None else self._joined("users", lambda users: self._owners(users, hosts))
        if plan.owner is not None and self.users is None:
            raise SparseDPError(
                f"Whose a canary is can only be said where users are known, and {type(base).__name__} has no attribute users."
            )

    def __len__(self) -> int:
        return len(self.base) + len(self.inserted)

    def __getitem__(self, index: int) -> Any:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        index %= len(self)
        size = len(self.base)
        return self.base[index] if index < size else self.canaries[self.inserted[index - size]]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Some examples; as the set itself gives them, if no canary is among them, and otherwise as a list."""
        where = np.asarray(indices, dtype=np.int64)
        is_canary = where >= len(self.base)
        if not hasattr(self.base, "__getitems__"):
            return [self[index] for index in where.tolist()]
        others = self.base.__getitems__(where[~is_canary].tolist())
        if not is_canary.any():
            return others
        remaining = iter(others)
        return [self[index] if inside else next(remaining) for index, inside in zip(where.tolist(), is_canary)]

    def _joined(self, name: str, of_canaries: Any) -> np.ndarray | None:
        """The set's own numbers for its examples, and behind them those of the canaries; None if it has none."""
        numbers = self.numbers_of_base(name)
        if numbers is None:
            return None
        return np.concatenate([numbers, of_canaries(numbers)])

    def _owners(self, users: np.ndarray, hosts: np.ndarray) -> np.ndarray:
        if self.plan.owner == "existing":
            return users[hosts]
        first = int(users.max()) + 1
        return first + (self.inserted if self.plan.owner == "one" else np.arange(len(self.inserted)))
