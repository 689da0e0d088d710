"""A linear model by the library's own DP-SGD: Poisson batches, clipped gradients, and noise that waits until a row is read.

The model is one table with a row for each column of the data, so that a step costs what its batch's non-zeros cost (LazyDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sparsedp.accounting import get_noise_multiplier
from sparsedp.convex.losses import Huber, Logistic, Loss, SmoothedHinge, Squared
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import UnsupportedError
from sparsedp.mechanisms import LazyDP
from sparsedp.statement import PrivacyStatement


@dataclass(frozen=True)
class SGDPlan:
    """What is fixed before the data are looked at, but for their shape."""

    loss: Loss
    rows: int  # n
    columns: int  # d
    models: int  # k
    row_norm: float
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    learning_rate: float
    model_norm: float

    @property
    def clip(self) -> float:
        """What a row's gradient is clipped to: for models of norm `model_norm` it never is any longer."""
        return self.loss.largest_slope(self.row_norm * self.model_norm) * self.row_norm * math.sqrt(self.models)

    @property
    def steps(self) -> int:
        return self.epochs * max(1, math.ceil(self.rows / self.batch_size))

    def excess_risk(self) -> float:
        """The bound of stochastic gradient descent on the average loss beyond that of the best model of norm `model_norm`.

        For the mean iterate, with the best step size: model_norm * sqrt((L^2 + d k std^2) / steps), std that of the noise on a
        step's mean gradient. What noise does along directions that no row has is counted too, although it is harmless.
        """
        noise = get_noise_multiplier(
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            sample_rate=min(1.0, self.batch_size / self.rows),
            steps=self.steps,
        )
        std = noise * self.clip / self.batch_size
        return self.model_norm * math.sqrt((self.clip**2 + self.columns * self.models * std**2) / self.steps)


class LinearModel(nn.Module):
    """<x, w> for k models: rows come as column numbers (n, width) and values (n, width), with zeros where a row has fewer."""

    def __init__(self, columns: int, models: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(columns, models, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        return self.weights(columns, per_sample_weights=values)


def train(plan: SGDPlan, rows: csr_array, targets: np.ndarray, seed: int | None) -> tuple[np.ndarray, PrivacyStatement]:
    """Weights (d, k) and the statement about them. `rows` (n, d) are clipped, `targets` (n, k)."""
    columns, values = padded(rows)
    data = TensorDataset(columns, values, torch.from_numpy(np.ascontiguousarray(targets, np.float32)))
    module = LinearModel(plan.columns, plan.models)
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=plan.learning_rate),
        data_loader=DataLoader(data, batch_size=plan.batch_size),
        target_epsilon=plan.epsilon,
        target_delta=plan.delta,
        epochs=plan.epochs,
        max_grad_norm=plan.clip,
        mechanism=LazyDP(),
    )
    loss = torch_loss(plan.loss)
    for _ in range(plan.epochs):
        for places, sizes, wanted in loader:
            optimizer.zero_grad()
            loss(model(places, sizes), wanted).sum(dim=1).mean().backward()
            optimizer.step()
    weights = model.state_dict()["weights.weight"].double().numpy().copy()
    statement = engine.statement(plan.delta)
    engine.close()
    return weights, statement


def padded(rows: csr_array) -> tuple[Tensor, Tensor]:
    """Column numbers (n, width) int64 and values (n, width) float32: width is the most non-zeros of a row."""
    sizes = np.diff(rows.indptr)
    width = max(1, int(sizes.max(initial=0)))
    if rows.shape[0] * width > max(1 << 24, 50 * rows.nnz):
        raise UnsupportedError(
            f"One row has {width} non-zeros, and on average they have {rows.nnz / rows.shape[0]:.3g}: method='sgd' keeps all "
            "rows as wide as the widest. Leave columns out, or take method='output'."
        )
    columns, values = np.zeros((rows.shape[0], width), np.int64), np.zeros((rows.shape[0], width), np.float32)
    of_row = np.repeat(np.arange(rows.shape[0]), sizes)
    within = np.arange(rows.nnz) - np.repeat(rows.indptr[:-1], sizes)
    columns[of_row, within], values[of_row, within] = rows.indices, rows.data
    return torch.from_numpy(columns), torch.from_numpy(values)


def torch_loss(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as a function of margins and targets (n, k), in torch."""
    if isinstance(loss, Logistic):
        return lambda margins, targets: F.softplus(-targets * margins)
    if isinstance(loss, SmoothedHinge):
        width = loss.width

        def hinge(margins: Tensor, targets: Tensor) -> Tensor:
            room = (1 + width - targets * margins).clamp(min=0)
            inside = room.clamp(max=2 * width)
            return inside**2 / (4 * width) + (room - inside)

        return hinge
    if isinstance(loss, Squared):
        return lambda margins, targets: 0.5 * (margins - targets) ** 2
    if isinstance(loss, Huber):
        return lambda margins, targets: F.huber_loss(margins, targets, reduction="none", delta=loss.width)
    raise UnsupportedError(f"method='sgd' does not know the loss {loss!r}.")
