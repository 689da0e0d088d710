"""Units of unequal lengths, end to end or one by one: what leaves each row with its unit, and what joins them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.registry import Call
from sparsedp.capture.units import Info, OneUnit, Owners, Rows, UnitAxis, UnitData, rows_end_to_end

# What gives a part, which tells by its place in memory which rows it has.
_PARTS = {"getitem", "narrow", "select", "split", "chunk", "tensor_split", "split_with_sizes", "unbind"}
# From rows end to end, and where those of each unit begin and end, to (units, longest, ...): TorchRec's.
_PADDING = "fbgemm::jagged_to_padded_dense"


def follow_ragged(call: Call, operands: list[tuple[Tensor, Info]]) -> Info | None:
    """What is known of rows that are cut, put into bags or joined end to end; None for other operations."""
    if call.name == _PADDING:
        offsets = call.argument(1, "offsets")
        is_one = isinstance(offsets, (tuple, list)) and len(offsets) == 1
        return _cut(call, operands, offsets[0]) if is_one else None
    if call.name == "embedding_bag":
        return _bags(call, operands)
    if call.name == "cat":
        return _joined(call, operands)
    if call.name == "stack" and call.units == 1 and call.argument(1, "dim", default=0) == 0:
        return UnitData(UnitAxis(0))  # pieces of the only unit
    (source, info), *others = operands
    owners = owners_on_first(info)
    if call.name not in _PARTS or others or owners is None:
        return None
    rows = rows_of_part(call.out, source)
    part = None if rows is None else owners.part(rows)
    return None if part is None else UnitData(None, Rows(0, part))


def owners_on_first(info: Any) -> Owners | None:
    """Of the rows along dimension 0; None where these have no owners."""
    rows = info.rows if isinstance(info, UnitData) else None
    return rows.owners if rows is not None and rows.dim == 0 else None


def follow_one_unit(call: Call, operands: list[tuple[Tensor, Info]]) -> Info | None:
    """What is known of the result of an operation on data of single units; None if it mixes several, or may.

    Those of all units in the order of the batch may be joined again: any other order, or one left out, would let the place
    in the batch decide what becomes of a unit.
    """
    units = [info.unit for _, info in operands if isinstance(info, OneUnit)]
    if len(units) < len(operands):
        return None
    tensors = call.argument(0, "tensors") if call.name in ("cat", "stack") else None
    # Where there is no other unit, pieces of the only one cannot be told from all units: both are true of them.
    if len(set(units)) == 1 and (tensors is None or call.units > 1 or len(units) < len(tensors)):
        return operands[0][1]
    if tensors is None or len(units) != len(tensors) or call.argument(1, "dim", default=0) != 0 or not call.units:
        return None
    order = torch.tensor(units)
    if len(order) % call.units or not torch.equal(order, torch.arange(len(order)) % call.units):
        return None
    if call.name == "stack":
        return UnitData(UnitAxis(0))
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    segments = (torch.arange(len(order)) // call.units).repeat_interleave(lengths)
    return rows_end_to_end(order.repeat_interleave(lengths), segments)


def unit_of_part(part: Tensor, whole: Tensor, units: int) -> int | None:
    """The unit that a view belongs to, of a tensor with the units on axis 0; None for one that has parts of several."""
    if whole.shape[0] != units or not whole.numel() or part.dtype != whole.dtype:
        return None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    apart = whole.stride(0)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(whole.shape[1:], whole.stride()[1:]))
    if apart < extent:
        return None
    unit, within = divmod(int(part.storage_offset()) - int(whole.storage_offset()), apart)
    reach = within + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride()) if size)
    return unit if reach < apart and 0 <= unit < units else None


def follow_nested(call: Call, operands: list[tuple[Tensor, Info]]) -> Info:
    """The same for torch's own nested tensors, each of whose units is a tensor of its own length."""
    if (
        call.name == "_nested_view_from_jagged"
    ):  # values, offsets, one that is nested, lengths, which dimension is ragged
        is_plain = call.argument(3, "lengths") is None and call.argument(4, "ragged_idx", default=1) == 1
        return (_cut(call, operands, call.args[1]) if is_plain else None) or UnitData(None)
    tensor, info = operands[0]
    if len(operands) > 1 or not isinstance(info, UnitData) or info.axis != UnitAxis(0) or tensor.shape[0] != call.units:
        return UnitData(None)
    if call.name in ("to_padded_tensor", "nested_to_padded_tensor"):
        return info
    if call.name in POINTWISE:
        return info if call.out.is_nested and call.out.shape[0] == call.units else UnitData(None)
    owners = owners_of_nested(tensor) if call.name == "_nested_get_values" else None
    return UnitData(None) if owners is None or len(owners) != len(call.out) else rows_end_to_end(owners)


def parts_of_nested(tensor: Any, info: Info) -> list[tuple[Tensor, Info]]:
    """What a nested tensor is made of, which it hands out unseen, and what is known of each part."""
    if tensor.layout != torch.jagged:
        return []
    placed = isinstance(info, UnitData) and info.axis == UnitAxis(0)
    owners = owners_of_nested(tensor) if placed else None
    parts: list[tuple[Any, Info]] = [(tensor.offsets(), UnitData(None)), (tensor.lengths(), UnitData(None))]
    parts.append((tensor._values, UnitData(None) if owners is None else rows_end_to_end(owners)))
    return [(part, of_part) for part, of_part in parts if part is not None]


