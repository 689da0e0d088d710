"""Rows of which units decide how many they have, or the order: each row has an owner, and is followed by it.

A mask picks more tokens from one unit than from another, a sort by length or by expert puts units in another order, and
a packed sequence has the time steps of all units one after another. No `UnitAxis` describes that. But every row still belongs
to one unit (`Owners`), and an operation that keeps rows apart keeps units apart. So rows are followed as if each were a unit
of its own, by the same rules (`carried`), and where rows of several tensors meet, they must have the same owners, in the same
order. Nothing may depend on the number of a row, because others decide it: a constant that differs from row to row, a cut
at some row, a sum over rows (whose number is everybody's) are not followed.

Rows are made, and go back to where they came from, by numbers of rows (`RowNumbers`): what `nonzero` gives for a mask, or
`sort` for its order. These are no ordinary data, because they count the rows of others, too: they may do nothing but pick
rows, and say where rows go. That a number picks a row of its own unit is compared each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsedp.capture.names import operands_of
from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.ragged import follow_ragged, picked_by_mask
from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, Call
from sparsedp.capture.units import (
    Info,
    Mixed,
    Owners,
    Packed,
    RowNumbers,
    Rows,
    UnitAxis,
    UnitData,
    owners_of_axis,
    placed_rows,
)
from sparsedp.errors import UnitsMixedError

InfoOf = Callable[[Tensor], Any]
LOST = UnitData(None)
# What gives the same numbers in the same order.
_SAME_NUMBERS = {"to", "cpu", "cuda", "long", "int", "clone", "detach", "contiguous", "view", "reshape", "flatten", "ravel",
                 "squeeze", "unsqueeze", "type", "alias"}  # fmt: skip
# What has parameters, or constants in their place, that face no rows.
_WEIGHTED = {"linear", "matmul", "mm", "embedding", "layer_norm", "group_norm", "rms_norm", "prelu"}
NUMBERED = Mixed("nonzero")  # numbers of what any of the units has, such as experts that some token is routed to


class Place(NamedTuple):
    """Rows along dimension `dim`."""

    dim: int
    owners: Owners


def place_of(tensor: Tensor, info: Any, units: int) -> Place | None:
    """Whose the rows of a tensor are, by its axis of units or by their owners; None if that is not known."""
    if not isinstance(info, UnitData):
        return None
    if info.axis is not None and info.axis.fits(tensor.shape, units):
        return Place(info.axis.dim, owners_of_axis(info.axis, tensor.shape[info.axis.dim], units))
    rows = info.rows
    if rows is not None and rows.dim < tensor.ndim and tensor.shape[rows.dim] == len(rows.owners.units):
        return Place(rows.dim, rows.owners)
    return None


def spread(owners: Owners, axis: UnitAxis, size: int) -> Owners:
    """The owners along a dimension where the rows lie as `axis` says of units."""
    count = len(owners.units)
    if axis.inner == 1 and size == count:
        return owners
    return Owners(owners.units[torch.arange(size) // axis.inner % max(count, 1)])


# ---------------------------------------------------------------------- operations that make rows, or number them


def rows_made(
    name: str, args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int
) -> list[Info] | None:
    """What is known of the results of an operation that makes rows with owners; None for any other operation."""
    maker = _MAKERS.get(name)
    return None if maker is None or not outputs else maker(args, kwargs, outputs, info_of, units)


def _where(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """torch.where(mask); with three operands it picks values."""
    return _positions(args, kwargs, outputs, info_of, units) if len(args) + len(kwargs) == 1 else None


def _positions(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """nonzero: the numbers of the rows that have what a mask says, and their other positions."""
    given = operands_of(args, kwargs)
    if len(given) != 1 or kwargs.get("out") is not None:
        return None
    (mask,) = given
    info = info_of(mask)
    if isinstance(info, Mixed):
        return [NUMBERED] * len(outputs) if type(info) is Mixed else None
    if isinstance(info, UnitData) and info.chosen is not None:
        info = UnitData(info.chosen)
    place = place_of(mask, info, units)
    if place is None or mask.ndim == 0:
        return [LOST] * len(outputs)
    is_tuple = len(outputs) == mask.ndim and outputs[0].ndim == 1
    numbers = outputs[place.dim] if is_tuple else outputs[0][:, place.dim]
    owners = Owners(place.owners.units[numbers.cpu()])
    number_info = UnitData(None, numbers=RowNumbers(owners, place.owners))
    if not is_tuple:
        return [number_info if mask.ndim == 1 else LOST]
    return [number_info if dim == place.dim else UnitData(None, Rows(0, owners)) for dim in range(mask.ndim)]


def _sorted(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """sort and argsort of one number of each row."""
    source = args[0] if args else kwargs.get("input")
    if not isinstance(source, Tensor) or source.ndim != 1 or kwargs.get("out") is not None:
        return None
    place = place_of(source, info_of(source), units)
    if place is None:
        return None
    order = outputs[-1].cpu()
    owners = Owners(place.owners.units[order], keys=source.detach().cpu()[order])
    numbers = UnitData(None, numbers=RowNumbers(owners, place.owners))
    return [numbers] if len(outputs) == 1 else [UnitData(None, Rows(0, owners)), numbers]


def _masked_select(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    source = args[0] if args else kwargs.get("input")
    mask = kwargs["mask"] if "mask" in kwargs else args[1]
    if not isinstance(source, Tensor) or kwargs.get("out") is not None:
        return None
    place, mask_info = place_of(source, info_of(source), units), info_of(mask)
    if place is None or torch.broadcast_shapes(source.shape, mask.shape) != source.shape:
        return [LOST]
    at = place.dim - (source.ndim - mask.ndim)
    if isinstance(mask_info, (UnitData, Mixed)):
        mask_place = place_of(mask, mask_info, units)
        if mask_place is None or mask_place.dim != at or not mask_place.owners.same(place.owners):
            return [LOST]
    elif at >= 0 and not is_shared_along(mask, at):
        return [LOST]
    picked = mask.expand(source.shape).nonzero()[:, place.dim].cpu()
    return [UnitData(None, Rows(0, Owners(place.owners.units[picked])))]


def _packed(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """Of a padded tensor: the first time step of all sequences, then the second of those that have one, ..."""
    source, lengths, batch_first = args
    lost: list[Info] = [LOST, Mixed("pack_padded_sequence")]
    place, length_info = place_of(source, info_of(source), units), info_of(lengths)
    if place is None or place.dim != (0 if batch_first else 1):
        return lost
    if isinstance(length_info, (UnitData, Mixed)):
        length_place = place_of(lengths, length_info, units)
        if length_place is None or not length_place.owners.same(place.owners):
            return lost
    whose, sizes = place.owners.units, outputs[1].detach().clone()
    rows = torch.cat([whose[:size] for size in sizes.tolist()])
    packed = Packed(sizes, place.owners, source.shape[1 if batch_first else 0])
    return [UnitData(None, Rows(0, Owners(rows, packed=packed))), lost[1]]


def _padded(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """Of a packed sequence: a padded tensor, and the lengths."""
    source, sizes, batch_first, _, length = args
    place = place_of(source, info_of(source), units)
    packed = None if place is None or place.dim != 0 else place.owners.packed
    if packed is None or not torch.equal(packed.sizes, sizes):
        return [LOST] * len(outputs)
    if length == len(sizes) and length != packed.length and units > 1 and torch.is_grad_enabled():
        raise UnitsMixedError(
            "pad_packed_sequence pads to the longest unit of this batch, so that others decide how long each unit's sequence "
            f"is: {length} time steps here, where the sequences that were packed had {packed.length}. "
            "Pass total_length=, such as the length of the padded input."
        )
    return [placed_rows(0 if batch_first else 1, packed.sequences), placed_rows(0, packed.sequences)]


def _packed_rows(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """`sparsedp.nn.packed.packed_rows`: (sequences, steps, ...) as rows like those that they were made of."""
    steps, data, sizes = args
    place, like = (place_of(tensor, info_of(tensor), units) for tensor in (steps, data))
    packed = None if like is None or like.dim != 0 else like.owners.packed
    if place is None or place.dim != 0 or like is None or packed is None or not torch.equal(packed.sizes, sizes):
        return [LOST]
    return [UnitData(None, Rows(0, like.owners))] if place.owners.same(packed.sequences) else [LOST]


def _time_steps(args: tuple, kwargs: dict, outputs: list[Tensor], info_of: InfoOf, units: int) -> list[Info] | None:
    """`sparsedp.nn.packed.time_steps`: (sequences, steps, ...), for layers that look at no step behind a sequence's end."""
    source, sizes = args
    place = place_of(source, info_of(source), units)
    packed = None if place is None or place.dim != 0 else place.owners.packed
    if packed is None or not torch.equal(packed.sizes, sizes):
        return [LOST]
    return [placed_rows(0, packed.sequences)]


