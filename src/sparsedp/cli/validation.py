"""Early stopping of a run: the half of the held-out data that is looked at, and the looks that are planned."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from torch.utils.data import Subset

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.data import HeldOutItems
from sparsedp.errors import ConfigError
from sparsedp.validation import PrivateValidation


def halves(held_out: Any, owners: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The places of two halves of what is held out, drawn at random once and for all: to choose by, and to report.

    What belongs to one of the `owners`, one for each example, stays together.
    """
    owners = np.unique(np.arange(len(held_out)) if owners is None else owners, return_inverse=True)[1]
    order = np.random.default_rng(0).permutation(owners.max() + 1)
    chosen = np.isin(owners, order[: len(order) // 2])
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def part_of(dataset: Any, places: np.ndarray) -> Any:
    """Some examples, with what else the data set says about each, if it can be divided so."""
    return dataset.subset(places) if hasattr(dataset, "subset") else Subset(dataset, places.tolist())


def with_validation(config: Config, data: Data) -> Data:
    """The data with half of what is held out set apart for early stopping: what a run reports is measured on the other half."""
    if config.training.early_stopping is None:
        return data
    if data.held_out is None or len(data.held_out) < 2:
        raise ConfigError(
            "training.early_stopping looks at half of the held-out data, and nothing is held out (data.held_out)"
        )
    chosen, reported = halves(data.held_out, _owners(data.held_out))
    if not len(chosen):
        raise ConfigError("training.early_stopping looks at half of the held-out users, and there is one alone")
    return data.with_validation(part_of(data.held_out, chosen), part_of(data.held_out, reported))


def plan_validation(config: Config, data: Data, units: int) -> PrivateValidation | Literal["public"] | None:
    """What `make_private` is told of the looks of a run on so many training units."""
    settings = config.training.early_stopping
    if settings is None:
        return None
    steps = config.training.epochs * _steps_per_epoch(config, units)
    looks = (steps - 1) // look_every(config, units)
    if looks < 1:
        raise ConfigError(
            f"training.early_stopping: the run ends after {steps} steps, before the first look would be due. Look more often, or "
            "train for more epochs."
        )
    if settings.validation == "public":
        return "public"
    if not are_items(data.validation) and config.loss != "binary_cross_entropy":
        raise ConfigError(
            "training.early_stopping.validation: private needs a loss of each example, and with a loss of your own there is only "
            "that of a batch. Use engine.validate in Python (docs/tuning.md), or a public validation set"
        )
    assert settings.std is not None
    owners = owners_of(config, data)
    count = len(data.validation) if owners is None else len(np.unique(owners))
    return PrivateValidation(units=count, looks=looks, std=settings.std, clip=_clip(config, data))


def look_every(config: Config, units: int) -> int:
    """Steps from one look to the next."""
    settings = config.training.early_stopping
    assert settings is not None
    return settings.every or (settings.every_epochs or 1) * _steps_per_epoch(config, units)


def _steps_per_epoch(config: Config, units: int) -> int:
    return math.ceil(units / config.training.batch_size)


def _clip(config: Config, data: Data) -> float:
    settings = config.training.early_stopping
    assert settings is not None
    if are_items(data.validation):
        if settings.clip is not None:
            raise ConfigError(
                "training.early_stopping.clip: what is looked at is 1 - NDCG@10, between 0 and 1: leave it out"
            )
        return 1.0
    return 2.0 if settings.clip is None else settings.clip


def owners_of(config: Config, data: Data) -> np.ndarray | None:
    """Whose each example of the validation set is; None if units are examples."""
    if config.privacy.unit == "example":
        return None
    owners = _owners(data.validation)
    if owners is None and are_items(data.validation):
        owners = np.arange(len(data.validation))
    if owners is None:
        raise ConfigError(
            "training.early_stopping.validation: private with privacy.unit: user needs to know whose each held-out example is: "
            "the held-out data need an attribute `users`, a whole number for each example"
        )
    return owners


def _owners(dataset: Any) -> np.ndarray | None:
    """Whose each example is, if the data set says so."""
    whole = _whole(dataset)
    owners = next((found for name in ("owners", "users") if (found := getattr(whole, name, None)) is not None), None)
    return None if owners is None else np.asarray(owners)[_places(dataset)]


def are_items(dataset: Any) -> bool:
    """Whether these are items to be ranked."""
    return isinstance(_whole(dataset), HeldOutItems)


def _whole(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, Subset) else dataset


def _places(dataset: Any) -> np.ndarray | slice:
    return np.asarray(dataset.indices) if isinstance(dataset, Subset) else slice(None)
