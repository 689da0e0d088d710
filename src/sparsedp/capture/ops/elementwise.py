"""Elementwise operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.expressions import (
    Expression,
    Placed,
    aligned_is_cheap,
    is_shared_along,
    place_aligned,
    place_built,
)
from sparsedp.capture.ops.helpers import names_of, require_placeable, require_small
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, axis_rule, plain_name, use_rule
from sparsedp.capture.units import UnitAxis


def _pointwise_names() -> set[str]:
    """What torch itself tags as pointwise, the operators, and layers that act on each element."""
    names = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads):
            names.add(plain_name(name.strip("_") if name.startswith("__") else name))
    names -= {"max", "min"}  # reductions as well: these have their own rule
    operators = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
    names |= {prefix + name for name in operators for prefix in ("", "r", "i")}
    return names | {
        "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "float", "double", "half", "long", "int",
        "type", "to", "cpu", "clone", "detach", "contiguous", "requires_grad", "dropout", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "softsign", "logsigmoid", "tanhshrink", "hardswish",
        "rrelu", "multiply", "subtract", "divide", "floor_divide", "negative", "absolute", "fix", "masked_fill", "nan_to_num",
        "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "bernoulli", "copysign", "greater",
        "less", "greater_equal", "less_equal", "not_equal", "type_as", "copy", "zero", "fill", "randint_like", "uniform",
        "normal", "exponential", "geometric", "cauchy", "log_normal", "random", "poisson", "binomial", "_standard_gamma",
        "native_dropout", "broadcast_tensors", "threshold", "_threshold", "bfloat16", "resolve_conj", "resolve_neg", "rdiv",
        "real", "imag", "conj", "data", "arccos", "arcsin", "arctan", "arctan2", "arccosh", "arcsinh", "arctanh",
    }  # fmt: skip


POINTWISE = frozenset(_pointwise_names())


@axis_rule(*POINTWISE, joint=True, in_place=True)
def aligned(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Broadcasting aligns dimensions from the right."""
    moved = axis.shifted(call.out.ndim - source.ndim)
    return moved if moved.dim >= 0 and call.out.shape[moved.dim] == source.shape[axis.dim] else None


@axis_rule("prelu")
def _prelu(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    """Elementwise, where the slopes are constant."""
    return axis


@use_rule(
    "add", "radd", "iadd", "add_", "sub", "rsub", "isub", "sub_", "subtract", "mul", "rmul", "imul", "mul_", "multiply",
    "div", "truediv", "rtruediv", "rdiv", "itruediv", "div_", "divide", "true_divide", "pow", "rpow",
    "maximum", "minimum",
    "where", "lerp", "addcmul", "addcdiv", "fmax", "fmin", "max", "min", "logaddexp", "atan2", "hypot",
)  # fmt: skip
def _elementwise(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
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
        expression = capture.expression(value)
        return value if expression is None else tap(capture, name, expression, axis, ndim, size)

    out = func(*[tapped(value) for value in args], **{key: tapped(value) for key, value in kwargs.items()})
    return capture.place(out, axis)


def _unflattened(expression: Expression, dim: int, sizes: tuple[int, int, int]) -> Expression:
    """The same with one dimension for those before the units, one for the units and one for those behind."""
    ids = None if expression.ids is None or dim >= expression.ids.ndim else expression.ids.unflatten(dim, sizes)
    apart = expression.tensor.unflatten(dim, sizes)
    return Expression(apart, expression.parameters, ids, expression.drawn, expression.looked_up)


def tap(capture: CaptureForRules, name: str, expression: Expression, axis: UnitAxis, ndim: int, size: int) -> Tensor:
    """The parameter, once for every unit, in a shape that broadcasts as before; its gradient is per unit.

    `axis` is where the units are in a result of `ndim` dimensions, `size` how long that dimension is.
    """
    units = capture.units
    dim = axis.dim - (ndim - expression.tensor.ndim)  # the dimension of the parameter that faces the units
    value = expression.tensor.detach()
    if units == 1 and dim >= 0 and value.shape[dim] not in (1, size):
        # The only unit meets it several times, where its own values are broadcast.
        require_placeable(capture, name, expression)
        every = (1, *value.shape)
        return capture.record(value, lambda grad: place_built(expression, grad.reshape(every)), UnitAxis(dim))
    if dim >= 0 and value.shape[dim] != 1:
        if size != units:  # such as heads of all units, one unit's after the other's
            apart = _unflattened(expression, dim, (size // max(units * axis.inner, 1), units, axis.inner))
            return tap(capture, name, apart, UnitAxis(dim + 1), apart.tensor.ndim, units).flatten(dim, dim + 2)
        if units > 1 and not is_shared_along(expression, dim):
            raise capture.refuse(
                name, expression.names,
                "units take different parts of it by their place in the batch, so that one unit more changes all others'",
                "use the same part for all units, or rows that each unit's own ids pick",
            )  # fmt: skip
        if not aligned_is_cheap(expression, dim):
            require_small(capture, name, expression, value.numel() // max(value.shape[dim], 1))
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
