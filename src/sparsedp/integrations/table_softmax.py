"""Causal language models whose loss is a softmax over the table in blocks, so that no logits of tokens x vocabulary are kept."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.errors import UnsupportedError
from sparsedp.integrations.unit_losses import IGNORED, Reduction, reduced
from sparsedp.nn import table_softmax_loss

LARGE = 1 << 15  # rows of a table from which on `PrivateTrainer` does this by itself

_PROBE = 100.0  # numbers that no soft-capping leaves as they are
_TOLERANCE = 1e-4


def softmax_over_table(model: nn.Module, reduction: Reduction = "mean") -> nn.Module:
    """The same model, whose forward() with `labels=` in training is a mean per unit, and keeps no logits. Returns it.

    The loss is that of transformers, next tokens with -100 for none, but a mean over each unit's own tokens, and then the mean
    or the sum over units. The table of the head may be the one of the word embeddings, one of its own, or frozen. The output
    has no `logits` then; without labels, and in eval mode, the model is as it was, and its `state_dict` always is.

    Takes models of transformers, also under PEFT, whose logits are c hidden @ weight.T, c a constant.
    """
    inner = inner_model(model)
    refuse_head(inner)
    original = type(inner).forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)  # a divisor that everybody decides
        given = inspect.signature(original).bind(self, *args, **kwargs)
        labels = given.arguments.get("labels")
        if labels is None or not self.training:
            return original(*given.args, **given.kwargs)
        for name in ("shift_labels", "return_dict"):
            if kwargs.get(name) is not None and not (name == "return_dict" and kwargs[name]):
                raise UnsupportedError(f"softmax_over_table takes no {name}={kwargs[name]!r}: leave it out.")
        given.arguments["labels"] = None
        weight = table_of(self)
        with _head_gives(self, lambda hidden: hidden):
            outputs = original(*given.args, **given.kwargs)
        hidden = outputs.logits  # what the head was given, times what the model multiplies its logits by
        losses = table_softmax_loss(hidden[:, :-1], weight, labels[:, 1:], ignore=IGNORED)
        rest = {name: value for name, value in outputs.items() if name not in ("loss", "logits")}
        return type(outputs)(loss=reduced(losses, reduction), **rest)

    if "forward" in vars(inner) and not is_over_table(model):
        raise UnsupportedError(
            f"The forward() of this {type(inner).__name__} was replaced already, on the object itself (by accelerate, or a "
            "device_map?). Call softmax_over_table on the model as it was loaded."
        )
    forward.is_over_table = True  # type: ignore[attr-defined]
    # A bound method, of which a copy of the model gets its own.
    inner.forward = types.MethodType(forward, inner)
    return model


def is_over_table(model: nn.Module) -> bool:
    """Whether `softmax_over_table` was called on the model."""
    return bool(getattr(vars(inner_model(model)).get("forward"), "is_over_table", False))


def inner_model(model: Any) -> nn.Module:
    """transformers' model, which may be under PEFT's."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def table_of(model: Any) -> Tensor:
    """The weight of the head, (rows, dim). Raises where the head is anything else than a product with it."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    own = getattr(head, "modules_to_save", None)  # PEFT's copy of the head, which is trained in its place
    if isinstance(own, nn.ModuleDict):
        active = list(getattr(head, "active_adapters", []))
        head = own[active[0]] if len(active) == 1 and active[0] in own else None
    what = type(model).__name__
    if type(head) is not nn.Linear:
        raise UnsupportedError(
            f"The head of {what} is {'missing' if head is None else type(head).__name__}, not an nn.Linear over the vocabulary, "
            "so that its softmax cannot be taken over a table. Leave adapters off the head (target_modules), or use ordinary "
            "logits (softmax_over_table=False)."
        )
    if head.bias is not None:
        raise UnsupportedError(
            f"The head of {what} has a bias, and a softmax over the table has none. Use ordinary logits "
            "(softmax_over_table=False), or a head without a bias."
        )
    weight: Tensor = head.weight
    return weight


def refuse_head(model: Any) -> None:
    """Raises if the model's logits are not c hidden @ weight.T: the head is given a probe to hand on, which must come out."""
    weight = table_of(model)
    what = type(model).__name__
    if bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)):
        raise UnsupportedError(f"{what} is an encoder-decoder model; softmax_over_table takes causal ones.")
    probes: list[Tensor] = []

    def probe(hidden: Tensor) -> Tensor:
        values = torch.arange(hidden.numel(), dtype=hidden.dtype, device=hidden.device).sin_()
        probes.append(values.view(hidden.shape) * _PROBE)
        return probes[-1]

    ids = torch.arange(3, device=weight.device)[None] % weight.shape[0]
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), _head_gives(model, probe):
            out = getattr(type(model).forward(model, input_ids=ids), "logits", None)
    finally:
        for part, training in modes.items():
            part.training = training
    if len(probes) != 1 or not isinstance(out, Tensor) or out.shape != (1, 3, weight.shape[1]):
        raise UnsupportedError(
            f"{what} does not call its head once on hidden states (batch, length, {weight.shape[1]}) and return what it gives as "
            "`logits`. Use ordinary logits (softmax_over_table=False)."
        )
    (sent,) = probes
    factor = (out * sent).sum() / sent.square().sum()
    if not bool(((out - factor * sent).abs() <= _TOLERANCE * _PROBE * factor.abs()).all()) or float(factor) == 0:
        raise UnsupportedError(
            f"{what} does more with its logits than to multiply them by a constant (soft-capping: "
            "config.final_logit_softcapping?), which a softmax over the table does not. Use ordinary logits "
            "(softmax_over_table=False), or set config.final_logit_softcapping to None."
        )


@contextmanager
def _head_gives(model: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, the head returns `forward(hidden)`."""
    state = vars(model.get_output_embeddings())
    before = state.get("forward")
    state["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del state["forward"]
        else:
            state["forward"] = before
