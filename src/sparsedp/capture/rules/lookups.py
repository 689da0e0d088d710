"""Rows of a table: nn.Embedding, nn.EmbeddingBag, weight[ids]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.capture import Capture
from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.rules.registry import NotThisForm, bind, require_functional, rule
from sparsedp.capture.tracking import UnitAxis, unit_first
from sparsedp.capture.uses import Lookup


def public_ids(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """The ids of a lookup that does not depend on the batch, such as position(torch.arange(L))."""
    ids: Any = None
    skip = None
    if name == "embedding":
        bound = bind(("input", "weight", "padding_idx"), args, kwargs)
        ids, table, skip = bound["input"], bound["weight"], bound.get("padding_idx")
    elif name == "getitem":
        table, ids = args
    elif name == "index_select":
        bound = bind(("input", "dim", "index"), args, kwargs)
        table, ids = bound["input"], bound["index"] if bound["dim"] == 0 else None
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or table.ndim != 2:
        return None
    return _without_padding(_wrapped(ids, table.shape[0]), table.shape[0], skip)


def _wrapped(ids: Tensor, rows: int) -> Tensor:
    """Negative ids count from the end."""
    return torch.where(ids < 0, ids + rows, ids).long()


def _without_padding(ids: Tensor, rows: int, skip: int | None) -> Tensor:
    """-1 for the ids that stand for padding, which have no gradient."""
    return ids if skip is None else ids.masked_fill(ids == skip % rows, -1)


def _refuse_lookup_options(capture: Capture, name: str, table: Expression, bound: dict[str, Any]) -> None:
    for option, instead in (
        ("max_norm", "constrain the rows after the step, or normalise the looked-up vectors"),
        ("scale_grad_by_freq", "leave it off"),
    ):
        if bound.get(option):
            why = "rewrites rows of the table" if option == "max_norm" else "divides by how often others use a row"
            raise capture.refuse(name, table.names, f"{option} {why} depending on the whole batch", instead)


def _table(capture: Capture, name: str, weight: Any) -> tuple[Expression, int]:
    """The table of a lookup and the row at which the looked-up block starts."""
    table = capture.expression(weight)
    if table is None:
        raise NotThisForm
    own = table.parameters[0][1]
    if table.tensor is own and own.ndim == 2 and own.is_contiguous():
        return table, 0
    width = table.tensor.shape[-1] if table.tensor.ndim == 2 else 0
    if not table.is_view or not table.tensor.is_contiguous() or own.ndim != 2 or own.shape[1] != width:
        raise NotThisForm
    return table, table.offset // width if width else 0


def _record_lookup(
    capture: Capture, name: str, table: Expression, first: int, ids: Tensor, out: Tensor, skip: int | None
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


@rule("embedding")
def _embedding(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    bound = bind(order, args, kwargs)
    require_functional(capture, name, func, F.embedding, args)
    table, first = _table(capture, name, bound["weight"])
    _refuse_lookup_options(capture, name, table, bound)
    ids = bound["input"]
    out = torch.embedding(table.tensor.detach(), ids)
    skip = bound.get("padding_idx")
    skip = None if skip is None else skip % table.tensor.shape[0]
    return _record_lookup(capture, name, table, first, ids, out, skip)


@rule("getitem", "index_select")
def _getitem(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "dim", "index"), args, kwargs)
    table, first = _table(capture, name, bound["input"])
    if name == "index_select":
        if bound["dim"] != 0:
            raise NotThisForm
        ids = bound["index"]
    else:
        ids = args[1]
        if isinstance(ids, tuple) and len(ids) == 1:
            ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise NotThisForm
    wrapped = _wrapped(ids, table.tensor.shape[0])
    capture.place(wrapped, capture.axis(ids, name, table.names))
    out = torch.embedding(table.tensor.detach(), wrapped)
    return _record_lookup(capture, name, table, first, wrapped, out, None)


@rule("embedding_bag")
def _embedding_bag(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    order = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
             "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
    bound = bind(order, args, kwargs)
    require_functional(capture, name, func, F.embedding_bag, args)
    # F.embedding_bag accepts (weight, input) in the wrong order for historical reasons; so does capture.
    if not bound["input"].is_floating_point():
        pass
    elif not bound["weight"].is_floating_point():
        bound["input"], bound["weight"] = bound["weight"], bound["input"]
    table, first = _table(capture, name, bound["weight"])
    _refuse_lookup_options(capture, name, table, bound)
    mode = bound.get("mode", "mean")
    if mode not in ("sum", "mean"):
        raise capture.refuse(name, table.names, f"mode '{mode}' is not supported", "use mode 'sum' or 'mean'")
    ids, offsets, weights = bound["input"], bound.get("offsets"), bound.get("per_sample_weights")
    if capture.expression(weights) is not None:
        raise capture.refuse(name, table.names, "per_sample_weights is a parameter", "look rows up with nn.Embedding")
    for given in (ids, weights):
        # With offsets, values lie end to end, as the batch has them. Other values are checked against the bags below.
        if given is None or not capture.is_data(given) or (offsets is not None and capture.is_end_to_end(given)):
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
    out = F.embedding_bag(**bound)
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
        if given is None or offsets is None or capture.known_axis(given) is None:
            continue
        per_unit = given.numel() // units if units else 1
        if not torch.equal(bag_of, torch.arange(given.numel(), device=ids.device) // per_unit):
            raise capture.refuse(
                name, table.names, "its offsets put ids or weights of one unit into the bag of another",
                "let the bag of each unit hold what is its own",
            )  # fmt: skip
    kept_ids = capture.keep(ids, name, table.names)
    kept_weights = None if weights is None else capture.keep(weights, name, table.names)

    def finish(grad: Tensor) -> Placed:
        rows = kept_ids.get().reshape(-1).long()
        kept = rows + first
        if skip is not None:
            kept = kept.masked_fill(rows == skip, -1)
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
