"""Tensors that are computed from parameters alone, and where a gradient on them lands in the parameter.

`emb.weight.T`, `in_proj_weight[:d]`, `position.weight[:L]`, `cls.expand(B, -1, -1)` are views: strides and
storage offset say which element of the parameter each of their elements is. `position(torch.arange(L))` is a
lookup with public ids. Anything else, `1 + weight` or `weight.exp()`, is computed: autograd takes the gradient of
every unit back to the parameters, J^T g with the copy's Jacobian J. It is written out for all units if that is small,
and else when it is needed, for one unit at a time (`Carried`). Where rows with public ids stand before the computation,
what is written out is the rows' gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sparsedp._torch import without_functions
from sparsedp.capture import products
from sparsedp.capture.uses import Built, Carried, Linear, Lookup, Part, Use
from sparsedp.errors import UnsupportedError
from sparsedp.noise import RandomKey

# By how many times the precision of the largest element slices may differ that were computed alike.
_SAME = 16
# Likewise gradients that go back from these slices.
_ROUNDED = 64
# Elements of a parameter up to which its per-unit gradient may be written out.
SMALL = 1 << 16
# Of larger ones, elements of all units' gradients that are written out together, in multiples of SMALL.
_WRITTEN = 256
# Elements of a computed copy and of the parameters behind it, for one unit: as much is written out at a time.
MAX_CARRIED = 1 << 27


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of the table `name` that were looked up with public ids, and were computed with afterwards."""

    name: str
    ids: Tensor  # -1 for padding
    elements: int
    edge: GradientEdge  # where the gradient of the rows is found on the way back, also if they were changed in place since


@dataclass(frozen=True)
class Expression:
    """`tensor` is a function of the private parameters `names` and of nothing that depends on the batch."""

    tensor: Tensor
    parameters: tuple[tuple[str, Tensor], ...]
    ids: Tensor | None = None  # of a lookup with public ids: tensor = parameter[ids]
    drawn: bool = False  # whether numbers that were drawn from the key in this pass have a part in it
    alike: frozenset[int] = frozenset()  # of what is drawn: dimensions along which slices differ by the draws alone
    rows: tuple[TableRows, ...] = ()  # for a table of which it depends on these rows alone
    version: int = field(init=False)  # how often `tensor` had been changed in place

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.tensor._version)

    @cached_property
    def names(self) -> str:
        return ", ".join(f"'{name}'" for name, _ in self.parameters)

    @property
    def is_view(self) -> bool:
        if len(self.parameters) != 1 or self.ids is not None:
            return False
        parameter = self.parameters[0][1]
        tensor = self.tensor
        if tensor is parameter:
            return True
        return (
            tensor.dtype == parameter.dtype
            and tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            and not tensor.is_neg()
            and parameter.is_contiguous()
        )

    @property
    def offset(self) -> int:
        return int(self.tensor.storage_offset()) - int(self.parameters[0][1].storage_offset())

    @property
    def small(self) -> bool:
        return sum(parameter.numel() for _, parameter in self.parameters) <= SMALL

    def viewed(self, tensor: Tensor) -> Expression:
        """Of `tensor`, a view of this one's with its history. It is not known to be rows."""
        return Expression(tensor, self.parameters, None, self.drawn, rows=self.rows)

    def require_unchanged(self) -> None:
        if self.tensor._version != self.version:
            raise UnsupportedError(
                f"What was computed from parameter {self.names} was changed in place after it had been used. Use the form "
                "that returns a new tensor."
            )


def joined_origin(expressions: Iterable[Expression]) -> tuple[tuple[tuple[str, Tensor], ...], tuple[TableRows, ...]]:
    """The parameters that a tensor made of `expressions` depends on, and the rows of those that it knows by rows alone."""
    parameters: dict[str, Tensor] = {}
    rows: dict[TableRows, None] = {}
    in_full: set[str] = set()
    for expression in expressions:
        parameters |= expression.parameters
        rows |= dict.fromkeys(expression.rows)
        in_full |= {name for name, _ in expression.parameters} - {part.name for part in expression.rows}
    return tuple(parameters.items()), tuple(part for part in rows if part.name not in in_full)


Placed = list[tuple[str, Use]]
# The gradient of some examples on an expression, (k, *expression.shape).
Gradient = Callable[[slice], Tensor]


def place_linear(expression: Expression, inputs: Tensor, grad: Tensor) -> Placed:
    """A linear map by the (O, I) matrix `expression`: inputs (B, P, I), output gradient (B, P, O)."""
    layout = _layout(expression)
    if layout is None:

        def gradient(examples: slice) -> Tensor:
            return torch.einsum("bpo,bpi->boi", grad[examples], inputs[examples])

        return _place(expression, len(grad), gradient, (grad, inputs))
    use = Linear(inputs, grad, expression.offset) if layout == "rows" else Linear(grad, inputs, expression.offset)
    return [(expression.parameters[0][0], use)]


