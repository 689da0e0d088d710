"""Shape: the same values in other places, and tensors that are joined."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import tap
from sparsedp.capture.ops.helpers import names_of
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import SHAPE_IN_PLACE, Call, axis_rule, use_rule
from sparsedp.capture.units import UnitAxis

# Operations that take from a second operand only its shape, type or device.
SHAPE_ONLY = {"expand_as", "view_as", "reshape_as", "type_as", "to", "is_same_size"}
_MAX_NUMBERED = 1 << 24  # elements of memory whose units are written down to see which of them a layout reads
SHAPE_IN_PLACE.update(("transpose", "swapaxes", "swapdims", "t", "squeeze", "unsqueeze"))


@axis_rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    one = call.argument(1, "dim0", "axis0") % source.ndim
    other = call.argument(2, "dim1", "axis1") % source.ndim
    return UnitAxis({one: other, other: one}.get(axis.dim, axis.dim), axis.inner)


@axis_rule("T", "t", "H")
def _reverse(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return UnitAxis(source.ndim - 1 - axis.dim, axis.inner)


@axis_rule("mT", "mH", "adjoint")
def _last_two(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    n = source.ndim
    return UnitAxis({n - 1: n - 2, n - 2: n - 1}.get(axis.dim, axis.dim), axis.inner)


@axis_rule("permute")
def _permute(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dims = [d % source.ndim for d in call.numbers(1, "dims")]
    return UnitAxis(dims.index(axis.dim), axis.inner)


@axis_rule("movedim", "moveaxis")
def _movedim(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    # Moves a tensor whose strides number its dimensions alongside: they say where each went.
    probe = torch.empty(1).as_strided([1] * source.ndim, list(range(source.ndim)))
    where = [call.argument(1, "source"), call.argument(2, "destination")]
    return UnitAxis(torch.movedim(probe, *where).stride().index(axis.dim), axis.inner)


@axis_rule("unsqueeze")
def _unsqueeze(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dim = call.argument(1, "dim", "axis") % call.out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@axis_rule("atleast_1d", "atleast_2d", "atleast_3d")
def _at_least(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return axis.shifted(1 if source.ndim == 1 and call.out.ndim > 1 else 0)


@axis_rule("diag_embed")
def _diag_embed(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """The last dimension becomes the diagonal of the last two, unless others are named."""
    return axis if len(call.args) + len(call.kwargs) == 1 and axis.dim < source.ndim - 1 else None


@axis_rule("view_as_complex", "view_as_real")
def _complex_parts(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if call.name == "view_as_real" or axis.dim < source.ndim - 1 else None


@axis_rule("squeeze")
def _squeeze(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    named = call.numbers(1, "dim", "axis")
    dims = {d % max(source.ndim, 1) for d in named} if named else set(range(source.ndim))
    gone = {d for d in dims if source.shape[d] == 1}
    if axis.dim in gone:  # a batch of one, whose axis was squeezed away
        return None
    return axis.shifted(-sum(1 for d in gone if d < axis.dim))


@axis_rule("reshape", "view", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "_unsafe_view")
def _reshape(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Row-major order is kept, so the number of elements behind a step of one unit is, too."""
    out = call.out
    if source is not call.argument(0, "input") or out.dtype != source.dtype:
        return None
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


@axis_rule("as_strided")
def _as_strided(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """Any elements of the memory: here each row of the result must be made of elements of one unit.

    The units are written into memory of the same layout, and read in the new one.
    """
    out, start = call.out, call.out.storage_offset() - source.storage_offset()
    repeated = any(size > 1 and stride == 0 for size, stride in zip(source.shape, source.stride()))
    if axis.dim != 0 or not out.ndim or not out.numel() or repeated or start < 0:
        return None
    ends = [
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1 for tensor in (source, out)
    ]
    if max(ends) > _MAX_NUMBERED:
        return None

    def units_of(rows: Tensor) -> Tensor:
        units = torch.arange(rows.shape[0]) // axis.inner % call.units
        return units.view(-1, *[1] * (rows.ndim - 1))

    def read(values: Tensor) -> Tensor:
        memory = torch.full((max(ends[0], start + ends[1]),), -1)
        memory.as_strided(source.shape, source.stride()).copy_(values)
        return memory.as_strided(out.shape, out.stride(), start)

    # Where in its unit an element is, must not depend on which unit that is.
    apart = source.shape[0] // (call.units * axis.inner), call.units, axis.inner, *source.shape[1:]
    within = torch.arange(source.numel() // call.units).view(apart[0], 1, *apart[2:]).expand(apart)
    keeps_units = bool((read(units_of(source)) == units_of(out)).all())
    is_whole = out.shape[0] % (call.units * axis.inner) == 0
    if not keeps_units or not is_whole:
        return None
    picked = read(within.reshape(source.shape)).unflatten(0, (-1, call.units, axis.inner))
    return axis if torch.equal(picked, picked[:, :1].expand_as(picked)) else None


@axis_rule("expand", "broadcast_to", "repeat", "tile", "expand_as")
def _expand(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    return axis.shifted(call.out.ndim - source.ndim)


@axis_rule("repeat_interleave")
def _repeat_interleave(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    return UnitAxis(axis.dim, axis.inner * repeats) if dim % source.ndim == axis.dim else axis


@axis_rule("pad", "constant_pad_nd")
def _pad(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    pad = list(call.argument(1, "pad"))
    place = 2 * (source.ndim - 1 - axis.dim)  # the last dimension's two sizes come first
    return axis if not any(pad[place : place + 2]) else None


@axis_rule("stack", joint=True)
def _stack_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    dim = call.argument(1, "dim", "axis", default=0) % call.out.ndim
    return axis.shifted(1 if dim <= axis.dim else 0)


@axis_rule("cat", "concat", "concatenate", joint=True)
def _cat_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    pieces = call.argument(0, "tensors")
    dim = call.argument(1, "dim", "axis", default=0) % source.ndim
    if dim != axis.dim:
        return axis
    # Along the units: whole batches one after another.
    whole = all(piece.shape[dim] % max(call.units * axis.inner, 1) == 0 for piece in pieces)
    return axis if whole and call.data == len(pieces) else None


@use_rule("cat", "concat", "concatenate", "stack")
def _join(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Parameters beside activations, such as a class token: each facing the units on the same axis."""
    tensors = list(kwargs.get("tensors", args[0] if args else ()))
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    data = next(tensor for tensor in tensors if capture.is_data(tensor))
    names = names_of(capture, tensors)
    axis = capture.axis(data, name, names)
    if data.shape[axis.dim] != capture.units or (name != "stack" and dim % data.ndim == axis.dim):
        raise capture.refuse(name, names, "it joins along the units' axis", "expand the parameter over the batch first")
    pieces = []
    for tensor in tensors:
        expression = capture.expression(tensor)
        pieces.append(
            tensor if expression is None else tap(capture, name, expression, axis, tensor.ndim, capture.units)
        )
    out = func(pieces, dim)
    before = name == "stack" and dim % out.ndim <= axis.dim
    return capture.place(out, axis.shifted(1 if before else 0))
