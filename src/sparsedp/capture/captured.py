"""The uses of parameters that the forward and backward passes over one batch left."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sparsedp.capture.forward_pass import HasUnits
from sparsedp.capture.owners import Grouping
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.terms import PublicTerm
from sparsedp.capture.uses import ParameterUses, RowNorms, Use
from sparsedp.errors import UnsupportedError


class Kept:
    """A tensor that a use needs after backward; changing it in place meanwhile is an error."""

    def __init__(self, tensor: Tensor, operation: str, names: str, where: str) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version
        self._operation, self._names, self._where = operation, names, where

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise UnsupportedError(
                f"The input of operation '{self._operation}' on parameter {self._names}{self._where} was modified in place "
                "before step(), or before the last physical batch's step() where a selection waits for it, so its gradient "
                "cannot be formed. Use the operation that returns a new tensor, and a new tensor for every batch."
            )
        return self._tensor


@dataclass
class Captured:
    """The uses of every private parameter by the units of one physical batch.

    `uses` keep the examples of the batch apart. A unit's gradient is the sum of its examples' gradients: `owners`, int64
    (examples,), says which unit each of them belongs to; None: example i is unit i.
    """

    units: int
    uses: dict[str, ParameterUses]
    _touched: TouchedRows | None = None
    owners: Tensor | None = None
    kept: list[Kept] = field(default_factory=list)  # tensors that the uses share their memory with
    _grouped: Grouping | None = None
    terms: list[PublicTerm] = field(default_factory=list)  # of the loss, that depend on parameters alone
    places: np.ndarray | None = None  # of the examples in the data set, where the loader knows them

    @staticmethod
    def of(
        batch: HasUnits, uses: dict[str, list[Use]], kept: list[Kept], terms: list[PublicTerm] | None = None
    ) -> Captured:
        """Of the `uses` of each parameter, in the order in which they came."""
        merged = {name: ParameterUses.of(parts).written_out() for name, parts in uses.items()}
        return Captured(batch.units, merged, owners=batch.owners, kept=kept, terms=terms or [], places=batch.places)

    @property
    def examples(self) -> int:
        return self.units if self.owners is None else len(self.owners)

    def hold(self) -> None:
        """Before other batches come: what no use shares its memory with need not stay."""
        uses = [use for parts in self.uses.values() for use in parts.all]
        tensors = [value for use in uses for value in vars(use).values() if isinstance(value, Tensor)]
        tensors += [
            value
            for parts in self.uses.values()
            for use in parts.carrieds
            for part in use.parts
            for value in part.memory
        ]
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.kept = [kept for kept in self.kept if kept.get().untyped_storage().data_ptr() in memory]

    def require_unchanged(self) -> None:
        """Raises if the memory of uses was changed since."""
        for kept in self.kept:
            kept.get()

    def touched(self, space: RowSpace) -> TouchedRows:
        """The lookups grouped by row, which is done once."""
        if self._touched is None or self._touched.space != space:
            self._touched = TouchedRows(self.uses, space, self.units, self.owners)
        return self._touched

    def squared_norms(self, uses: ParameterUses, row_norms: RowNorms | None = None) -> Tensor:
        """Squared norm of each unit's gradient, (units,), by `uses` of one parameter; see `ParameterUses`."""
        if self.owners is None:
            return uses.squared_norms(self.units, row_norms)
        if self._grouped is None:
            self._grouped = Grouping(self.owners, self.units)
        return self._grouped.squared_norms(uses)

    def each(self, factors: Tensor) -> Tensor:
        """A factor for each unit as one for each example, (examples,): what the weighted sums of `uses` take."""
        return factors if self.owners is None else factors[self.owners]