def linear_is_cheap(expression: Expression) -> bool:
    """Whether `place_linear` keeps the factored form."""
    return expression.tensor.ndim == 2 and _layout(expression) is not None


def _layout(expression: Expression) -> Literal["rows", "columns"] | None:
    """Whether a matrix lies in its parameter row by row or column by column, without gaps; None if it does neither."""
    if not expression.is_view:
        return None
    rows, columns = expression.tensor.shape
    down, across = expression.tensor.stride()
    if (across == 1 or columns == 1) and (down == columns or rows == 1):
        return "rows"
    if (down == 1 or rows == 1) and (across == rows or columns == 1):
        return "columns"
    return None


def place_built(expression: Expression, values: Tensor) -> Placed:
    """A per-unit gradient `values` (B, *expression.shape), written out."""
    return _place(expression, len(values), lambda examples: values[examples], (values,), is_written=True)


def place_looked_up(expression: Expression, ids: Tensor, values: Tensor) -> Placed:
    """Rows of `expression` (V, ...) by each unit's ids (B, P), -1 for padding: values (B, P, ...)."""
    count, shape = len(ids), expression.tensor.shape

    def gradient(examples: slice) -> Tensor:
        rows, grads = ids[examples], values[examples]
        units = torch.arange(len(rows), device=rows.device)[:, None]
        at = (units * (shape[0] + 1) + rows.where(rows >= 0, shape[0])).reshape(-1)  # one row more, for padding
        full = grads.new_zeros(len(rows) * (shape[0] + 1), *shape[1:])
        return full.index_add_(0, at, grads.flatten(0, 1)).unflatten(0, (len(rows), shape[0] + 1))[:, :-1]

    return _place(expression, count, gradient, (values, ids))


def place_aligned(expression: Expression, grad: Tensor, dim: int) -> Placed:
    """A gradient on the expression whose dimension `dim` counts the units: unit b has only the b-th slice."""
    values = grad.movedim(dim, 0)
    if expression.ids is not None:
        return [(expression.parameters[0][0], _lookup(expression.ids.movedim(dim, 0), values))]
    if not len(values):
        return []
    expression.require_unchanged()
    if expression.tensor.stride(dim) == 0:  # all units have the same elements
        with torch.enable_grad():
            return place_built(expression.viewed(expression.tensor.select(dim, 0)), values)
    units = len(values)

    def gradient(examples: slice) -> Tensor:
        mine = values[examples]
        numbers = torch.arange(units, device=mine.device)
        full = mine.new_zeros(len(mine), *values.shape)
        full[numbers[: len(mine)], numbers[examples]] = mine
        return full.movedim(1, dim + 1)

    return _place(expression, units, gradient, (values,))


def is_shared_along(expression: Expression, dim: int) -> bool:
    """Whether all slices along a dimension are the same function of the parameters, but for numbers drawn from the key.

    Views and lookups tell by strides and ids. Computed copies (`position.repeat(B, 1, 1)`) by their values and by where
    gradients go from each slice: rows of a parameter may all be zero at first, and rows by place in the batch all the same.
    """
    tensor = expression.tensor.detach()
    if expression.ids is None and tensor.stride(dim) == 0:
        return True
    if dim in expression.alike:  # each unit's part has the same law, whoever else is there
        return True
    if expression.ids is not None:
        return dim < expression.ids.ndim and is_repeated(expression.ids, dim)
    return not expression.is_view and is_repeated(tensor, dim) and _goes_back_alike(expression, dim)


def is_repeated(tensor: Tensor, dim: int) -> bool:
    """Whether all slices are the same."""
    first = tensor.narrow(dim, 0, 1).expand_as(tensor)
    if torch.equal(tensor, first) or not tensor.is_floating_point():
        return torch.equal(tensor, first)
    # The same computation for each slice, by a matrix product, say, may round each of them otherwise.
    largest = float(tensor.where(tensor.isfinite(), 0).abs().max())
    is_close = (tensor - first).abs() <= _SAME * torch.finfo(tensor.dtype).eps * largest  # not where it is infinite
    return bool((is_close | (tensor == first) | (tensor.isnan() & first.isnan())).all())


