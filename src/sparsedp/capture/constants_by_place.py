"""Constants by place in the batch: what a unit meets must not depend on how many units come before it.

`x * torch.arange(len(x))[:, None]` treats the first unit otherwise than the second. One unit more moves everybody behind it to
another place, so that all of their gradients change, and the bound is gone. So a constant that faces the units must be the same
for all of them. Numbers that are drawn have one law in every place instead.

Where a constant faces the units, the rules of the operations say: what would have units there would have them where the result
has them. Constants in an index, and places that are written to, are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsedp.capture.expressions import is_repeated
from sparsedp.capture.names import operands_of
from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.indexing import counts_units, is_advanced, only_mask
from sparsedp.capture.ops.losses import LOSSES, OF_CLASSES
from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, Call, plain_name
from sparsedp.capture.units import UnitAxis
from sparsedp.errors import UnitsMixedError

PUTTING = {"index_put", "_index_put_impl"}
_SCATTERING = {"scatter", "scatter_add", "scatter_reduce"}
BY_PLACE = "its place in the batch decides"  # words of the errors

Placed = Sequence[tuple[Tensor, UnitAxis]]
Faced = Iterator[tuple[Tensor, UnitAxis]]


class Constants(Protocol):
    """What is known of tensors that no unit decides."""

    def is_constant(self, tensor: Any) -> bool:
        """Whether it is one that may differ from unit to unit: not one that is drawn by the same law for each."""

    def is_alike(self, tensor: Tensor, axis: UnitAxis, units: int) -> bool:
        """Whether a constant is the same for all units, which would be at `axis` of it, or drawn by one law."""

    def is_by_units(self, index: Any) -> bool:
        """Whether what units decide, or what is drawn for each, has a part in an index."""


def by_place_refused(name: str, where: Callable[[], str], taken_out: str = "") -> UnitsMixedError:
    """`taken_out` is the operation that made a Python value of units before, in the same pass."""
    python = f" Of values that '{taken_out}' took out of units, make them with torch operations." if taken_out else ""
    return UnitsMixedError(
        f"Operation '{name}'{where()} lets each unit meet a part of a constant that {BY_PLACE}, so that one unit more changes "
        "the gradients of all units behind it. Use the same values for all units (shape 1 along the batch), make them of each "
        f"unit's own inputs, or draw them in forward().{python}"
    )


def meets_by_place(call: Call, placed: Placed, axis: UnitAxis | None, constants: Constants) -> bool:
    """Whether units meet different values of a constant, by their place in the batch.

    `placed` are the operands that have units, and where; `axis` is where the result has them, None if it is a mean or sum.
    """
    if call.units < 2:
        return False
    if call.name == "getitem":
        faced = _in_index(call, axis, constants)
    elif call.name in PUTTING:
        has_units_beside = any(tensor is not call.args[0] for tensor, _ in placed)
        if not has_units_beside and not constants.is_by_units(call.argument(1, "indices")):
            return not puts_alike(call, placed[0][1])
        faced = _beside_counted(call, constants)
    elif call.name in _SCATTERING:
        if axis is not None and _leaves_units_out(call, axis):
            return True
        faced = _scattered(call, axis, constants)
    elif call.name == "embedding_bag" and _weighs_by_place(call, constants):
        return True
    else:
        faced = _facing(call, placed, axis, constants)
    return any(not constants.is_alike(tensor, at, call.units) for tensor, at in faced)


def is_same(tensor: Tensor, axis: UnitAxis, units: int) -> bool:
    """Whether a constant is the same for all units, which would be at `axis` of it."""
    if units < 2 or not axis.fits(tensor.shape, units) or tensor.stride(axis.dim) == 0 or not tensor.numel():
        return True
    tensor = tensor.detach()
    if axis.inner == 1 and tensor.shape[axis.dim] == units:
        return is_repeated(tensor, axis.dim)
    return is_repeated(tensor.unflatten(axis.dim, (-1, units, axis.inner)), axis.dim + 1)


# ---------------------------------------------------------------------- where constants face units


def _facing(call: Call, placed: Placed, axis: UnitAxis | None, constants: Constants) -> Faced:
    operands = [tensor for tensor in operands_of(call.args, call.kwargs) if constants.is_constant(tensor)]
    if call.name in JOINT and len({id(tensor) for tensor in operands}) < len(operands):
        call, views = _with_each_apart(call, {id(tensor) for tensor in operands})
    else:
        views = [(tensor, tensor) for tensor in operands]
    for tensor, view in views:
        if tensor is call.out or tensor.numel() < 2:
            continue
        if axis is None:
            yield from ((tensor, at) for at in _in_loss(call, tensor, placed))
        elif call.name in JOINT and call.name != "index_select":  # whose constants say which rows, not what meets them
            yield from ((tensor, at) for at in _by_rule(call, view, axis))
        elif (beside := _beside_weights(call, tensor, axis)) is not None:
            yield tensor, beside


def _with_each_apart(call: Call, repeated: set[int]) -> tuple[Call, list[tuple[Tensor, Tensor]]]:
    """The same call with a view in each place where a constant is, and these: rules tell operands apart by what they are."""
    views: list[tuple[Tensor, Tensor]] = []

    def apart(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in repeated:
            views.append((value, value.detach()))
            return views[-1][1]
        return type(value)(map(apart, value)) if type(value) in (tuple, list) else value

    kwargs = {key: apart(value) for key, value in call.kwargs.items()}
    return call._replace(args=apart(call.args), kwargs=kwargs), views


def _by_rule(call: Call, tensor: Tensor, axis: UnitAxis) -> Iterator[UnitAxis]:
    rule = AXIS_RULES[call.name]
    for dim, size in enumerate(tensor.shape):
        for inner in {1, axis.inner}:
            at = UnitAxis(dim, inner)
            if size > 1 and at.fits(tensor.shape, call.units) and rule(call, tensor, at) == axis:
                yield at


def _in_loss(call: Call, tensor: Tensor, placed: Placed) -> Iterator[UnitAxis]:
    """Targets and weights of a loss: dimensions are aligned from the right, those of classes from the left."""
    for other, axis in placed:
        if call.name in OF_CLASSES:
            if tensor is call.argument(2, "weight") or axis.dim == min(1, max(other.ndim, tensor.ndim) - 1):
                continue  # weights of classes, which no unit has
            skipped = 0 if axis.dim == 0 else tensor.ndim - other.ndim  # a target has no dimension of classes
            yield axis.shifted(skipped)
        elif call.name in LOSSES:
            yield axis.shifted(tensor.ndim - other.ndim)
        elif call.name == "sequence_loss":
            yield axis


def _beside_weights(call: Call, tensor: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Of operations that treat each unit by itself, those with a constant that may face the units all the same."""
    if call.name == "linear" and tensor is call.argument(2, "bias"):
        return axis.shifted(tensor.ndim - call.out.ndim)
    if call.name == "prelu" and tensor is call.argument(1, "weight"):
        return UnitAxis(0, axis.inner) if axis.dim == 1 else None
    if call.name == "embedding_bag" and tensor is call.argument(8, "per_sample_weights"):
        return UnitAxis(0, 1 if tensor.ndim == 2 else max(tensor.shape[0] // call.units, 1))
    return UnitAxis(0) if call.name.startswith("fractional_max_pool") else None  # where it begins, by image


def _weighs_by_place(call: Call, constants: Constants) -> bool:
    """Whether constant weights lie end to end in bags of unequal lengths: whose a weight is, goes by what comes before."""
    weights, offsets = call.argument(8, "per_sample_weights"), call.argument(2, "offsets")
    if not constants.is_constant(weights) or offsets is None or not weights.numel():
        return False
    length = weights.numel() // call.units
    equal = torch.arange(call.units, device=offsets.device) * length
    is_equal = weights.numel() == length * call.units and torch.equal(offsets[: call.units].long(), equal)
    return not is_equal and not is_repeated(weights.detach(), 0)


def _in_index(call: Call, axis: UnitAxis | None, constants: Constants) -> Faced:
    """Of x[mask] and x[torch.arange(B), columns]: the mask, the columns, or x itself where it is a constant."""
    source, index = call.args[0], call.args[1]
    mask = only_mask(index)
    if axis is None or axis.dim != 0:
        return
    if mask is not None:
        rows = UnitAxis(0, max(mask.shape[0] // call.units, 1))
        yield from ((tensor, rows) for tensor in (source, mask) if constants.is_constant(tensor))
        return
    first, *others = index if isinstance(index, tuple) else (index,)
    if not constants.is_constant(first) or not counts_units(call):  # ids of the units may count them by accident
        return
    if constants.is_constant(source):
        yield source, UnitAxis(0)
    for item in others:
        if is_advanced(item) and (not isinstance(item, Tensor) or constants.is_constant(item)):
            column = torch.as_tensor(item)
            if column.ndim == first.ndim:
                yield column, UnitAxis(0)


def _beside_counted(call: Call, constants: Constants) -> Faced:
    """Of target[rows, columns] = values, some of which are the units': columns and values, and what is not written to."""
    target, index, values = call.args[0], call.argument(1, "indices"), call.argument(2, "values")
    first, *columns = index if isinstance(index, (tuple, list)) else [index]
    if target is not call.out and constants.is_constant(target):
        yield target, UnitAxis(0)
    written = torch.broadcast_tensors(first, *columns)[0]
    behind = target.ndim - 1 - len(columns)
    for tensor, ndim in (*((column, written.ndim) for column in columns), (values, written.ndim + behind)):
        if constants.is_constant(tensor) and tensor.ndim == ndim and tensor.numel() > 1:
            yield tensor, UnitAxis(0, max(tensor.shape[0] // call.units, 1))


def _scattered(call: Call, axis: UnitAxis | None, constants: Constants) -> Faced:
    index, source = call.argument(2, "index"), call.argument(3, "src")
    if axis is None:
        return
    yield from (
        (tensor, axis) for tensor in (call.args[0], index) if constants.is_constant(tensor) and tensor is not call.out
    )
    if isinstance(source, Tensor) and source.ndim and constants.is_constant(source):
        is_whole = source.shape == index.shape
        yield source if is_whole else source[tuple(slice(size) for size in index.shape)], axis


def _leaves_units_out(call: Call, axis: UnitAxis) -> bool:
    """Whether an index is shorter than what it writes to, so that the last units get nothing."""
    index = call.argument(2, "index")
    return bool(index.numel()) and index.shape[axis.dim] != call.out.shape[axis.dim]


# ---------------------------------------------------------------------- constants that are written


def puts_alike(call: Call, axis: UnitAxis) -> bool:
    """Whether index_put writes the same constants to the same places of all units."""
    index, values = tuple(call.argument(1, "indices")), call.argument(2, "values")
    accumulate = bool(call.argument(3, "accumulate", default=False))
    return _is_same_written(call.args[0], axis, call.units, values, lambda to, of: to.index_put_(index, of, accumulate))


def writes_alike(target: Tensor, index: Any, value: Any, axis: UnitAxis, units: int) -> bool:
    """Whether target[index] = value writes the same to the same places of all units, which are at `axis` of the target."""
    if units < 2:
        return True
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(is_advanced, items)):
        part = target.detach()[index]
        inside = AXIS_RULES["getitem"](Call("getitem", (target, index), {}, part, units), target, axis)
        if not part.numel():
            return True
        if not isinstance(inside, UnitAxis) or part.shape[inside.dim] != target.shape[axis.dim]:
            return False  # a part of the units
        if not isinstance(value, Tensor):
            return True
        faced = inside.shifted(value.ndim - part.ndim)
        return faced.dim < 0 or is_same(value, faced, units)
    return _is_same_written(target, axis, units, value, lambda to, of: to.__setitem__(index, of))


def _is_same_written(
    target: Tensor, axis: UnitAxis, units: int, value: Any, write: Callable[[Tensor, Tensor], Any]
) -> bool:
    """Whether writing into zeros gives all units the same: ones, to see where, and the value."""
    is_tensor = isinstance(value, Tensor)
    dtype = value.dtype if is_tensor else torch.float32
    written = [torch.ones((), dtype=dtype, device=target.device), *([value.detach()] if is_tensor else [])]
    for values in written:
        probe = torch.zeros(target.shape, dtype=dtype, device=target.device)
        write(probe, values)
        if not is_same(probe, axis, units):
            return False
    return True


def is_index_alike(target: Tensor, index: Any, value: Any, axis: UnitAxis, units: int, constants: Constants) -> bool:
    """Whether target[index] = value, where units decide the one or the other, writes to the same places of all units."""
    if units < 2:
        return True
    call = Call("getitem", (target, index), {}, target, units)
    faced = _in_index(call, axis, constants)
    is_same_value = not constants.is_constant(value) or value.ndim == 0 or is_repeated(value.detach(), 0)
    return (is_same_value or not any(map(is_advanced, index if isinstance(index, tuple) else (index,)))) and all(
        tensor is target or constants.is_alike(tensor, at, units) for tensor, at in faced
    )


_MAX_NUMBERED = 1 << 24  # elements of memory in which what is written to is marked


def is_part_alike(part: Tensor, whole: Tensor, axis: UnitAxis, units: int, values: Sequence[Any]) -> bool:
    """Whether what is written into `part`, which has memory of `whole`, is the same for all units, at `axis` of `whole`.

    Each of the values is written into memory of the same layout, and read as the whole.
    """
    start = min(part.storage_offset(), whole.storage_offset())
    ends = [_end(tensor) - start for tensor in (part, whole)]
    if max(ends) > _MAX_NUMBERED or part.dtype != whole.dtype:
        return False
    for value in values:
        memory = torch.zeros(max(ends), dtype=torch.float64)
        memory.as_strided(part.shape, part.stride(), part.storage_offset() - start).copy_(value)
        if not is_same(memory.as_strided(whole.shape, whole.stride(), whole.storage_offset() - start), axis, units):
            return False
    return True


def without_part(whole: Tensor, part: Tensor) -> Tensor | None:
    """A copy of `whole` with zeros where it has memory of `part`; None if that cannot be told."""
    start = min(part.storage_offset(), whole.storage_offset())
    size = max(_end(tensor) - start for tensor in (part, whole))
    if size > _MAX_NUMBERED or part.dtype != whole.dtype:
        return None
    memory = torch.zeros(size, dtype=whole.dtype)
    copy = memory.as_strided(whole.shape, whole.stride(), whole.storage_offset() - start)
    copy.copy_(whole.detach())
    memory.as_strided(part.shape, part.stride(), part.storage_offset() - start).zero_()
    return copy


def written_values(name: str, args: tuple, part: Tensor, constants: list[Tensor]) -> list[Tensor] | None:
    """What an operation that changes `part` in place writes there, or where: each of its shape. None if that cannot be told."""
    one = torch.ones((), dtype=torch.float64)
    if name == "setitem":
        values = []
        for value in (one, *constants):
            values.append(torch.zeros(part.shape, dtype=torch.float64))
            values[-1][args[1]] = value.double()
        return values
    is_pointwise = plain_name(name) in POINTWISE
    return [one, *(constant.double() for constant in constants)] if is_pointwise or not constants else None


def _end(tensor: Tensor) -> int:
    """Behind its last element in memory."""
    return (
        int(tensor.storage_offset())
        + 1
        + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    )


# ---------------------------------------------------------------------- one unit after the other


def recipe_of_part(part: Tensor, whole: Tensor) -> int:
    """Tells parts of single units, such as x[2], apart by which elements of which tensor they have."""
    within = (int(part.storage_offset()) - int(whole.storage_offset())) % max(whole.stride(0), 1)
    return hash((whole.data_ptr(), within, tuple(part.shape), part.stride()))


def recipe_of(name: str, args: tuple, kwargs: dict, of_tensor: Callable[[Tensor], int | None]) -> int | None:
    """Tells operations on one unit apart by what they do: name, numbers, constants. None where its own data decide the shape."""
    if name in _OF_OWN_SHAPE or (name == "getitem" and only_mask(args[1]) is not None):
        return None
    parts: list[Any] = []
    for value in (args, tuple(sorted(kwargs.items()))):
        if not _add_parts(value, of_tensor, parts):
            return None
    return hash((name, *parts))


_OF_OWN_SHAPE = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}


def _add_parts(value: Any, of_tensor: Callable[[Tensor], int | None], parts: list[Any]) -> bool:
    if isinstance(value, Tensor):
        recipe = of_tensor(value)
        parts.append(recipe)
        return recipe is not None
    if isinstance(value, (tuple, list)):
        parts.append(len(value))
        return all(_add_parts(item, of_tensor, parts) for item in value)
    if isinstance(value, slice):
        return _add_parts((value.start, value.stop, value.step), of_tensor, parts)
    parts.append(repr(value))
    return True


def values_of(tensor: Tensor) -> int:
    """A number that tells constants apart by shape, type and values."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hash(
        (tuple(tensor.shape), str(tensor.dtype), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    )


def are_joined_by_place(recipes: list[Any], units: int) -> bool:
    """Of pieces in the order of the batch, for each segment of all units: whether some were made otherwise than others."""
    if None in recipes:
        return False
    return any(len(set(recipes[start : start + units])) > 1 for start in range(0, len(recipes), max(units, 1)))
