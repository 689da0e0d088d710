"""What a step asks of the processes that train together, the ranks: to add up what each found in its part of a batch.

A unit is on one rank, and a row of a table is owned by one. Which rows a batch touches, how much and by what gradients, is
known where the units are; selection and noise are drawn where the rows are. A `RowExchange` takes the one to the other, and
`Ranks` adds up the rest. Here are those of a process that trains alone, in which nothing has to go anywhere; `distributed/`
has those of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from sparsedp.capture import RowSpace, RowSparse
from sparsedp.tables.spec import Shard


class RowExchange(ABC):
    """Of one step: the rows that this rank's units touch, and those that all ranks' units touch and this rank owns.

    Rows are global ones (`RowSpace`), distinct and ascending.
    """

    space: RowSpace
    rows: Tensor  # owned here and touched by units of any rank

    @abstractmethod
    def owned(self, name: str) -> range:
        """The rows of a table that this rank owns."""

    def owned_of(self, name: str, rows: Tensor) -> Tensor:
        """Those of a table's `rows`, ascending, that this rank owns."""
        owned = self.owned(name)
        if len(owned) == self.space.sizes[self.space.names.index(name)]:
            return rows
        begin, end = torch.searchsorted(rows, rows.new_tensor([owned.start, owned.stop])).tolist()
        return rows[begin:end]

    @abstractmethod
    def add_up(self, values: Tensor) -> Tensor:
        """A number for each row that this rank's units touch, float64 (n,), added up over the ranks: one for each of `rows`."""

    @abstractmethod
    def add_up_rows(self, sums: Mapping[str, RowSparse]) -> dict[str, RowSparse]:
        """Rows of each table, out of those that this rank's units touch, added up over the ranks: the rows owned here."""

    @abstractmethod
    def on_all_ranks(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A number for each of some owned rows, (n,), as all ranks have them: all rows, and the sum over a row's owners."""

    @abstractmethod
    def of_own_units(self, selection: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a selection by the owners of rows means for this rank's units: those of their rows that may change.

        A process that trains alone may keep rows in it that none of its units touch.
        """


class Ranks(ABC):
    """The processes that train together, as one of them sees them."""

    several: bool
    shards: Mapping[str, Shard]  # those that this rank has of tables which it does not have as a whole

    @abstractmethod
    def meet(
        self, step: int, batch: int, options: Iterable[tuple[str, bool, str | None]], dense: Iterable[Tensor]
    ) -> None:
        """Before a step: raises on all ranks if they are not about to take the same one.

        They are to be at the same step and batch, with the same dense parameters. `options` are (name, whether it is trained,
        the optimizer's options for it) of each parameter; None: this rank has no part of it.
        """

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Whether this rank has any part of a table."""

    @abstractmethod
    def counts(self, name: str) -> bool:
        """Whether rows of a table that this rank owns are counted here: not if another rank has the same ones."""

    @abstractmethod
    def exchange(self, space: RowSpace, rows: Tensor) -> RowExchange:
        """Tells the owners which global rows this rank's units touch."""

    @abstractmethod
    def add_up_dense(self, sums: Sequence[Tensor]) -> None:
        """Adds the ranks' sums up, in place."""

    @abstractmethod
    def agree(self, error: Exception | None) -> None:
        """Raises on all ranks if there is an error on one of them."""


class LocalExchange(RowExchange):
    """All units and all rows are here."""

    def __init__(self, space: RowSpace, rows: Tensor) -> None:
        self.space, self.rows = space, rows

    def owned(self, name: str) -> range:
        return range(self.space.sizes[self.space.names.index(name)])

    def add_up(self, values: Tensor) -> Tensor:
        return values

    def add_up_rows(self, sums: Mapping[str, RowSparse]) -> dict[str, RowSparse]:
        return dict(sums)

    def on_all_ranks(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rows, values

    def of_own_units(self, selection: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(selection)


class OneRank(Ranks):
    """A process that trains alone."""

    several = False
    shards: Mapping[str, Shard] = MappingProxyType({})

    def meet(
        self, step: int, batch: int, options: Iterable[tuple[str, bool, str | None]], dense: Iterable[Tensor]
    ) -> None:
        return

    def owns(self, name: str) -> bool:
        return True

    def counts(self, name: str) -> bool:
        return True

    def exchange(self, space: RowSpace, rows: Tensor) -> RowExchange:
        return LocalExchange(space, rows)

    def add_up_dense(self, sums: Sequence[Tensor]) -> None:
        return

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error
