"""Whoever owns rows of tables: settles them before they are read, and lets them take their gradients.

One owner may have all rows of all tables, or each of several some rows of each: the model is the same, bit for bit, because
whatever is drawn for a row is a function of the key, the step, the table, the row's number and the column alone. Owners may
share the memory of a table, or each have a shard of it in a parameter of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._torch import without_subclasses
from sparsedp.errors import SparseDPError
from sparsedp.noise import RandomKey, Sums
from sparsedp.progress import Progress, no_progress
from sparsedp.tables.spec import Shard, TableSpec


@dataclass(frozen=True)
class Ownership:
    """What an owner is given: which rows of which tables, and what it has to know of the run."""

    tables: Mapping[str, TableSpec]
    parameters: Mapping[str, nn.Parameter]  # the tables by name, with the rows of all owners, or a shard
    optimizer: Optimizer  # the user's own
    key: Callable[[], RandomKey]  # the noise's: another one after a run is resumed
    std: float  # deviation of a step's noise on the averaged gradient
    steps: Callable[[], int]  # that the run has taken so far
    stage: Callable[[str], AbstractContextManager[Any]] = nullcontext  # entered around each stage of a step
    progress: Progress = no_progress  # told of the settling of a large table
    cut: Mapping[str, range] = field(default_factory=dict)  # the rows that this owner has of some tables; of others all
    # Tables of which `parameters` holds a shard alone, (len(rows), len(columns)); of the others it holds all.
    shards: Mapping[str, Shard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.shards.keys() & self.tables.keys():
            shard, table, shape = self.shards[name], self.tables[name], self.parameters[name].shape
            if not shard.is_of(table) or shape != shard.shape:
                raise SparseDPError(
                    f"Table '{name}' is {tuple(table.shape)}, and its shard has rows {shard.rows} and columns {shard.columns}, "
                    f"in a parameter of {tuple(shape)}. A shard is a part of its table, and the parameter has its shape."
                )
            if name in self.cut:
                raise SparseDPError(
                    f"Table '{name}' is both in cut and in shards. The owner of a shard has all of its rows: leave cut out."
                )

    def owned(self, name: str) -> range:
        """The numbers of the rows that this owner has of a table."""
        if name in self.shards:
            return self.shards[name].rows
        return self.cut.get(name, range(self.tables[name].rows))

    def first_in_memory(self, name: str) -> int:
        """The row that is at place 0 of a table's parameter."""
        return self.shards[name].rows.start if name in self.shards else 0

    def columns(self, name: str) -> range | None:
        """The columns that a table's parameter has; None: all."""
        columns = self.shards[name].columns if name in self.shards else None
        return None if columns is None or len(columns) == self.tables[name].dim else columns


class Owner(ABC):
    """Owns rows of tables, which are known by their names and the rows' numbers in the whole table.

    Of a table that it has a shard of, it has the shard's columns alone: what it is given for a row, and gives, are these.
    """

    adds_noise = (
        False  # whether the owner itself adds the noise, to all of its rows; otherwise `apply` gets noisy gradients
    )

    def __init__(self, ownership: Ownership) -> None:
        self.run = ownership

    # Names of the rows' weights, and what an optimizer keeps beside them, by parameter name.

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The settled weights of each table's owned rows, and all that the optimizer keeps for each of these rows."""
        self.settle_all()
        with without_subclasses():
            return {name: self._rows_of(name) for name in self.run.tables}

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Puts what `state` gave in place. No row is owed anything then."""
        with self.replaced(), torch.no_grad(), without_subclasses():
            for name in self.run.tables:
                for key, rows in self._rows_of(name).items():
                    rows.copy_(state[name][key])

    def _rows_of(self, name: str) -> dict[str, Tensor]:
        parameter, owned, first = self.run.parameters[name], self.run.owned(name), self.run.first_in_memory(name)
        kept = self.run.optimizer.state.get(parameter, {})
        tensors = {"weight": parameter, **{key: value for key, value in kept.items() if isinstance(value, Tensor)}}
        return {
            key: value.detach().as_subclass(Tensor)[owned.start - first : owned.stop - first]
            for key, value in tensors.items()
            if value.ndim and len(value) == len(parameter) and value.layout == torch.strided
        }

    # What happens in a step, in this order.

    def before_read(self, name: str, rows: Tensor | None) -> None:  # noqa: B027
        """Rows of a table are about to be read: any shape, repeated or not. None: all of them."""

    def begin(self, trained: Collection[str]) -> None:  # noqa: B027
        """Before a step: checks that it can be taken. `trained` names the tables that are not frozen."""

    def noise_parts(self, sums: Mapping[int, Sums]) -> list[Mapping[int, Sums]]:
        """The sums of a step that are to get noise, in parts each of which is drawn by one owner."""
        return [sums]

    def advance(self) -> None:  # noqa: B027
        """Counts the step. What is owed for it is owed from now on, also if the update is interrupted."""

    @abstractmethod
    def apply(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Lets rows, distinct and ascending, take their gradients in the step that `advance` has counted.

        `values` are (n, columns of the parameter).
        """

    # What happens between steps.

    def settle_all(self, names: Collection[str] | None = None) -> None:  # noqa: B027
        """Gives all rows of some tables, or of all, the noise that they are owed."""

    def pending(self) -> dict[str, int]:
        """For each table, how many of its rows are owed noise; empty if rows are never owed any."""
        return {}

    def replaced(self) -> AbstractContextManager[None]:
        """Within it all weights are replaced; afterwards no row is owed anything. If that fails, it is as before."""
        return nullcontext()

    def attach(self, settler: Owner | None = None) -> Callable[[Callable, tuple, dict], None] | None:
        """Stands before the weights from now on, if rows may be owed something.

        `settler` is the owner of all rows, if this one has a part of them. Returns what has to be called before operations that
        no guard sees, such as those of a forward pass under capture; None if there is nothing to do before them.
        """
        return None

    def detach(self) -> None:  # noqa: B027
        """Settles all rows, and leaves the weights as ordinary parameters."""


