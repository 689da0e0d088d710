"""Uses of parameters by rows that have owners (`owned_rows.py`), such as the tokens that are routed to one expert.

A rule sees each row as if it were a unit. What it finds for the rows is then brought together by their owners:

- `Linear` (rows, P, I): the rows of a unit become its positions, (units, c P, I), zeros where there are fewer than c
- `Built` (rows, n): added up, (units, n)
- `Lookup`: the positions stay as they are and get another unit
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparsedp.capture.expressions import Placed
from sparsedp.capture.names import operands_of
from sparsedp.capture.ops.grouped import GROUPED
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.owned_rows import place_of, spread
from sparsedp.capture.tensors import KnownTensors
from sparsedp.capture.units import Owners, Rows, UnitAxis, placed_rows
from sparsedp.capture.uses import of_owners


def by_rows(capture: CaptureForRules, known: KnownTensors, name: str, args: tuple, kwargs: dict) -> RowsAsUnits | None:
    """For a rule of an operation on rows that have owners: the capture with rows for units. None for other operations."""
    if name in GROUPED or name == "embedding_bag":  # whose rule looks at owners itself
        return None
    for tensor in operands_of(args, kwargs):
        rows = known.rows(tensor)
        if rows is not None:
            return RowsAsUnits(capture, known, rows.owners)
    return None


class RowsAsUnits:
    """A forward pass as rules for the use of parameters see it, with the rows of `owners` in the place of units."""

    def __init__(self, capture: CaptureForRules, known: KnownTensors, owners: Owners) -> None:
        self._capture, self._known, self._owners = capture, known, owners
        self.is_data, self.expression, self.rows = capture.is_data, capture.expression, capture.rows
        self.is_end_to_end, self.keep = capture.is_end_to_end, capture.keep
        self.resumed, self.refuse, self.place_parts = capture.resumed, capture.refuse, capture.place_parts

    @property
    def units(self) -> int:
        return len(self._owners.units)

    @property
    def forward_only(self) -> bool:
        return self._capture.forward_only

    def known_axis(self, tensor: Tensor) -> UnitAxis | None:
        place = place_of(tensor, self._known.get(tensor), self._capture.units)
        return UnitAxis(place.dim) if place is not None and place.owners.same(self._owners) else None

    def axis(self, tensor: Tensor, operation: str, names: str) -> UnitAxis:
        axis = self.known_axis(tensor)
        if axis is not None:
            return axis
        self._capture.axis(tensor, operation, names)  # raises, unless it has units elsewhere
        raise self.refuse(
            operation, names, "its inputs have rows of different units, or of the same units in another order",
            "pick the rows of all inputs by the same mask or index",
        )  # fmt: skip

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed], axis: UnitAxis | None) -> Tensor:
        owners, units = self._owners.units, self._capture.units
        recorded = self._capture.record(out, lambda grad: placed_by_owner(finish(grad), owners, units), None)
        return self.place(recorded, axis)

    def place_rows(self, out: Tensor, rows: Rows) -> Tensor:
        return self._capture.place_rows(out, rows)

    def place(self, out: Tensor, axis: UnitAxis | None) -> Tensor:
        if axis is None or not axis.fits(out.shape, self.units):
            return self._capture.place(out, None)
        self._known[out] = placed_rows(axis.dim, spread(self._owners, axis, out.shape[axis.dim]))
        return out


def placed_by_owner(placed: Placed, owners: Tensor, units: int) -> Placed:
    """Uses by rows as uses by units."""
    return [(name, of_owners(use, owners, units)) for name, use in placed] if len(owners) else []
