"""The losses that a configuration can name: each is the mean, or the sum, over the units of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from sparsedp.cli.config.datasets import Topic
from sparsedp.cli.config.trust import Code
from sparsedp.nn import binary_candidate_loss, candidate_loss

Loss = Callable[[Any, Any], Tensor]  # of (output, target), or of (output, batch) where a batch is a dict
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class LossKind:
    topic: Topic
    make: Callable[[Reduction], Loss]
    draws_negatives: bool = False  # scores the target against drawn negatives only


def _binary_cross_entropy(reduction: Reduction) -> Loss:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, target, reduction=reduction)

    return loss


def _cross_entropy(reduction: Reduction) -> Loss:
    """Of logits [n, classes] and the numbers of classes [n]."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction=reduction)

    return loss


def _softmax(reduction: Reduction) -> Loss:
    """The loss of a model whose output is each unit's mean loss over its targets."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return _reduced(output.mean(), batch, reduction)

    return loss


def _of_candidates(mean_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Reduction], Loss]:
    """A loss of the scores of candidates: the mean over units of each unit's own mean over its targets, `mean_of`."""

    def make(reduction: Reduction) -> Loss:
        def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
            valid = batch["candidates"][..., 0] > 0
            return _reduced(mean_of(output, valid), batch, reduction)

        return loss

    return make


def _reduced(mean: Tensor, batch: dict[str, Tensor], reduction: Reduction) -> Tensor:
    return mean * len(batch["history"]) if reduction == "sum" else mean


LOSSES = {
    "binary_cross_entropy": LossKind("clicks", _binary_cross_entropy),
    "cross_entropy": LossKind("text", _cross_entropy),
    "softmax": LossKind("sequences", _softmax),
    "sampled_softmax": LossKind("sequences", _of_candidates(candidate_loss), draws_negatives=True),
    "binary_candidates": LossKind("sequences", _of_candidates(binary_candidate_loss), draws_negatives=True),
}
SEQUENCE_LOSSES = tuple(name for name, kind in LOSSES.items() if kind.topic == "sequences")
CANDIDATE_LOSSES = tuple(name for name, kind in LOSSES.items() if kind.draws_negatives)


def make_loss(name: str, reduction: Reduction, code: Code) -> Loss:
    """The loss of that name, or the user's own at that address."""
    return LOSSES[name].make(reduction) if name in LOSSES else code.find(name, "loss")
