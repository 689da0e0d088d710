"""Where the units of a batch are in a tensor: the words in which that is said.

Clipping needs to know which part of an activation belongs to which unit. A model may transpose, flatten or stack its
activations, so the position of the units is followed through the forward pass instead of being guessed from sizes (a
sequence as long as the batch is large would fool a guess).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

VALID_POSITIONS = "a mean over valid positions"  # what a loss with ignored targets, or with weights, makes of the units


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


@dataclass(frozen=True, eq=False)
class Owners:
    """Whose the rows along some dimension are: `units`, int64 (n,), has the unit of each.

    Where units decide how many rows they have, or the order, as a mask or a sort does, no `UnitAxis` says it. `inner` is that
    of the `UnitAxis` that says it, if one does.
    """

    units: Tensor
    inner: int | None = None
    keys: Tensor | None = None  # what the rows are sorted by, (n,): each number is decided by the row's own unit
    packed: Packed | None = None
    # Of rows in segments, such as features, each with rows of all units: the segment of each, (n,) ascending. A part of whole
    # segments has the same of every unit; any other would leave out rows of the unit that happens to be first or last.
    segments: Tensor | None = None

    def same(self, other: Owners) -> bool:
        return self is other or torch.equal(self.units, other.units)

    def part(self, rows: slice) -> Owners | None:
        """Of some of the rows, if they are whole segments."""
        segments = self.segments
        if segments is None:
            return None
        edges = [edge for edge in (rows.start, rows.stop) if 0 < edge < len(segments)]
        if any(int(segments[edge - 1]) == int(segments[edge]) for edge in edges):
            return None
        return Owners(self.units[rows], segments=segments[rows])


@dataclass(frozen=True, eq=False)
class Packed:
    """Of the rows of a packed sequence: how many each time step has, whose the sequences are, and how long the padded ones."""

    sizes: Tensor
    sequences: Owners
    length: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows along dimension `dim`, each of one unit: index i belongs to unit owners.units[i].

    Nothing may depend on a row's number: others decide it.
    """

    dim: int
    owners: Owners


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """Of a tensor (n,) of numbers of rows: `owners` of the numbers, and of the rows that they count.

    Each number is that of a row of its own unit, which this unit decides: units[numbers] = owners.
    """

    owners: Owners
    counted: Owners


@dataclass(frozen=True)
class UnitData:
    """A tensor that depends on the batch. `axis` is None where the position of the units is not known.

    Three more are known without an axis: `rows` that have owners, `numbers` of such rows, and where the units are in a mask that
    all units chose together, `chosen`: its positions may be asked for, and nothing else.
    """

    axis: UnitAxis | None
    rows: Rows | None = None
    numbers: RowNumbers | None = None
    chosen: UnitAxis | None = None


@dataclass(frozen=True)
class OneUnit(UnitData):
    """A tensor that is made of the data of one unit alone, and of constants, such as a row of the batch.

    `recipe` tells what was done to the unit from what was done to others; None where its own data may have decided that.
    """

    unit: int = -1
    recipe: int | None = field(default=None, compare=False)


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


def owners_of_axis(axis: UnitAxis, size: int, units: int) -> Owners:
    """Of the rows along a dimension of this size."""
    return Owners(torch.arange(size) // axis.inner % max(units, 1), axis.inner if size == units * axis.inner else None)


def placed_rows(dim: int, owners: Owners) -> UnitData:
    """Rows along a dimension, by an axis where there is one."""
    return UnitData(UnitAxis(dim, owners.inner)) if owners.inner is not None else UnitData(None, Rows(dim, owners))


def rows_end_to_end(owners: Tensor, segments: Tensor | None = None) -> UnitData:
    """Rows of the units end to end along dimension 0, the n-th of unit owners[n], in segments or all in one."""
    whose = owners.cpu()
    return UnitData(
        None, Rows(0, Owners(whose, segments=torch.zeros_like(whose) if segments is None else segments.cpu()))
    )


def unit_first(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The tensor with its units on axis 0: (units, ...). Other positions keep their order."""
    shape = tensor.shape
    if axis.inner == 1 and shape[axis.dim] == units:
        return tensor.movedim(axis.dim, 0) if axis.dim else tensor
    outer = shape[axis.dim] // (units * axis.inner) if units else 0
    split = tensor.reshape(*shape[: axis.dim], outer, units, axis.inner, *shape[axis.dim + 1 :])
    return split.movedim(axis.dim + 1, 0)
