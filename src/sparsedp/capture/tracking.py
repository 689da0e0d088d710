"""Where the units are: follows the unit axis of every tensor that is computed from a batch.

Clipping needs to know which part of an activation belongs to which unit. A model may transpose, flatten or stack its
activations, so the position of the units is followed through the forward pass instead of being guessed from sizes
(a sequence as long as the batch is large would fool a guess).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitAxis:
    """Units lie along dimension `dim`: index i of it belongs to unit (i // inner) mod units."""

    dim: int
    inner: int = 1

    def shifted(self, by: int) -> UnitAxis:
        return UnitAxis(self.dim + by, self.inner)

    def fits(self, shape: Sequence[int], units: int) -> bool:
        if not 0 <= self.dim < len(shape):
            return False
        block = units * self.inner
        return shape[self.dim] == 0 if block == 0 else shape[self.dim] > 0 and shape[self.dim] % block == 0


@dataclass(frozen=True)
class UnitData:
    """A tensor that depends on the batch. `axis` is None where the position of the units is not known."""

    axis: UnitAxis | None


@dataclass(frozen=True)
class Mixed:
    """A tensor in which the units of a batch were reduced to one value, such as a batch mean."""

    operation: str


def unit_first(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The tensor with its units on axis 0: (units, ...). Other positions keep their order."""
    shape = tensor.shape
    if axis.inner == 1 and shape[axis.dim] == units:
        return tensor.movedim(axis.dim, 0)
    outer = shape[axis.dim] // (units * axis.inner) if units else 0
    split = tensor.reshape(*shape[: axis.dim], outer, units, axis.inner, *shape[axis.dim + 1 :])
    return split.movedim(axis.dim + 1, 0)


def find_axis(shape: Sequence[int], units: int) -> UnitAxis | None:
    """The unit axis of a tensor of which only the shape is known: the only dimension of the right size."""
    candidates = [dim for dim, size in enumerate(shape) if size == units]
    return UnitAxis(candidates[0]) if len(candidates) == 1 else None


Rule = Callable[[UnitAxis, Tensor, Tensor, tuple, dict], "UnitAxis | None"]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def output_axis(name: str, axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    """The unit axis of `out`, the result of operation `name` on `source` (its first argument with units)."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(axis, source, out, args, kwargs)
    if out.ndim >= source.ndim:  # elementwise with broadcasting, matrix products: dimensions align from the right
        moved = axis.shifted(out.ndim - source.ndim)
        return moved if out.shape[moved.dim] == source.shape[axis.dim] else None
    same = out.ndim > axis.dim and out.shape[: axis.dim + 1] == source.shape[: axis.dim + 1]
    return axis if same else None


def reduces_units(name: str, axis: UnitAxis, source: Tensor, args: tuple, kwargs: dict) -> bool:
    """Whether operation `name` reduces over the unit axis of its argument."""
    if name not in _REDUCTIONS:
        return False
    dims = _reduced_dims(name, source, args, kwargs)
    return axis.dim in dims


_REDUCTIONS = {
    "sum", "mean", "std", "var", "amax", "amin", "max", "min", "prod", "norm", "logsumexp", "any", "all", "median",
    "quantile", "nanmean", "nansum", "std_mean", "var_mean", "vector_norm", "argmax", "argmin", "softmax",
    "log_softmax", "cumsum", "sort", "topk", "cumprod", "count_nonzero", "aminmax", "nanmedian", "mode", "kthvalue",
}  # fmt: skip
_KEEP_SHAPE = {"softmax", "log_softmax", "cumsum", "cumprod", "sort", "topk"}


def _dim_argument(args: tuple, kwargs: dict) -> Any:
    """The `dim` of a reduction: by name, or the first number or list of numbers after the tensor."""
    for key in ("dim", "axis"):
        if key in kwargs:
            return kwargs[key]
    for value in args[1:]:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, (tuple, list)) and value and all(isinstance(v, int) for v in value):
            return value
    return None


def _reduced_dims(name: str, source: Tensor, args: tuple, kwargs: dict) -> set[int]:
    arguments = args
    if name in {
        "norm",
        "vector_norm",
        "quantile",
        "nanquantile",
        "topk",
        "kthvalue",
        "logsumexp",
        "std",
        "var",
    }:
        # The first number of these may be an order or a count, not a dimension.
        skip = 2 if name in {"norm", "vector_norm", "quantile", "nanquantile", "topk", "kthvalue"} else 1
        arguments = (None, *args[skip:])
    dim = _dim_argument(arguments, kwargs)
    if dim is None:
        if name in {"topk", "kthvalue", "sort", "median", "mode"}:
            return {source.ndim - 1}
        return set(range(source.ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return {d % max(source.ndim, 1) for d in dims}


def _reduction(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    if out.ndim == source.ndim:
        return axis
    dims = _reduced_dims("", source, args, kwargs)
    removed = sum(1 for d in dims if d < axis.dim)
    return axis.shifted(-removed)


for _name in _REDUCTIONS - _KEEP_SHAPE:
    _RULES[_name] = _reduction


@_rule("transpose", "swapaxes", "swapdims", "transpose_")
def _transpose(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    named = [kwargs[k] for k in ("dim0", "dim1", "axis0", "axis1") if k in kwargs]
    one, other = (d % source.ndim for d in [*args[1:3], *named])
    return UnitAxis({one: other, other: one}.get(axis.dim, axis.dim), axis.inner)


@_rule("T", "t", "t_")
def _reverse(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    return UnitAxis(source.ndim - 1 - axis.dim, axis.inner)


@_rule("mT", "mH", "adjoint")
def _last_two(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    n = source.ndim
    return UnitAxis({n - 1: n - 2, n - 2: n - 1}.get(axis.dim, axis.dim), axis.inner)


def _sizes(args: tuple, kwargs: dict, *names: str) -> list[int]:
    """The sizes or dimensions of a call such as view(2, 3) or view((2, 3))."""
    for name in names:
        if name in kwargs:
            value = kwargs[name]
            return list(value) if isinstance(value, (tuple, list)) else [value]
    rest = args[1:]
    return list(rest[0]) if rest and isinstance(rest[0], (tuple, list)) else [v for v in rest if isinstance(v, int)]


@_rule("permute")
def _permute(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    dims = [d % source.ndim for d in _sizes(args, kwargs, "dims")]
    return UnitAxis(dims.index(axis.dim), axis.inner)


@_rule("movedim", "moveaxis")
def _movedim(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    # Move a one-hot of the dimensions alongside: its strides say where each went.
    probe = torch.empty(1).as_strided([1] * source.ndim, list(range(source.ndim)))
    moved = torch.movedim(probe, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    return UnitAxis(moved.stride().index(axis.dim), axis.inner)


@_rule("unsqueeze", "unsqueeze_")
def _unsqueeze(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    dim = _sizes(args, kwargs, "dim")[0] % out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@_rule("squeeze", "squeeze_")
def _squeeze(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    named = _sizes(args, kwargs, "dim")
    dims = {d % source.ndim for d in named} if named else set(range(source.ndim))
    gone = {d for d in dims if source.shape[d] == 1}
    if axis.dim in gone:  # a batch of one, whose axis was squeezed away
        return None
    return axis.shifted(-sum(1 for d in gone if d < axis.dim))


@_rule("reshape", "view", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "contiguous", "_unsafe_view")
def _reshape(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    """Row-major order is kept, so the number of elements behind a step of one unit is, too."""
    if source.shape == out.shape:
        return axis
    if out.numel() == 0:
        return UnitAxis(0) if out.ndim and out.shape[0] == 0 else None
    behind = axis.inner * math.prod(source.shape[axis.dim + 1 :])
    count = source.shape[axis.dim] // axis.inner
    before = source.numel() // (behind * count)
    tail = out.numel()
    for dim, size in enumerate(out.shape):
        head, tail = out.numel() // tail, tail // size
        reaches = size * tail >= behind * min(count, 2)  # the step from one unit to the next lies in this dimension
        if tail <= behind and behind % tail == 0 and before % head == 0 and reaches:
            return UnitAxis(dim, behind // tail)
    return None


@_rule("stack")
def _stack(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@_rule("cat", "concat", "concatenate", "hstack", "vstack")
def _cat(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    if out.ndim != source.ndim:
        return None
    if out.shape[axis.dim] == source.shape[axis.dim] or axis.inner == 1:
        return axis
    return None


@_rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expand(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    return axis.shifted(out.ndim - source.ndim)


@_rule("repeat_interleave")
def _repeat_interleave(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(repeats, int) or dim is None:
        return None
    return UnitAxis(axis.dim, axis.inner * repeats) if dim % source.ndim == axis.dim else axis


@_rule("select")
def _select(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % source.ndim
    return None if dim == axis.dim else axis.shifted(-1 if dim < axis.dim else 0)


@_rule("unbind")
def _unbind(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % source.ndim
    return None if dim == axis.dim else axis.shifted(-1 if dim < axis.dim else 0)


@_rule("index_select", "narrow", "chunk", "split", "tensor_split", "split_with_sizes")
def _part(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    return axis if out.shape[axis.dim] == source.shape[axis.dim] else None


@_rule("embedding")
def _embedding(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis:
    return axis  # one more dimension at the end


@_rule("getitem", "__getitem__")
def _getitem(axis: UnitAxis, source: Tensor, out: Tensor, args: tuple, kwargs: dict) -> UnitAxis | None:
    index = args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (Tensor, list)) for item in items):
        return _advanced_getitem(axis, source, out, items)
    taken = sum(1 for item in items if item is not None and item is not Ellipsis)
    dim = out_dim = 0
    for item in items if Ellipsis in items else [*items, Ellipsis]:
        if item is None:
            out_dim += 1
        elif item is Ellipsis:
            span = source.ndim - taken
            if dim <= axis.dim < dim + span:
                return UnitAxis(out_dim + axis.dim - dim, axis.inner)
            dim, out_dim = dim + span, out_dim + span
        elif isinstance(item, slice):
            if dim == axis.dim:
                whole = out.shape[out_dim] == source.shape[dim] and (item.step or 1) == 1
                return UnitAxis(out_dim, axis.inner) if whole else None
            dim, out_dim = dim + 1, out_dim + 1
        else:  # an integer takes its dimension away
            if dim == axis.dim:
                return None
            dim += 1
    return None


def _advanced_getitem(axis: UnitAxis, source: Tensor, out: Tensor, items: list) -> UnitAxis | None:
    """x[torch.arange(B), lengths] keeps the units in front; x[:, ids] too. Anything else is not followed."""
    first = items[0]
    if axis != UnitAxis(0):
        return None
    if isinstance(first, slice) and first == slice(None):
        return axis
    counts = isinstance(first, Tensor) and first.dtype != torch.bool and first.ndim >= 1
    if counts and first.shape[0] == source.shape[0] and _is_arange(first):
        return axis
    return None


def _is_arange(index: Tensor) -> bool:
    flat = index.reshape(index.shape[0], -1)
    wanted = torch.arange(index.shape[0], device=index.device)[:, None]
    return bool((flat == wanted).all())
