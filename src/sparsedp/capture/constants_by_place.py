"""Constants by place in the batch: what a unit meets must not depend on how many units come before it.

`x * torch.arange(len(x))[:, None]` treats the first unit otherwise than the second. One unit more moves everybody behind it to
another place, so that all of their gradients change, and the bound is gone. So a constant that faces the units must be the same
for all of them. Numbers that are drawn have one law in every place, and are looked after elsewhere (`laws.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, Call
from sparsedp.capture.units import UnitAxis
from sparsedp.errors import UnitsMixedError

# Their constants say which rows, not what meets them: where units may be counted, the rules themselves say.
_BY_NUMBERS = {"getitem", "index_put", "_index_put_impl", "index_select", "index_add", "index_copy", "index_fill",
               "index_reduce", "embedding", "one_hot", "searchsorted"}  # fmt: skip
_COMBINING = JOINT - _BY_NUMBERS
_WITH_CLASS_WEIGHTS = {"cross_entropy", "nll_loss"}


def require_same_for_all(call: Call, axis: UnitAxis, constants: list[Tensor], where: Callable[[], str]) -> None:
    """Raises if units, which are at `axis` of the result, meet different values of a constant."""
    if call.units < 2:
        return
    if call.name == "getitem":
        constants = _columns(call, constants)
    elif call.name not in _COMBINING:
        return
    for tensor in constants:
        for faced in _facing(call, tensor, axis):
            if not _is_same(tensor, faced, call.units):
                raise by_place_refused(call.name, where)


def by_place_refused(name: str, where: Callable[[], str]) -> UnitsMixedError:
    return UnitsMixedError(
        f"Operation '{name}'{where()} lets each unit meet a part of a constant that its place in the batch decides, so that one "
        "unit more changes the gradients of all units behind it. Use the same values for all units (shape 1 along the "
        "batch), make them of each unit's own inputs, or draw them in forward()."
    )


def is_same_in(target: Tensor, index: Any, value: Any, axis: UnitAxis, units: int) -> bool:
    """Whether target[index] = value writes the same for all units, which are at `axis` of the target."""
    if not isinstance(value, Tensor) or value.ndim == 0 or units < 2:
        return True
    part = target[index]
    rule, call = AXIS_RULES["getitem"], Call("getitem", (target, index), {}, part, units)
    inside = rule(call, target, axis)
    if not isinstance(inside, UnitAxis):
        return True  # a part of the units, or in an order that is not known
    faced = inside.shifted(value.ndim - part.ndim)
    return faced.dim < 0 or value.shape[faced.dim] == 1 or _is_same(value, faced, units)


def _columns(call: Call, constants: list[Tensor]) -> list[Tensor]:
    """Of x[counted, columns]: the constants that say what of each unit is picked."""
    index = call.args[1]
    others = {id(item) for item in index[1:]} if isinstance(index, tuple) else set()
    return [tensor for tensor in constants if id(tensor) in others and tensor.ndim == 1]


def _facing(call: Call, tensor: Tensor, axis: UnitAxis) -> Iterator[UnitAxis]:
    """Where a constant faces the units: what would have them there would have them at `axis` of the result."""
    if call.name in _WITH_CLASS_WEIGHTS and tensor is not call.argument(1, "target"):
        return
    if call.name == "getitem":
        yield from [UnitAxis(0)] if axis == UnitAxis(0) and tensor.shape[0] == call.units else []
        return
    rule = AXIS_RULES[call.name]
    for dim, size in enumerate(tensor.shape):
        for inner in {1, axis.inner}:
            place = UnitAxis(dim, inner)
            if size > 1 and place.fits(tensor.shape, call.units) and rule(call, tensor, place) == axis:
                yield place


def _is_same(tensor: Tensor, axis: UnitAxis, units: int) -> bool:
    if not axis.fits(tensor.shape, units) or tensor.stride(axis.dim) == 0:
        return True
    apart = tensor.detach().unflatten(axis.dim, (-1, units, axis.inner))
    first = apart.narrow(axis.dim + 1, 0, 1)
    return bool(((apart == first) | ((apart != apart) & (first != first))).all())
