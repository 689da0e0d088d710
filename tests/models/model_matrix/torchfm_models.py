"""torchfm: factorisation machines and their kin, on ids of several fields."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import click_loss, clicks, drawn, without_batch_norm

FIELDS = [5] * 6


def fields(n: int) -> tuple[Tensor, Tensor]:
    return drawn(n, len(FIELDS), high=5), clicks(n)


def _build(module: str, name: str, arguments: tuple[Any, ...], batch_norm: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = getattr(importlib.import_module(f"torchfm.model.{module}"), name)(*arguments)
        return model if batch_norm else without_batch_norm(model)

    return build


# File, class and arguments.
MODELS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("lr", "LogisticRegressionModel", (FIELDS,)),
    ("fm", "FactorizationMachineModel", (FIELDS, 8)),
    ("ffm", "FieldAwareFactorizationMachineModel", (FIELDS, 4)),
    ("fnn", "FactorizationSupportedNeuralNetworkModel", (FIELDS, 8, (16,), 0.0)),
    ("wd", "WideAndDeepModel", (FIELDS, 8, (16,), 0.0)),
    ("pnn", "ProductNeuralNetworkModel", (FIELDS, 8, (16,), 0.0)),
    ("dcn", "DeepCrossNetworkModel", (FIELDS, 8, 2, (16,), 0.0)),
    ("nfm", "NeuralFactorizationMachineModel", (FIELDS, 8, (16,), (0.0, 0.0))),
    ("fnfm", "FieldAwareNeuralFactorizationMachineModel", (FIELDS, 4, (16,), (0.0, 0.0))),
    ("dfm", "DeepFactorizationMachineModel", (FIELDS, 8, (16,), 0.0)),
    ("xdfm", "ExtremeDeepFactorizationMachineModel", (FIELDS, 8, (16,), 0.0, (8, 8))),
    ("afm", "AttentionalFactorizationMachineModel", (FIELDS, 8, 8, (0.0, 0.0))),
    ("afi", "AutomaticFeatureInteractionModel", (FIELDS, 8, 8, 2, 2, (16,), (0.0, 0.0, 0.0))),
    ("ncf", "NeuralCollaborativeFiltering", (FIELDS, [0], [1], 8, (8,), 0.0)),
    ("afn", "AdaptiveFactorizationNetwork", (FIELDS, 8, 12, (16,), (0.0, 0.0))),
]

CASES = [
    *(Case(f"torchfm.{name}", "torchfm", _build(module, name, arguments, False), fields, click_loss)
      for module, name, arguments in MODELS),
    *(Case(f"torchfm.{name}.batch_norm", "torchfm", _build(module, name, arguments, True), fields, click_loss)
      for module, name, arguments in (MODELS[4], MODELS[9])),
]  # fmt: skip
