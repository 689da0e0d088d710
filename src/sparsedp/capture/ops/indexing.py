"""Parts of a tensor, by number, by range, by ids or by mask."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import tap
from sparsedp.capture.ops.helpers import bind
from sparsedp.capture.ops.lookups import is_plain_table, record_computed_lookup, record_lookup, table_of, wrapped
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, NotThisForm, RowsRead, axis_rule, reads_rows, use_rule
from sparsedp.capture.units import Mixed, UnitAxis

_MASKS = (torch.bool, torch.uint8)  # torch takes bytes for masks


@axis_rule("select", "unbind", "iter")
def _select(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dim = call.argument(1, "dim", default=0) % source.ndim
    return None if dim == axis.dim else axis.shifted(-1 if dim < axis.dim else 0)


@axis_rule("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _parts(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dim = call.argument(2, "dim", "axis", default=0) % source.ndim
    if dim != axis.dim:
        return axis
    # Whole batches, one after another: all parts begin where a batch does if they are equally long.
    block = call.units * axis.inner
    equal = isinstance(call.argument(1, "chunks", "split_size_or_sections", "split_size", "sections"), int)
    return axis if equal and block and call.out.shape[dim] == block and source.shape[dim] % block == 0 else None


@axis_rule("narrow")
def _narrow(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else None


@axis_rule("index_select", joint=True)
def _index_select_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.data > 1:
        return Mixed("indexing with ids of the batch")
    dim = call.argument(1, "dim") % max(call.out.ndim, 1)
    if source is not call.argument(0, "input"):  # rows of a constant table
        return UnitAxis(dim, axis.inner)
    return axis if dim != axis.dim else Mixed(call.name)


@axis_rule("bucketize")
def _bucketize(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    """Each value by itself, where the boundaries are constant."""
    return axis


@axis_rule("searchsorted", joint=True)
def _searchsorted(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    """Each value in the row of boundaries before which it stands, or in the only one."""
    only = call.argument(0, "sorted_sequence").ndim == 1
    if source is call.argument(1, "input", "self") and only and call.data == 1:
        return axis
    return axis if axis.dim < source.ndim - 1 and not only else Mixed(call.name)


@axis_rule("getitem", joint=True)
def _getitem_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    index = call.args[1]
    mask = only_mask(index)
    if source is not call.args[0]:
        # An index that comes from the batch: fine as a mask, or beside an index that counts the units.
        if source.dtype in _MASKS:
            count = _picked_from_each(call, axis) if mask is source else None
            return None if count is None else UnitAxis(0, count)
        if call.data == 1 and index is source:  # rows of a constant table
            return axis
        first = index[0] if isinstance(index, tuple) else index
        fits = axis == UnitAxis(0) and counts_units(call) and source.ndim == first.ndim  # fewer would lie further right
        return axis if fits else Mixed("indexing with ids of the batch")
    if mask is not None:
        count = _picked_from_each(call, axis)
        return None if count is None else UnitAxis(0, count)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(map(is_advanced, items)):
        if axis != UnitAxis(0):
            return None
        return axis if counts_units(call) or _leaves_first_alone(items, source.ndim) else None
    return _basic_getitem(call, source, axis, items)


def only_mask(index: Any) -> Tensor | None:
    """The mask of x[mask] and x[mask, :]; None for other indices."""
    first, *others = index if isinstance(index, tuple) and index else (index,)
    is_mask = isinstance(first, Tensor) and first.dtype in _MASKS
    return first if is_mask and all(item is Ellipsis or item == slice(None) for item in others) else None


def _picked_from_each(call: Call, axis: UnitAxis) -> int | None:
    """x[mask], with positions of each unit in the mask: how many it picks from every unit, if from all as many.

    They stay in their order: one unit's after the other's. None where a unit would have more than another, or none.
    """
    source, mask = call.args[0], only_mask(call.args[1])
    assert mask is not None
    has_positions = mask.ndim > 1 or axis.inner > 1
    fits = axis.dim == 0 and source.shape[0] == call.units * axis.inner and mask.shape[:1] == source.shape[:1]
    if not fits or not has_positions:
        return None
    if not call.units:
        return 1
    counts = (mask != 0).reshape(call.units, -1).sum(1)
    count = int(counts[0])
    return count if count and bool((counts == count).all()) else None


def is_advanced(item: Any) -> bool:
    """Whether an index is made of numbers or of a mask: a tensor, a list, an array, a tuple within a tuple."""
    is_number = isinstance(item, Integral) and not isinstance(item, bool)
    return not (item is None or item is Ellipsis or isinstance(item, slice) or is_number)


def _leaves_first_alone(items: list, ndim: int) -> bool:
    """x[:, i, j] and x[..., i]: advanced indices side by side, behind the first dimension, stay where they are."""
    advanced = [n for n, item in enumerate(items) if is_advanced(item)]
    side_by_side = advanced[-1] - advanced[0] == len(advanced) - 1
    first = items[0]
    whole = isinstance(first, slice) and first == slice(None)
    taken = sum(_dimensions_taken(item) for item in items)
    return side_by_side and (whole or (first is Ellipsis and taken < ndim))


def _dimensions_taken(item: Any) -> int:
    """How many dimensions an index stands for: a mask for as many as it has, any other for one."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = is_advanced(item) and torch.as_tensor(item).dtype == torch.bool
    return torch.as_tensor(item).ndim if is_mask else 1


