"""Convolutions: linear maps of the patches of their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.capture import Capture
from sparsedp.capture.expressions import Expression, Placed, place_built, place_linear
from sparsedp.capture.rules.registry import NotThisForm, bind, plain, require_small, rule
from sparsedp.capture.tracking import UnitAxis


@rule("conv1d", "conv2d")
def _conv(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, kwargs)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    spatial = 1 if name == "conv1d" else 2
    if not capture.is_data(x) or capture.is_data(weight) or x.ndim != spatial + 2:
        raise NotThisForm
    kernel, shift = capture.expression(weight), capture.expression(bias)
    names = ", ".join(e.names for e in (kernel, shift) if e is not None)
    if capture.axis(x, name, names) != UnitAxis(0) or x.shape[0] != capture.units:
        raise capture.refuse(name, names, "units are not on axis 0 of its input", "keep the batch first")
    if kernel is not None and (not kernel.is_view or not kernel.tensor.is_contiguous()):
        require_small(capture, name, kernel)
    stride, dilation = _pair(bound.get("stride", 1), spatial), _pair(bound.get("dilation", 1), spatial)
    groups = bound.get("groups", 1)
    before, after = _padding(bound.get("padding", 0), weight.shape[2:], dilation, spatial)
    padded = F.pad(x, [p for b, a in zip(reversed(before), reversed(after)) for p in (b, a)]) if any(after) else x
    out = func(padded, plain(capture, weight), plain(capture, bias), stride, 0, dilation, groups)
    inputs = capture.keep(padded, name, names)

    def finish(grad: Tensor) -> Placed:
        g = grad.flatten(2)  # (B, O, P)
        placed: Placed = [] if shift is None else place_built(shift, g.sum(2))
        if kernel is None:
            return placed
        patches = _patches(inputs.get(), weight.shape[2:], stride, dilation)  # (B, C * window, P)
        return placed + _place_kernel(kernel, patches, g, groups)

    return capture.record(out, finish, UnitAxis(0))


def _patches(x: Tensor, window: Sequence[int], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    if x.ndim == 3:  # a signal is an image of height one
        return F.unfold(x[:, :, None], (1, *window), (1, *dilation), 0, (1, *stride))
    return F.unfold(x, tuple(window), dilation, 0, stride)


def _place_kernel(kernel: Expression, patches: Tensor, grad: Tensor, groups: int) -> Placed:
    """Each group of output channels is a linear map of its own input channels."""
    weight = kernel.tensor
    a, g = patches.unflatten(1, (groups, -1)), grad.unflatten(1, (groups, -1))
    if groups > 1 and kernel.small:
        built = torch.einsum("bgop,bgip->bgoi", g, a)
        return place_built(kernel, built.reshape(len(grad), *weight.shape))
    rows = weight.shape[0] // groups
    flat = weight.view(weight.shape[0], -1)
    placed: Placed = []
    for group in range(groups):
        part = Expression(flat[group * rows : (group + 1) * rows], kernel.parameters)
        placed += place_linear(part, a[:, group].mT, g[:, group].mT)
    return placed


def _pair(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count // len(value))


def _padding(
    padding: Any, size: Sequence[int], dilation: tuple[int, ...], count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, size)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return _pair(padding, count), _pair(padding, count)
