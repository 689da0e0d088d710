"""Rows of a table: nn.Embedding, nn.EmbeddingBag. `ops/indexing.py` has weight[ids]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed, place_looked_up
from sparsedp.capture.ids import explained_ids
from sparsedp.capture.ops import absent
from sparsedp.capture.ops.helpers import bind, require_affordable, require_functional
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.ragged import owners_of_nested
from sparsedp.capture.ops.registry import Call, NotThisForm, RowsRead, axis_rule, reads_rows, rows_read, use_rule
from sparsedp.capture.units import Info, Mixed, UnitAxis, unit_first
from sparsedp.capture.uses import Lookup

# Functions that have the name of one in torch.nn.functional, and their arguments in another order.
OTHER_ORDER: set[Callable] = {torch.embedding, torch.embedding_bag}


@reads_rows(F.embedding)
def _embedding_rows(args: tuple, kwargs: dict) -> RowsRead:
    bound = bind(("input", "weight", "padding_idx"), args, kwargs)
    return RowsRead(bound.get("weight"), bound.get("input"), bound.get("padding_idx"))


@reads_rows(F.embedding_bag)
def _embedding_bag_rows(args: tuple, kwargs: dict) -> RowsRead:
    bound = bind(("input", "weight"), args, kwargs)
    return RowsRead(bound.get("weight"), bound.get("input"), result_is_rows=False)


@reads_rows(*OTHER_ORDER)
def _other_order_rows(args: tuple, kwargs: dict) -> RowsRead | None:
    return RowsRead(args[0], args[1], result_is_rows=False) if len(args) > 1 else None


def public_ids(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """The ids of a lookup that does not depend on the batch, such as position(torch.arange(L)); -1 for padding."""
    rows = rows_read(func, args, kwargs)
    if rows is None or not rows.result_is_rows or rows.table.ndim != 2:
        return None
    count = rows.table.shape[0]
    ids = wrapped(rows.ids, count)
    return ids if rows.padding is None else ids.masked_fill(ids == rows.padding % count, -1)


# What leaves rows whole: on some of them, in other places.
_MOVING_ROWS = {"to", "unsqueeze", "expand", "expand_as", "view", "reshape", "getitem", "contiguous", "clone", "transpose",
                "permute", "repeat", "squeeze", "narrow", "flatten", "unflatten", "index_select", "select", "float", "cpu",
                "type_as", "movedim"}  # fmt: skip


# Elements of rows that are numbered to see where an operation moves them: more would take as much memory as a table.
_MAX_NUMBERED = 1 << 22


def moved_ids(name: str, func: Callable, args: tuple, kwargs: dict, rows: Tensor, ids: Tensor) -> Tensor | None:
    """The ids of the result of an operation on `rows`, those of a table by `ids`, if that has whole rows last."""
    if name not in _MOVING_ROWS or not 0 < rows.numel() <= _MAX_NUMBERED:
        return None
    width = rows.shape[-1]
    numbers = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
    given = [numbers if value is rows else value for value in args]
    if name in ("to", "float", "type_as"):
        moved: Any = numbers if func(*args, **kwargs).dtype == rows.dtype else None
    else:
        moved = func(*given, **{key: numbers if value is rows else value for key, value in kwargs.items()})
    if not isinstance(moved, Tensor) or moved.ndim == 0 or moved.shape[-1] != width or not moved.numel():
        return None
    first = moved[..., :1]
    whole = bool((first % width == 0).all()) and torch.equal(moved, first + torch.arange(width, device=rows.device))
    return ids.reshape(-1)[first.squeeze(-1) // width] if whole else None


def wrapped(ids: Tensor, rows: int) -> Tensor:
    """Negative ids count from the end."""
    return torch.where(ids < 0, ids + rows, ids).long()


def _refuse_lookup_options(capture: CaptureForRules, name: str, table: Expression, bound: dict[str, Any]) -> None:
    for option, instead in (
        ("max_norm", "constrain the rows after the step, or normalise the looked-up vectors"),
        ("scale_grad_by_freq", "leave it off"),
    ):
        if bound.get(option):
            why = "rewrites rows of the table" if option == "max_norm" else "divides by how often others use a row"
            raise capture.refuse(name, table.names, f"{option} {why} depending on the whole batch", instead)


def table_of(capture: CaptureForRules, name: str, weight: Any) -> tuple[Expression, int]:
    """The table of a lookup and the row at which the looked-up block starts."""
    table = capture.expression(weight)
    if table is None:
        raise NotThisForm
    parameter = table.parameters[0][1]
    if table.tensor is parameter and parameter.ndim == 2 and parameter.is_contiguous():
        return table, 0
    width = table.tensor.shape[-1] if table.tensor.ndim == 2 else 0
    if not table.is_view or not table.tensor.is_contiguous() or parameter.ndim != 2 or parameter.shape[1] != width:
        raise NotThisForm
    return table, table.offset // width if width else 0


def record_lookup(
    capture: CaptureForRules, name: str, table: Expression, first: int, ids: Tensor, out: Tensor, skip: int | None
) -> Tensor:
    units = capture.units
    axis = capture.axis(ids, name, table.names)
    kept_ids = capture.keep(ids, name, table.names)

    def finish(grad: Tensor) -> Placed:
        rows = unit_first(kept_ids.get(), axis, units).reshape(-1).long()
        values = unit_first(grad, axis, units).reshape(rows.numel(), grad.shape[-1])
        per_unit = rows.numel() // units if units else 0
        whose = torch.arange(units, device=rows.device)
        if per_unit != 1:
            whose = whose.repeat_interleave(per_unit)
        kept = rows if first == 0 else rows + first
        if skip is not None:
            kept = kept.masked_fill(rows == skip, -1)
        return [(table.parameters[0][0], Lookup(kept, whose, values, one_each=per_unit == 1))]

    return capture.record(out, finish, axis)


def is_plain_table(capture: CaptureForRules, weight: Any) -> bool:
    """Whether rows of it are rows of a parameter: not of a transposed, scaled or otherwise computed one."""
    try:
        table_of(capture, "", weight)
    except NotThisForm:
        return False
    return True


def record_computed_lookup(
    capture: CaptureForRules, name: str, weight: Any, ids: Tensor, out: Tensor, skip: int | None
) -> Tensor:
    """Rows of a tensor (V, ...) that is computed from parameters alone, or is an unusual view of one."""
    table, units = capture.expression(weight), capture.units
    if table is None:
        raise NotThisForm
    require_affordable(capture, name, table)
    axis = capture.axis(ids, name, table.names)
    kept_ids = capture.keep(ids, name, table.names)

    def finish(grad: Tensor) -> Placed:
        rows = unit_first(kept_ids.get(), axis, units).reshape(units, ids.numel() // units if units else 0).long()
        values = unit_first(grad, axis, units).reshape(*rows.shape, *table.tensor.shape[1:])
        return place_looked_up(table, rows if skip is None else rows.masked_fill(rows == skip, -1), values)

    return capture.record(out, finish, axis)


@axis_rule("embedding", "one_hot", joint=True)
def _embedding_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    if call.name == "one_hot" and call.argument(1, "num_classes", default=-1) == -1:
        return Mixed("as many classes as the largest id of the batch needs")
    if call.name == "embedding" and (call.data > 1 or source is call.argument(1, "weight")):
        return Mixed("looking up activations")  # of other units, by their number
    return axis  # one more dimension, at the end


@use_rule("embedding")
def _embedding(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    bound = bind(order, args, kwargs)
    if func is not absent.embedding:
        require_functional(capture, name, func, F.embedding, args)
    weight, ids = bound["weight"], bound["input"]
    expression = capture.expression(weight)
    if expression is None or capture.is_data(weight):
        raise NotThisForm
    _refuse_lookup_options(capture, name, expression, bound)
    skip = bound.get("padding_idx")
    skip = None if skip is None else skip % expression.tensor.shape[0]
    if ids.is_nested:
        return _nested_rows(capture, name, weight, ids, skip)
    with explained_ids(expression.names, expression.tensor.shape[0], ids):
        out = bound["found"]() if "found" in bound else torch.embedding(expression.tensor.detach(), ids)
    if not is_plain_table(capture, weight):
        return record_computed_lookup(capture, name, weight, ids, out, skip)
    table, first = table_of(capture, name, weight)
    return record_lookup(capture, name, table, first, ids, out, skip)


def _nested_rows(capture: CaptureForRules, name: str, weight: Tensor, ids: Tensor, skip: int | None) -> Tensor:
    """Rows by the ids of a nested tensor, as one: each unit's by its own."""
    table, first = table_of(capture, name, weight)
    axis, owners = capture.axis(ids, name, table.names), owners_of_nested(ids)
    if owners is None or axis != UnitAxis(0):
        instead = "look up ids.to_padded_tensor(0), and mask what is padded"
        raise capture.refuse(name, table.names, "whose the ids of a nested tensor are is not known", instead)
    rows = ids.values()
    kept_ids = capture.keep(rows, name, table.names)

    def finish(grad: Tensor) -> Placed:
        looked_up = kept_ids.get().long()
        kept = looked_up + first
        if skip is not None:
            kept = kept.masked_fill(looked_up == skip, -1)
        return [(table.parameters[0][0], Lookup(kept, owners, grad))]

    values = capture.record(torch.embedding(table.tensor.detach(), rows), finish, None)
    out: Tensor = torch.nested.nested_tensor_from_jagged(values, ids.offsets())  # type: ignore[attr-defined]
    capture.place(out, axis)
    capture.place_parts(out)
    return out


