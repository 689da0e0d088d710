"""Elementwise operations, and parameters that are joined to activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp.capture.capture import Capture
from sparsedp.capture.expressions import (
    Expression,
    Placed,
    aligned_is_cheap,
    is_shared_along,
    place_aligned,
    place_built,
)
from sparsedp.capture.rules.registry import names_of, require_placeable, require_small, rule
from sparsedp.capture.tracking import UnitAxis


@rule(
    "add", "radd", "iadd", "add_", "sub", "rsub", "isub", "sub_", "subtract", "mul", "rmul", "imul", "mul_", "multiply",
    "div", "truediv", "rtruediv", "rdiv", "itruediv", "div_", "divide", "true_divide", "pow", "rpow",
    "maximum", "minimum",
    "where", "lerp", "addcmul", "addcdiv", "fmax", "fmin", "max", "min", "logaddexp", "atan2", "hypot",
)  # fmt: skip
def _elementwise(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Any broadcasting operation: every unit gets its own copy of the parameter, whose gradient is kept."""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    names = names_of(capture, operands)
    ndim = max(operand.ndim for operand in operands)
    placed = []
    for operand in operands:
        if capture.is_data(operand):
            axis = capture.axis(operand, name, names).shifted(ndim - operand.ndim)
            placed.append((axis, operand.shape[axis.dim - ndim]))
    axis, size = placed[0]
    if any(other != placed[0] for other in placed) and capture.units > 1:
        raise capture.refuse(name, names, "units lie on different axes of its inputs", "align them first")

    def tapped(value: Any) -> Any:
        found = capture.expression(value)
        return value if found is None else tap(capture, name, found, axis, ndim, size)

    out = func(*[tapped(value) for value in args], **{key: tapped(value) for key, value in kwargs.items()})
    return capture.place(out, axis)


def tap(capture: Capture, name: str, expression: Expression, axis: UnitAxis, ndim: int, size: int) -> Tensor:
    """The parameter, once for every unit, in a shape that broadcasts as before; its gradient is per unit.

    `axis` is where the units are in a result of `ndim` dimensions, `size` how long that dimension is.
    """
    units = capture.units
    dim = axis.dim - (ndim - expression.tensor.ndim)  # the dimension of the parameter that faces the units
    value = expression.tensor.detach()
    if dim >= 0 and value.shape[dim] != 1:
        if size != units:
            raise capture.refuse(
                name, expression.names, "units share an axis with positions", "unflatten the input first"
            )
        if units > 1 and not is_shared_along(expression, dim):
            raise capture.refuse(
                name, expression.names,
                "units take different parts of it by their place in the batch, so that one unit more changes all others'",
                "use the same part for all units, or rows that each unit's own ids pick",
            )  # fmt: skip
        if not aligned_is_cheap(expression, dim):
            require_small(capture, name, expression)
        return capture.record(value, lambda grad: place_aligned(expression, grad, dim), UnitAxis(dim))
    require_placeable(capture, name, expression)
    copies = value.reshape(*(1,) * max(0, -dim), *value.shape)
    at = max(dim, 0)
    copies = copies.expand(*copies.shape[:at], units, *copies.shape[at + 1 :])

    def finish(grad: Tensor) -> Placed:
        return place_built(expression, grad.movedim(at, 0).reshape(units, *expression.tensor.shape))

    tapped = capture.record(copies, finish, UnitAxis(at))
    if size == units:
        return tapped
    outer = size // (units * axis.inner) if units else 0
    shape = [-1] * at + [outer, units, axis.inner] + [-1] * (tapped.ndim - at - 1)
    return tapped.unsqueeze(at + 1).unsqueeze(at).expand(shape).flatten(at, at + 2)


@rule("cat", "concat", "concatenate", "stack")
def _join(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Parameters beside activations, such as a class token: each facing the units on the same axis."""
    tensors = list(kwargs.get("tensors", args[0] if args else ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    data = next(tensor for tensor in tensors if capture.is_data(tensor))
    names = names_of(capture, tensors)
    axis = capture.axis(data, name, names)
    if data.shape[axis.dim] != capture.units or (name != "stack" and dim % data.ndim == axis.dim):
        raise capture.refuse(name, names, "it joins along the units' axis", "expand the parameter over the batch first")
    pieces = []
    for tensor in tensors:
        found = capture.expression(tensor)
        pieces.append(tensor if found is None else tap(capture, name, found, axis, tensor.ndim, capture.units))
    out = func(pieces, dim)
    before = name == "stack" and dim % out.ndim <= axis.dim
    return capture.place(out, axis.shifted(1 if before else 0))
