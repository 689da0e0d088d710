"""Trials of code that torch does not show: it runs again, with some units exchanged for others, and is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.units import UnitAxis


class Outcome(NamedTuple):
    outputs: list[Tensor | None]
    grads: list[Tensor | None]  # of the inputs


@dataclass(frozen=True)
class Trial:
    """A function that runs again. `inputs` are copies of its tensors, as they were before it ran first."""

    function: Callable
    args: tuple  # with `inputs` in their places
    inputs: list[Tensor]
    input_axes: list[UnitAxis | None]
    output_axes: list[UnitAxis | None]
    units: int
    is_first: bool  # at this place in the module

    def run(self, inputs: list[Tensor], grads: list[Tensor | None]) -> Outcome:
        """The outputs for these inputs, and the inputs' gradients for `grads` of the outputs."""
        leaves = [copied(tensor, was.requires_grad) for tensor, was in zip(inputs, self.inputs)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            passed = iter([leaf.clone() for leaf in leaves])  # it may change them in place, which leaves do not allow
            outputs = list(tensors_in(self.function(*with_tensors(self.args, passed))))
        made = [(out, grad.clone()) for out, grad in zip(outputs, grads) if out.requires_grad and grad is not None]
        ends, weights = [out for out, _ in made], [grad for _, grad in made]
        grads_of_leaves = iter(
            torch.autograd.grad(ends, wanted, weights, allow_unused=True) if made else [None] * len(wanted)
        )
        back = [next(grads_of_leaves) if leaf.requires_grad else None for leaf in leaves]
        return Outcome([out.detach() for out in outputs], back)


def copied(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _unit_of(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The unit of each index along the dimension that has the units."""
    return torch.arange(tensor.shape[axis.dim]) // axis.inner % units


def exchanged(tensor: Tensor, axis: UnitAxis | None, source: Tensor) -> Tensor:
    """The tensor with the values of unit source[u] for unit u: values that the function surely takes."""
    if axis is None:
        return tensor
    unit = _unit_of(tensor, axis, len(source))
    index = torch.arange(tensor.shape[axis.dim]) + (source[unit] - unit) * axis.inner
    return tensor.index_select(axis.dim, index.to(tensor.device))


def joined(tensor: Tensor, others: Tensor, axis: UnitAxis, kept: Tensor) -> Tensor:
    """The kept units' parts of `tensor`, and all others' of `others`."""
    is_kept = kept[_unit_of(tensor, axis, len(kept))].to(tensor.device)
    return torch.where(is_kept.view(-1, *(1,) * (tensor.ndim - 1 - axis.dim)), tensor, others)


def _by_unit(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """(units, elements of a unit)"""
    return tensor.unflatten(axis.dim, (-1, units, axis.inner)).movedim(axis.dim + 1, 0).flatten(1)


def unchanged_units(tensor: Tensor | None, other: Tensor | None, axis: UnitAxis, kept: Tensor) -> bool:
    """Whether the kept units' parts of two results are the same, each but for its own last digits."""
    if tensor is None or other is None:
        return tensor is other
    units = len(kept)
    if tensor.shape != other.shape or tensor.dtype != other.dtype or not axis.fits(tensor.shape, units):
        return False
    if not tensor.numel():
        return True
    rows = kept.to(tensor.device)
    mine, theirs = _by_unit(tensor, axis, units)[rows], _by_unit(other, axis, units)[rows]
    if not tensor.is_floating_point():
        return torch.equal(mine, theirs)
    tolerance = 16 * torch.finfo(tensor.dtype).eps * mine.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)
    is_same = (mine == theirs) | ((mine - theirs).abs() <= tolerance) | (mine.isnan() & theirs.isnan())
    return bool(is_same.all())


def unchanged(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results are the same, but for the last digits."""
    if tensor is None or other is None:
        return tensor is other
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.equal(tensor, other)
    atol = 16 * torch.finfo(tensor.dtype).eps * float(tensor.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(tensor, other, rtol=0, atol=atol, equal_nan=True)
