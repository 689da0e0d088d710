"""How good a model is on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from sparsedp.cli.assemble import Data, Loss, forward
from sparsedp.cli.config import Config
from sparsedp.cli.sequences import rank
from sparsedp.data import HeldOutItems, auc, log_loss
from sparsedp.errors import SparseDPError


def evaluate(config: Config, model: nn.Module, loss: Loss, data: Data) -> dict[str, Any]:
    """AUC and log loss for binary cross-entropy, NDCG and HIT for held-out items of sequences, else the mean loss.

    Empty if nothing is held out. If the held-out data have periods, "periods" has the same for each of them.
    """
    if data.held_out is None:
        return {}
    if isinstance(data.held_out, HeldOutItems):
        return rank_items(config, model, data, data.held_out)
    collate = getattr(data.held_out, "collate", data.collate)
    return evaluate_on(config, model, loss, data.held_out, collate, getattr(data.held_out, "periods", None))


def rank_items(config: Config, model: nn.Module, data: Data, held_out: Any) -> dict[str, Any]:
    """NDCG@10 and HIT@10 on some of the held-out items, beside those of the most popular items."""
    with _evaluating(model):
        return rank(config, model, data.training, held_out)


def evaluate_on(
    config: Config, model: nn.Module, loss: Loss, dataset: Any, collate: Callable[[Any], Any], periods: Any = None
) -> dict[str, Any]:
    """As `evaluate`, on any data set. `periods` holds the period of each of its examples."""
    if periods is None:
        return _metrics([_seen(config, model, loss, dataset, collate)])
    periods = np.asarray(periods)
    parts = {
        int(period): _seen(config, model, loss, Subset(dataset, np.flatnonzero(periods == period).tolist()), collate)
        for period in np.unique(periods)
    }
    return {
        **_metrics(list(parts.values())),
        "periods": {str(period): {"examples": part.count, **_metrics([part])} for period, part in parts.items()},
    }


@dataclass(frozen=True)
class _Seen:
    """What a model said about some examples."""

    loss: float  # summed
    count: int
    outputs: torch.Tensor | None  # logits and labels, for binary cross-entropy
    targets: torch.Tensor | None


def _metrics(parts: Sequence[_Seen]) -> dict[str, float]:
    """Of all parts together."""
    mean = {"loss": sum(part.loss for part in parts) / sum(part.count for part in parts)}
    if any(part.outputs is None for part in parts):
        return mean
    logits, labels = (
        torch.cat([getattr(part, name) for part in parts]).flatten().numpy() for name in ("outputs", "targets")
    )
    if not np.isin(labels, (0, 1)).all():  # shares of clicks: nothing to rank
        return mean
    return {"auc": auc(labels, logits), "log_loss": log_loss(labels, logits)}


def _seen(config: Config, model: nn.Module, loss: Loss, dataset: Any, collate: Callable[[Any], Any]) -> _Seen:
    batch_size = config.training.max_physical_batch or config.training.batch_size
    outputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    total, seen = 0.0, 0
    with torch.no_grad(), _evaluating(model):
        for batch in _batches(dataset, collate, batch_size):
            count = min(batch_size, len(dataset) - seen)
            output, target, value = forward(model, loss, batch)
            total += value.item() * (count if config.privacy.loss_reduction == "mean" else 1)
            seen += count
            if config.loss == "binary_cross_entropy":
                outputs.append(output)
                targets.append(target)
    if not np.isfinite(total):
        raise SparseDPError(f"The loss on the held-out data is {total}: the weights have diverged. Lower optimizer.lr.")
    if config.loss != "binary_cross_entropy":
        return _Seen(total, seen, None, None)
    return _Seen(total, seen, torch.cat(outputs), torch.cat(targets))


def _batches(dataset: Any, collate: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
    # A generator of its own, so that an evaluation leaves torch's global one alone.
    return iter(DataLoader(dataset, batch_size=batch_size, collate_fn=collate, generator=torch.Generator()))


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
