"""Normalisation: the activation is normalised without parameters, then scaled and shifted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.expressions import Expression
from sparsedp.capture.ops.elementwise import tap
from sparsedp.capture.ops.helpers import bind, names_of, require_functional
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, axis_rule, batch_first, use_rule
from sparsedp.capture.units import Mixed, UnitAxis


def _scale_and_shift(capture: CaptureForRules, normal: Tensor, weight: Any, bias: Any) -> Tensor:
    with capture.resumed():
        if weight is not None:
            normal = normal * weight
        return normal if bias is None else normal + bias


def _axis(capture: CaptureForRules, name: str, source: Tensor, trailing: int) -> UnitAxis:
    """Where the units of an activation are that is normalised: not among the `trailing` dimensions."""
    axis = capture.axis(source, name, "of the layer")
    if axis.dim >= source.ndim - trailing:
        raise capture.refuse(name, "of the layer", "it normalises over the units of the batch", "keep the batch first")
    return axis


@axis_rule("layer_norm", "rms_norm")
def _trailing_norm(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    trailing = _trailing(call.argument(1, "normalized_shape"))
    return axis if axis.dim < source.ndim - trailing else Mixed(call.name)


def _trailing(shape: Any) -> int:
    """How many dimensions a `normalized_shape` stands for, the last ones."""
    return len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1


@use_rule("layer_norm")
def _layer_norm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
    return _over_trailing(capture, name, F.layer_norm, bound)


@use_rule("rms_norm")
def _rms_norm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    return _over_trailing(capture, name, F.rms_norm, bound)


def _over_trailing(
    capture: CaptureForRules, name: str, function: Callable[..., Tensor], bound: dict[str, Any]
) -> Tensor:
    """A normalisation over the last dimensions, with a weight and a bias for each of their elements."""
    x, weight, bias = bound.pop("input"), bound.pop("weight", None), bound.pop("bias", None)
    normalise = functools.partial(function, **bound)
    axis = _axis(capture, name, x, _trailing(bound["normalized_shape"]))
    scale, shift = capture.expression(weight), capture.expression(bias)
    is_alike = all(parameter is None or parameter.dtype == x.dtype for parameter in (weight, bias))
    if scale is None or (shift is None) != (bias is None) or not is_alike or not x.requires_grad:
        return _scale_and_shift(capture, capture.place(normalise(x), axis), weight, bias)

    def tapped(expression: Expression | None) -> Tensor | None:
        return None if expression is None else tap(capture, name, expression, axis, x.ndim, x.shape[axis.dim])

    out = _Normalised.apply(normalise, x, tapped(scale), tapped(shift))  # type: ignore[no-untyped-call]
    return capture.place(out, axis)


class _Normalised(torch.autograd.Function):
    """`normalise(x)` times a weight, plus a bias if there is one.

    It keeps no more than torch's own does, x: what is normalised is made again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, normalise: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.normalise, ctx.shape_of_bias = normalise, None if bias is None else bias.shape
        ctx.save_for_backward(x, weight)
        out = normalise(x).mul_(weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            normal = ctx.normalise(x)
        of_weight = (grad * normal.detach()).sum_to_size(weight.shape)
        (of_x,) = torch.autograd.grad(normal, x, grad * weight)
        of_bias = None if ctx.shape_of_bias is None else grad.sum_to_size(ctx.shape_of_bias)
        return None, of_x, of_weight, of_bias


axis_rule("group_norm", "instance_norm", "batch_norm", "local_response_norm")(batch_first)


def _by_channel(capture: CaptureForRules, parameter: Any, ndim: int) -> Any:
    """(C,) as (C, 1, ..., 1), to meet (B, C, ...)."""
    if parameter is None:
        return None
    with capture.resumed():
        return parameter.reshape(-1, *(1,) * (ndim - 2))


def _normalised(capture: CaptureForRules, name: str, function: Callable[..., Tensor], bound: dict[str, Any]) -> Tensor:
    """A normalisation of (B, C, ...), with a weight and a bias per channel."""
    x = bound["input"]
    weight, bias = (_by_channel(capture, bound.pop(key, None), x.ndim) for key in ("weight", "bias"))
    axis = _axis(capture, name, x, x.ndim - 1)
    return _scale_and_shift(capture, capture.place(function(**bound), axis), weight, bias)


@use_rule("group_norm")
def _group_norm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    bound = bind(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    return _normalised(capture, name, F.group_norm, bound)


@use_rule("instance_norm")
def _instance_norm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    require_functional(capture, name, func, F.instance_norm, args)
    order = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    bound = bind(order, args, kwargs)
    names = names_of(capture, [t for t in (bound.get("weight"), bound.get("bias")) if t is not None])
    if bound.get("use_input_stats", True) and bound.get("running_mean") is not None:
        raise capture.refuse(
            name,
            names,
            "it stores running statistics of the batch without noise",
            "set track_running_stats=False",
        )
    return _normalised(capture, name, F.instance_norm, bound)


@use_rule("batch_norm")
def _batch_norm(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    require_functional(capture, name, func, F.batch_norm, args)
    order = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    bound = bind(order, args, kwargs)
    if bound.get("training", False) or bound["running_mean"] is None:
        names = names_of(capture, [t for t in (bound.get("weight"), bound.get("bias")) if t is not None])
        raise capture.refuse(
            name,
            names,
            "its statistics mix the units of the batch",
            "use GroupNorm or LayerNorm, or put it in eval()",
        )
    return _normalised(capture, name, F.batch_norm, bound)


# Operations that normalise over the batch, and the argument that says whether they do, which comes sixth.
BATCH_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def takes_batch_statistics(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether one of these operations normalises over the batch, or stores statistics of it."""
    uses_batch = kwargs.get(BATCH_STATISTICS[name], args[5] if len(args) > 5 else name != "batch_norm")
    stored = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
    return bool(uses_batch and (name == "batch_norm" or stored is not None))
