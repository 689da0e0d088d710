"""Losses of token models that are a mean per unit, in place of a mean over all valid tokens of a batch.

A mean over the batch's valid tokens divides every unit's loss by a number that all units decide: one more unit changes
everybody's gradient, and clipping bounds nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100  # the label of a token that has no loss

Reduction = Literal["mean", "sum"]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each unit's mean cross-entropy over its own labelled tokens, (B,); 0 for a unit without any.

    `logits` are (B, L, V) and `labels` (B, L), IGNORED where a token has no loss.
    """
    valid = labels != IGNORED
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    return (losses * valid).sum(1) / valid.sum(1).clamp(min=1)


def next_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """As `token_losses`, of causal models: the logits at a place are for the label behind it."""
    return token_losses(logits[:, :-1], labels[:, 1:])


def span_losses(start_logits: Tensor, end_logits: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Each unit's loss of extractive question answering, (B,): the mean over where the answer starts and ends.

    `start_logits` and `end_logits` are (B, L). A place outside of them has no loss.
    """
    total = torch.zeros_like(start_logits[:, 0])
    for logits, places in ((start_logits, starts), (end_logits, ends)):
        places = places.reshape(len(logits), -1)[:, 0]
        inside = (places >= 0) & (places < logits.shape[1])
        losses = cross_entropy(logits, places.masked_fill(~inside, 0), reduction="none")
        total = total + losses * inside / 2
    return total


def reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """The loss of a batch from those of its units."""
    return losses.mean() if reduction == "mean" else losses.sum()


def losses_of_units(kind: str, outputs: Any, labels: dict[str, Tensor]) -> Tensor:
    """The losses of a batch's units, (B,), from what a model without labels gave. `kind` is one of `LABELS`."""
    if kind == "ForQuestionAnswering":
        return span_losses(
            outputs["start_logits"], outputs["end_logits"], labels["start_positions"], labels["end_positions"]
        )
    losses = next_token_losses if kind == "ForCausalLM" else token_losses
    return losses(outputs["logits"], labels["labels"])


# The kinds of models, by the names that transformers has for their losses, whose own loss is a mean over valid tokens (or
# places), and the arguments that hold their labels.
LABELS = {
    "ForCausalLM": ("labels",),
    "ForMaskedLM": ("labels",),
    "ForTokenClassification": ("labels",),
    "ForConditionalGeneration": ("labels",),
    "ForQuestionAnswering": ("start_positions", "end_positions"),
}