def _goes_back_alike(expression: Expression, dim: int) -> bool:
    """Whether each slice gives the parameters the same for the same gradient: of random multiples, the sum of the multiples."""
    tensor, key = expression.tensor, RandomKey.from_os().generator()
    shape = [size if d == dim else 1 for d, size in enumerate(tensor.shape)]
    multiples = torch.from_numpy(key.standard_normal(tensor.shape[dim])).to(tensor).view(shape)
    values = torch.from_numpy(key.standard_normal(tensor.narrow(dim, 0, 1).shape)).to(tensor)
    first = torch.zeros_like(multiples)
    first.narrow(dim, 0, 1).fill_(1)
    parameters = [parameter for _, parameter in expression.parameters]
    with without_functions(), torch.enable_grad():
        of_first, of_all = (
            _derived(tensor, parameters, weights * values, is_grads_batched=False) for weights in (first, multiples)
        )
    return all(_are_multiples(one, other, multiples) for one, other in zip(of_first, of_all))


def _are_multiples(one: Tensor | None, other: Tensor | None, multiples: Tensor) -> bool:
    """Whether `other` is the sum of the multiples of `one`, element by element, but for rounding."""
    if one is None or other is None:
        return one is other
    one, other = one.to_dense(), other.to_dense()
    sizes = float(multiples.abs().sum()) * one.abs()
    smallest = _ROUNDED * torch.finfo(one.dtype).eps * float(sizes.max()) if sizes.numel() else 0.0
    return bool(((other - float(multiples.sum()) * one).abs() <= 1e-3 * sizes + smallest).all())


# ---------------------------------------------------------------------- views, rows, and what is computed


def _place(
    expression: Expression, units: int, gradient: Gradient, memory: tuple[Tensor, ...], is_written: bool = False
) -> Placed:
    """`gradient` reads the tensors `memory`; if it `is_written`, it is there for all units already."""
    name, parameter = expression.parameters[0]
    if expression.ids is not None:
        values = gradient(slice(0, units))
        return [(name, _lookup(expression.ids.expand(units, *expression.ids.shape), values))]
    if not expression.is_view:
        return _through_autograd(expression, units, gradient, memory)
    size = parameter.numel()
    if is_written and expression.tensor is parameter and parameter.is_contiguous():
        return [(name, Built(gradient(slice(0, units)).reshape(units, size), 0))]
    is_written = is_written or _is_written_out(expression, units, expression.tensor.numel())
    if is_written and _is_block(expression):
        values, _ = _in_order(expression, gradient(slice(0, units)))
        return [(name, Built(values.reshape(units, values.shape[1:].numel()), expression.offset))]
    if _is_written_out(expression, units, size):
        return [(name, Built(_scattered(expression, gradient(slice(0, units))), 0))]
    return [(name, Carried.of(Part(gradient, lambda values: _scattered(expression, values), memory), parameter, units))]


def _is_written_out(expression: Expression, units: int, size: int) -> bool:
    """Whether the gradients of a parameter of this size are kept for all units at once."""
    return expression.small or units * size <= _WRITTEN * SMALL


def carried_elements(expression: Expression, copies: int = 1) -> int:
    """Elements of one unit's gradient that are written out on their way to the parameters; `copies` are in the expression.

    0 for rows, and for views of a block: their gradient is the parameters' as it is.
    """
    if expression.ids is not None or (expression.is_view and _is_block(expression)):
        return 0
    by_rows = {rows.name for rows in expression.rows}
    in_full = sum(parameter.numel() for name, parameter in expression.parameters if name not in by_rows)
    return expression.tensor.numel() // max(copies, 1) + sum(rows.elements for rows in expression.rows) + in_full


def _lookup(ids: Tensor, grad: Tensor) -> Lookup:
    """ids (B, ...), grad (B, ..., d)."""
    count = ids.shape[0]
    per_unit = ids[0].numel() if count else 0
    units = torch.arange(count, device=ids.device).repeat_interleave(per_unit)
    flat = grad.reshape(count * per_unit, grad.shape[-1])
    return Lookup(ids.reshape(-1), units, flat, one_each=per_unit == 1)


def _in_order(expression: Expression, values: Tensor) -> tuple[Tensor, list[int]]:
    """`values` (B, *shape) with the dimensions of a view in the order that they have in the parameter, and that order.

    Elements that the view repeats (stride 0) share one gradient: those are added up.
    """
    shape, stride = expression.tensor.shape, expression.tensor.stride()
    repeated = [d for d, (n, s) in enumerate(zip(shape, stride)) if s == 0 and n > 1]
    if repeated:
        values = values.sum([d + 1 for d in repeated], keepdim=True)
    order = _kept_dimensions(expression)
    rest = [d for d in range(len(shape)) if d not in order]
    return values.permute(0, *(d + 1 for d in order), *(d + 1 for d in rest)), order


def _kept_dimensions(expression: Expression) -> list[int]:
    """The dimensions of a view with more than one element, those that lie furthest apart first."""
    shape, stride = expression.tensor.shape, expression.tensor.stride()
    return sorted((d for d, n in enumerate(shape) if n > 1 and stride[d] != 0), key=lambda d: -stride[d])


