"""grouped_mm: the rows of a matrix in groups, each multiplied by a matrix of its own, as tokens by the weights of experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed, linear_is_cheap, place_linear
from sparsedp.capture.ops.helpers import bind, require_small
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import use_rule
from sparsedp.capture.units import Rows
from sparsedp.capture.uses import of_owners

GROUPED = ("grouped_mm", "_grouped_mm")


@use_rule(*GROUPED)
def _grouped(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Rows (n, I) by matrices (groups, I, O): those before offs[0] by the first, those before offs[1] by the second, ..."""
    bound = bind(("input", "mat2"), args, kwargs)
    x, matrices, ends = bound["input"], bound["mat2"], bound.get("offs")
    weight = capture.expression(matrices)
    names = "" if weight is None else weight.names
    rows = capture.rows(x)
    form = "give it rows (n, in) of the batch that are sorted by group, a parameter (groups, in, out), and offs"
    if weight is None or x.ndim != 2 or matrices.ndim != 3 or ends is None or bound.get("bias") is not None:
        raise capture.refuse(name, names, "this form of it is not followed", form)
    numbers = torch.searchsorted(
        ends.contiguous(), torch.arange(len(x), device=ends.device, dtype=ends.dtype), right=True
    )
    keys = None if rows is None or rows.dim != 0 else rows.owners.keys
    if rows is None or keys is None or not torch.equal(numbers.cpu(), keys.to(numbers.dtype).cpu()):
        raise capture.refuse(name, names, "it is not known that each row's own unit decides its group", form)
    edges = [0, *ends.tolist()]
    groups = [(number, slice(*edge)) for number, edge in enumerate(pairwise(edges)) if edge[0] < edge[1]]
    parts = {number: Expression(matrices[number].mT, weight.parameters) for number, _ in groups}  # (O, I)
    for part in parts.values():
        if not linear_is_cheap(part):
            require_small(capture, name, part)
    pieces = [x[group] @ parts[number].tensor.detach().mT for number, group in groups]
    out = torch.cat(pieces) if pieces else x.new_zeros(len(x), matrices.shape[2])
    inputs, owners, units = capture.keep(x, name, names), rows.owners, capture.units

    def finish(grad: Tensor) -> Placed:
        values = inputs.get()
        return [
            (parameter, of_owners(use, owners.units[group], units))
            for number, group in groups
            for parameter, use in place_linear(parts[number], values[group, None], grad[group, None])
        ]

    return capture.place_rows(capture.record(out, finish, None), Rows(0, owners))
