"""Tensors that are computed from parameters alone, and where a gradient on them lands in the parameter.

`emb.weight.T`, `in_proj_weight[:d]`, `position.weight[:L]`, `cls.expand(B, -1, -1)` are views: strides and
storage offset say which element of the parameter each of their elements is. `position(torch.arange(L))` is a
lookup with public ids. Anything else, `1 + weight` or `weight.exp()`, is computed: its per-unit gradient is
carried to the parameter by autograd, which is affordable for parameters with few elements only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sparsedp.capture.uses import Built, Linear, Lookup, Use
from sparsedp.errors import UnsupportedError

# Elements of a parameter up to which its per-unit gradient may be written out.
SMALL = 1 << 16
# ... and how many times the elements of what is computed from it.
_COPIES = 4


@dataclass(frozen=True)
class LookedUp:
    """Rows of a table by public ids, tensor = parameter[ids], from which something was computed."""

    name: str
    parameter: Tensor
    tensor: Tensor
    ids: Tensor
    version: int = field(init=False)  # how often `tensor` had been changed in place

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.tensor._version)


Parameters = tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True)
class Expression:
    """`tensor` is a function of the private parameters `names` and of nothing that depends on the batch."""

    tensor: Tensor
    parameters: tuple[tuple[str, Tensor], ...]
    ids: Tensor | None = None  # of a lookup with public ids: tensor = parameter[ids]
    drawn: bool = False  # whether numbers that were drawn from the key in this pass have a part in it
    looked_up: tuple[LookedUp, ...] = ()  # what it depends on the parameters of these by, and by nothing else
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
    def whole(self) -> Parameters:
        """The parameters that it does not depend on by looked-up rows alone."""
        names = {rows.name for rows in self.looked_up}
        return tuple((name, parameter) for name, parameter in self.parameters if name not in names)

    @property
    def size(self) -> int:
        """Elements of a gradient that is carried back to parameters, or to looked-up rows of them."""
        return sum(parameter.numel() for _, parameter in self.whole) + sum(
            rows.tensor.numel() for rows in self.looked_up
        )

    @property
    def small(self) -> bool:
        return self.size <= SMALL

    def is_small_beside(self, elements: int) -> bool:
        """Whether its gradient may be written out for every unit, where each meets a copy with so many elements anyway."""
        return self.size <= max(SMALL, _COPIES * elements)


def joined_lookups(expressions: Sequence[Expression]) -> tuple[LookedUp, ...]:
    """The looked-up rows by which something computed from all of these depends on parameters."""
    whole = {name for expression in expressions for name, _ in expression.whole}
    rows = {id(rows.tensor): rows for expression in expressions for rows in expression.looked_up}
    return tuple(each for each in rows.values() if each.name not in whole)


Placed = list[tuple[str, Use]]


def place_linear(expression: Expression, inputs: Tensor, grad: Tensor) -> Placed:
    """A linear map by the (O, I) matrix `expression`: inputs (B, P, I), output gradient (B, P, O)."""
    layout = _layout(expression)
    if layout is None:
        return place_built(expression, torch.einsum("bpo,bpi->boi", grad, inputs))
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
    return _place(expression, values, expression.tensor.shape, expression.tensor.stride())


def place_aligned(expression: Expression, grad: Tensor, dim: int) -> Placed:
    """A gradient on the expression whose dimension `dim` counts the units: unit b has only the b-th slice."""
    shape, stride = list(expression.tensor.shape), list(expression.tensor.stride())
    values = grad.movedim(dim, 0)
    if expression.ids is not None:
        name = expression.parameters[0][0]
        return [(name, _lookup(expression.ids.movedim(dim, 0), values))]
    if stride[dim] == 0 and expression.is_view:
        return _place(expression, values, shape[:dim] + shape[dim + 1 :], stride[:dim] + stride[dim + 1 :])
    units = shape[dim]
    full = grad.new_zeros(units, units, *values.shape[1:])
    full[torch.arange(units), torch.arange(units)] = values
    return place_built(expression, full.movedim(1, dim + 1))


def is_shared_along(expression: Expression, dim: int) -> bool:
    """Whether all slices along a dimension are the same part of the parameter, or parts that were drawn from the key.

    Views and lookups tell by strides and ids. Computed copies (`position.repeat(B, 1, 1)`) by their values.
    """
    if expression.drawn:  # each unit's part has the same law, whoever else is there
        return True
    tensor = expression.tensor.detach()
    if expression.ids is not None:
        tensor = expression.ids
    elif expression.is_view:
        return tensor.stride(dim) == 0
    return dim < tensor.ndim and torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def aligned_is_cheap(expression: Expression, dim: int) -> bool:
    """Whether `place_aligned` needs nothing larger than the gradient."""
    return expression.ids is not None or (expression.is_view and expression.tensor.stride(dim) == 0)


def _lookup(ids: Tensor, grad: Tensor) -> Lookup:
    """ids (B, ...), grad (B, ..., d)."""
    count = ids.shape[0]
    per_unit = ids[0].numel() if count else 0
    units = torch.arange(count, device=ids.device).repeat_interleave(per_unit)
    flat = grad.reshape(count * per_unit, grad.shape[-1])
    return Lookup(ids.reshape(-1), units, flat, one_each=per_unit == 1)


def _place(expression: Expression, values: Tensor, shape: list[int] | torch.Size, stride: list[int] | tuple) -> Placed:
    name, parameter = expression.parameters[0]
    if expression.ids is not None:
        return [(name, _lookup(expression.ids.expand(values.shape[0], *expression.ids.shape), values))]
    if not expression.is_view:
        return _through_autograd(expression, values)
    # Elements that the view repeats (stride 0) share one gradient: add those up, then bring the other dimensions into the
    # order that they have in the parameter.
    repeated = [d for d, (n, s) in enumerate(zip(shape, stride)) if s == 0 and n > 1]
    if repeated:
        values = values.sum([d + 1 for d in repeated], keepdim=True)
    kept = [d for d, n in enumerate(values.shape[1:]) if n > 1]
    order = sorted(kept, key=lambda d: -stride[d])
    values = values.permute(0, *(d + 1 for d in order), *(d + 1 for d in range(len(shape)) if d not in kept))
    expected = 1
    for d in reversed(order):
        if stride[d] != expected:
            return [(name, _scatter(expression, parameter, values, order, stride))]
        expected *= shape[d]
    return [(name, Built(values.reshape(values.shape[0], expected), expression.offset))]


def _scatter(
    expression: Expression, parameter: Tensor, values: Tensor, order: list[int], stride: list[int] | tuple
) -> Built:
    """For views with gaps, such as columns of a matrix: the whole parameter's per-unit gradient."""
    index = torch.full((1,), expression.offset, device=values.device)
    for d, size in zip(order, values.shape[1:]):
        index = (index[:, None] + stride[d] * torch.arange(size, device=values.device)).reshape(-1)
    flat = values.reshape(values.shape[0], index.numel())
    return Built(flat.new_zeros(flat.shape[0], parameter.numel()).index_add_(1, index, flat), 0)