def counts_units(call: Call) -> bool:
    """x[torch.arange(B), ...]: every unit takes from itself."""
    index = call.args[1]
    first = index[0] if isinstance(index, tuple) else index
    if not isinstance(first, Tensor) or first.dtype == torch.bool or first.ndim == 0:
        return False
    if first.shape[0] != call.units or call.args[0].shape[0] != call.units:
        return False
    others = index[1:] if isinstance(index, tuple) else ()
    if any(is_advanced(item) and torch.as_tensor(item).ndim > first.ndim for item in others):
        return False  # which puts another dimension before the units
    if not call.units:
        return True
    flat = first.reshape(first.shape[0], -1)
    return bool((flat == torch.arange(first.shape[0], device=first.device)[:, None]).all())


def _basic_getitem(call: Call, source: Tensor, axis: UnitAxis, items: list) -> UnitAxis | None:
    """Integers, slices, None and Ellipsis."""
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
                start, stop, step = item.indices(source.shape[dim])
                block = max(call.units * axis.inner, 1)
                whole = step == 1 and start % block == 0 and (stop - start) % block == 0
                return UnitAxis(out_dim, axis.inner) if whole else None
            dim, out_dim = dim + 1, out_dim + 1
        else:  # an integer takes its dimension away
            if dim == axis.dim:
                return None
            dim += 1
    return None


def written_axis(target: Tensor, index: Any, value_axis: UnitAxis, value: Tensor, units: int) -> UnitAxis | None:
    """The unit axis of a constant `target` after target[index] = value: where reading it back finds the value's units."""
    part = target[index]
    wanted = value_axis.shifted(part.ndim - value.ndim)
    call = Call("getitem", (target, index), {}, part, units)
    candidates = [
        UnitAxis(dim, inner)
        for dim, size in enumerate(target.shape)
        for inner in {1, value_axis.inner}
        if size == units * inner and _getitem_axis(call, target, UnitAxis(dim, inner)) == wanted
    ]
    return candidates[0] if len(candidates) == 1 else None


def is_by_numbers(index: Any) -> bool:
    """Whether an index is made of tensors of numbers alone."""
    items = index if isinstance(index, (tuple, list)) and len(index) else (index,)
    return all(isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32) for item in items)