class SeveralOwners(Owner):
    """Owners that have all rows of a run's tables between them, in parameters that they share."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        assert not any(owner.run.shards for owner in owners), "owners of shards have parameters of their own"
        super().__init__(replace(owners[0].run, cut={}))
        self.owners = list(owners)
        self.adds_noise = owners[0].adds_noise

    def _parts(self, name: str) -> Iterator[tuple[Owner, range]]:
        for owner in self.owners:
            if owner.run.owned(name):
                yield owner, owner.run.owned(name)

    def state(self) -> dict[str, dict[str, Tensor]]:
        parts = [owner.state() for owner in self.owners]
        return {
            name: {key: torch.cat([part[name][key] for part in parts]) for key in parts[0][name]}
            for name in self.run.tables
        }

    def before_read(self, name: str, rows: Tensor | None) -> None:
        if (
            rows is not None
            and rows.numel()
            and not 0 <= int(rows.min()) <= int(rows.max()) < self.run.tables[name].rows
        ):
            rows = None  # from the end, or too large, which is torch's to refuse
        for owner, owned in self._parts(name):
            owner.before_read(name, None if rows is None else rows[(rows >= owned.start) & (rows < owned.stop)])

    def begin(self, trained: Collection[str]) -> None:
        for owner in self.owners:
            owner.begin(trained)

    def noise_parts(self, sums: Mapping[int, Sums]) -> list[Mapping[int, Sums]]:
        names = {table.index: name for name, table in self.run.tables.items()}
        parts: list[Mapping[int, Sums]] = [
            {index: table_sums for index, table_sums in sums.items() if index not in names}
        ]
        for owner in self.owners:
            parts.append(
                {i: _cut(table_sums, owner.run.owned(names[i])) for i, table_sums in sums.items() if i in names}
            )
        return parts

    def advance(self) -> None:
        for owner in self.owners:
            owner.advance()

    def apply(self, name: str, rows: Tensor, values: Tensor) -> None:
        for owner, owned in self._parts(name):
            begin, end = torch.searchsorted(rows, rows.new_tensor([owned.start, owned.stop])).tolist()
            owner.apply(name, rows[begin:end], values[begin:end])

    def settle_all(self, names: Collection[str] | None = None) -> None:
        for owner in self.owners:
            owner.settle_all(names)

    def pending(self) -> dict[str, int]:
        parts = [owner.pending() for owner in self.owners]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner in self.owners:
                stack.enter_context(owner.replaced())
            yield

    def attach(self, settler: Owner | None = None) -> Callable[[Callable, tuple, dict], None] | None:
        before = None
        for owner in self.owners:
            before = owner.attach(self)
        return before

    def detach(self) -> None:
        for owner in self.owners:
            owner.detach()


def _cut(sums: Sums, owned: range) -> Sums:
    """The part of a table's sums that is of some rows."""
    if sums.numbers is not None:
        edges = sums.numbers.new_tensor([owned.start, owned.stop])
        begin, end = torch.searchsorted(sums.numbers, edges).tolist()
        return Sums(sums.values[begin:end], numbers=sums.numbers[begin:end])
    held = sums.rows
    if held is not None:
        held = held[(held >= owned.start) & (held < owned.stop)] - owned.start
    return Sums(sums.values[owned.start : owned.stop], held, first=sums.first + owned.start)
