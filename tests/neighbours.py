"""How much one unit moves what is released: by captured uses, and by whole steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.capture import Captured
from sparsedp.clipping import Clipping
from support import capture_uses, dense, unit_loss

CLIP = 0.5
Loop = Callable[[nn.Module, Any], Tensor]


def clipped_sum(found: Captured, module: nn.Module, clipping: Clipping) -> Tensor:
    squares = sum(uses.squared_norms(found.units) for uses in found.uses.values())
    assert isinstance(squares, Tensor)
    factors = clipping.factors(squares.sqrt())
    parts = []
    for name, parameter in module.named_parameters():
        if name in found.uses:
            parts.append(dense(found.uses[name].weighted_sum(factors, parameter.shape), parameter.shape).flatten())
        else:
            parts.append(torch.zeros(parameter.numel(), dtype=parameter.dtype))
    return torch.cat(parts)


def largest_influence(module: nn.Module, inputs: list[Tensor], clipping: Clipping, loss: Callable = unit_loss) -> float:
    """The most that leaving one unit out moves the clipped sum."""
    whole = clipped_sum(capture_uses(module, inputs, loss), module, clipping)
    worst = 0.0
    for unit in range(inputs[0].shape[0]):
        rest = [torch.cat([tensor[:unit], tensor[unit + 1 :]]) for tensor in inputs]
        without = clipped_sum(capture_uses(module, rest, loss), module, clipping)
        worst = max(worst, float((whole - without).norm()))
    return worst


def step_without_noise(
    module: nn.Module, data: tuple[Tensor, ...], loop: Loop, users: Any = None, **options: Any
) -> Tensor:
    """What one step without noise, over all units, moves the parameters by: the sum of clipped gradients at C = 1."""
    module = copy.deepcopy(module)
    before = torch.cat([p.detach().double().flatten() for p in module.parameters() if p.requires_grad])
    units = len(data[0]) if users is None else len(np.unique(users))
    if users is not None:
        options |= {"unit": "user", "users": users}
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=0).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*data), batch_size=units), noise_multiplier=0.0, max_grad_norm=1.0,
        loss_reduction="sum", **options,
    )  # fmt: skip
    for batch in loader:
        optimizer.zero_grad()
        loop(module, batch).backward()
        optimizer.step()
    return before - torch.cat([p.detach().double().flatten() for p in module.parameters() if p.requires_grad])


def contribution(module: nn.Module, data: tuple[Tensor, ...], loop: Loop, users: Any = None, **options: Any) -> float:
    """By how much the sum differs without unit 0, the first."""
    kept = torch.arange(len(data[0])) != 0 if users is None else torch.from_numpy(users != 0)
    less = tuple(tensor[kept] for tensor in data)
    others = None if users is None else users[kept.numpy()]
    whole = step_without_noise(module, data, loop, users, **options)
    return float((whole - step_without_noise(module, less, loop, others, **options)).norm())
