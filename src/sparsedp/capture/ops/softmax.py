"""`sparsedp.nn.table_softmax_loss`: a softmax over all rows of a table, whose logits are never kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsedp.capture.expressions import Placed
from sparsedp.capture.ops.helpers import bind
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, axis_rule, use_rule
from sparsedp.capture.units import Mixed, UnitAxis
from sparsedp.capture.uses import Passed, Softmax, SoftmaxLoss, checked_targets


@axis_rule("table_softmax_loss", joint=True)
def _table_softmax_loss_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    fits = axis == UnitAxis(0) and source.shape[0] == call.units and source is not call.argument(1, "weight")
    return axis if fits else Mixed(call.name)  # rows of the batch as a table: in-batch negatives


def _mark(weight: Tensor) -> float:
    """Tells a table from a changed one: logits are computed again from it, and must come out the same."""
    rows, columns = (
        torch.arange(1, size + 1, dtype=torch.float64, device=weight.device).sin_() for size in weight.shape
    )
    return float(torch.dot(rows, torch.mv(weight, columns.to(weight.dtype)).double()))


@use_rule("table_softmax_loss")
def _table_softmax_loss(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("hidden", "weight", "target", "ignore"), args, kwargs)
    hidden, target = bound["hidden"], bound["target"]
    table = capture.expression(bound["weight"])
    instead = "pass hidden (batch, length, dim) and target (batch, length), both computed from the batch"
    if table is None or not capture.is_data(hidden) or not capture.is_data(target):
        expression = next(e for e in map(capture.expression, (bound["weight"], hidden)) if e is not None)
        raise capture.refuse(name, expression.names, "its hidden states or targets do not come from the batch", instead)
    for what in (hidden, target):
        if capture.axis(what, name, table.names) != UnitAxis(0) or what.shape[0] != capture.units:
            raise capture.refuse(name, table.names, "units are not on axis 0 of its inputs", instead)
    parameter = table.parameters[0][1]
    weight = table.tensor.detach()
    if (
        not table.is_view or not weight.is_contiguous() or parameter.ndim != 2 or parameter.shape[1] != weight.shape[1]
        or table.offset % weight.shape[1]
    ):  # fmt: skip
        raise capture.refuse(
            name, table.names, "the table is used through a computed copy or an unusual view",
            "pass the parameter itself, or some of its rows, weight[a:b]",
        )  # fmt: skip
    wanted, left_out = checked_targets(target, weight.shape[0], bound.get("ignore", 0))
    passed: list[Passed] = []
    out = SoftmaxLoss.apply(hidden, weight, wanted, left_out, passed, capture.forward_only)  # type: ignore[no-untyped-call]
    kept_weight = capture.keep(weight, name, table.names)
    first, mark = table.offset // weight.shape[1], _mark(weight)
    is_changed = capture.refuse(
        name, table.names, "the table was changed between forward and step()", "change it later"
    )

    def finish(grad: Tensor) -> Placed:
        done = passed[0]
        if _mark(kept_weight.get()) != mark:  # through .data, which its version does not tell of
            raise is_changed
        use = Softmax(
            done.hidden, wanted, done.log_sum, done.scale * grad[:, None], kept_weight.get, first, left_out,
            square=None if done.square is None else done.square * grad.double().square(), sizes=done.sizes,
        )  # fmt: skip
        return [(table.parameters[0][0], use)]

    return capture.record(out, finish, UnitAxis(0))
