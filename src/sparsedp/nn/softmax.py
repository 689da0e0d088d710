"""Softmax losses of sequence models, over a whole table: each unit's own mean over its positions, so that units do not mix.

`target` says which row follows at each position, and `ignore`, by default 0, that none does. The row `ignore` itself, which
stands for padding and never follows anything, is not in the softmax: its logit does not count, and it has no gradient from it.
If `ignore` is not a row, such as -100, all rows are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sparsedp.capture.uses import SoftmaxLoss, checked_targets
from sparsedp.capture.uses.logit_gradients import CHUNK


def table_softmax_loss(hidden: Tensor, weight: Tensor, target: Tensor, ignore: int = 0) -> Tensor:
    """Cross-entropy of the logits hidden @ weight.T, (B, L, rows), which are never kept: each unit's mean, (B,).

    `hidden` is (B, L, dim), `weight` (rows, dim), `target` (B, L). A unit without any target has loss 0. In a private module,
    call it in forward(), on the parameter itself; the table may be tied, that is, be looked up in as well. Memory is that of
    a few positions' logits, and positions without a target cost nothing.
    """
    if has_torch_function((hidden, weight, target)):
        return handle_torch_function(
            table_softmax_loss, (hidden, weight, target), hidden, weight, target, ignore=ignore
        )
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1] or hidden.shape[:2] != target.shape:
        raise ValueError(
            "table_softmax_loss takes hidden (B, L, dim), weight (rows, dim) and target (B, L), not "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    wanted, left_out = checked_targets(target, weight.shape[0], ignore)
    return SoftmaxLoss.apply(hidden, weight, wanted, left_out, None)  # type: ignore[no-untyped-call]


def sequence_loss(logits: Tensor, target: Tensor, ignore: int = 0) -> Tensor:
    """Cross-entropy of logits (B, ..., rows) with target (B, ...): the mean over units of each one's own mean.

    Takes less time and memory than F.cross_entropy: beside the logits, nothing of their size is kept for backward.
    """
    if has_torch_function((logits, target)):
        return handle_torch_function(sequence_loss, (logits, target), logits, target, ignore=ignore)
    if logits.shape[:-1] != target.shape or target.ndim < 1:
        raise ValueError(
            f"sequence_loss takes logits (B, ..., rows) and target (B, ...), not {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    wanted, left_out = checked_targets(target, logits.shape[-1], ignore)
    return _LogitsLoss.apply(logits, wanted[:, None].flatten(1), left_out).mean()  # type: ignore[no-untyped-call]


class _LogitsLoss(torch.autograd.Function):
    """losses (B,) of logits (B, ..., V) and target (B, P), -1 where a position does not count."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, left_out: int | None) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        kept = (target >= 0).flatten().nonzero().squeeze(1)
        wanted = target.flatten()[kept]
        sums = rows.new_empty(kept.numel())
        for s, chunk in _chunks(rows, kept):
            if left_out is not None:
                chunk[:, left_out] = -torch.inf
            highest = chunk.amax(1)
            torch.softmax(chunk, 1, out=chunk)
            sums[s] = highest - chunk.amax(1).log()  # the largest is exp(highest - sum)
        shares = (target >= 0).sum(1).clamp_min(1).to(rows.dtype).reciprocal()
        each = torch.zeros_like(target, dtype=rows.dtype)
        each.view(-1)[kept] = (sums - rows[kept, wanted]).clamp_min_(0)
        ctx.save_for_backward(logits, kept, wanted, sums, shares)
        ctx.left_out = left_out
        return each.sum(1) * shares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, kept, wanted, sums, shares = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        gradient = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        scale = (grads[0] * shares)[kept // max(1, rows.shape[0] // max(1, len(shares))), None]
        for s, chunk in _chunks(rows, kept):
            chunk.sub_(sums[s, None]).exp_()
            if ctx.left_out is not None:
                chunk[:, ctx.left_out] = 0
            chunk[torch.arange(len(chunk), device=chunk.device), wanted[s]] -= 1
            gradient.index_copy_(0, kept[s], chunk.mul_(scale[s]))
        return gradient.view(logits.shape), None, None


def _chunks(rows: Tensor, kept: Tensor) -> Any:
    """Copies of some of the rows at a time, in memory that stays in the processor's cache, and their places in `kept`."""
    step = max(1, CHUNK // max(1, rows.shape[1]))
    out = rows.new_empty(min(step, kept.numel()), rows.shape[1])
    for start in range(0, kept.numel(), step):
        s = slice(start, min(start + step, kept.numel()))
        yield s, torch.index_select(rows, 0, kept[s], out=out[: s.stop - s.start])