_MAKERS: dict[str, Callable[[tuple, dict, list[Tensor], InfoOf, int], list[Info] | None]] = {
    "where": _where,
    "nonzero": _positions,
    "sort": _sorted,
    "argsort": _sorted,
    "masked_select": _masked_select,
    "_pack_padded_sequence": _packed,
    "_pad_packed_sequence": _padded,
    "time_steps": _time_steps,
    "packed_rows": _packed_rows,
}


def index_by_numbered(args: tuple, info_of: InfoOf) -> tuple | None:
    """mask[n], n one of the numbers that `nonzero` gave for the whole batch, with a Python number instead; None for others.

    Code that loops over the experts that some token is routed to, and over those alone, does the same as code that loops over
    all of them. It is taken as Python's own `if` and `for` are, which capture does not see.
    """
    source, index = args
    items = index if isinstance(index, tuple) else (index,)
    numbered = [item for item in items if isinstance(item, Tensor) and info_of(item) is NUMBERED]
    if not numbered or any(item.numel() != 1 or item.ndim > 1 for item in numbered):
        return None
    info = info_of(source)
    if source.is_floating_point() or not isinstance(info, UnitData) or info.axis is None:
        return None
    if any(isinstance(item, Tensor) and info_of(item) is not NUMBERED for item in items):
        return None
    number = {id(item): int(item) for item in numbered}
    taken = tuple(
        item
        if id(item) not in number
        else slice(number[id(item)], number[id(item)] + 1)
        if item.ndim
        else number[id(item)]
        for item in items
    )
    return source, taken if isinstance(index, tuple) else taken[0]


