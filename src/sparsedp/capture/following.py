"""Follows the unit axis of every tensor that is computed from a batch, from operation to operation.

How it goes through one operation is said in `ops/`. Here it is decided what comes of the operands together: units that lie
in different places, that were reduced to one value, or whose place is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp.capture.combining import combination_advice
from sparsedp.capture.inputs import advice
from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.lookups import is_bag_of_each
from sparsedp.capture.ops.losses import LOSSES, place_in_loss
from sparsedp.capture.ops.ragged import follow_nested, follow_one_unit, unit_of_part
from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, Call, plain_name
from sparsedp.capture.owned_rows import follow_rows
from sparsedp.capture.units import Info, Mixed, OneUnit, UnitAxis, UnitData, WholeBatch
from sparsedp.errors import UnitsMixedError

# Words of errors for operations that may mix units, or may not: it is not known.
UNCERTAIN = ("joins several activations in a way that is not followed", "a tensor in which their position is not known")


def follow(
    name: str,
    args: tuple,
    kwargs: dict,
    operands: list[tuple[Tensor, Info]],
    out: Tensor,
    units: int,
    where: Callable[[], str],
) -> Info:
    """What is known of `out`, the result of an operation on `operands`; raises if it mixes units for certain."""
    info = _follow(name, args, kwargs, operands, out, units, where)
    is_sum = isinstance(info, Mixed) and _is_linear(info)  # which a term of the loss may be added to
    if units != 1 or is_sum or not out.ndim or plain_name(name) not in AXIS_RULES:
        return info
    first = args[0] if args else None  # numbers of rows that pick some of it are the unit's own, too
    others = [each for tensor, each in operands if tensor is first or not _are_numbers(each)]
    if not _is_placed(info, out) and all(map(_is_plain, others)):
        return UnitData(UnitAxis(0, max(out.shape[0], 1)))  # all of it is of the only unit
    return info


def _is_placed(info: Info, out: Tensor) -> bool:
    if not isinstance(info, UnitData):
        return False
    without_axis = (
        info.rows is not None or info.numbers is not None or info.chosen is not None or isinstance(info, OneUnit)
    )
    return without_axis or (info.axis is not None and info.axis.fits(out.shape, 1))


def _are_numbers(info: Info) -> bool:
    return isinstance(info, UnitData) and info.numbers is not None


def _is_plain(info: Info) -> bool:
    """Whether it is of the units of this batch, each row in a place that does not count."""
    return isinstance(info, UnitData) and info.numbers is None and info.chosen is None


def _follow(
    name: str,
    args: tuple,
    kwargs: dict,
    operands: list[tuple[Tensor, Info]],
    out: Tensor,
    units: int,
    where: Callable[[], str],
) -> Info:
    call = Call(plain_name(name), args, kwargs, out, units, len(operands))
    if any(tensor.is_nested for tensor, _ in operands):
        return follow_nested(call, operands)
    if len(operands) == 1 and (simple := _follow_alone(call, *operands[0])) is not None:
        return simple
    if isinstance(operands[0][1], OneUnit):
        return follow_one_unit(call, operands) or UnitData(None)
    of_rows = follow_rows(call, operands, where)
    if of_rows is not None:
        return of_rows
    mixes = [info for _, info in operands if isinstance(info, Mixed)]
    if mixes:
        of_whole_batch = [info for info in mixes if isinstance(info, WholeBatch)]
        return _follow_mixed(call, operands, (of_whole_batch or mixes)[0], where)
    placed = [
        (tensor, info.axis)
        for tensor, info in operands
        if isinstance(info, UnitData) and info.axis is not None and info.axis.fits(tensor.shape, units)
    ]
    rule = AXIS_RULES.get(call.name)
    if rule is None and len(operands) > 1 and out.requires_grad and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} joins several activations in a way that is not followed, so it may mix units. "
            "Write it with matmul, einsum or elementwise operations."
        )
    if not placed or rule is None:
        return UnitData(None)
    joint = call.name in JOINT
    if len(placed) < len(operands) and joint and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} combines units with a tensor in which their position is not known, so it may give "
            "one unit a part of another. Keep the batch on an axis of its own, and do not permute or select along it."
        )
    if not joint and (len(operands) > 1 or operands[0][0] is not _first(args, kwargs)):
        return UnitData(None)
    if call.name in LOSSES and units > 1 and len({place_in_loss(call, *pair) for pair in placed}) > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} compares predictions and targets whose units are in different places. Give both the "
            "same order."
        )
    outcomes = {rule(call, tensor, axis) for tensor, axis in placed}
    lost = None in outcomes
    combinations = sorted((axis for axis in outcomes if isinstance(axis, Mixed)), key=_is_linear)
    combined = combinations[0] if combinations else None  # one that is not linear, if there is any
    axes = {axis for axis in outcomes if isinstance(axis, UnitAxis) and axis.fits(out.shape, units)}
    if combined is not None:
        if out.requires_grad and combined.operation not in _LINEAR_REDUCTIONS and units > 1:
            raise UnitsMixedError(
                f"Operation '{name}'{where()} combines the units of the batch, so one unit's loss depends on the others and "
                f"clipping bounds nothing. {combination_advice(combined.operation)}"
            )
        return combined
    if len(axes) > 1 and units > 1:
        raise UnitsMixedError(
            f"Operation '{name}'{where()} compares every unit of the batch with every other one (in-batch negatives? attention "
            "across the batch?), so one unit's loss depends on the others and clipping bounds nothing. Draw negatives from a "
            "public distribution instead, and let each unit attend to itself alone."
        )
    if axes and not lost:
        return UnitData(axes.pop())
    return _of_one_unit(call, operands)


def _of_one_unit(call: Call, operands: list[tuple[Tensor, Info]]) -> UnitData:
    """x[2], and what a loop over the units of x gives."""
    tensor, info = operands[0]
    is_taken = call.name in ("getitem", "select", "unbind", "iter") and len(operands) == 1
    unit = unit_of_part(call.out, tensor, call.units) if is_taken and info == UnitData(UnitAxis(0)) else None
    return UnitData(None) if unit is None else OneUnit(None, unit=unit)


def _follow_alone(call: Call, tensor: Tensor, info: Info) -> UnitData | None:
    """The common case of `follow`: one operand, whose units are in a known place and do not mix. None in any other case."""
    rule = AXIS_RULES.get(call.name)
    if rule is None or not isinstance(info, UnitData) or info.axis is None:
        return None
    if call.name not in JOINT and tensor is not _first(call.args, call.kwargs):
        return None
    axis = rule(call, tensor, info.axis)
    if not isinstance(axis, UnitAxis):
        return None
    return UnitData(axis if axis.fits(call.out.shape, call.units) else None)


# What may be done with a value that was summed over the batch: it must stay linear in the units' parts.
_LINEAR_REDUCTIONS = {"sum", "mean"}

_LINEAR_ON_MIXED = {"add", "radd", "sub", "rsub", "neg", "sum", "mean", "stack", "cat", "clone", "detach", "to", "float",
                    "double", "squeeze", "unsqueeze", "reshape", "view", "flatten", "getitem", "expand"}  # fmt: skip


def _is_linear(mixed: Mixed) -> bool:
    return mixed.operation in _LINEAR_REDUCTIONS


_DIVISION = {"div", "truediv", "divide", "true_divide"}


def _follow_mixed(call: Call, operands: list[tuple[Tensor, Info]], mixed: Mixed, where: Callable[[], str]) -> Info:
    if isinstance(mixed, WholeBatch):
        if is_bag_of_each(call, operands):
            return UnitData(UnitAxis(0))
        meets = any(isinstance(info, UnitData) for _, info in operands) or call.out.requires_grad
        if call.units > 1 and meets:
            raise UnitsMixedError(
                f"Operation '{call.name}'{where()} lets the units of the batch meet the input '{mixed.operation}', which has no "
                f"axis of units, so that all of them may decide it. {advice(mixed.operation)}"
            )
        return WholeBatch(mixed.operation, _keeps_order(call, operands))
    if call.units > 1 and any(isinstance(info, UnitData) for _, info in operands):
        raise UnitsMixedError(
            f"Operation '{call.name}'{where()} combines each unit with '{mixed.operation}' over the whole batch, so one unit's "
            f"loss depends on the others and clipping bounds nothing. {combination_advice(mixed.operation)}"
        )
    alone = len(operands) == 1
    scaled = alone and (
        call.name in ("mul", "rmul", "multiply") or (call.name in _DIVISION and operands[0][0] is call.args[0])
    )
    linear = call.name in _LINEAR_ON_MIXED or scaled
    if call.out.requires_grad and not linear and call.units > 1:
        raise UnitsMixedError(
            f"Operation '{call.name}'{where()} acts on a sum or mean over the whole batch. The loss must be a mean or sum over "
            "units of something that each unit decides alone, divided by constants only."
        )
    return mixed


# What leaves the values of bags, which lie end to end, in their order.
_IN_ORDER = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "narrow", "split", "chunk", "tensor_split",
             "split_with_sizes"}  # fmt: skip


def _keeps_order(call: Call, operands: list[tuple[Tensor, Info]]) -> bool:
    """Whether each value of the result is made of the values in the same place of flat inputs, and of constants."""
    if not all(isinstance(info, WholeBatch) and info.in_order for _, info in operands):
        return False
    if call.name in POINTWISE:
        return all(tensor.shape == call.out.shape for tensor, _ in operands)
    # A part of them would begin elsewhere than the bags do that offsets tell.
    return call.name in _IN_ORDER and all(tensor.numel() == call.out.numel() for tensor, _ in operands)


def _first(args: tuple, kwargs: dict) -> Any:
    if args:
        return args[0][0] if isinstance(args[0], (tuple, list)) and args[0] else args[0]
    return kwargs.get("input")