def owners_of_nested(tensor: Any) -> Tensor | None:
    """The unit of each of its values, (N,); None if these have gaps, or are not its units' rows end to end."""
    if tensor.layout != torch.jagged or tensor.lengths() is not None or not tensor.is_contiguous():
        return None
    return _owners_by_offsets(tensor.offsets(), len(tensor._values), tensor.shape[0])


def picked_by_mask(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData | None:
    """The rows of x[mask], where both have the units in the same place, or the mask is the same for every unit.

    What lies before the units, such as features, becomes segments.
    """
    source, mask = call.args[0], call.args[1]
    mask = mask[0] if isinstance(mask, tuple) and len(mask) == 1 else mask
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8) or mask.ndim == 0:
        return None
    infos = {id(tensor): info for tensor, info in operands}
    axes = {info.axis for info in infos.values() if isinstance(info, UnitData)}
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or id(source) not in infos or set(infos) - {id(source), id(mask)}:
        return None
    if axis.dim >= mask.ndim or not axis.fits(source.shape, call.units) or not call.units:
        return None
    by_unit = mask.unflatten(axis.dim, (-1, call.units, axis.inner))  # (..., outer, units, inner, ...)
    if id(mask) not in infos and not torch.equal(by_unit, by_unit.narrow(axis.dim + 1, 0, 1).expand_as(by_unit)):
        return None
    outer = by_unit.shape[: axis.dim + 1].numel()
    numbers = torch.arange(outer * call.units, device=mask.device)
    places = numbers.view(*by_unit.shape[: axis.dim + 2], *(1,) * (by_unit.ndim - axis.dim - 2)).expand_as(by_unit)
    picked = places[by_unit != 0]
    return rows_end_to_end(picked % call.units, picked // call.units)


def rows_of_part(part: Tensor, whole: Tensor) -> slice | None:
    """Which rows of a contiguous tensor a view of it has, each or a part of each; None if that is not seen."""
    width = whole[0].numel() if len(whole) else 0
    if part.ndim == 0 or not whole.is_contiguous() or not width:
        return slice(0, 0) if part.ndim and not part.numel() and part.shape[:1] == (0,) else None
    if not part.numel():
        return slice(0, 0) if part.shape[0] == 0 else None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or part.dtype != whole.dtype:
        return None
    first, within = divmod(int(part.storage_offset()) - int(whole.storage_offset()), width)
    reach = within + sum((size - 1) * stride for size, stride in zip(part.shape[1:], part.stride()[1:]))
    count = part.shape[0]
    fits = reach < width and (count == 1 or part.stride(0) == width) and first >= 0 and first + count <= len(whole)
    return slice(first, first + count) if fits else None


def owners_by_lengths(lengths: Tensor) -> Tensor:
    """The unit of each row, (N,), where unit b's `lengths[b]` rows follow those of the units before it."""
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths.long())


def _owners_by_offsets(offsets: Tensor, rows: int, units: int) -> Tensor | None:
    """Likewise by where each unit's rows begin and the last's end; None if they do not cover the rows one by one."""
    if offsets.ndim != 1 or offsets.numel() != units + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != rows:
        return None
    lengths = offsets.diff()
    return owners_by_lengths(lengths) if bool((lengths >= 0).all()) else None


def _cut(call: Call, operands: list[tuple[Tensor, Info]], offsets: Tensor) -> UnitData | None:
    """Rows end to end, the first operand, by `offsets`: each unit has its own, if these say so."""
    owners = owners_on_first(next((info for tensor, info in operands if tensor is call.args[0]), None))
    told = None if owners is None else _owners_by_offsets(offsets, len(call.args[0]), call.units)
    if owners is None or told is None:
        return None
    return UnitData(UnitAxis(0)) if torch.equal(told.cpu(), owners.units) else None


def _bags(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData | None:
    """Bags of a constant table, if the offsets give each unit its own ids and weights."""
    ids, offsets = call.argument(0, "input"), call.argument(2, "offsets")
    weights = call.argument(8, "per_sample_weights")
    owners_of = {id(tensor): owners_on_first(info) for tensor, info in operands}
    if offsets is None or call.out.shape[:1] != (call.units,) or owners_of.get(id(ids)) is None:
        return None
    if any(tensor is not ids and tensor is not weights and tensor is not offsets for tensor, _ in operands):
        return None
    last = bool(call.argument(9, "include_last_offset", default=False))
    ends = offsets if last else torch.cat([offsets, offsets.new_full((1,), ids.numel())])
    told = _owners_by_offsets(ends, ids.numel(), call.units)
    if told is None:
        return None
    given = [owners_of[id(tensor)] for tensor in (ids, weights) if tensor is not None and id(tensor) in owners_of]
    fits = all(owners is not None and torch.equal(told.cpu(), owners.units) for owners in given)
    return UnitData(UnitAxis(0)) if fits else None


def _joined(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData | None:
    """Rows after rows."""
    tensors = call.argument(0, "tensors")
    owners_of = {id(tensor): owners_on_first(info) for tensor, info in operands}
    parts = [owners for owners in (owners_of.get(id(tensor)) for tensor in tensors) if owners is not None]
    if call.argument(1, "dim", default=0) % max(call.out.ndim, 1) != 0 or len(parts) < len(tensors):
        return None
    segments, start = [], 0
    for part in parts:
        of_part = torch.zeros_like(part.units) if part.segments is None else part.segments
        segments.append(of_part + start)
        start += int(of_part.max()) + 1 if len(of_part) else 0
    return rows_end_to_end(torch.cat([part.units for part in parts]), torch.cat(segments))
