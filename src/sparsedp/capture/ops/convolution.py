"""Convolutions, which are linear maps of the patches of their input, and what else is done to images and signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.expressions import Expression, Placed, place_built, place_linear
from sparsedp.capture.ops.helpers import bind, plain, require_affordable
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, NotThisForm, axis_rule, batch_first, use_rule
from sparsedp.capture.units import Mixed, UnitAxis

_SPATIAL = {
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("conv", "conv_transpose")},
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")},
    **{f"fractional_max_pool{n}d{kind}": n for n in (2, 3) for kind in ("", "_with_indices")},
    **{f"{kind}max_pool{n}d_with_indices": n for n in (1, 2, 3) for kind in ("", "adaptive_")},
    "lp_pool1d": 1, "lp_pool2d": 2, "pixel_shuffle": 2, "pixel_unshuffle": 2,
}  # fmt: skip


@axis_rule(*_SPATIAL)
def _spatial(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    dims = _SPATIAL[call.name]
    if "pool" in call.name:  # each channel by itself
        return axis if axis.dim < source.ndim - dims else None
    return axis if axis.dim == 0 and source.ndim == dims + 2 else None


@use_rule("conv1d", "conv2d")
def _conv(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
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
        require_affordable(capture, name, kernel)
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
    if kernel.ids is None and not kernel.is_view:  # a parameter itself changes with each step
        kernel.require_unchanged()
    placed: Placed = []
    for group in range(groups):
        with torch.enable_grad():
            part = kernel.viewed(weight[group * rows : (group + 1) * rows].reshape(rows, -1))
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


@axis_rule("unfold")
def _unfold(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    """`F.unfold`, of images, or `Tensor.unfold`, along a dimension."""
    if "dilation" in call.kwargs:
        return axis if axis.dim == 0 and source.ndim == 4 else None
    dim = call.argument(1, "dimension") % source.ndim
    return Mixed(call.name) if dim == axis.dim else axis


@axis_rule("fold")
def _fold(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis.dim == 0 and source.ndim == 3 else None


@axis_rule("grid_sample", "affine_grid", joint=True)
def _sampled_images(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis == UnitAxis(0) else None


axis_rule("interpolate", "upsample", "channel_shuffle")(batch_first)