@axis_rule("embedding_bag")
def _embedding_bag_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis == UnitAxis(0) and source.ndim == 2 else None


@use_rule("embedding_bag")
def _embedding_bag(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
             "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
    bound = bind(order, args, kwargs)
    if func is not absent.embedding_bag:
        require_functional(capture, name, func, F.embedding_bag, args)
    # F.embedding_bag accepts (weight, input) in the wrong order for historical reasons; so does capture.
    if not bound["input"].is_floating_point():
        pass
    elif not bound["weight"].is_floating_point():
        bound["input"], bound["weight"] = bound["weight"], bound["input"]
    table, first = table_of(capture, name, bound["weight"])
    _refuse_lookup_options(capture, name, table, bound)
    mode = bound.get("mode", "mean")
    if mode not in ("sum", "mean"):
        raise capture.refuse(name, table.names, f"mode '{mode}' is not supported", "use mode 'sum' or 'mean'")
    ids, offsets, weights = bound["input"], bound.get("offsets"), bound.get("per_sample_weights")
    if capture.expression(weights) is not None:
        raise capture.refuse(name, table.names, "per_sample_weights is a parameter", "look rows up with nn.Embedding")
    for given in (ids, weights):
        # With offsets, values lie end to end, as the batch has them. Other values are checked against the bags below.
        if given is None or not capture.is_data(given):
            continue
        if offsets is not None and (capture.is_end_to_end(given) or capture.rows(given) is not None):
            continue
        place = capture.axis(given, name, table.names)
        if place.dim != 0 or given.shape[0] != capture.units * place.inner or (offsets is None and place.inner > 1):
            instead = "give each unit's ids and weights in a row of its own, in the order of the batch"
            raise capture.refuse(name, table.names, "its ids do not have the units on axis 0", instead)
    skip = bound.get("padding_idx")
    if skip is not None and skip < 0:
        skip += table.tensor.shape[0]
    bound["weight"] = table.tensor.detach()
    bound["sparse"] = False
    with explained_ids(table.names, table.tensor.shape[0], ids):
        out = bound["found"]() if "found" in bound else F.embedding_bag(**bound)
    if out.shape[0] != capture.units:
        raise capture.refuse(
            name,
            table.names,
            f"it forms {out.shape[0]} bags for {capture.units} units",
            "give every unit exactly one bag",
        )
    units = capture.units
    bag_of = _bags(ids, offsets, bool(bound.get("include_last_offset")), units)
    if bag_of.numel() != ids.numel():  # torch's kernels disagree on what that means
        instead = "let the last offset be the number of ids"
        raise capture.refuse(
            name, table.names, f"{ids.numel() - bag_of.numel()} ids lie behind the last offset", instead
        )
    for given in (ids, weights):
        rows = capture.rows(given)
        if given is None or offsets is None or (rows is None and capture.known_axis(given) is None):
            continue
        per_unit = given.numel() // units if units else 1
        whose = torch.arange(given.numel()) // per_unit if rows is None else rows.owners.units
        if not torch.equal(bag_of.cpu(), whose):
            raise capture.refuse(
                name, table.names, "its offsets put ids or weights of one unit into the bag of another",
                "let the bag of each unit hold what is its own",
            )  # fmt: skip
    kept_ids = capture.keep(ids, name, table.names)
    kept_weights = None if weights is None else capture.keep(weights, name, table.names)
    one_each = weights is None and torch.equal(bag_of, torch.arange(units, device=bag_of.device))

    def finish(grad: Tensor) -> Placed:
        rows = kept_ids.get().reshape(-1).long()
        kept = rows + first
        if skip is not None:
            kept = kept.masked_fill(rows == skip, -1)
        if one_each:  # a sum, or a mean, of one row is the row
            return [(table.parameters[0][0], Lookup(kept, bag_of, grad, one_each=True))]
        factor = None if kept_weights is None else kept_weights.get().reshape(-1)
        if mode == "mean":
            sizes = torch.zeros(units, dtype=grad.dtype, device=grad.device)
            sizes.index_add_(0, bag_of, (kept >= 0).to(grad.dtype))
            factor = (1 / sizes.clamp_min(1))[bag_of]
        return [(table.parameters[0][0], Lookup(kept, bag_of, grad, source=bag_of, weight=factor))]

    return capture.record(out, finish, UnitAxis(0))


def _bags(ids: Tensor, offsets: Tensor | None, include_last: bool, units: int) -> Tensor:
    """The bag of each id, (N,)."""
    if offsets is None:
        return torch.arange(units, device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if include_last else offsets
    ends = torch.cat([starts[1:], starts.new_full((1,), ids.numel())]) if starts.numel() else starts
    if include_last and offsets.numel():
        ends = offsets[1:]
    return torch.arange(units, device=ids.device).repeat_interleave(ends - starts)


def is_bag_of_each(call: Call, operands: list[tuple[Tensor, Info]]) -> bool:
    """Whether it is an embedding_bag of a constant table with offsets that give each unit its bag."""
    if call.name != "embedding_bag" or call.argument(2, "offsets") is None or call.out.shape[0] != call.units:
        return False
    return all(tensor is not call.argument(1, "weight") for tensor, _ in operands)
