"""Linear maps and products: nn.Linear, x @ W, W @ x, addmm, einsum."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed, linear_is_cheap, place_built, place_linear
from sparsedp.capture.ops.helpers import bind, plain, positions, require_small
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, NotThisForm, axis_rule, use_rule
from sparsedp.capture.units import Mixed, UnitAxis


def _record_linear(
    capture: CaptureForRules, name: str, matrix: Expression | None, bias: Expression | None, x: Tensor, out: Tensor,
    axis: UnitAxis, arranged: Callable[[Tensor], Tensor] | None = None, out_axis: UnitAxis | None = None,
) -> Tensor:  # fmt: skip
    """x (..., I) and out (..., O) with units on the same axis; either parameter may be absent.

    An output with its dimensions, and units, elsewhere is `arranged` like that. It has torch's own layout in memory: what views
    of it may be changed in place depends on that.
    """
    units = capture.units
    names = ", ".join(e.names for e in (matrix, bias) if e is not None)
    if axis.dim == x.ndim - 1:
        raise capture.refuse(name, names, "it sums over the units of the batch", "transpose its input")
    if matrix is not None and not linear_is_cheap(matrix):
        require_small(capture, name, matrix)
    inputs = capture.keep(x, name, names)

    def finish(grad: Tensor) -> Placed:
        g = positions(grad if arranged is None else arranged(grad), axis, units)
        placed: Placed = []
        if matrix is not None:
            placed += place_linear(matrix, positions(inputs.get(), axis, units), g)
        if bias is not None:
            placed += place_built(bias, g[:, 0] if g.shape[1] == 1 else g.sum(1))
        return placed

    return capture.record(out, finish, out_axis or axis)


@axis_rule("linear")
def _linear_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis if axis.dim < source.ndim - 1 else Mixed("linear")


@use_rule("linear")
def _linear(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "weight", "bias"), args, kwargs)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if not capture.is_data(x) or capture.is_data(weight) or capture.is_data(bias) or weight.ndim != 2:
        raise NotThisForm
    matrix, shift = capture.expression(weight), capture.expression(bias)
    names = ", ".join(e.names for e in (matrix, shift) if e is not None)
    axis = capture.axis(x, name, names)
    out = F.linear(x, plain(capture, weight), plain(capture, bias))
    return _record_linear(capture, name, matrix, shift, x, out, axis)


@axis_rule("matmul", "mm", "bmm", "mv", "rmatmul", joint=True)
def _matmul_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    left = call.argument(0, "input")
    right = call.argument(1, "other", "mat2", "vec", "tensor")
    if call.name == "rmatmul":
        left, right = right, left
    is_left, is_right = source is left, source is right
    if is_left and is_right:
        return Mixed(call.name)
    if left.ndim == 1 or right.ndim == 1:
        if is_left and left.ndim > 1 and axis.dim < left.ndim - 1:
            return axis
        return Mixed(call.name)
    if axis.dim == (source.ndim - 1 if is_left else source.ndim - 2):
        return Mixed(call.name)
    return axis.shifted(call.out.ndim - source.ndim)


@use_rule("matmul", "mm", "mv", "rmatmul", "dot")
def _matmul(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "other"), args, kwargs)
    left: Tensor = bound["input"]
    right: Tensor = next(bound[key] for key in ("other", "mat2", "vec", "tensor") if key in bound)
    if name == "rmatmul":
        left, right = right, left
    if capture.is_data(left):
        matrix = _view_of(capture, right, _transposed if right.ndim == 2 else _as_row)
        if right.ndim > 2:
            raise NotThisForm
        axis = capture.axis(left, name, matrix.names)
        out = F.linear(left, matrix.tensor.detach())
        recorded = _record_linear(capture, name, matrix, None, left, out, axis)
        if right.ndim == 1:
            with capture.resumed():
                return recorded.squeeze(-1)
        return recorded
    if left.ndim != 2 or right.ndim < 2:
        raise NotThisForm
    left_matrix = capture.expression(left)
    if left_matrix is None:
        raise NotThisForm
    axis = capture.axis(right, name, left_matrix.names)
    behind = {right.ndim - 1: right.ndim - 2, right.ndim - 2: right.ndim - 1}.get(axis.dim, axis.dim)
    out = torch.matmul(left_matrix.tensor.detach(), right)  # W @ x is (x^T W^T)^T
    return _record_linear(
        capture, name, left_matrix, None, right.mT, out, UnitAxis(behind, axis.inner), lambda grad: grad.mT, axis
    )


def _view_of(capture: CaptureForRules, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Expression:
    """A parameter seen through a view that stays part of its history."""
    expression = capture.expression(tensor)
    if expression is None:
        raise NotThisForm
    return Expression(view(tensor), expression.parameters, expression.ids)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _as_row(tensor: Tensor) -> Tensor:
    return tensor[None]


@use_rule("addmm")
def _addmm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "mat1", "mat2"), args, kwargs)
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1 or capture.is_data(bound["input"]):
        raise NotThisForm
    with capture.resumed():
        return torch.matmul(bound["mat1"], bound["mat2"]) + bound["input"]


@axis_rule("einsum", joint=True)
def _einsum_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    equation = call.args[0]
    operands = list(call.args[1]) if isinstance(call.args[1], (tuple, list)) else list(call.args[1:])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    # The same tensor may stand in several places, with its units under several letters.
    letters = {term[axis.dim] for term, operand in zip(inputs.split(","), operands) if operand is source}
    if len(letters) != 1:
        return Mixed("einsum")
    letter = letters.pop()
    return UnitAxis(output.index(letter), axis.inner) if letter in output else Mixed("einsum")


@use_rule("einsum")
def _einsum(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """einsum of an activation and a matrix that have only summed indices in common: a linear map."""
    equation = args[0]
    given = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    operands = given
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        raise NotThisForm
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if capture.is_data(operands[1]) and not capture.is_data(operands[0]):
        operands, terms = operands[::-1], terms[::-1]
    x, weight = operands
    data, matrix = terms
    summed = [c for c in matrix if c in data and c not in output]
    free = [c for c in matrix if c not in data and c in output]
    if (
        len(summed) + len(free) != len(matrix) or len(set(matrix)) != len(matrix) or len(set(data)) != len(data)
        or any(c not in output and c not in summed for c in data) or capture.is_data(weight)
    ):  # fmt: skip
        raise NotThisForm
    kept, order = [c for c in data if c in output], [c for c in data if c in output] + free
    with capture.resumed():
        view = weight.permute([matrix.index(c) for c in (*free, *summed)])
        sizes = view.shape[: len(free)]
        view = view.reshape(sizes.numel(), -1)
    matrix_view = capture.expression(view)
    if matrix_view is None:
        raise NotThisForm
    axis = capture.axis(x, name, matrix_view.names)
    unit = data[axis.dim]
    if unit in summed:
        raise capture.refuse(
            name, matrix_view.names, "it sums over the units of the batch", "keep their index in the result"
        )
    inner = x.detach().permute([data.index(c) for c in (*kept, *summed)]).flatten(len(kept)) if summed else x[..., None]
    out = func(equation, *[plain(capture, operand) for operand in given])

    def arranged(grad: Tensor) -> Tensor:
        grad = grad.permute([output.index(c) for c in order])
        return grad.flatten(len(kept)) if free else grad[..., None]

    inner_axis, out_axis = UnitAxis(kept.index(unit), axis.inner), UnitAxis(output.index(unit), axis.inner)
    return _record_linear(capture, name, matrix_view, None, inner, out, inner_axis, arranged, out_axis)