def chosen_mask(info: Info) -> UnitData:
    """What is known of mask[n]: which n is looked at, all units decide, so that it says nothing but where rows are."""
    return UnitData(None, chosen=info.axis if isinstance(info, UnitData) else None)


# ---------------------------------------------------------------------- operations on rows


def follow_rows(call: Call, operands: list[tuple[Tensor, Info]], where: Callable[[], str]) -> Info | None:
    """What is known of the result of an operation on rows with owners, or that picks some; None where other rules say."""
    alone = operands[0][1] if len(operands) == 1 else None
    if isinstance(alone, UnitData) and alone.chosen is not None and call.name in ("squeeze", "bool"):
        axis = AXIS_RULES[call.name](call, operands[0][0], alone.chosen)
        return UnitData(None, chosen=axis if isinstance(axis, UnitAxis) else None)
    special = _SPECIAL.get(call.name)
    has_rows = any(isinstance(info, UnitData) and (info.rows or info.numbers) for _, info in operands)
    if (special is None and not has_rows) or any(isinstance(info, Mixed) for _, info in operands):
        return None
    infos = {id(tensor): info for tensor, info in operands}
    if special is not None and (has_rows or call.name in ("getitem", "index_select", "setitem")):
        info = special(call, lambda tensor: infos.get(id(tensor)))
        if info is not None:
            return info
    if not has_rows:
        return None
    cut_or_joined = follow_ragged(call, operands)
    if cut_or_joined is not None:
        return cut_or_joined
    if any(isinstance(info, UnitData) and info.numbers is not None for _, info in operands):
        return _numbers_after(call, operands)
    return _carried(call, operands, where)


