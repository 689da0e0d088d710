"""The looks of a run at its validation set, after which it may stop early."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.evaluation import TOP, evaluate_on, evaluating, rank_items
from sparsedp.cli.prepare import Prepared
from sparsedp.cli.validation import are_items, look_every, owners_of
from sparsedp.data.ranking import held_out_ranks


class Looks:
    """Looks at the validation set after the steps at which that is due."""

    def __init__(self, config: Config, parts: Prepared) -> None:
        settings, rule = config.training.early_stopping, parts.stopping
        assert settings is not None and rule is not None
        self.rule = rule
        self._private = settings.validation == "private"
        self._every = look_every(config, parts.engine.plan.dataset_size)
        self._looked = 0  # the step after which the latest look was
        self._config, self._parts = config, parts

    @property
    def are_due(self) -> bool:
        step = self._parts.steps_taken
        return step % self._every == 0 and self._looked < step and not self._parts.finished

    def look(self) -> float:
        """What the validation set gives now, which the rule takes in; smaller is better."""
        config, parts = self._config, self._parts
        if self._private:
            values = private_values(config, parts.model, parts.data)
            value = parts.engine.validate(values, owners_of(config, parts.data))
        else:
            value = parts.processes.from_first(_public_value(config, parts))
        self._looked = parts.steps_taken
        self.rule(value)
        return value

    def state(self) -> dict[str, Any]:
        return {"looked": self._looked, **self.rule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self._looked = state["looked"]
        self.rule.load_state_dict(state)


def private_values(config: Config, model: nn.Module, data: Data) -> torch.Tensor:
    """One number for each example of the validation set, float64 [n], which depends on that example and the weights alone.

    The loss of a click, or 1 - NDCG@10 of an item that is held out.
    """
    validation = data.validation
    with torch.no_grad(), evaluating(model):
        if are_items(validation):
            exclude = getattr(config.data, "exclude_seen", False)
            ranks = held_out_ranks(model.score_next, validation, exclude_seen=exclude)  # type: ignore[arg-type]
            return 1 - torch.where(ranks <= TOP, 1 / torch.log2(1 + ranks), 0.0)
        collate = getattr(validation, "collate", data.collate)
        size = config.training.max_physical_batch or config.training.batch_size
        losses = []
        for *inputs, target in DataLoader(validation, size, collate_fn=collate, generator=torch.Generator()):
            logits = model(*inputs).double()
            losses.append(F.binary_cross_entropy_with_logits(logits, target.double(), reduction="none").flatten())
        return torch.cat(losses)


def _public_value(config: Config, parts: Prepared) -> float:
    data = parts.data
    if are_items(data.validation):
        return 1 - rank_items(config, parts.model, data, data.validation)[f"ndcg@{TOP}"]
    collate = getattr(data.validation, "collate", data.collate)
    metrics = evaluate_on(config, parts.model, parts.loss, data.validation, collate, part="Validation")
    return float(metrics.get("log_loss", metrics.get("loss", math.nan)))
