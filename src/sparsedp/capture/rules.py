"""How each torch operation uses a parameter: one rule per operation, found by the operation's name.

A rule runs the operation with its parameters detached, hands the output to `capture.record` together with a function
that turns the output's gradient into uses, and returns the output. To add an operation, write a rule and register it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.attention import attention
from sparsedp.capture.capture import Capture
from sparsedp.capture.expressions import (
    Expression,
    Placed,
    aligned_is_cheap,
    linear_is_cheap,
    place_aligned,
    place_built,
    place_linear,
)
from sparsedp.capture.tracking import UnitAxis, unit_first
from sparsedp.capture.uses import Lookup

Rule = Callable[[Capture, str, Callable, tuple, dict], Any]
_RULES: dict[str, Rule] = {}


class _NotThisForm(Exception):
    """A rule does not cover this form of its operation; the general one may."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers how the operations `names` use parameters."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


def run_use(
    capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]
) -> Any:
    found = _RULES.get(name)
    if found is not None:
        try:
            return found(capture, name, func, args, kwargs)
        except _NotThisForm:
            pass
    return _unit_by_unit(capture, name, func, args, kwargs, expressions)


def public_ids(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """The ids of a lookup that does not depend on the batch, such as position(torch.arange(L))."""
    ids: Any = None
    skip = None
    if name == "embedding":
        bound = _bind(("input", "weight", "padding_idx"), args, kwargs)
        ids, table, skip = bound["input"], bound["weight"], bound.get("padding_idx")
    elif name == "getitem":
        table, ids = args
    elif name == "index_select":
        bound = _bind(("input", "dim", "index"), args, kwargs)
        table, ids = bound["input"], bound["index"] if bound["dim"] == 0 else None
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or table.ndim != 2:
        return None
    return _without_padding(_wrapped(ids, table.shape[0]), table.shape[0], skip)


def _wrapped(ids: Tensor, rows: int) -> Tensor:
    """Negative ids count from the end."""
    return torch.where(ids < 0, ids + rows, ids).long()


def _without_padding(ids: Tensor, rows: int, skip: int | None) -> Tensor:
    """-1 for the ids that stand for padding, which have no gradient."""
    return ids if skip is None else ids.masked_fill(ids == skip % rows, -1)


def _bind(names: Sequence[str], args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


def _plain(capture: Capture, value: Any) -> Any:
    """A parameter without its history; anything else as it is."""
    return value.detach() if capture.expression(value) is not None else value


def _positions(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """(B, P, last): units first, the last dimension last, all others merged."""
    moved = unit_first(tensor, axis, units)
    return moved.reshape(units, moved[0, ..., 0].numel() if units else 0, moved.shape[-1])


# ---------------------------------------------------------------------- lookups


def _refuse_lookup_options(capture: Capture, name: str, table: Expression, bound: dict[str, Any]) -> None:
    for option, instead in (
        ("max_norm", "constrain the rows after the step, or normalise the looked-up vectors"),
        ("scale_grad_by_freq", "leave it off"),
    ):
        if bound.get(option):
            why = "rewrites rows of the table" if option == "max_norm" else "divides by how often others use a row"
            raise capture.refuse(name, table.names, f"{option} {why} depending on the whole batch", instead)


def _table(capture: Capture, name: str, weight: Any) -> tuple[Expression, int]:
    """The table of a lookup and the row at which the looked-up block starts."""
    table = capture.expression(weight)
    if table is None:
        raise _NotThisForm
    width = table.tensor.shape[-1] if table.tensor.ndim == 2 else 0
    own = table.parameters[0][1]
    if not table.is_view or not table.tensor.is_contiguous() or own.ndim != 2 or own.shape[1] != width:
        raise _NotThisForm
    return table, table.offset // width if width else 0


def _require_functional(capture: Capture, name: str, func: Callable, functional: Callable, args: tuple) -> None:
    """torch.x and torch.nn.functional.x may share a name, but not the order of their arguments."""
    if func is not functional:
        names = _names(capture, [value for value in args if isinstance(value, Tensor)])
        raise capture.refuse(name, names, f"torch.{name} takes other arguments", f"use torch.nn.functional.{name}")


def _record_lookup(
    capture: Capture, name: str, table: Expression, first: int, ids: Tensor, out: Tensor, skip: int | None
) -> Tensor:
    units = capture.units
    axis = capture.axis(ids, name, table.names)
    kept_ids = capture.keep(ids, name, table.names)

    def finish(grad: Tensor) -> Placed:
        rows = unit_first(kept_ids.get(), axis, units).reshape(-1).long()
        values = unit_first(grad, axis, units).reshape(rows.numel(), grad.shape[-1])
        per_unit = rows.numel() // units if units else 0
        whose = torch.arange(units, device=rows.device).repeat_interleave(per_unit)
        kept = rows if first == 0 else rows + first
        if skip is not None:
            kept = kept.masked_fill(rows == skip, -1)
        return [(table.parameters[0][0], Lookup(kept, whose, values, one_each=per_unit == 1))]

    return capture.record(out, finish, axis)


@rule("embedding")
def _embedding(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    bound = _bind(order, args, kwargs)
    _require_functional(capture, name, func, F.embedding, args)
    table, first = _table(capture, name, bound["weight"])
    _refuse_lookup_options(capture, name, table, bound)
    ids = bound["input"]
    out = F.embedding(ids, table.tensor.detach())
    skip = bound.get("padding_idx")
    skip = None if skip is None else skip % table.tensor.shape[0]
    return _record_lookup(capture, name, table, first, ids, out, skip)


@rule("getitem", "index_select")
def _getitem(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "dim", "index"), args, kwargs)
    table, first = _table(capture, name, bound["input"])
    if name == "index_select":
        if bound["dim"] != 0:
            raise _NotThisForm
        ids = bound["index"]
    else:
        ids = args[1]
        if isinstance(ids, tuple) and len(ids) == 1:
            ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise _NotThisForm
    wrapped = _wrapped(ids, table.tensor.shape[0])
    capture.place(wrapped, capture.axis(ids, name, table.names))
    out = F.embedding(wrapped, table.tensor.detach())
    return _record_lookup(capture, name, table, first, wrapped, out, None)


@rule("embedding_bag")
def _embedding_bag(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
             "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
    bound = _bind(order, args, kwargs)
    _require_functional(capture, name, func, F.embedding_bag, args)
    # F.embedding_bag accepts (weight, input) in the wrong order for historical reasons; so does capture.
    if not bound["input"].is_floating_point():
        pass
    elif not bound["weight"].is_floating_point():
        bound["input"], bound["weight"] = bound["weight"], bound["input"]
    table, first = _table(capture, name, bound["weight"])
    _refuse_lookup_options(capture, name, table, bound)
    mode = bound.get("mode", "mean")
    if mode not in ("sum", "mean"):
        raise capture.refuse(name, table.names, f"mode '{mode}' is not supported", "use mode 'sum' or 'mean'")
    ids, offsets, weights = bound["input"], bound.get("offsets"), bound.get("per_sample_weights")
    if capture.expression(weights) is not None:
        raise capture.refuse(name, table.names, "per_sample_weights is a parameter", "look rows up with nn.Embedding")
    skip = bound.get("padding_idx")
    if skip is not None and skip < 0:
        skip += table.tensor.shape[0]
    bound["weight"] = table.tensor.detach()
    bound["sparse"] = False
    out = F.embedding_bag(**bound)
    if out.shape[0] != capture.units:
        raise capture.refuse(
            name,
            table.names,
            f"it forms {out.shape[0]} bags for {capture.units} units",
            "give every unit exactly one bag",
        )
    units = capture.units
    bag_of = _bags(ids, offsets, bool(bound.get("include_last_offset")), units)
    kept_ids = capture.keep(ids, name, table.names)
    kept_weights = None if weights is None else capture.keep(weights, name, table.names)

    def finish(grad: Tensor) -> Placed:
        rows = kept_ids.get().reshape(-1).long()
        kept = rows + first
        if skip is not None:
            kept = kept.masked_fill(rows == skip, -1)
        factor = None if kept_weights is None else kept_weights.get().reshape(-1)
        if mode == "mean":
            sizes = torch.zeros(units, dtype=grad.dtype, device=grad.device)
            sizes.index_add_(0, bag_of, (kept >= 0).to(grad.dtype))
            factor = (1 / sizes.clamp_min(1))[bag_of]
        return [(table.parameters[0][0], Lookup(kept, bag_of, grad, source=bag_of, weight=factor))]

    return capture.record(out, finish, UnitAxis(0))


def _bags(ids: Tensor, offsets: Tensor | None, include_last: bool, units: int) -> Tensor:
    """The bag of each id, (N,)."""
    if offsets is None:
        return torch.arange(units, device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if include_last else offsets
    ends = torch.cat([starts[1:], starts.new_full((1,), ids.numel())]) if starts.numel() else starts
    if include_last and offsets.numel():
        ends = offsets[1:]
    return torch.arange(units, device=ids.device).repeat_interleave(ends - starts)


# ---------------------------------------------------------------------- linear maps


def _record_linear(
    capture: Capture, name: str, matrix: Expression | None, bias: Expression | None, x: Tensor, out: Tensor,
    axis: UnitAxis,
) -> Tensor:  # fmt: skip
    """x (..., I) and out (..., O) with units on the same axis; either parameter may be absent."""
    units = capture.units
    names = ", ".join(e.names for e in (matrix, bias) if e is not None)
    if axis.dim == x.ndim - 1:
        raise capture.refuse(name, names, "it sums over the units of the batch", "transpose its input")
    if matrix is not None and not linear_is_cheap(matrix):
        _require_small(capture, name, matrix)
    inputs = capture.keep(x, name, names)

    def finish(grad: Tensor) -> Placed:
        g = _positions(grad, axis, units)
        placed: Placed = []
        if matrix is not None:
            placed += place_linear(matrix, _positions(inputs.get(), axis, units), g)
        if bias is not None:
            placed += place_built(bias, g[:, 0] if g.shape[1] == 1 else g.sum(1))
        return placed

    return capture.record(out, finish, axis)


@rule("linear")
def _linear(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "weight", "bias"), args, kwargs)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if not capture.is_data(x) or capture.is_data(weight) or capture.is_data(bias) or weight.ndim != 2:
        raise _NotThisForm
    matrix, shift = capture.expression(weight), capture.expression(bias)
    names = ", ".join(e.names for e in (matrix, shift) if e is not None)
    axis = capture.axis(x, name, names)
    out = F.linear(x, _plain(capture, weight), _plain(capture, bias))
    return _record_linear(capture, name, matrix, shift, x, out, axis)


@rule("addmm")
def _addmm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "mat1", "mat2"), args, kwargs)
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1 or capture.is_data(bound["input"]):
        raise _NotThisForm
    with capture.resumed():
        return torch.matmul(bound["mat1"], bound["mat2"]) + bound["input"]


@rule("matmul", "mm", "mv", "rmatmul", "dot")
def _matmul(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "other"), args, kwargs)
    left: Tensor = bound["input"]
    right: Tensor = next(bound[key] for key in ("other", "mat2", "vec", "tensor") if key in bound)
    if name == "rmatmul":
        left, right = right, left
    if capture.is_data(left):
        matrix = _view_of(capture, right, _transposed if right.ndim == 2 else _as_row)
        if right.ndim > 2:
            raise _NotThisForm
        axis = capture.axis(left, name, matrix.names)
        out = F.linear(left, matrix.tensor.detach())
        recorded = _record_linear(capture, name, matrix, None, left, out, axis)
        if right.ndim == 1:
            with capture.resumed():
                return recorded.squeeze(-1)
        return recorded
    if left.ndim != 2 or right.ndim < 2:
        raise _NotThisForm
    with capture.resumed():  # W @ x is (x^T W^T)^T
        return F.linear(right.mT, left).mT


def _view_of(capture: Capture, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Expression:
    """A parameter seen through a view that stays part of its history."""
    known = capture.expression(tensor)
    if known is None:
        raise _NotThisForm
    return Expression(view(tensor), known.parameters, known.ids)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _as_row(tensor: Tensor) -> Tensor:
    return tensor[None]


@rule("einsum")
def _einsum(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """einsum of an activation and a matrix that have only summed indices in common: a linear map."""
    equation = args[0]
    operands = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        raise _NotThisForm
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
        raise _NotThisForm
    kept = [c for c in data if c in output]
    with capture.resumed():
        inner = x.permute([data.index(c) for c in (*kept, *summed)]).flatten(len(kept)) if summed else x[..., None]
        view = weight.permute([matrix.index(c) for c in (*free, *summed)])
        sizes = view.shape[: len(free)]
        view = view.reshape(sizes.numel(), -1)
        out = F.linear(inner, view).unflatten(-1, sizes or (1,))
        order = [*kept, *free]
        if not free:
            out = out.squeeze(-1)
        return out.permute([order.index(c) for c in output])


@rule("conv1d", "conv2d")
def _conv(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """A convolution is a linear map of the patches of its input."""
    bound = _bind(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, kwargs)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    spatial = 1 if name == "conv1d" else 2
    if not capture.is_data(x) or capture.is_data(weight) or x.ndim != spatial + 2:
        raise _NotThisForm
    kernel, shift = capture.expression(weight), capture.expression(bias)
    names = ", ".join(e.names for e in (kernel, shift) if e is not None)
    if capture.axis(x, name, names) != UnitAxis(0):
        raise capture.refuse(name, names, "units are not on axis 0 of its input", "keep the batch first")
    stride, dilation = _pair(bound.get("stride", 1), spatial), _pair(bound.get("dilation", 1), spatial)
    groups, units = bound.get("groups", 1), capture.units
    size = weight.shape[2:]
    before, after = _padding(bound.get("padding", 0), size, dilation, spatial)
    padded = F.pad(x, [p for b, a in zip(reversed(before), reversed(after)) for p in (b, a)]) if any(after) else x
    out = func(padded, _plain(capture, weight), _plain(capture, bias), stride, 0, dilation, groups)
    inputs = capture.keep(padded, name, names)
    if kernel is not None and (not kernel.is_view or not kernel.tensor.is_contiguous()):
        _require_small(capture, name, kernel)

    def finish(grad: Tensor) -> Placed:
        g = grad.flatten(2)  # (B, O, P)
        placed: Placed = []
        if shift is not None:
            placed += place_built(shift, g.sum(2))
        if kernel is None:
            return placed
        image = inputs.get() if spatial == 2 else inputs.get()[:, :, None]
        window = tuple(size) if spatial == 2 else (1, *size)
        step = stride if spatial == 2 else (1, *stride)
        spread = dilation if spatial == 2 else (1, *dilation)
        patches = F.unfold(image, window, spread, 0, step)  # (B, C * window, P)
        rows = weight.shape[0] // groups
        width = patches.shape[1] // groups
        for group in range(groups):
            part = kernel.tensor.view(weight.shape[0], -1)[group * rows : (group + 1) * rows]
            piece = Expression(part, kernel.parameters)
            a = patches[:, group * width : (group + 1) * width].mT
            placed += place_linear(piece, a, g[:, group * rows : (group + 1) * rows].mT)
        return placed

    def finish_small_groups(grad: Tensor) -> Placed:
        g = grad.flatten(2).unflatten(1, (groups, -1))
        image = inputs.get() if spatial == 2 else inputs.get()[:, :, None]
        window = tuple(size) if spatial == 2 else (1, *size)
        step = stride if spatial == 2 else (1, *stride)
        spread = dilation if spatial == 2 else (1, *dilation)
        patches = F.unfold(image, window, spread, 0, step).unflatten(1, (groups, -1))
        placed: Placed = []
        if shift is not None:
            placed += place_built(shift, g.sum(3).flatten(1))
        if kernel is not None:
            built = torch.einsum("bgop,bgip->bgoi", g, patches).reshape(units, *weight.shape)
            placed += place_built(kernel, built)
        return placed

    few = groups > 1 and (kernel is None or kernel.small)
    return capture.record(out, finish_small_groups if few else finish, UnitAxis(0))


def _pair(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count // len(value))


def _padding(
    padding: Any, size: Sequence[int], dilation: tuple[int, ...], count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, size)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return _pair(padding, count), _pair(padding, count)


# ---------------------------------------------------------------------- elementwise


@rule(
    "add", "radd", "iadd", "add_", "sub", "rsub", "isub", "sub_", "subtract", "mul", "rmul", "imul", "mul_", "multiply",
    "div", "truediv", "rtruediv", "rdiv", "itruediv", "div_", "divide", "true_divide", "pow", "rpow",
    "maximum", "minimum",
    "where", "lerp", "addcmul", "addcdiv", "fmax", "fmin", "max", "min", "logaddexp", "atan2", "hypot",
)  # fmt: skip
def _elementwise(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Any broadcasting operation: every unit gets its own copy of the parameter, whose gradient is kept."""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    names = _names(capture, operands)
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
        return value if found is None else _tap(capture, name, found, axis, ndim, size)

    out = func(*[tapped(value) for value in args], **{key: tapped(value) for key, value in kwargs.items()})
    return capture.place(out, axis)


def _names(capture: Capture, operands: list[Tensor]) -> str:
    return ", ".join(e.names for e in map(capture.expression, operands) if e is not None)


def _tap(capture: Capture, name: str, expression: Expression, axis: UnitAxis, ndim: int, size: int) -> Tensor:
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
        if not aligned_is_cheap(expression, dim):
            _require_small(capture, name, expression)
        return capture.record(value, lambda grad: place_aligned(expression, grad, dim), UnitAxis(dim))
    _require_placeable(capture, name, expression)
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


def _require_placeable(capture: Capture, name: str, expression: Expression) -> None:
    if not expression.is_view and expression.ids is None:
        _require_small(capture, name, expression)


def _require_small(capture: Capture, name: str, expression: Expression) -> None:
    if not expression.small:
        raise capture.refuse(
            name,
            expression.names,
            "the parameter is used through a computed copy or an unusual view, and is too large to write "
            "out its gradient "
            "for every unit",
            "apply the computation to the activations, or use nn.Linear, nn.Embedding, F.linear or x @ W on "
            "the parameter",
        )


@rule("cat", "concat", "concatenate", "stack")
def _join(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Parameters beside activations, such as a class token: each facing the units on the same axis."""
    tensors = list(kwargs.get("tensors", args[0] if args else ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    data = next(tensor for tensor in tensors if capture.is_data(tensor))
    names = _names(capture, tensors)
    axis = capture.axis(data, name, names)
    if data.shape[axis.dim] != capture.units or (name != "stack" and dim % data.ndim == axis.dim):
        raise capture.refuse(name, names, "it joins along the units' axis", "expand the parameter over the batch first")
    pieces = []
    for tensor in tensors:
        found = capture.expression(tensor)
        pieces.append(tensor if found is None else _tap(capture, name, found, axis, tensor.ndim, capture.units))
    out = func(pieces, dim)
    before = name == "stack" and dim % out.ndim <= axis.dim
    return capture.place(out, axis.shifted(1 if before else 0))


# ---------------------------------------------------------------------- normalisation


def _scale_and_shift(capture: Capture, normal: Tensor, weight: Any, bias: Any) -> Tensor:
    with capture.resumed():
        if weight is not None:
            normal = normal * weight
        return normal if bias is None else normal + bias


def _follow(capture: Capture, name: str, source: Tensor, out: Tensor, trailing: int) -> Tensor:
    """A normalised activation: its units are where they were, and not among the `trailing` dimensions."""
    axis = capture.axis(source, name, "of the layer")
    if axis.dim >= source.ndim - trailing:
        raise capture.refuse(name, "of the layer", "it normalises over the units of the batch", "keep the batch first")
    return capture.place(out, axis)


def _trailing(bound: dict[str, Any]) -> int:
    shape = bound["normalized_shape"]
    return len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1


@rule("layer_norm")
def _layer_norm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
    weight, bias = bound.pop("weight", None), bound.pop("bias", None)
    return _scale_and_shift(
        capture, _follow(capture, name, bound["input"], F.layer_norm(**bound), _trailing(bound)), weight, bias
    )


@rule("rms_norm")
def _rms_norm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    weight = bound.pop("weight", None)
    return _scale_and_shift(
        capture, _follow(capture, name, bound["input"], F.rms_norm(**bound), _trailing(bound)), weight, None
    )


def _by_channel(capture: Capture, parameter: Any, ndim: int) -> Any:
    """(C,) as (C, 1, ..., 1), to meet (B, C, ...)."""
    if parameter is None:
        return None
    with capture.resumed():
        return parameter.reshape(-1, *(1,) * (ndim - 2))


@rule("group_norm")
def _group_norm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = _bind(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    x = bound["input"]
    weight, bias = (_by_channel(capture, bound.pop(key, None), x.ndim) for key in ("weight", "bias"))
    return _scale_and_shift(capture, _follow(capture, name, x, F.group_norm(**bound), x.ndim - 1), weight, bias)


@rule("instance_norm")
def _instance_norm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    _require_functional(capture, name, func, F.instance_norm, args)
    order = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    bound = _bind(order, args, kwargs)
    names = _names(capture, [t for t in (bound.get("weight"), bound.get("bias")) if t is not None])
    if bound.get("use_input_stats", True) and bound.get("running_mean") is not None:
        raise capture.refuse(
            name,
            names,
            "it stores running statistics of the batch without noise",
            "set track_running_stats=False",
        )
    x = bound["input"]
    weight, bias = (_by_channel(capture, bound.pop(key, None), x.ndim) for key in ("weight", "bias"))
    return _scale_and_shift(capture, _follow(capture, name, x, F.instance_norm(**bound), x.ndim - 1), weight, bias)


@rule("batch_norm")
def _batch_norm(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    _require_functional(capture, name, func, F.batch_norm, args)
    order = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    bound = _bind(order, args, kwargs)
    x = bound["input"]
    if bound.get("training", False) or bound["running_mean"] is None:
        names = _names(capture, [t for t in (bound.get("weight"), bound.get("bias")) if t is not None])
        raise capture.refuse(
            name,
            names,
            "its statistics mix the units of the batch",
            "use GroupNorm or LayerNorm, or put it in eval()",
        )
    weight, bias = (_by_channel(capture, bound.pop(key, None), x.ndim) for key in ("weight", "bias"))
    return _scale_and_shift(capture, _follow(capture, name, x, F.batch_norm(**bound), x.ndim - 1), weight, bias)


@rule("multi_head_attention_forward")
def _attention(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    with capture.resumed():
        return attention(*args, **kwargs)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _recurrent(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    operands = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    names = _names(capture, [t for t in operands if isinstance(t, Tensor)])
    raise capture.refuse(name, names, "torch's recurrent layers are fused", "use sparsedp.nn.LSTM or sparsedp.nn.GRU")


# ---------------------------------------------------------------------- everything else


def _unit_by_unit(
    capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]
) -> Tensor:
    """An operation without a rule, on small parameters: each unit gets its own copy, and `vmap` keeps units apart."""
    names = ", ".join(e.names for e in expressions)
    instead = (
        "write the computation with nn.Linear, nn.Embedding, F.linear, x @ W or elementwise operations, or freeze the "
        "parameter with requires_grad_(False)"
    )
    if not all(expression.small for expression in expressions):
        raise capture.refuse(name, names, "capture has no rule for this operation on a large parameter", instead)
    if name.endswith("_") or name == "setitem" or "out" in kwargs:
        raise capture.refuse(name, names, "it writes in place", "use the form that returns a new tensor")
    units = capture.units
    moved: list[Tensor] = []

    def prepare(value: Any) -> Any:
        """Replaces batch tensors and parameters by their place in `moved`."""
        if isinstance(value, (tuple, list)):
            return type(value)(prepare(item) for item in value)
        found = capture.expression(value)
        if found is not None:
            moved.append(_tap(capture, name, found, UnitAxis(0), found.tensor.ndim + 1, units))
        elif capture.is_data(value):
            axis = capture.axis(value, name, names)
            if axis != UnitAxis(0) or value.shape[0] != units:
                raise capture.refuse(name, names, "units are not on axis 0 of its input", "keep the batch first")
            moved.append(value[:, None])
        else:
            return value
        return _Place(len(moved) - 1)

    spots, named = prepare(args), {key: prepare(value) for key, value in kwargs.items()}

    def one(*values: Tensor) -> Tensor:
        def fill(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(fill(item) for item in value)
            return values[value.index] if isinstance(value, _Place) else value

        result = func(*fill(spots), **{key: fill(value) for key, value in named.items()})
        if not isinstance(result, Tensor) or result.shape[:1] != (1,):
            raise capture.refuse(name, names, "its result does not have the units on axis 0", instead)
        return result[0]

    if units == 0:
        with torch.no_grad():
            plain = func(*_detached(capture, args), **_detached(capture, kwargs))
        return capture.record(plain, lambda grad: [], UnitAxis(0))
    try:
        out = torch.func.vmap(one, randomness="different")(*moved)
    except RuntimeError as error:
        raise capture.refuse(name, names, f"it cannot run unit by unit ({error})", instead) from error
    with torch.no_grad():
        plain = func(*_detached(capture, args), **_detached(capture, kwargs))
    closeness = 1e-4 * float(plain.abs().amax()) if plain.numel() else 0.0
    if plain.shape != out.shape or not torch.allclose(plain, out, rtol=1e-3, atol=closeness, equal_nan=True):
        raise capture.refuse(name, names, "its result for one unit depends on the others", instead)
    return capture.place(out, UnitAxis(0))


class _Place:
    """Stands in an argument list for the tensor that `vmap` hands over."""

    def __init__(self, index: int) -> None:
        self.index = index


def _detached(capture: Capture, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached(capture, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(capture, item) for item in value)
    return value.detach() if isinstance(value, Tensor) else value
