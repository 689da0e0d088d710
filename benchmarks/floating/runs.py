"""Private runs in which half of a table's rows get a gradient of a thousandth of C, and the others get none.

Who has one is decided by coins. All else is alike: each unit looks up one row, the sampling rate is 1, and nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.noise import GaussianNoise, row_normals, zero_others
from sparsedp.tables import lazy

# With this SIGMA, and 4,000 units or 2,000, half of the floating-point numbers are holes between those that noise reaches.
CLIP, SIGMA, MOMENTUM = 1.0, 0.9, 0.9
SIZE = 1e-3  # of a touched row's gradient, in units of C
# With it AdaFEST's selection is a coin for each row: a unit moves the chance by a fraction of 1e-4.
_MAP_NOISE = 3000.0

MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    "lazydp": sparsedp.LazyDP,
    "lazydp by step": lambda: sparsedp.LazyDP(aggregate=False),
    "adafest": lambda: sparsedp.AdaFEST(threshold=0.0, noise_ratio=_MAP_NOISE, map_clip=1.0),
    "eana": sparsedp.EANA,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
    "adagrad": lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate),
}
PAIRS = (
    ("dpsgd", "sgd"), ("dpsgd", "momentum"), ("dpsgd", "adagrad"), ("lazydp", "sgd"), ("lazydp", "momentum"),
    ("lazydp by step", "sgd"), ("lazydp by step", "momentum"), ("adafest", "sgd"), ("adafest", "adagrad"), ("eana", "sgd"),
    ("eana", "adagrad"),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One run. Rows begin with zeros, or with normal numbers that the attacker knows.

    A row with a gradient has it in every step; with `only_last`, in the last one alone, before which there is a checkpoint.
    """

    mechanism: str
    optimizer: str
    steps: int = 1
    dtype: str = "float32"
    rate: float = 0.1
    zeros: bool = True
    only_last: bool = False
    rows: int = 4000
    dim: int = 16
    seed: int = 0

    @property
    def ideal(self) -> float:
        """How often the best guess about a row is right if noise were exactly Gaussian: Phi(mu / 2)."""
        square = (SIZE / SIGMA) ** 2 + ((_MAP_NOISE * SIGMA) ** -2 if self.mechanism == "adafest" else 0.0)
        mu = math.sqrt(square * (1 if self.only_last else self.steps))
        return 0.5 * (1 + math.erf(mu / 2 / math.sqrt(2)))


@dataclass(frozen=True)
class Released:
    """What an attacker has of a run: the states of a table (rows, dim) at the last two checkpoints, and all settings.

    `signs` (dim,) are those of the gradient, which has the same direction on all rows that have one.
    """

    setting: Setting
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    std: float
    signs: np.ndarray
    has_gradient: np.ndarray  # the secret, bool (rows,)


class _Scores(nn.Module):
    """score = (size of the unit) (row of the unit) . direction: so the unit's gradient is its size times the direction."""

    def __init__(self, rows: int, direction: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, len(direction))
        self.register_buffer("direction", direction)

    def forward(self, ids: Tensor, sizes: Tensor) -> Tensor:
        return (self.table(ids) * self.direction).sum(1) * sizes


def train(setting: Setting) -> Released:
    """Takes the steps of one run, seeded."""
    random = np.random.default_rng([setting.seed, 1])
    dtype = getattr(torch, setting.dtype)
    direction = random.normal(size=setting.dim)
    direction /= np.linalg.norm(direction)
    has_gradient = random.permutation(setting.rows) % 2 == 0
    # EANA gives untouched rows no noise, which everybody sees: there, rows without a gradient are touched as well.
    touched = np.arange(setting.rows) if setting.mechanism == "eana" else np.flatnonzero(has_gradient)
    ids, sizes = torch.from_numpy(touched), torch.from_numpy(SIZE * CLIP * has_gradient[touched]).to(dtype)
    module: Any = _Scores(setting.rows + 1, torch.from_numpy(direction)).to(dtype)
    start = (
        np.zeros((setting.rows + 1, setting.dim))
        if setting.zeros
        else random.normal(size=(setting.rows + 1, setting.dim))
    )
    with torch.no_grad():
        module.table.weight.copy_(torch.from_numpy(0.1 * start))
    before = {"weight": module.table.weight.detach().clone().numpy()[:-1]}
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=setting.seed).make_private(
        module=module, optimizer=OPTIMIZERS[setting.optimizer](module.parameters(), setting.rate),
        data_loader=DataLoader(TensorDataset(ids, sizes), batch_size=len(ids)), noise_multiplier=_multiplier(setting),
        max_grad_norm=CLIP, mechanism=MECHANISMS[setting.mechanism](),
    )  # fmt: skip
    for step in range(setting.steps):
        is_last = step == setting.steps - 1
        if is_last and setting.only_last and step:
            before = _states(module, optimizer)
        for own, size in loader:
            if setting.only_last and not is_last:
                own = torch.full_like(own, setting.rows)  # a row that nobody looks at takes all gradients
            optimizer.zero_grad()
            module(own, size).mean().backward()
            optimizer.step()
    return Released(
        setting,
        before,
        _states(module, optimizer),
        SIGMA * CLIP / len(ids),
        np.where(direction < 0, -1.0, 1.0),
        has_gradient,
    )


def _multiplier(setting: Setting) -> float:
    """Such that the gradient's noise is SIGMA times C."""
    return SIGMA / math.hypot(1.0, 1 / _MAP_NOISE) if setting.mechanism == "adafest" else SIGMA


def _states(module: nn.Module, optimizer: Any) -> dict[str, np.ndarray]:
    """Weights and optimizer state of the table, as a checkpoint would hold them."""
    states = {"weight": module.state_dict()["table.weight"]}
    of_table = optimizer.state_dict()["state"].get(0, {})
    states |= {name: value for name, value in of_table.items() if isinstance(value, Tensor) and value.ndim == 2}
    return {name: value.as_subclass(Tensor).detach().clone().numpy()[:-1] for name, value in states.items()}


# ---------------------------------------------------------------------- the control: noise as it would be without a grid


def _add_with_holes(self: GaussianNoise, tensors: Any, std: float, step: int) -> None:
    for index, sums in tensors.items():
        zero_others(sums)
        noise = torch.empty_like(sums.values)
        self.fill({index: noise}, std, step)
        sums.values.add_(noise)


def _add_rows_with_holes(
    key: Any, table: Tensor, rows: Tensor, std: np.ndarray, grid: float, factor: Any = None, numbers: Any = None
) -> None:
    noise = (
        row_normals(key, rows if numbers is None else numbers, table) * torch.from_numpy(std).to(table.dtype)[:, None]
    )
    table[rows] = table[rows] * (1.0 if factor is None else torch.from_numpy(factor).to(table.dtype)[:, None]) + noise


@contextmanager
def without_grid() -> Iterator[None]:
    """Within it sums are rounded, and so is their noise, and both are added in the table's own type: nothing else is rounded."""
    with (
        mock.patch.object(GaussianNoise, "add", _add_with_holes),
        mock.patch.object(lazy, "add_row_normals", _add_rows_with_holes),
        mock.patch.object(lazy, "round_to", lambda values, grid: values),
    ):
        yield