def _numbers_after(call: Call, operands: list[tuple[Tensor, Info]]) -> Info | None:
    """Of an operation on numbers of rows alone."""
    (source, info), *others = operands
    if others or not isinstance(info, UnitData) or info.numbers is None or call.out.is_floating_point():
        return None
    numbers, count = info.numbers, source.numel()
    first_column = call.name == "getitem" and isinstance(call.args[1], tuple) and call.args[1] == (slice(None), 0)
    if call.out.numel() == count and (call.name in _SAME_NUMBERS or first_column):
        return info
    if call.name in ("expand", "expand_as") and source.ndim == 2 and call.out.shape[0] == count:
        return info  # (n, 1) as (n, width), for gather
    divisor = call.argument(1, "other")
    inner = numbers.counted.inner
    if not isinstance(divisor, int) or source is not call.args[0] or inner is None or divisor <= 0 or inner % divisor:
        return None
    if call.name in (
        "floordiv",
        "floor_divide",
    ):  # positions that a unit has several times, such as once for each expert
        counted = owners_of_axis(UnitAxis(0, inner // divisor), len(numbers.counted.units) // divisor, call.units)
        return UnitData(None, numbers=RowNumbers(numbers.owners, counted))
    if call.name in ("mod", "remainder") and source.ndim == 1:
        return UnitData(None, Rows(0, numbers.owners))
    return None


def _carried(call: Call, operands: list[tuple[Tensor, Info]], where: Callable[[], str]) -> Info | None:
    """Rows as units of their own, by the operation's own rule: their owners go where they go."""
    rule = AXIS_RULES.get(call.name)
    if rule is None or (call.name not in JOINT and len(operands) > 1):
        return None
    places: list[Place] = []
    for tensor, info in operands:
        place = place_of(tensor, info, call.units)
        if place is None:
            return None
        if call.name not in JOINT and tensor is not call.argument(0, "input", "self"):
            return LOST
        assert isinstance(info, UnitData)
        count = len(place.owners.units)
        if info.axis is not None:
            axis, whose = rule(call, tensor, info.axis), Owners(torch.arange(call.units))
        else:
            axis, whose = rule(call._replace(units=count), tensor, UnitAxis(place.dim)), place.owners
        if isinstance(axis, Mixed) and not call.out.requires_grad:
            return axis
        if isinstance(axis, UnitAxis) and axis.fits(call.out.shape, len(whose.units)):
            places.append(Place(axis.dim, spread(whose, axis, call.out.shape[axis.dim])))
        elif (together := _together(call, tensor, place)) is not None:
            places.append(together)
        else:
            return LOST
    first, *others = places
    if any(other.dim != first.dim or not other.owners.same(first.owners) for other in others):
        if call.out.requires_grad and call.units > 1:
            raise UnitsMixedError(
                f"Operation '{call.name}'{where()} joins rows of different units, or of the same units in another order, so one "
                "unit's loss depends on the others and clipping bounds nothing. Pick rows of all operands by the same mask or "
                "index, and put them back in their places first."
            )
        return LOST
    return placed_rows(*first) if _constants_are_shared(call, operands, first.dim) else LOST


def _together(call: Call, source: Tensor, place: Place) -> Place | None:
    """view(-1, n, ...): n rows become one, where they have the same owner. These are what it has without others, too."""
    if call.name not in ("view", "reshape", "unflatten", "_unsafe_view") or not call.out.numel():
        return None
    before, count = source.shape[: place.dim], len(place.owners.units)
    if call.out.shape[: place.dim] != before or call.out.ndim <= place.dim or count % call.out.shape[place.dim]:
        return None
    size = call.out.shape[place.dim]
    groups = place.owners.units.view(size, -1)
    return Place(place.dim, Owners(groups[:, 0])) if bool((groups == groups[:, :1]).all()) else None


def is_shared_along(tensor: Tensor, dim: int) -> bool:
    """Whether all slices along a dimension are the same."""
    tensor = tensor.detach()
    return tensor.shape[dim] <= 1 or torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def _constants_are_shared(call: Call, operands: list[tuple[Tensor, Info]], dim: int) -> bool:
    """Whether each row meets the same constants: what differs from row to row is given to a row by others' number of rows.

    `dim` is where the rows are in the result.
    """
    data = {id(tensor) for tensor, _ in operands}
    given = operands_of(call.args, call.kwargs)
    constants = [tensor for tensor in given if id(tensor) not in data]
    if call.name in POINTWISE:
        if any(isinstance(value, (list, np.ndarray)) for value in (*call.args, *call.kwargs.values())):
            return False
        behind = call.out.ndim - dim
        return all(c.ndim < behind or is_shared_along(c, c.ndim - behind) for c in constants)
    if not constants:
        return True
    if call.name in ("cat", "concat", "concatenate"):
        return all(is_shared_along(c, dim) for c in constants)
    if call.name == "getitem":  # constants that stand behind the rows' dimension, which stays whole
        index = call.args[1]
        first = index[0] if isinstance(index, tuple) else index
        return first is Ellipsis or isinstance(first, slice)
    if call.name.startswith("conv"):
        return True
    return call.name in _WEIGHTED and all(c.ndim <= 2 for c in constants) and not _has_wide_bias(call)


def _has_wide_bias(call: Call) -> bool:
    bias = call.argument(2, "bias") if call.name == "linear" else None
    return isinstance(bias, Tensor) and bias.ndim > 1


# ---------------------------------------------------------------------- rows by their numbers


class _Column(NamedTuple):
    """Indices (n,) into one dimension of a tensor."""

    dim: int
    values: Tensor
    owners: Owners | None  # None: constants
    counted: Owners | None  # for numbers of rows: of which rows


class _Index(NamedTuple):
    columns: list[_Column]
    at: int  # the dimension of the result that they give


def _index_of(source: Tensor, items: list[Any], info_of: InfoOf, units: int) -> _Index | None:
    """An index of whole slices and, side by side, numbers and one-dimensional tensors or a mask; None for others."""
    if not all(item is None or item is Ellipsis or isinstance(item, (slice, int, Tensor)) for item in items):
        return None
    taken = sum(item.ndim if _is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis)
    spelt: list[Any] = []
    for item in items:
        spelt += [slice(None)] * (source.ndim - taken) if item is Ellipsis else [item]
    advanced = [n for n, item in enumerate(spelt) if item is not None and not isinstance(item, slice)]
    if not advanced or advanced[-1] - advanced[0] != len(advanced) - 1:
        return None
    columns: list[_Column] = []
    dim = 0
    for item in spelt:
        if item is None:
            continue
        if isinstance(item, slice):
            if item != slice(None):
                return None
        elif isinstance(item, Tensor) and item.ndim > 0:
            made = list(_columns(item, dim, info_of, units))
            if not made:
                return None
            columns += made
            dim += len(made) - 1
        elif not isinstance(item, int) or isinstance(item, bool):
            return None
        dim += 1
    counts = {len(column.values) for column in columns}
    return _Index(columns, advanced[0]) if len(counts) == 1 else None


def _columns(item: Tensor, dim: int, info_of: InfoOf, units: int) -> Iterator[_Column]:
    info = info_of(item)
    place = place_of(item, info, units)
    if _is_mask(item):
        positions = item.nonzero(as_tuple=True)
        if place is None and info is None:
            yield from (_Column(dim + n, values, None, None) for n, values in enumerate(positions))
        elif place is not None:
            owners = Owners(place.owners.units[positions[place.dim].cpu()])
            for n, values in enumerate(positions):
                yield _Column(dim + n, values, owners, place.owners if n == place.dim else None)
    elif item.ndim == 1 and item.dtype in (torch.int64, torch.int32):
        if isinstance(info, UnitData) and info.numbers is not None:
            yield _Column(dim, item, info.numbers.owners, info.numbers.counted)
        elif place is not None or info is None:
            yield _Column(dim, item, None if place is None else place.owners, None)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _owners_picked(index: _Index, place: Place, is_axis: bool) -> Owners | None:
    """Of the rows that an index picks from rows; None where a unit may get another one's, or rows that others decide."""
    facing = next((column for column in index.columns if column.dim == place.dim), None)
    if facing is None:
        return None
    if facing.owners is None:
        # Constants may bring units into another order. What they pick from some units and not from others, or from rows that
        # units made, they pick by place.
        order, every = facing.values.cpu(), torch.arange(len(place.owners.units))
        if len(index.columns) == 1 and (not len(order) or torch.equal(order, every)):
            return place.owners if len(order) else Owners(every[:0])  # all rows, or none, whoever they are
        is_order = order.shape == every.shape and torch.equal(order.sort().values, every)
        return Owners(order) if is_axis and is_order and place.owners.inner == 1 and len(index.columns) == 1 else None
    if facing.counted is None or not facing.counted.same(place.owners):
        return None
    if not torch.equal(place.owners.units[facing.values.cpu()], facing.owners.units):
        return None
    for column in index.columns:
        if column.owners is None and not is_shared_along(column.values, 0):
            return None
        if column.owners is not None and not column.owners.same(facing.owners):
            return None
    return facing.owners


def _items(call: Call) -> list[Any] | None:
    if call.name == "index_select":
        dim, index = call.argument(1, "dim"), call.argument(2, "index")
        return [slice(None)] * (dim % call.argument(0, "input").ndim) + [index] if isinstance(dim, int) else None
    index = call.argument(1, "indices")
    return list(index) if isinstance(index, (tuple, list)) else [index]


def _picked(call: Call, info_of: InfoOf) -> Info | None:
    """x[numbers], x[mask] and index_select."""
    source, items = call.argument(0, "input"), _items(call)
    info = info_of(source)
    if info is None and items is not None:
        return _picked_of_constant(call, source, items, info_of)
    if items is None or not isinstance(info, UnitData) or _is_followed_by_axis(call, info_of):
        return None
    if call.name == "getitem":
        infos = [(tensor, info_of(tensor)) for tensor in operands_of(call.args, call.kwargs)]
        by_mask = picked_by_mask(call, [(tensor, each) for tensor, each in infos if each is not None])
        if by_mask is not None:
            return by_mask
    place = place_of(source, info, call.units)
    if info.numbers is not None and source.ndim == 1:
        place = Place(0, info.numbers.owners)
    index = None if place is None else _index_of(source, items, info_of, call.units)
    if place is None or index is None:
        return None
    owners = _owners_picked(index, place, info.axis is not None)
    if owners is None or call.out.shape[index.at] != len(owners.units):
        return None
    if info.numbers is not None:
        return UnitData(None, numbers=RowNumbers(owners, info.numbers.counted))
    return placed_rows(index.at, owners)


def _picked_of_constant(call: Call, source: Tensor, items: list[Any], info_of: InfoOf) -> Info | None:
    """constant[numbers], where the constant has the same for all rows, such as an initial state of zeros."""
    index = _index_of(source, items, info_of, call.units)
    if index is None or len(index.columns) != 1:
        return None
    (column,) = index.columns
    if column.counted is None or column.owners is None or source.shape[column.dim] != len(column.counted.units):
        return None
    return placed_rows(index.at, column.owners) if is_shared_along(source, column.dim) else None


def _is_followed_by_axis(call: Call, info_of: InfoOf) -> bool:
    """Whether all operands have an axis of units, and the operation's rule gives one."""
    rule = AXIS_RULES[call.name]
    for tensor in operands_of(call.args, call.kwargs):
        info = info_of(tensor)
        if isinstance(info, UnitData):
            if info.axis is None or not info.axis.fits(tensor.shape, call.units):
                return False
            if not isinstance(rule(call, tensor, info.axis), UnitAxis):
                return False
    return True


def _put(call: Call, info_of: InfoOf) -> Info | None:
    """target[numbers] = rows, target[mask] = rows, index_add and index_copy: rows that go to places of their own units."""
    target = call.args[0]
    if call.name in ("index_add", "index_copy"):
        dim, values = call.argument(1, "dim"), call.argument(3, "source")
        items = [slice(None)] * (dim % target.ndim) + [call.argument(2, "index")]
    else:
        given, values = _items(call), call.argument(2, "values")
        items = [] if given is None else given
    inverse = _inverse(target, items, values, info_of)
    if inverse is not None:
        return inverse
    index = _index_of(target, items, info_of, call.units) if items else None
    if index is None:
        return None
    info = info_of(target)
    if info is None:  # a constant: its rows are those that the numbers count
        facing = next((column for column in index.columns if column.counted is not None), None)
        if facing is None or facing.counted is None or target.shape[facing.dim] != len(facing.counted.units):
            return None
        place = Place(facing.dim, facing.counted)
    else:
        known = place_of(target, info, call.units)
        if known is None:
            return None
        place = known
    owners = _owners_picked(index, place, is_axis=False)
    if owners is None or not _are_of(
        values, owners, index.at, target.ndim - len(index.columns) + 1, info_of, call.units
    ):
        return None
    return info if isinstance(info, UnitData) else placed_rows(*place)


def _are_of(values: Any, owners: Owners, dim: int, ndim: int, info_of: InfoOf, units: int) -> bool:
    """Whether values that are written have rows of these owners along a dimension of `ndim`, or are the same for all."""
    if not isinstance(values, Tensor):
        return isinstance(values, (int, float, bool))
    at = dim - (ndim - values.ndim)
    info = info_of(values)
    if info is None:
        return at < 0 or is_shared_along(values, at)
    place = place_of(values, info, units)
    return place is not None and place.dim == at and place.owners.same(owners)


def _inverse(target: Tensor, items: list[Any], values: Any, info_of: InfoOf) -> Info | None:
    """inverse[order] = arange(n): which number the row has that was n-th before a sort."""
    if target.ndim != 1 or len(items) != 1 or not isinstance(items[0], Tensor) or not isinstance(values, Tensor):
        return None
    info = info_of(items[0])
    if not isinstance(info, UnitData) or info.numbers is None or info_of(values) is not None:
        return None
    numbers, order = info.numbers, items[0].cpu()
    count = len(numbers.counted.units)
    every = torch.arange(count)
    if order.shape != every.shape or len(target) != count or not torch.equal(order.sort().values, every):
        return None
    if not torch.equal(values.cpu(), every):
        return None
    return UnitData(None, numbers=RowNumbers(numbers.counted, numbers.owners))


def _gathered(call: Call, info_of: InfoOf) -> Info | None:
    """gather of rows by their numbers, which are the same in all columns."""
    source, index = call.argument(0, "input"), call.argument(2, "index")
    info, numbers = info_of(source), info_of(index)
    place = place_of(source, info, call.units)
    if (
        place is None
        or not isinstance(numbers, UnitData)
        or numbers.numbers is None
        or call.argument(1, "dim") != place.dim
    ):
        return None
    if place.dim != 0 or index.ndim != source.ndim or source.ndim > 2:
        return None
    column = index if index.ndim == 1 else index[:, 0]
    picked = _Index([_Column(0, column, numbers.numbers.owners, numbers.numbers.counted)], 0)
    owners = _owners_picked(picked, place, is_axis=False)
    return None if owners is None else placed_rows(0, owners)


def _scattered(call: Call, info_of: InfoOf) -> Info | None:
    return _inverse(call.args[0], [call.argument(2, "index")], call.argument(3, "src", "value"), info_of)


_SPECIAL: dict[str, Callable[[Call, InfoOf], Info | None]] = {
    "getitem": _picked,
    "index_select": _picked,
    "setitem": _put,
    "index_put": _put,
    "_index_put_impl": _put,
    "index_add": _put,
    "index_copy": _put,
    "scatter": _scattered,
    "gather": _gathered,
}
