"""Rows of units of unequal lengths, end to end: what leaves each row with its unit, and what gives every unit its own again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.registry import Call
from sparsedp.capture.units import Info, Ragged, UnitAxis, UnitData

_MASKS = (torch.bool, torch.uint8)  # torch takes bytes for masks
# What keeps values in row-major order.
_RESHAPING = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
# What gives a part, which tells by its place in memory which rows it has.
_PARTS = {"getitem", "narrow", "select", "split", "chunk", "tensor_split", "split_with_sizes", "unbind"}
# From rows end to end, and where those of each unit begin and end, to (units, longest, ...).
_PADDING = {"fbgemm::jagged_to_padded_dense", "_jagged_to_padded_dense_forward"}


def follow_ragged(call: Call, operands: list[tuple[Tensor, Info]]) -> Info | None:
    """What is known of the result of an operation on rows of unequal lengths, at least one operand; None if nothing is."""
    if call.name in _PADDING:
        return _padded(call, operands)
    if call.name == "embedding_bag":
        return _bags(call, operands)
    if call.name == "cat":
        return _joined(call, operands)
    rows = [(tensor, info) for tensor, info in operands if isinstance(info, Ragged)]
    first, info = rows[0]
    if len(rows) < len(operands) or not all(info.are_rows_of(other) for _, other in rows[1:]):
        return None
    if call.name in POINTWISE:
        shapes = [(tensor.ndim, *tensor.shape[:1]) for tensor, _ in rows]
        return info if all(shape == (call.out.ndim, *call.out.shape[:1]) for shape in shapes) else None
    if len(rows) > 1:
        return None
    if call.name in _RESHAPING:
        return info if call.out.numel() == first.numel() and call.out.shape[:1] == first.shape[:1] else None
    if call.name == "embedding" and first is call.argument(0, "input"):
        return info
    if call.name in _PARTS:
        part = rows_of_part(call.out, first)
        return None if part is None else Ragged(None, info.owners[part])
    return None


def picked_by_mask(call: Call, operands: list[tuple[Tensor, Info]]) -> Tensor | None:
    """The units of the rows of x[mask], where both have the units in the same place, or the mask is the same for all."""
    source, mask = call.args[0], call.args[1]
    mask = mask[0] if isinstance(mask, tuple) and len(mask) == 1 else mask
    if not isinstance(mask, Tensor) or mask.dtype not in _MASKS or mask.ndim == 0:
        return None
    infos = {id(tensor): info for tensor, info in operands}
    axes = {info.axis for info in infos.values() if isinstance(info, UnitData)}
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or id(source) not in infos or len(infos) != len({id(source), id(mask)} & set(infos)):
        return None
    if axis.dim >= mask.ndim or not axis.fits(source.shape, call.units) or not call.units:
        return None
    units = torch.arange(source.shape[axis.dim], device=mask.device) // axis.inner % call.units
    return units.view(-1, *(1,) * (mask.ndim - 1 - axis.dim)).expand(mask.shape)[mask != 0]


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


def _padded(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData | None:
    """Each unit its own rows, if the offsets say so."""
    values, offsets = call.args[0], call.argument(1, "offsets")
    info = next((info for tensor, info in operands if tensor is values), None)
    if not isinstance(info, Ragged) or not isinstance(offsets, (tuple, list)) or len(offsets) != 1:
        return None
    told = _owners_by_offsets(offsets[0], len(values), call.units)
    return UnitData(UnitAxis(0)) if told is not None and torch.equal(told, info.owners) else None


def _bags(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData | None:
    """Bags of a constant table, if the offsets give each unit its own ids and weights."""
    ids, offsets = call.argument(0, "input"), call.argument(2, "offsets")
    weights = call.argument(8, "per_sample_weights")
    known = {id(tensor): info for tensor, info in operands}
    if offsets is None or call.out.shape[:1] != (call.units,) or not isinstance(known.get(id(ids)), Ragged):
        return None
    if any(tensor is not ids and tensor is not weights and tensor is not offsets for tensor, _ in operands):
        return None
    last = bool(call.argument(9, "include_last_offset", default=False))
    ends = offsets if last else torch.cat([offsets, offsets.new_full((1,), ids.numel())])
    told = _owners_by_offsets(ends, ids.numel(), call.units)
    infos: Sequence[Info | None] = [known.get(id(tensor)) for tensor in (ids, weights)]
    fits = all(isinstance(info, Ragged) and told is not None and torch.equal(told, info.owners)
               for tensor, info in zip((ids, weights), infos) if tensor is not None and id(tensor) in known)  # fmt: skip
    return UnitData(UnitAxis(0)) if fits else None


def _joined(call: Call, operands: list[tuple[Tensor, Info]]) -> Ragged | None:
    """Rows after rows."""
    tensors, known = call.argument(0, "tensors"), {id(tensor): info for tensor, info in operands}
    infos = [known.get(id(tensor)) for tensor in tensors]
    owners = [info.owners for info in infos if isinstance(info, Ragged)]
    if call.argument(1, "dim", default=0) % max(call.out.ndim, 1) != 0 or len(owners) < len(infos):
        return None
    return Ragged(None, torch.cat(owners))