def _through_autograd(expression: Expression, values: Tensor) -> Placed:
    if values.shape[0] == 0:
        return []
    changed = any(rows.tensor._version != rows.version for rows in expression.looked_up)
    if expression.tensor._version != expression.version or changed:
        raise UnsupportedError(
            f"What was computed from parameter {expression.names} was changed in place after it had been used. Use the form "
            "that returns a new tensor."
        )
    with torch.enable_grad():
        try:
            grads = _gradients(expression, values, is_grads_batched=True)
        except RuntimeError:  # not all of torch can go back for many units at once: sparse matrices, for one
            each = [_gradients(expression, value, is_grads_batched=False) for value in values]
            grads = [None if grad[0] is None else torch.stack(list(grad)) for grad in zip(*each)]
    whole, units = expression.whole, values.shape[0]
    placed: Placed = [
        (name, Built(grad.reshape(units, -1), 0)) for (name, _), grad in zip(whole, grads) if grad is not None
    ]
    for rows, grad in zip(expression.looked_up, grads[len(whole) :]):
        if grad is not None:
            placed.append((rows.name, _lookup(rows.ids.expand(units, *rows.ids.shape), grad)))
    return placed


def _gradients(expression: Expression, values: Tensor, is_grads_batched: bool) -> Sequence[Tensor | None]:
    """Of each parameter or looked-up rows, for one gradient on the expression or, `is_grads_batched`, for many."""
    parameters = [parameter for _, parameter in expression.whole] + [rows.tensor for rows in expression.looked_up]
    return torch.autograd.grad(
        expression.tensor, parameters, values, is_grads_batched=is_grads_batched, retain_graph=True, allow_unused=True
    )
