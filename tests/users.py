"""Users of several tests: batches and loaders with users, and the reference by single examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import AdaFEST
from sparsedp.capture import Captured
from sparsedp.noise import RandomKey
from sparsedp.sampling import BatchInfo
from support import Clicks, Gradients, capture_uses, clicks, dense, make_private, one_by_one, unit_loss

KEY = RandomKey.from_seed(0)
CLIP = 0.5


MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    "lazydp": sparsedp.LazyDP,
    "eana": sparsedp.EANA,
    "fest": lambda: sparsedp.FEST(k=20, epsilon=1.0, split="tables"),
    "adafest": lambda: AdaFEST(threshold=0.5, noise_ratio=2.0),
    "adafest+": lambda: AdaFEST(threshold=0.5, noise_ratio=2.0, preselect=sparsedp.FEST(k=20, split="tables")),
    "exponential": lambda: sparsedp.ExponentialSelection(k=10, epsilon=1.0),
}


def batch_of_users(owners: Tensor, units: int) -> BatchInfo:
    return BatchInfo(units, units, True, True, 0, owners=owners)


def capture_users(
    module: nn.Module, inputs: Sequence[Tensor], owners: Sequence[int] | Tensor, units: int,
    loss: Callable[[Any], Tensor] = unit_loss,
) -> Captured:  # fmt: skip
    info = batch_of_users(torch.as_tensor(owners, dtype=torch.long), units)
    found = capture_uses(module, inputs, loss, lambda: info)
    assert found.units == units and found.examples == len(inputs[0])
    return found


def summed(examples: list[Gradients], owners: Sequence[int] | Tensor, units: int) -> list[Gradients]:
    """Each user's gradient: the sum of those of their examples."""
    totals = [{name: torch.zeros_like(value) for name, value in examples[0].items()} for _ in range(units)]
    for example, owner in zip(examples, torch.as_tensor(owners).tolist()):
        for name, value in example.items():
            totals[owner][name] += value
    return totals


def assert_exact(
    module: nn.Module, inputs: Sequence[Tensor], owners: Sequence[int] | Tensor, units: int,
    loss: Callable[[Any], Tensor] = unit_loss, tolerance: float = 1e-8,
) -> Captured:  # fmt: skip
    """Norms and weighted sums of users equal those of a float64 loop over single examples."""
    module = module.double()
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    wanted = summed(one_by_one(module, inputs, loss), owners, units)
    found = capture_users(module, inputs, owners, units, loss)
    factors = torch.linspace(0.2, 1.7, units, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        squares = torch.stack([gradient[name].square().sum() for gradient in wanted])
        if name not in found.uses:
            assert float(squares.max()) == 0, f"{name} has a gradient but no use"
            continue
        uses = found.uses[name]
        norms = found.squared_norms(uses)
        assert norms.shape == (units,) and norms.dtype == torch.float64
        torch.testing.assert_close(norms, squares, rtol=tolerance, atol=tolerance)
        total = sum(factor * gradient[name] for factor, gradient in zip(factors, wanted))
        mine = dense(uses.weighted_sum(found.each(factors), parameter.shape), parameter.shape)
        torch.testing.assert_close(mine, total, rtol=tolerance, atol=tolerance)
    return found


def with_users(batch_size: int = 4, users: int = 12, examples: int = 40, **options: Any) -> DataLoader:
    """Clicks of some users, interleaved; each has at least one."""
    data: Any = TensorDataset(*clicks(examples))
    data.users = np.random.default_rng(0).permutation(np.arange(examples) ** 2 % 37 % users)
    data.users[:users] = np.arange(users)
    return DataLoader(data, batch_size=batch_size, shuffle=True, **options)


def start(
    mechanism: str = "dpsgd", workers: int = 0, module: nn.Module | None = None, batch_size: int = 4, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    return make_private(
        Clicks() if module is None else module, with_users(batch_size, num_workers=workers), unit="user",
        mechanism=MECHANISMS[mechanism](), **options,
    )  # fmt: skip


def steps(run: tuple, count: int, reduction: str = "mean") -> None:
    engine, module, optimizer, loader = run
    until = engine.ledger.steps + count
    while engine.ledger.steps < until:
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y, reduction=reduction).backward()
            optimizer.step()
            if engine.ledger.steps == until:
                break


class Tables(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(6, 2), nn.Embedding(5, 2)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        h = self.a(ids).sum(1) + self.b(ids[:, 0] % 5)
        return h @ self.b.weight.T if self.tied else h
