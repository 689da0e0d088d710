"""Losses of transformers' models, one per unit, in place of the models' own for a batch.

A mean over the batch's valid tokens divides every unit's loss by a number that all units decide: one more unit changes
everybody's gradient, and clipping bounds nothing. So does a mean over units where the loss is to be a sum over them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

IGNORED = -100  # the label of a token, or of a unit, that has no loss

Reduction = Literal["mean", "sum"]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each unit's mean cross-entropy over its own labelled tokens, (B,); 0 for a unit without any.

    `logits` are (B, L, V) and `labels` (B, L), IGNORED where a token has no loss.
    """
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"The logits are of {tuple(logits.shape[:2])} units and tokens, and the labels of {tuple(labels.shape)}: each token "
            "has to have its logits."
        )
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


def class_losses(logits: Tensor, labels: Tensor, problem: str | None = None) -> Tensor:
    """Each unit's loss of classification or regression, (B,); 0 for a unit whose class is IGNORED.

    `logits` are (B, K). `problem` is one of transformers' names for config.problem_type; None: decided as transformers does, by K
    and the type of the labels.
    """
    logits = logits.reshape(len(labels), -1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if problem is None:
        if logits.shape[1] == 1:
            problem = "regression"
        else:
            problem = MULTI_LABEL if labels.is_floating_point() else SINGLE_LABEL
    if problem == SINGLE_LABEL:
        return cross_entropy(logits, labels.reshape(-1), reduction="none", ignore_index=IGNORED)
    if problem not in ("regression", MULTI_LABEL):
        raise ValueError(f"config.problem_type is {problem!r}; expected regression, {SINGLE_LABEL} or {MULTI_LABEL}.")
    compare = mse_loss if problem == "regression" else binary_cross_entropy_with_logits
    return compare(logits, labels.reshape(logits.shape).to(logits.dtype), reduction="none").mean(1)


def reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """The loss of a batch from those of its units."""
    return losses.mean() if reduction == "mean" else losses.sum()


def losses_of_units(kind: str, outputs: Any, labels: dict[str, Tensor], problem: str | None = None) -> Tensor:
    """The losses of a batch's units, (B,), from what a model without labels gave. `kind` is one of `LABELS`.

    `problem` is the model's config.problem_type, of models that classify.
    """
    if kind in CLASSIFIERS:
        return class_losses(outputs["logits"], labels["labels"], problem)
    if kind == "ForQuestionAnswering":
        return span_losses(
            outputs["start_logits"], outputs["end_logits"], labels["start_positions"], labels["end_positions"]
        )
    losses = next_token_losses if kind == "ForCausalLM" else token_losses
    return losses(outputs["logits"], labels["labels"])


SINGLE_LABEL, MULTI_LABEL = "single_label_classification", "multi_label_classification"
CLASSIFIERS = (
    "ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification",
)  # fmt: skip
# The kinds of models, by the names that transformers has for their losses, and the arguments that hold their labels.
LABELS = {
    **dict.fromkeys(CLASSIFIERS, ("labels",)),
    "ForCausalLM": ("labels",),
    "ForMaskedLM": ("labels",),
    "ForTokenClassification": ("labels",),
    "ForConditionalGeneration": ("labels",),
    "ForQuestionAnswering": ("start_positions", "end_positions"),
}
