"""The batch that a forward pass is over, and where in the module the pass is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from sparsedp.errors import DataError, UnsupportedError


class HasUnits(Protocol):
    """A batch that the loop works on; two batches are the same if they are the same object."""

    @property
    def units(self) -> int: ...

    @property
    def examples(self) -> int: ...

    @property
    def owners(self) -> Tensor | None: ...

    @property
    def offsets(self) -> tuple[Tensor, ...]: ...  # tensors with an entry for each example, which other examples decide

    @property
    def constants(self) -> tuple[Tensor, ...]: ...  # tensors that are the same in every batch

    @property
    def unit_axes(self) -> tuple[tuple[Tensor, int | None], ...]: ...  # tensors of the batch, and where their units are

    @property
    def places(self) -> np.ndarray | None: ...  # of the examples in the data set, where the loader knows them


@dataclass(frozen=True, eq=False)
class UnannouncedBatch:
    """A batch that no loader announced: its units are its examples."""

    units: int
    owners: Tensor | None = None
    offsets: tuple[Tensor, ...] = ()
    constants: tuple[Tensor, ...] = ()
    unit_axes: tuple[tuple[Tensor, int | None], ...] = ()
    places: np.ndarray | None = None

    @property
    def examples(self) -> int:
        return self.units


class ForwardPass:
    """The forward pass that runs now, or ran last: what the parts of capture share of it."""

    def __init__(self) -> None:
        self.modules: list[str] = []  # the names of the modules that run, the outermost first
        self.batch: HasUnits
        self.units: int  # how many places the unit axis has: one for each example
        self.announced: int | None = None  # examples of the loop's batch, where the pass is over another one
        self.be_over(UnannouncedBatch(0))

    def be_over(self, batch: HasUnits) -> None:
        self.batch, self.units = batch, batch.examples

    def counted(self) -> str:
        """For messages: how many units there are, and what that number comes from if the loop's batch has another."""
        if self.announced is None:
            return f"{self.units} units"
        return (
            f"{self.units} rows that the module was called with, while the batch has {self.announced} units (call it with the "
            "batch as it is, and flatten or repeat inside of forward()),"
        )

    def where(self) -> str:
        """For messages: ' in module ...', the innermost one that has a name."""
        name = next((name for name in reversed(self.modules) if name), "")
        return f" in module '{name}'" if name else ""

    def rows_of(self, error: DataError) -> str:
        """For messages: which rows of the data set the examples of an error are, with a blank before; '' if nobody knows."""
        places = self.batch.places
        if not error.places or places is None or not len(places) == error.places_of == self.units:
            return ""
        rows = ", ".join(str(places[place]) for place in error.places)
        return f" In the data set: row{'s' if len(error.places) > 1 else ''} {rows}."

    def refuse(self, operation: str, names: str, reason: str, instead: str) -> UnsupportedError:
        """The error that says why an operation cannot use the parameters `names`, and what to do."""
        return UnsupportedError(
            f"Operation '{operation}' on parameter {names}{self.where()}: {reason}. Instead: {instead}."
        )
