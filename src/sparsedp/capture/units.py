"""Where the units of a batch are in a tensor: the words in which that is said.

Clipping needs to know which part of an activation belongs to which unit. A model may transpose, flatten or stack its
activations, so the position of the units is followed through the forward pass instead of being guessed from sizes (a
sequence as long as the batch is large would fool a guess).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class UnitAxis(NamedTuple):
    """Units lie along dimension `dim`: index i of it belongs to unit (i // inner) mod units."""

    dim: int
    inner: int = 1

    def shifted(self, by: int) -> UnitAxis:
        return UnitAxis(self.dim + by, self.inner)

    def fits(self, shape: Sequence[int], units: int) -> bool:
        if not 0 <= self.dim < len(shape):
            return False
        block = units * self.inner
        return shape[self.dim] == 0 if block == 0 else shape[self.dim] > 0 and shape[self.dim] % block == 0


@dataclass(frozen=True)
class UnitData:
    """A tensor that depends on the batch. `axis` is None where the position of the units is not known."""

    axis: UnitAxis | None


@dataclass(frozen=True)
class OneUnit(UnitData):
    """A tensor that is made of the data of one unit alone, and of constants, such as a row of the batch."""

    unit: int


@dataclass(frozen=True, eq=False)
class Ragged(UnitData):
    """Rows of the units end to end, some with more of them than others: index n of dimension 0 belongs to unit owners[n].

    It has no `axis`, so that whatever does not look for `owners` takes the place of the units for unknown. Rows may come in
    segments, such as features, each with rows of all units. A part of whole segments has the same of every unit; any other
    would leave out rows of the unit that happens to be first or last.
    """

    owners: Tensor  # (N,), int64
    segments: Tensor  # (N,), int64, ascending

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def are_rows_of(self, other: Ragged) -> bool:
        """Whether both have the same units' rows in the same places."""
        return self.owners is other.owners or torch.equal(self.owners, other.owners)

    @staticmethod
    def of(owners: Tensor, segments: Tensor | None = None) -> Ragged:
        """All rows are of one segment, if nothing else is said."""
        return Ragged(None, owners, torch.zeros_like(owners) if segments is None else segments)

    def part(self, rows: slice) -> Ragged | None:
        """Rows of whole segments; None for others."""
        segments = self.segments
        edges = [edge for edge in (rows.start, rows.stop) if 0 < edge < len(segments)]
        if any(int(segments[edge - 1]) == int(segments[edge]) for edge in edges):
            return None
        return Ragged(None, self.owners[rows], segments[rows])


@dataclass(frozen=True)
class Mixed:
    """A tensor in which the units of a batch were reduced to one value, such as a batch mean."""

    operation: str


@dataclass(frozen=True)
class WholeBatch(Mixed):
    """An input of forward() without an axis of units, by its name, or what was made of it: all units may decide it.

    Bags with offsets may be made of such inputs: flat ids, weights and offsets say themselves whose an id is, as long as each
    value is made of the one in its place alone (`in_order`).
    """

    in_order: bool = True


Info = UnitData | Mixed


def unit_first(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The tensor with its units on axis 0: (units, ...). Other positions keep their order."""
    shape = tensor.shape
    if axis.inner == 1 and shape[axis.dim] == units:
        return tensor.movedim(axis.dim, 0) if axis.dim else tensor
    outer = shape[axis.dim] // (units * axis.inner) if units else 0
    split = tensor.reshape(*shape[: axis.dim], outer, units, axis.inner, *shape[axis.dim + 1 :])
    return split.movedim(axis.dim + 1, 0)
