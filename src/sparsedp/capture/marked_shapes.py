"""Shapes for people to read, with a star behind the size of the axis that has the units: (5*, 7, 16)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsedp.capture.tensors import KnownTensors
from sparsedp.capture.units import Mixed, UnitAxis, UnitData, WholeBatch


def marked_shape(shape: Sequence[int], axis: UnitAxis | None = None) -> str:
    """(5*, 7) for a shape whose units are on axis 0; without a star if there is no axis of units."""
    sizes = [f"{size}*" if axis is not None and dim == axis.dim else str(size) for dim, size in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def described(tensor: Tensor, known: KnownTensors) -> str:
    """A tensor's shape and what is known of it, in a few words."""
    if tensor.is_nested:
        return "a nested tensor"
    expression = known.expression(tensor)
    if expression is not None:
        is_itself = len(expression.parameters) == 1 and expression.parameters[0][1] is expression.tensor
        others = len(expression.parameters) - 1
        names = f"'{expression.parameters[0][0]}'" + (f" and {others} other{'s'[: others - 1]}" if others else "")
        return f"{'' if is_itself else 'made of '}{names} {marked_shape(tensor.shape)}"
    info = known.get(tensor)
    shape = marked_shape(tensor.shape, known.known_axis(tensor))
    if isinstance(info, WholeBatch):
        return f"{shape} of input '{info.operation}', which has no axis of units"
    if isinstance(info, Mixed):
        return f"{shape} of all units"
    if isinstance(info, UnitData) and known.known_axis(tensor) is None:
        return f"{shape} with units in places that are not known"
    return shape
