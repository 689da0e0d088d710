"""DP-SGD for sequence models as it was before phantom clipping, as baselines (DPFormer, section 4.2).

- per-example gradients: `torch.func` writes every unit's gradient out, then they are clipped and added up.
- ghost clipping: norms from activations and output gradients, layer by layer. A layer is an embedding of all M items for the
  logits, so its norm is <a a^T, De De^T> with De the units' (M, d) gradients and both products (M, M): O(B M^2). Tied tables are
  not supported, so the model has a second one. All other layers have this library's norms, and its sums: no second backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.speed.timing import Stopwatch
from sparsedp.capture import Capture, ParameterUses
from sparsedp.clipping import Clipping
from sparsedp.noise import GaussianNoise, RandomKey
from sparsedp.sampling import BatchInfo

Batch = Callable[[], tuple[Tensor, Tensor]]  # histories and targets, (B, L)


def unit_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Each unit's mean cross-entropy over its targets that are not 0, (B,), as plain PyTorch has it."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    valid = (target != 0).to(each.dtype)
    return (each * valid).sum(1) / valid.sum(1).clamp_min(1)


def add_unit_gradients(
    module: nn.Module, batch: tuple[Tensor, Tensor], clipping: Clipping, out: dict[str, Tensor], most: int
) -> None:
    """Adds the clipped sum to `out`, from gradients of as many units at a time as fit into `most` elements."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    buffers = dict(module.named_buffers())

    def loss(weights: dict[str, Tensor], history: Tensor, target: Tensor) -> Tensor:
        return unit_losses(functional_call(module, {**weights, **buffers}, (history[None],)), target[None])[0]

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    for s in _some(len(batch[0]), sum(p.numel() for p in parameters.values()), most):
        unit_gradients = gradients(parameters, batch[0][s], batch[1][s])
        squares = sum(torch.linalg.vector_norm(g.flatten(1), dim=1).double().square() for g in unit_gradients.values())
        assert isinstance(squares, Tensor)
        factors = clipping.factors(squares.sqrt())
        for name, g in unit_gradients.items():
            out[name].view(-1).addmv_(g.flatten(1).mT, factors.to(g.dtype))


def add_ghost(
    module: nn.Module, batch: tuple[Tensor, Tensor], clipping: Clipping, out: dict[str, Tensor], most: int,
    watch: Callable = nullcontext,
) -> None:  # fmt: skip
    """Adds the clipped sum to `out`. The module's `output_table` may have a single, linear use."""
    history, target = batch
    units = len(history)
    info = BatchInfo(units, units, True, True, 0)
    capture = Capture(module, dict(module.named_parameters()), lambda: info)
    capture.attach()
    try:
        with watch("forward"):
            losses = unit_losses(module(history), target)
        with watch("backward"):
            losses.sum().backward()
        captured = capture.collect()
    finally:
        capture.detach()
    assert captured is not None
    with watch("norms"), torch.no_grad():
        squares = torch.zeros(units, dtype=torch.float64)
        for name, uses in captured.uses.items():
            squares += (
                ghost_squares(uses, out[name].shape[1], most)
                if name == "output_table.weight"
                else uses.squared_norms(units)
            )
        factors = clipping.factors(squares.sqrt())
    with watch("sums"), torch.no_grad():
        for name, uses in captured.uses.items():
            uses.add_weighted_sum(out[name], factors.to(out[name].dtype))


def ghost_squares(uses: ParameterUses, width: int, most: int) -> Tensor:
    """Squared norms (B,) of an output table by ghost clipping's formula for embeddings, with M "inputs" for each unit."""
    if uses.builts:
        every = uses.builts[0].values.unflatten(1, (-1, width))
    else:
        every = uses.linears[0].grad.mT @ uses.linears[0].inputs  # (B, M, d)
    rows = torch.arange(every.shape[1])
    squares = torch.zeros(len(every), dtype=torch.float64)
    for s in _some(len(squares), 2 * len(rows) ** 2, most):
        of_items = every[s]
        products = of_items @ of_items.mT
        squares[s] = products.masked_fill_(rows[:, None] != rows, 0).sum((1, 2)).double()
    return squares


def _some(units: int, elements: int, most: int) -> Iterator[slice]:
    step = max(1, most // elements)
    for start in range(0, units, step):
        yield slice(start, min(start + step, units))


def dense_step(
    module: nn.Module, add: Callable, batch: Batch, watch: Stopwatch, most: int, *, lr: float = 0.01,
    noise_multiplier: float = 1.0, max_norm: float = 1.0,
) -> Callable[[], None]:  # fmt: skip
    """A step of DP-SGD with one of the two ways to the clipped sum."""
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr)
    buffers = {name: torch.empty_like(p, requires_grad=False) for name, p in parameters.items()}
    noise, steps = GaussianNoise(RandomKey.from_os()), count()
    clipping = Clipping(max_norm)

    def run() -> None:
        inputs = batch()
        with watch("noise"):
            noise.fill(dict(enumerate(buffers.values())), noise_multiplier * max_norm, next(steps))
        if add is add_ghost:
            add_ghost(module, inputs, clipping, buffers, most, watch)
        else:
            with watch("unit gradients"):
                add_unit_gradients(module, inputs, clipping, buffers, most)
        with watch("update"):
            for name, parameter in parameters.items():
                parameter.grad = buffers[name].div_(len(inputs[0]))
            optimizer.step()
        module.zero_grad(set_to_none=True)
        watch.lap()

    return run
