"""What several tests need: per-unit gradients one unit at a time, and small private runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.capture import Capture, Captured, RowSparse
from sparsedp.sampling import BatchInfo

Gradients = dict[str, Tensor]


class Apply(nn.Module):
    """A module from a function: forward(*inputs) is function(self, *inputs)."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def unit_loss(output: Any) -> Tensor:
    """A sum over units of something that is not linear in the output."""
    output = output[0] if isinstance(output, tuple) else output
    return output.sin().sum() + output.square().sum() / 7


def one_by_one(
    module: nn.Module, inputs: Sequence[Tensor], loss: Callable[[Any], Tensor] = unit_loss
) -> list[Gradients]:
    """Every unit's gradient by ordinary autograd on that unit alone."""
    found = []
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for unit in range(inputs[0].shape[0]):
        value = loss(module(*[tensor[unit : unit + 1] for tensor in inputs]))
        grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        found.append({n: torch.zeros_like(p) if g is None else g.to_dense() for (n, p), g in zip(named.items(), grads)})
    return found


def batch_of(units: int) -> Callable[[], BatchInfo]:
    """What a loader would say of its current batch."""
    info = BatchInfo(units, units, True, True, 0)
    return lambda: info


def capture_uses(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss: Callable[[Any], Tensor] = unit_loss,
    batch: Callable[[], BatchInfo] | None = None,
) -> Captured:
    """The uses of one pass over `inputs`, whose examples are the units unless `batch` says otherwise.

    Whatever the module does, its graph must be gone afterwards: a use that holds on to it makes a cycle, some of them through
    the graph's own nodes, where not even the garbage collector finds them.
    """
    current = batch_of(inputs[0].shape[0]) if batch is None else batch
    capture = Capture(module, {n: p for n, p in module.named_parameters() if p.requires_grad}, current)
    recorded: list[weakref.ref[Tensor]] = []
    record = capture.record

    def watched(*args: Any) -> Tensor:
        out = record(*args)
        recorded.append(weakref.ref(out))
        return out

    capture.record = watched  # type: ignore[method-assign]
    capture.attach()
    gc.disable()
    try:
        loss(module(*inputs)).backward()
        found = capture.collect()
        assert not any(out() is not None for out in recorded), "a use holds on to the graph"
    finally:
        gc.enable()
        capture.detach()
    assert found is not None
    return found


def dense(total: Tensor | RowSparse, shape: torch.Size) -> Tensor:
    if isinstance(total, RowSparse):
        return total.values.new_zeros(shape).index_add_(0, total.rows, total.values.view(-1, *shape[1:]))
    return total.view(shape)


def assert_exact(
    module: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] = unit_loss, tolerance: float = 1e-9
) -> Captured:
    """Captured norms and weighted sums equal those of the one-unit-at-a-time loop, in float64."""
    module = module.double()
    doubled = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    wanted = one_by_one(module, doubled, loss)
    found = capture_uses(module, doubled, loss)
    assert_equal(module, found, wanted, tolerance)
    return found


def assert_equal(module: nn.Module, found: Captured, wanted: list[Gradients], tolerance: float = 1e-9) -> None:
    """The captured norms and weighted sums are those of `wanted`, every unit's gradient."""
    units = len(wanted)
    factors = torch.linspace(0.2, 1.7, units, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            assert name not in found.uses
            continue
        squares = torch.stack([gradient[name].square().sum() for gradient in wanted])
        total = sum(f * gradient[name] for f, gradient in zip(factors, wanted))
        assert isinstance(total, Tensor)
        if name not in found.uses:
            assert float(squares.max()) == 0, f"{name} has a gradient but no use"
            continue
        uses = found.uses[name]
        torch.testing.assert_close(uses.squared_norms(units), squares, rtol=tolerance, atol=tolerance)
        mine = dense(uses.weighted_sum(factors, parameter.shape), parameter.shape)
        torch.testing.assert_close(mine, total, rtol=tolerance, atol=tolerance)
        assert parameter.grad is None


def loader_of(*tensors: Tensor, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True, **options)


def make_private(
    module: nn.Module, loader: DataLoader, *, seed: int | None = 0, optimizer: torch.optim.Optimizer | None = None,
    noise_multiplier: float = 1.0, max_grad_norm: float = 1.0, **options: Any,
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:  # fmt: skip
    engine = sparsedp.PrivacyEngine(seed=seed)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    module, private, private_loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm, **options,
    )  # fmt: skip
    return engine, module, private, private_loader


class Clicks(nn.Module):
    """A small model with a table and dense layers."""

    def __init__(self, rows: int = 50, dim: int = 6, features: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.hidden = nn.Linear(dim + features, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        joined = torch.cat([self.table(ids), features], dim=-1)
        return self.out(torch.relu(self.hidden(joined))).squeeze(-1)


def clicks(count: int, rows: int = 50, features: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (count,), generator=generator)
    x = torch.randn(count, features, generator=generator)
    return ids, x, (x.sum(1) + 0.1 * (ids % 5) > 0).float()


def train(
    module: nn.Module, optimizer: Any, loader: Any, epochs: int = 1, each: Callable[[], None] | None = None
) -> None:
    for _ in range(epochs):
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            optimizer.step()
            if each is not None:
                each()
