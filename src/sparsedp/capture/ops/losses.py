"""Losses: reductions of what predictions and targets say about each unit."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import aligned
from sparsedp.capture.ops.registry import Call, axis_rule
from sparsedp.capture.units import VALID_POSITIONS, Mixed, UnitAxis

LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
           "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "soft_margin_loss"}  # fmt: skip

OF_CLASSES = ("cross_entropy", "nll_loss")


def place_in_loss(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis:
    """Where the units are in what a loss compares: dimensions are aligned from the right, with classes from the left."""
    return axis if call.name in OF_CLASSES else axis.shifted(-source.ndim)


@axis_rule(*LOSSES, joint=True)
def _loss(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.name in OF_CLASSES:
        scores = call.argument(0, "input")
        if source.ndim == scores.ndim and axis.dim == min(1, scores.ndim - 1):
            return Mixed("a softmax over units")
        if source is call.argument(2, "weight"):
            return Mixed("weights of classes that the units decide")  # each unit takes that of its own target
    reduction = call.kwargs.get("reduction", "mean")
    if reduction != "none":
        return Mixed("mean" if _counts_everything(call) else VALID_POSITIONS)
    if call.name not in OF_CLASSES:
        return aligned(call, source, axis)
    return axis if axis.dim == 0 and call.out.ndim and call.out.shape[0] == source.shape[0] else None


@axis_rule("sequence_loss", joint=True)
def _sequence_loss(call: Call, source: Tensor, axis: UnitAxis) -> Mixed:
    return Mixed("mean" if axis == UnitAxis(0) else VALID_POSITIONS)


def _counts_everything(call: Call) -> bool:
    """Whether a loss divides by a number that no unit's data decides."""
    if call.name not in OF_CLASSES or call.kwargs.get("reduction", "mean") != "mean":
        return True
    target = call.argument(1, "target")
    ignored = call.kwargs.get("ignore_index", -100)
    return not (target.dtype == torch.int64 and bool((target == ignored).any())) and call.kwargs.get("weight") is None
