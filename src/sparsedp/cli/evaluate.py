"""How good a model is on what was held out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from sparsedp.cli.assemble import Data, Loss, forward
from sparsedp.cli.config import Config
from sparsedp.data import auc, log_loss
from sparsedp.errors import SparseDPError


def evaluate(config: Config, model: nn.Module, loss: Loss, data: Data) -> dict[str, float]:
    """AUC and log loss for binary cross-entropy, else the mean loss; empty if nothing is held out."""
    if data.held_out is None:
        return {}
    batch_size = config.training.max_physical_batch or config.training.batch_size
    outputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    total, seen = 0.0, 0
    with torch.no_grad(), _evaluating(model):
        for batch in _batches(data, batch_size):
            count = min(batch_size, len(data.held_out) - seen)
            output, target, value = forward(model, loss, batch)
            total += value.item() * (count if config.privacy.loss_reduction == "mean" else 1)
            seen += count
            if config.loss == "binary_cross_entropy":
                outputs.append(output)
                targets.append(target)
    if not np.isfinite(total):
        raise SparseDPError(f"The loss on the held-out data is {total}: the weights have diverged. Lower optimizer.lr.")
    if config.loss != "binary_cross_entropy":
        return {"loss": total / seen}
    logits, labels = torch.cat(outputs).flatten().numpy(), torch.cat(targets).flatten().numpy()
    if not np.isin(labels, (0, 1)).all():  # shares of clicks: nothing to rank
        return {"loss": total / seen}
    return {"auc": auc(labels, logits), "log_loss": log_loss(labels, logits)}


def _batches(data: Data, batch_size: int) -> Iterator[Any]:
    # A generator of its own, so that an evaluation leaves torch's global one alone.
    collate = getattr(data.held_out, "collate", data.collate)
    return iter(
        DataLoader(data.held_out, batch_size=batch_size, collate_fn=collate, generator=torch.Generator())  # type: ignore[arg-type]
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """eval() for a while. Then each module has its own mode again: a frozen BatchNorm must stay in eval()."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
