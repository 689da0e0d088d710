"""DP-SGD in the forms that were published before fast norms, as baselines (LazyDP, section 2.5).

- (B) every unit's gradient is written out, clipped and added up (Abadi et al. 2016).
- (R) every unit's gradient is formed for its norm alone, one layer at a time; a second backward pass, over the losses
  times their clip factors, gives the clipped sum (Lee and Kifer 2021).

The third form, (F), norms without gradients, is `sparsedp.DPSGD`, which needs no second backward pass either. For a
table, a unit's gradient is written out on the rows that the unit uses: on the whole table it would not fit anywhere.
All three end alike: noise on every row, to which the clipped sum is added, and a dense update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.speed.timing import Stopwatch
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError
from sparsedp.noise import GaussianNoise, RandomKey

# Bytes that the units' written-out gradients may take. (B) takes fewer units at a time rather than more memory.
MATERIALISED = 1 << 30
# The same for a single layer's, which (R) throws away at once; best if they stay in the processor's cache.
_TEMPORARY = 1 << 23

Losses = Callable[[], Tensor]  # runs the module on a batch: the loss of each unit, (B,)
Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Call:
    """One call of a layer with parameters in a forward pass."""

    layer: nn.Module
    weight: str
    bias: str | None
    inputs: Tensor  # (B, I), or the ids of a table, (B, L)
    output: Tensor  # (B, O)

    @property
    def elements(self) -> int:
        """Elements of one unit's gradient of the weight, written out; 0 for a table, whose rows take little."""
        return self.inputs.shape[1] * self.output.shape[1] if isinstance(self.layer, nn.Linear) else 0


class _Rows(NamedTuple):
    """Gradients of units on rows of a table: each (unit, row) once."""

    units: Tensor  # (n,)
    rows: Tensor  # (n,)
    values: Tensor  # (n, dim)


