"""`sparsedp.nn.table_softmax_loss`: cross-entropy of a softmax over all rows of a table, whose logits are never kept.

The loss of a unit has one gradient only, so what the forward pass computes of the logits' gradient G, see
`logit_gradients.py`, is right up to that factor: the gradient of the hidden states and the unit's norm need no second look at
the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.uses import logit_gradients
from sparsedp.capture.uses.logit_gradients import (
    Measure,
    Scratch,
    column_chunks,
    gradients,
    less_targets,
    logits,
    parts,
)
from sparsedp.capture.uses.softmax import Softmax


def checked_targets(target: Tensor, rows: int, ignore: int) -> tuple[Tensor, int | None]:
    """Targets with -1 for `ignore`, and the row that is not in the softmax: `ignore`, if it is one."""
    if not isinstance(ignore, int):
        raise ValueError(f"ignore must be an int, the same for every batch, not {type(ignore).__name__}")
    left_out = ignore if 0 <= ignore < rows else None
    if rows < (1 if left_out is None else 2):
        raise ValueError(f"a softmax over {rows} rows, of which {ignore} is left out, has none")
    wanted = target.detach().long()
    ignored = wanted == ignore
    wanted = wanted.masked_fill(ignored, 0)
    if wanted.numel():
        lowest, highest = (int(value) for value in wanted.aminmax())
        if lowest < 0 or highest >= rows:
            raise ValueError(
                f"targets lie between {lowest} and {highest}; they must be rows of the table, from 0 to {rows - 1}, or "
                f"ignore={ignore}"
            )
    return wanted.masked_fill(ignored, -1), left_out


@dataclass(frozen=True)
class Passed:
    """What a forward pass computes, at a gradient of 1 on each unit's loss."""

    hidden: Tensor  # (B, P, d) its own copy: norms and sums must be of the same numbers. 0 where positions do not count
    log_sum: Tensor  # (B, P); 0 at positions that do not count
    scale: Tensor  # (B, P), 1 / the number of a unit's positions that count
    hidden_grad: Tensor | None  # (B, P, d)
    square: Tensor | None  # (B,) squared norm of each unit's gradient of the table
    sizes: Tensor | None  # (B, P) norms of the rows of G / scale


def softmax_pass(
    hidden: Tensor, table: Tensor, target: Tensor, left_out: int | None, *, gradient: bool, norms: bool
) -> tuple[Tensor, Passed]:
    """hidden (B, P, d), table (V, d), target (B, P) with -1 where a position does not count.

    Returns losses (B,), each unit's mean cross-entropy over the positions that count, 0 without any, and the rest apart:
    whoever keeps it must not hold on to the losses, which are about to be part of the graph.
    """
    hidden = hidden.detach().masked_fill((target < 0)[..., None], 0)
    counts = (target >= 0).sum(1)
    scale = (target >= 0).to(hidden.dtype) / counts.clamp_min(1)[:, None]
    losses, log_sum = hidden.new_zeros(hidden.shape[0]), torch.zeros_like(scale)
    grads = torch.zeros_like(hidden) if gradient else None
    square = torch.zeros(hidden.shape[0], dtype=torch.float64, device=hidden.device) if norms else None
    sizes = torch.zeros_like(scale) if norms else None
    scratch = Scratch()
    for part in parts(hidden, target, scale, table.shape[0]):
        where = (part.units[:, None], part.at)
        wanted, shares = target[where], scale[where]
        columns = column_chunks(table.shape[0], len(part.hidden), logit_gradients.WHOLE)
        if len(columns) == 1:
            softmax = logits(part.hidden, table, left_out, columns[0], scratch)
            highest = softmax.amax(1)
            torch.softmax(softmax, 1, out=softmax)
            sums = highest - softmax.amax(1).log()  # the largest is exp(highest - log_sum)
            pieces: Iterable[tuple[slice, Tensor]] = [(columns[0], less_targets(softmax, wanted.flatten(), columns[0]))]
        else:
            sums = torch.stack(
                [logits(part.hidden, table, left_out, c, scratch).logsumexp(1) for c in columns]
            ).logsumexp(0)
            pieces = gradients(part.hidden, table, sums[:, None], wanted.flatten(), left_out, columns, scratch)
        of_targets = (part.hidden * table[wanted.flatten().clamp_min(0)]).sum(1)
        losses[part.units] = ((sums - of_targets).clamp_min(0).view_as(shares) * shares).sum(1)
        log_sum[where] = sums.view_as(shares).masked_fill(wanted < 0, 0)
        if not (gradient or norms):
            continue
        part_grad = torch.zeros_like(part.hidden)
        measure = Measure(part.inputs)
        for c, grad in pieces:
            if norms:
                measure.add(grad)
            if gradient:
                part_grad.addmm_(grad, table[c])
        if grads is not None:
            grads[where] = part_grad.view_as(part.inputs) * shares[..., None]
        if square is not None and sizes is not None:
            square[part.units], sizes[where] = measure.square(), measure.sizes()
    return losses, Passed(hidden, log_sum, scale, grads, square, sizes)


class SoftmaxLoss(torch.autograd.Function):
    """losses (B,) of hidden (B, P, d), table (V, d) and target (B, P), -1 where a position does not count.

    `passed` receives the forward pass, with the units' norms, for whoever keeps the use of the table. With `losses_only` it is
    known that no backward pass follows: neither norms nor gradients are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, target: Tensor, left_out: int | None, passed: list[Passed] | None,
        losses_only: bool = False,
    ) -> Tensor:  # fmt: skip
        gradient, norms = ctx.needs_input_grad[0] and not losses_only, passed is not None and not losses_only
        losses, result = softmax_pass(hidden, table, target, left_out, gradient=gradient, norms=norms)
        ctx.losses_only = losses_only
        if passed is not None:
            passed.append(result)
        ctx.left_out = left_out
        of_table = (
            (result.hidden, table, target, result.log_sum, result.scale) if ctx.needs_input_grad[1] else [None] * 5
        )
        ctx.save_for_backward(result.hidden_grad, *of_table)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        assert not ctx.losses_only, "a backward pass after a forward pass that was to have none"
        hidden_grad, hidden, table, target, log_sum, scale = ctx.saved_tensors
        of_hidden = None if hidden_grad is None else hidden_grad * grads[0][:, None, None]
        of_table = None
        if table is not None:
            of_table = torch.zeros_like(table, memory_format=torch.contiguous_format)
            use = Softmax(hidden, target, log_sum, scale, lambda: table, 0, ctx.left_out)
            use.add_weighted_sum(of_table.view(-1), grads[0])
        return of_hidden, of_table, None, None, None, None
