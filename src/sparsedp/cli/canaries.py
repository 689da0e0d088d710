"""Canaries in the data of a run, and their losses under the model that it trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from sparsedp.audit.canaries import CanaryPlan
from sparsedp.audit.inserted import WithCanaries
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.losses import SEQUENCE_LOSSES
from sparsedp.cli.evaluation import evaluating
from sparsedp.cli.prepare import forward, limit_threads, with_collate
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.trained import read_weights, trained_model
from sparsedp.errors import ConfigError, SparseDPError, one_line

_BATCH = 512  # canaries that go through the model at once


def insert_canaries(config: Config, data: Data, plan: CanaryPlan) -> Data:
    """The data with the canaries of the plan in the training set, which is then a `WithCanaries`."""
    if config.privacy.unit == "user" and plan.owner is None:
        raise ConfigError("privacy.unit: user, so that it must be said whose the canaries are")
    if config.privacy.unit != "user" and plan.owner is not None:
        raise ConfigError(
            f"privacy.unit: {config.privacy.unit}, so that canaries are nobody's: leave out whose they are"
        )
    training = WithCanaries(data.training, plan)
    try:
        data.collate([training[0], training.canaries[0]])
    except Exception as error:  # a user's own code: anything
        raise SparseDPError(
            f"A canary and an example do not go into one batch: {type(data.training).__name__}.make_canary must return what "
            f"__getitem__ returns. {one_line(error)}"
        ) from error
    return replace(data, training=training)


def require_canaries(folder: RunFolder, audit: str | None = None) -> CanaryPlan:
    """The plan of the canaries in the run's data, which must be those of `audit`, if one is named."""
    plan = folder.read_canaries()
    if plan is None:
        raise SparseDPError(
            f"{folder.path} is a run without canaries: nothing was inserted, so that there is nothing to look for. Give the "
            "audit its configuration, and it trains with canaries."
        )
    if audit is not None and plan.audit != audit:
        raise SparseDPError(f"{folder.path} has canaries of another audit: sparsedp audit {plan.audit} {folder.path}")
    return plan


@dataclass(frozen=True)
class TrainedCanaries:
    """The canaries of a finished run, and the loss of each under its model, float64 (n,)."""

    plan: CanaryPlan
    losses: np.ndarray

    @property
    def repetitions(self) -> np.ndarray:
        return np.array(self.plan.repetitions)


def canary_losses(
    config: Config, folder: RunFolder, data: Data, progress: Callable[[int], None] = lambda count: None
) -> TrainedCanaries:
    """The losses of all canaries of a finished run; `data` are those of its configuration, without canaries.

    `progress` is called with how many are done, after each batch.
    """
    plan = require_canaries(folder)
    if not folder.is_released:
        raise SparseDPError(
            f"{folder.path} is not finished. Go on with it first: sparsedp train --resume {folder.path}"
        )
    limit_threads(config)
    data = with_collate(config, insert_canaries(config, data, plan))
    model = trained_model(config, folder, data, read_weights(folder)[1])
    return TrainedCanaries(plan, example_losses(config, model, data, data.training.canaries, progress))


def example_losses(
    config: Config,
    model: nn.Module,
    data: Data,
    examples: Sequence[Any],
    progress: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """The loss of each example by itself, float64 (n,), in eval mode.

    Of sequences it is the softmax over all items, also where training compares with drawn negatives alone, whose loss would
    depend on the draw. A training set's own `canary_loss(model, examples)` goes before all others.
    """
    size, losses_of = _losses_of(config, model, data)
    losses = []
    with torch.no_grad(), evaluating(model):
        for begin in range(0, len(examples), size):
            part = list(examples[begin : begin + size])
            values = torch.as_tensor(losses_of(part)).double()
            if values.shape != (len(part),):
                raise SparseDPError(
                    f"canary_loss gave a result of shape {tuple(values.shape)} for {len(part)} examples: expected one loss each."
                )
            losses.append(values.cpu().numpy())
            progress(begin + len(part))
    return np.concatenate(losses)


def _losses_of(config: Config, model: nn.Module, data: Data) -> tuple[int, Callable[[list[Any]], Any]]:
    """How many examples go through the model at once, and what gives their losses."""
    own = getattr(data.training, "canary_loss", None)
    if own is not None:
        return _BATCH, lambda examples: own(model, examples)
    if config.loss == "binary_cross_entropy":
        return _BATCH, lambda examples: _click_losses(model, data, examples)
    if config.loss in SEQUENCE_LOSSES:
        return _BATCH, lambda examples: _softmax_losses(model, data, examples)
    loss = config.make_loss()  # a user's own is of a batch: that of a single example is its own
    return 1, lambda examples: forward(model, loss, data.collate(examples))[2].reshape(1)


def _click_losses(model: nn.Module, data: Data, examples: Sequence[Any]) -> torch.Tensor:
    *inputs, labels = data.collate(examples)
    losses = F.binary_cross_entropy_with_logits(model(*inputs), labels, reduction="none")
    return losses.reshape(len(examples), -1).mean(1)


def _softmax_losses(model: nn.Module, data: Data, examples: Sequence[Any]) -> torch.Tensor:
    history, target = data.training.collate(examples)
    return model(history=history, target=target)