def add_materialised(
    module: nn.Module, losses: Losses, clipping: Clipping, out: Mapping[str, Tensor], divisor: float = 1.0,
    stage: Stage = nullcontext, room: Tensor | None = None,
) -> None:  # fmt: skip
    """(B): adds the clipped sum over `divisor` to `out`, a tensor of each parameter's shape.

    `room` is memory to write the units' gradients into, a vector: using it again saves the time of getting it.
    """
    with stage("forward"):
        calls, unit_losses = _watched(module, losses)
    with stage("backward"):
        grads = torch.autograd.grad(unit_losses.sum(), [call.output for call in calls])
    room = grads[0].new_empty(MATERIALISED // grads[0].element_size()) if room is None else room
    with torch.no_grad():
        for part in _parts(unit_losses.numel(), room, calls):
            _add_part(calls, [grad[part] for grad in grads], part, room, clipping, out, divisor, stage)


def _add_part(
    calls: list[_Call], grads: list[Tensor], part: slice, room: Tensor, clipping: Clipping, out: Mapping[str, Tensor],
    divisor: float, stage: Stage,
) -> None:  # fmt: skip
    """(B) for some of the units."""
    with stage("unit gradients"):
        sizes = [call.elements * grads[0].shape[0] for call in calls]
        rooms = room[: sum(sizes)].split(sizes)
        written = [
            _unit_gradients(call, call.inputs[part], grad, space) for call, grad, space in zip(calls, grads, rooms)
        ]
    with stage("norms"):
        squares = torch.zeros(grads[0].shape[0], dtype=torch.float64)
        for call, grad, mine in zip(calls, grads, written):
            _add_squares(squares, mine)
            if call.bias is not None:
                _add_squares(squares, grad)
        factors = clipping.factors(squares.sqrt()) / divisor
    with stage("sums"):
        for call, grad, mine in zip(calls, grads, written):
            scale = factors.to(grad.dtype)
            if isinstance(mine, _Rows):
                out[call.weight].index_add_(0, mine.rows, mine.values * scale[mine.units, None])
            else:
                out[call.weight].view(-1).addmv_(mine.flatten(1).mT, scale)
            if call.bias is not None:
                out[call.bias].addmv_(grad.mT, scale)


def add_reweighted(
    module: nn.Module, losses: Losses, clipping: Clipping, out: Mapping[str, Tensor], divisor: float = 1.0,
    stage: Stage = nullcontext, room: Tensor | None = None,
) -> None:  # fmt: skip
    """(R): as `add_materialised`. Tables need `sparse=True`, or autograd makes dense gradients of them."""
    with stage("forward"):
        calls, unit_losses = _watched(module, losses)
    with stage("backward"):
        grads = torch.autograd.grad(unit_losses.sum(), [call.output for call in calls], retain_graph=True)
    room = grads[0].new_empty(_TEMPORARY // grads[0].element_size()) if room is None else room
    with stage("norms"), torch.no_grad():
        squares = torch.zeros(unit_losses.numel(), dtype=torch.float64)
        for call, grad in zip(calls, grads):
            for part in _parts(unit_losses.numel(), room, [call]):
                _add_squares(squares[part], _unit_gradients(call, call.inputs[part], grad[part], room))
            if call.bias is not None:
                _add_squares(squares, grad)
        factors = clipping.factors(squares.sqrt()) / divisor
    with stage("second backward"):
        for name, parameter in module.named_parameters():
            parameter.grad = out[name]  # autograd adds to it in place
        (unit_losses * factors.to(unit_losses.dtype)).sum().backward()
        module.zero_grad(set_to_none=True)


def _parts(units: int, room: Tensor, calls: list[_Call]) -> Iterator[slice]:
    """Parts of the batch for whose written-out gradients there is room."""
    each = max(1, sum(call.elements for call in calls))
    size = room.numel() // each
    if size == 0:
        raise ValueError(f"room has {room.numel()} elements; a unit's gradient needs {each}")
    for start in range(0, units, size):
        yield slice(start, min(start + size, units))


def _unit_gradients(call: _Call, inputs: Tensor, grad: Tensor, room: Tensor) -> Tensor | _Rows:
    """Every unit's gradient of the layer's weight: (B, O, I), or on the rows of a table that the units use."""
    if isinstance(call.layer, nn.Linear):
        shape = (*grad.shape, inputs.shape[1])
        out = room[: grad.shape[0] * call.elements].view(shape)
        return torch.mul(grad[:, :, None], inputs[:, None, :], out=out)
    units, length = inputs.shape
    whose = torch.arange(units).repeat_interleave(length)
    ids = inputs.reshape(-1)
    if length == 1:
        return _Rows(whose, ids, grad)
    rows = call.layer.num_embeddings
    assert isinstance(rows, int)
    keys, inverse = torch.unique(whose * rows + ids, return_inverse=True)
    values = grad.new_zeros(keys.numel(), grad.shape[1]).index_add_(0, inverse, grad[whose])
    return _Rows(keys // rows, keys % rows, values)


def _add_squares(squares: Tensor, gradients: Tensor | _Rows) -> None:
    """Adds every unit's squared norm to `squares` (B,)."""
    if isinstance(gradients, _Rows):
        norms = torch.linalg.vector_norm(gradients.values, dim=1).double()
        squares.index_add_(0, gradients.units, norms.square())
    else:
        squares += torch.linalg.vector_norm(gradients.flatten(1), dim=1).double().square()


def _watched(module: nn.Module, losses: Losses) -> tuple[list[_Call], Tensor]:
    """Runs the module; the calls of its layers with parameters, and the units' losses."""
    calls: list[_Call] = []
    handles = []

    def watch(name: str) -> Callable[[nn.Module, tuple, Tensor], None]:
        def hook(layer: nn.Module, args: tuple, output: Tensor) -> None:
            if any(call.layer is layer for call in calls):
                raise UnsupportedError(f"Layer '{name}' is called twice; this baseline takes one call of each layer.")
            bias = f"{name}.bias" if getattr(layer, "bias", None) is not None else None
            inputs = args[0][:, None] if isinstance(layer, nn.Embedding) else args[0]
            if inputs.ndim != 2 or output.ndim != 2:
                raise UnsupportedError(f"Layer '{name}' has several positions in a unit; this baseline takes one.")
            calls.append(_Call(layer, f"{name}.weight", bias, inputs.detach(), output))

        return hook

    try:
        for name, layer in module.named_modules():
            if any(True for _ in layer.parameters(recurse=False)):
                _refuse(name, layer)
                handles.append(layer.register_forward_hook(watch(name)))
        return calls, losses()
    finally:
        for handle in handles:
            handle.remove()


def _refuse(name: str, layer: nn.Module) -> None:
    plain_bag = isinstance(layer, nn.EmbeddingBag) and layer.mode == "sum" and layer.padding_idx is None
    plain_table = isinstance(layer, nn.Embedding) and layer.padding_idx is None
    if not (plain_bag or plain_table or isinstance(layer, nn.Linear)):
        raise UnsupportedError(
            f"Layer '{name}' ({type(layer).__name__}): these baselines take nn.Linear, nn.Embedding and nn.EmbeddingBag "
            "with mode 'sum', without padding."
        )


def dense_step(
    module: nn.Module,
    losses: Losses,
    form: Literal["B", "R"],
    *,
    units: int,
    buffers: Mapping[str, Tensor],
    watch: Stopwatch,
    lr: float = 0.01,
    noise_multiplier: float = 1.0,
    max_norm: float = 1.0,
) -> Callable[[], None]:
    """A step of DP-SGD in one of the two forms.

    `buffers` has a tensor of each parameter's shape, which steps of several modules may share: nothing in it lasts.
    """
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr)
    noise, steps = GaussianNoise(RandomKey.from_os()), count()
    add, size = (add_materialised, MATERIALISED) if form == "B" else (add_reweighted, _TEMPORARY)
    room = torch.empty(size // 4)

    def run() -> None:
        with watch("noise"):
            noise.fill(dict(enumerate(buffers.values())), noise_multiplier * max_norm / units, next(steps))
        add(module, losses, Clipping(max_norm), buffers, float(units), watch, room)
        with watch("update"):
            for name, parameter in parameters.items():
                parameter.grad = buffers[name]
            optimizer.step()
        module.zero_grad(set_to_none=True)
        watch.lap()

    return run