@axis_rule("index_put", "_index_put_impl", joint=True, in_place=True)
def _index_put(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """target[rows, ...] = values, where the numbers of the rows say that what each unit has goes to a row of its own."""
    target, index, values = call.args[0], call.argument(1, "indices"), call.argument(2, "values")
    if target.shape[:1] != (call.units,) or not is_by_numbers(index):
        return None
    if source is target and source is not values:
        return axis if axis == UnitAxis(0) else None
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    places = torch.broadcast_tensors(*parts)[0]  # the row of each element that is written
    rest = [1] * (target.ndim - len(parts)) if source is values else []
    whose = torch.arange(source.shape[axis.dim], device=source.device) // axis.inner % max(call.units, 1)
    whose = whose.reshape([-1 if dim == axis.dim else 1 for dim in range(source.ndim)])
    rows = places.reshape(*places.shape, *rest)
    if source.ndim > rows.ndim:
        return None
    return UnitAxis(0) if bool((rows == whose).all()) else None


@reads_rows(Tensor.__getitem__)
def _getitem_rows(args: tuple, kwargs: dict) -> RowsRead | None:
    return RowsRead(args[0], _ids_of_rows(args[1])) if len(args) == 2 else None


def _ids_of_rows(index: Any) -> Any:
    """The ids of x[ids], x[ids,] and x[ids, :]; any other index as it is."""
    if not isinstance(index, tuple) or not index:
        return index
    first, *others = index
    return (
        first
        if all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in others)
        else index
    )


@reads_rows(torch.index_select, Tensor.index_select)
def _index_select_rows(args: tuple, kwargs: dict) -> RowsRead | None:
    bound = bind(("input", "dim", "index"), args, kwargs)
    return RowsRead(bound.get("input"), bound.get("index")) if bound.get("dim") == 0 else None


@use_rule("getitem", "index_select")
def _getitem(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "dim", "index"), args, kwargs)
    weight = bound["input"]
    expression = capture.expression(weight)
    if expression is None:
        raise NotThisForm
    if name == "index_select":
        if bound["dim"] != 0:
            raise NotThisForm
        ids = bound["index"]
    else:
        ids = _ids_of_rows(args[1])
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise NotThisForm
    row_ids = wrapped(ids, weight.shape[0])
    capture.place(row_ids, capture.axis(ids, name, expression.names))
    if not is_plain_table(capture, weight):
        out = weight.detach()[row_ids]
        return record_computed_lookup(capture, name, weight, row_ids, out, None)
    table, first = table_of(capture, name, weight)
    out = torch.embedding(table.tensor.detach(), row_ids)
    return record_lookup(capture, name, table, first, row_ids, out, None)


@use_rule("setitem")
def _setitem(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> None:
    """x[:, :2] = parameter: a part of each unit's values is replaced by its own copy."""
    target, index, value = args
    expression = capture.expression(value)
    items = index if isinstance(index, tuple) else (index,)
    if expression is None or not capture.is_data(target) or any(map(is_advanced, items)):
        raise NotThisForm
    axis = capture.axis(target, name, expression.names)
    part = target.detach()[index]
    part_axis = _basic_getitem(Call("getitem", (target, index), {}, part, capture.units), target, axis, list(items))
    if part_axis is None or not part_axis.fits(part.shape, capture.units) or value.ndim > part.ndim:
        raise NotThisForm
    func(target, index, tap(capture, name, expression, part_axis, part.ndim, part.shape[part_axis.dim]))
    capture.place(target, axis)


@axis_rule("gather", "take_along_dim", joint=True)
def _gather(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    dim = call.argument(1, "dim") if call.name == "gather" else call.argument(2, "dim")
    return axis if isinstance(dim, int) and dim % source.ndim != axis.dim else Mixed(call.name)


@axis_rule("scatter", "scatter_add", "scatter_reduce", joint=True, in_place=True)
def _scatter(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    """Along every other dimension, an element stays where its index is."""
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else Mixed(call.name)


@axis_rule("index_add", "index_copy", "index_fill", "index_reduce", joint=True, in_place=True)
def _index_along(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if source is call.argument(2, "index"):
        return Mixed("indexing with ids of the batch")
    return axis if call.argument(1, "dim") % source.ndim != axis.dim else None