def _is_block(expression: Expression) -> bool:
    """Whether the elements of a view lie one behind the other in the parameter, in whatever order."""
    shape, stride = expression.tensor.shape, expression.tensor.stride()
    expected = 1
    for d in reversed(_kept_dimensions(expression)):
        if stride[d] != expected:
            return False
        expected *= shape[d]
    return True


def _scattered(expression: Expression, values: Tensor) -> Tensor:
    """For any view, also with gaps, such as columns of a matrix: the whole parameter's gradient, (B, n)."""
    stride = expression.tensor.stride()
    values, order = _in_order(expression, values)
    index = torch.full((1,), expression.offset, device=values.device)
    for d, size in zip(order, values.shape[1:]):
        index = (index[:, None] + stride[d] * torch.arange(size, device=values.device)).reshape(-1)
    flat = values.reshape(values.shape[0], index.numel())
    return flat.new_zeros(flat.shape[0], expression.parameters[0][1].numel()).index_add_(1, index, flat)


def _through_autograd(expression: Expression, units: int, gradient: Gradient, memory: tuple[Tensor, ...]) -> Placed:
    """Of what is computed: rows that were looked up first get theirs, parameters that are used in full all of it."""
    if units == 0:
        return []
    expression.require_unchanged()
    by_rows = {rows.name for rows in expression.rows}
    in_full = [(name, parameter) for name, parameter in expression.parameters if name not in by_rows]
    together = [
        (name, parameter) for name, parameter in in_full if _is_written_out(expression, units, parameter.numel())
    ]
    placed: Placed = []
    for (name, origin), values in _written_out(
        expression, units, gradient, [*together, *((r.name, r) for r in expression.rows)]
    ):
        if isinstance(origin, TableRows):
            ids = origin.ids.expand(units, *origin.ids.shape)
            placed.append((name, _lookup(ids, values)))
        else:
            placed.append((name, Built(values.reshape(units, -1), 0)))
    for name, parameter in in_full:
        if all(name != other for other, _ in together):
            part = Part(gradient, _carrier(expression, parameter), memory)
            placed.append((name, Carried.of(part, parameter, units)))
    return placed


Origin = Tensor | TableRows


def _written_out(
    expression: Expression, units: int, gradient: Gradient, origins: Sequence[tuple[str, Origin]]
) -> list[tuple[tuple[str, Origin], Tensor]]:
    """The gradients (B, ...) of parameters or rows, for all units; those that the expression does not depend on are left out."""
    if not origins:
        return []
    elements = expression.tensor.numel() + sum(_size(origin) for _, origin in origins)
    parts = [
        _gradients(expression, gradient(examples), [origin for _, origin in origins])
        for examples in products.chunks(units, elements, products.TEMPORARY)
    ]
    gathered = []
    for number, origin in enumerate(origins):
        values = [part[number] for part in parts]
        present = [value for value in values if value is not None]
        if present:
            gathered.append((origin, present[0] if len(present) == 1 else torch.cat(present)))
    return gathered


def _size(origin: Origin) -> int:
    return origin.elements if isinstance(origin, TableRows) else origin.numel()


def _carrier(expression: Expression, parameter: Tensor) -> Callable[[Tensor], Tensor]:
    def carry(values: Tensor) -> Tensor:
        (grad,) = _gradients(expression, values, [parameter])
        if grad is None:
            return torch.zeros(len(values), parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        return grad.reshape(len(values), -1)

    return carry


def _gradients(expression: Expression, values: Tensor, origins: Sequence[Origin]) -> Sequence[Tensor | None]:
    """Of parameters or rows, (k, ...), for the gradients `values` (k, *shape) on the expression."""
    expression.require_unchanged()
    inputs: list[Any] = [origin.edge if isinstance(origin, TableRows) else origin for origin in origins]
    with torch.enable_grad():
        if len(values) > 1:
            try:
                return _derived(expression.tensor, inputs, values, is_grads_batched=True)
            except RuntimeError:  # not all of torch can go back for many units at once: sparse matrices, for one
                pass
        each = [_derived(expression.tensor, inputs, value, is_grads_batched=False) for value in values]
    return [None if grad[0] is None else torch.stack([g.to_dense() for g in grad]) for grad in zip(*each)]


def _derived(tensor: Tensor, inputs: Sequence[Any], values: Tensor, is_grads_batched: bool) -> Sequence[Tensor | None]:
    """Of each input, a tensor or an edge, for one gradient on the tensor or, `is_grads_batched`, for many."""
    return torch.autograd.grad(
        tensor, inputs, values, is_grads_batched=is_grads_batched, retain_graph=True, allow_unused=True
    )
