"""Linear maps and products: nn.Linear, x @ W, W @ x, addmm, einsum."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed, linear_is_cheap, place_built, place_linear
from sparsedp.capture.ops.elementwise import aligned, tap
from sparsedp.capture.ops.helpers import bind, plain, positions, require_affordable
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
        require_affordable(capture, name, matrix)
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
    return _product_axis(call, left, right, source, axis)


def _product_axis(call: Call, left: Tensor, right: Tensor, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    """Of `left @ right`, one of which is `source`."""
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


@use_rule("matmul", "mm", "mv", "rmatmul", "dot", "bmm")
def _matmul(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "other"), args, kwargs)
    left: Tensor = bound["input"]
    right: Tensor = next(bound[key] for key in ("other", "mat2", "vec", "tensor") if key in bound)
    if name == "rmatmul":
        left, right = right, left
    if left.ndim > 2 and right.ndim > 2:
        return _product_of_matrices(capture, name, left, right)
    if capture.is_data(left):
        if right.ndim > 2:
            raise NotThisForm
        matrix = _view_of(capture, right, _transposed if right.ndim == 2 else _as_row)
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


def _product_of_matrices(capture: CaptureForRules, name: str, left: Tensor, right: Tensor) -> Tensor:
    """Matrices that are parameters beside those of each unit: every unit gets its own copy, whose gradient is kept."""
    data, parameter = (left, right) if capture.is_data(left) else (right, left)
    expression = capture.expression(parameter)
    if expression is None or not capture.is_data(data):
        raise NotThisForm
    ndim = max(left.ndim, right.ndim)
    axis = capture.axis(data, name, expression.names).shifted(ndim - data.ndim)
    if axis.dim >= ndim - 2:  # units among the rows or columns of a matrix
        raise NotThisForm
    size = data.shape[axis.dim - ndim]
    tapped = tap(capture, name, expression, axis, ndim, size)
    out = torch.matmul(left, tapped) if data is left else torch.matmul(tapped, right)
    return capture.place(out, axis)


def _view_of(capture: CaptureForRules, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Expression:
    """A parameter seen through a view that stays part of its history."""
    expression = capture.expression(tensor)
    if expression is None:
        raise NotThisForm
    return expression.viewed(view(tensor))


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _as_row(tensor: Tensor) -> Tensor:
    return tensor[None]


@axis_rule("addmm", "baddbmm", "addmv", joint=True, in_place=True)
def _added_product_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    added = call.argument(0, "input")
    left, right = call.argument(1, "mat1", "batch1", "mat"), call.argument(2, "mat2", "batch2", "vec")
    if source is not added:
        return _product_axis(call, left, right, source, axis)
    return Mixed(call.name) if source is left or source is right else aligned(call, source, axis)


@use_rule("addmm", "baddbmm", "addmv")
def _added_product(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(_ADDED_PRODUCTS[name], args, kwargs)
    if len(args) > 3 or bound.get("out") is not None or bound.get("beta", 1) == 0:
        raise NotThisForm
    added, left, right = (bound[key] for key in _ADDED_PRODUCTS[name])
    with capture.resumed():
        product = torch.matmul(left, right)
        if bound.get("alpha", 1) != 1:
            product = product * bound["alpha"]
        return product + (added if bound.get("beta", 1) == 1 else added * bound["beta"])


_ADDED_PRODUCTS = {
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmv": ("input", "mat", "vec"),
}


def _einsum_terms(args: tuple) -> tuple[list[str], str, list[Tensor]] | None:
    """The letters of each operand and of the result, "..." spelt out, and the operands; None for other forms of einsum."""
    equation = args[0]
    if not isinstance(equation, str):
        return None
    operands = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    free = [letter for letter in string.ascii_uppercase + string.ascii_lowercase if letter not in equation]
    spans = [operand.ndim - len(term) + 3 if "..." in term else 0 for term, operand in zip(terms, operands)]
    if max(spans) > len(free) or min(spans) < 0:
        return None
    dots = "".join(free[: max(spans)])
    if not arrow:
        output = ("..." if dots else "") + "".join(sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1))
    terms = [term.replace("...", dots[len(dots) - span :]) for term, span in zip(terms, spans)]
    return terms, output.replace("...", dots), operands


@axis_rule("einsum", joint=True)
def _einsum_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    equation = _einsum_terms(call.args)
    return None if equation is None else _axis_by_letters(*equation, source, axis)


def _axis_by_letters(
    terms: list[str], output: str, operands: list[Tensor], source: Tensor, axis: UnitAxis
) -> UnitAxis | Mixed:
    # The same tensor may stand in several places, with its units under several letters.
    letters = {term[axis.dim] for term, operand in zip(terms, operands) if operand is source}
    if len(letters) != 1:
        return Mixed("einsum")
    letter = letters.pop()
    if any(term.count(letter) > 1 for term, operand in zip(terms, operands) if operand is source):
        return Mixed("einsum")  # a diagonal: each unit's place in the batch picks an element
    return UnitAxis(output.index(letter), axis.inner) if letter in output else Mixed("einsum")


@use_rule("einsum")
def _einsum(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """einsum of an activation and a matrix that have only summed indices in common: a linear map."""
    equation = _einsum_terms(args)
    if equation is None:
        raise NotThisForm
    terms, output, operands = given_terms, _, given = equation
    if len(operands) != 2:
        return _einsum_of_copies(capture, name, *equation)
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
        return _einsum_of_copies(capture, name, *equation)
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
    out = torch.einsum(",".join(given_terms) + "->" + output, *[plain(capture, operand) for operand in given])

    def arranged(grad: Tensor) -> Tensor:
        grad = grad.permute([output.index(c) for c in order])
        return grad.flatten(len(kept)) if free else grad[..., None]

    inner_axis, out_axis = UnitAxis(kept.index(unit), axis.inner), UnitAxis(output.index(unit), axis.inner)
    return _record_linear(capture, name, matrix_view, None, inner, out, inner_axis, arranged, out_axis)


def _einsum_of_copies(
    capture: CaptureForRules, name: str, terms: list[str], output: str, operands: list[Tensor]
) -> Tensor:
    """Any other einsum with parameters: every unit gets its own copy of each, whose gradient is kept."""
    expressions = [capture.expression(operand) for operand in operands]
    names = ", ".join(e.names for e in expressions if e is not None)
    placed = set()
    for term, operand in zip(terms, operands):
        if capture.is_data(operand):
            axis = capture.axis(operand, name, names)
            placed.add((term[axis.dim], axis.inner, operand.shape[axis.dim]))
    if len(placed) != 1:
        raise capture.refuse(name, names, "units lie under different letters of its inputs", "align them first")
    letter, inner, size = placed.pop()
    if letter not in output:
        raise capture.refuse(name, names, "it sums over the units of the batch", "keep their index in the result")
    if any(term.count(letter) > 1 for term in terms):
        raise capture.refuse(name, names, "it takes a diagonal along the units of the batch", "give units one letter")
    tapped_terms, tapped = [], []
    for term, operand, expression in zip(terms, operands, expressions):
        if expression is None:
            tapped_terms.append(term)
            tapped.append(operand)
        elif letter in term:
            at = UnitAxis(term.index(letter), inner)
            tapped_terms.append(term)
            tapped.append(tap(capture, name, expression, at, operand.ndim, size))
        else:
            tapped_terms.append(letter + term)
            tapped.append(tap(capture, name, expression, UnitAxis(0, inner), operand.ndim + 1, size))
    out = torch.einsum(",".join(tapped_terms) + "->" + output, *tapped)
    return capture.place(out, UnitAxis(output.index(letter), inner))


def _tensordot_equation(left: Tensor, right: Tensor, dims: Any) -> str | None:
    """The einsum that a tensordot is; None for dimensions in a tensor."""
    if isinstance(dims, int):
        dims = list(range(left.ndim - dims, left.ndim)), list(range(dims))
    if isinstance(dims, Tensor) or len(dims) != 2:
        return None
    ours, theirs = ([each] if isinstance(each, int) else list(each) for each in dims)
    letters = string.ascii_letters
    one = list(letters[: left.ndim])
    other = list(letters[left.ndim : left.ndim + right.ndim])
    for this, that in zip(ours, theirs):
        other[that] = one[this]
    kept = [c for c in one if c not in other] + [c for c in other if c not in one]
    return "".join(one) + "," + "".join(other) + "->" + "".join(kept)


@axis_rule("tensordot", joint=True)
def _tensordot_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    left, right = call.argument(0, "a"), call.argument(1, "b")
    equation = _tensordot_equation(left, right, call.argument(2, "dims", default=2))
    terms = None if equation is None else _einsum_terms((equation, left, right))
    return None if terms is None else _axis_by_letters(*terms, source, axis)


@use_rule("tensordot")
def _tensordot(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("a", "b", "dims"), args, kwargs)
    equation = _tensordot_equation(bound["a"], bound["b"], bound.get("dims", 2))
    if equation is None or bound.get("out") is not None:
        raise NotThisForm
    return _einsum(capture, name, torch.einsum, (equation, bound["a"], bound["b"]), {})
