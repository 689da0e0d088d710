"""What several packages' cases need: examples, losses, and stand-ins for what mixes units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def drawn(*shape: int, low: int = 0, high: int, seed: int = 0) -> Tensor:
    """Whole numbers from low to high - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clicks(n: int) -> Tensor:
    return drawn(n, high=2, seed=99).float()


def click_loss(probability: Tensor, target: Tensor) -> Tensor:
    """Of a model that returns probabilities, (n,) or (n, 1)."""
    return nn.functional.binary_cross_entropy(probability.reshape(target.shape), target.to(probability.dtype))


def logit_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.reshape(target.shape), target.to(logits.dtype))


def square_loss(output: Any, target: Tensor) -> Tensor:
    """Of a model that returns a representation, (n, ...): its mean square distance from a number of the unit's own."""
    shifted = output - target.to(output.dtype).reshape(-1, *[1] * (output.dim() - 1))
    return shifted.square().mean()


class AsForward(nn.Module):
    """A model and the way in which it is called: forward(*inputs) is call(model, *inputs)."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.call(self.model, *inputs, **named)


class PlainScale(nn.Module):
    """What a user puts in the place of BatchNorm: a learned scale and shift of each channel (axis 1)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


def without_batch_norm(module: nn.Module) -> nn.Module:
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            parent = module.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], PlainScale(part.num_features))
    return module
