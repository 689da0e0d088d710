"""Reductions, and what acts along a dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.ops.elementwise import aligned
from sparsedp.capture.ops.registry import VALUES_IN_PLACE, Call, axis_rule
from sparsedp.capture.units import Mixed, UnitAxis

# Position of the dimension among the arguments, and its default: "all" reduces everything.
REDUCTIONS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("sum", "mean", "std", "var", "amax", "amin", "prod", "logsumexp", "any", "all", "nanmean", "nansum", "std_mean",
         "var_mean", "argmax", "argmin", "count_nonzero", "max", "min", "median", "nanmedian", "aminmax"), (1, "all"),
    ),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile"), (2, "all")),
    "kthvalue": (2, -1),
    "mode": (1, -1),
}  # fmt: skip

ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), (1, None)
    ),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1)),
    "topk": (2, -1),
    "normalize": (2, 1),
    "gumbel_softmax": (4, -1),
    "diff": (2, -1),
}

ALONG |= dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), (2, -1))

ALONG |= dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), (2, (-2, -1)))

ALONG |= dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), (2, "all"))

_SHUFFLING: dict[str, tuple[int, Any]] = {
    "flip": (1, None),
    "roll": (2, None),
    "rot90": (2, (0, 1)),
    "fft_fftshift": (1, "all"),
    "fft_ifftshift": (1, "all"),
}


def _dims(call: Call, position: int, default: Any, ndim: int) -> set[int] | None:
    """The dimensions that an operation acts along; None if that cannot be told."""
    value = call.argument(position, "dim", "axis", "dims", default=default)
    if call.name == "flip" and len(call.args) > 2:
        value = list(call.args[1:])
    if value is None or (isinstance(value, (tuple, list)) and not value):
        value = default
    if value == "all":
        return set(range(ndim))
    if isinstance(value, int) and not isinstance(value, bool):
        return {value % max(ndim, 1)}
    if isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        return {v % max(ndim, 1) for v in value}
    return None


@axis_rule(*REDUCTIONS, joint=True)
def _reduction(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    if call.name in ("max", "min") and isinstance(call.argument(1, "other"), Tensor):
        return aligned(call, source, axis)
    dims = _dims(call, *REDUCTIONS[call.name], source.ndim)
    if dims is None:
        return None
    if axis.dim in dims:
        return Mixed(call.name)
    if call.name in ("quantile", "nanquantile") and torch.as_tensor(call.argument(1, "q")).ndim:
        return None  # several quantiles come first, on a dimension of their own
    return axis if call.out.ndim == source.ndim else axis.shifted(-sum(1 for d in dims if d < axis.dim))


@axis_rule(*ALONG)
def _along(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    dims = _dims(call, *ALONG[call.name], source.ndim)
    if dims is None:
        return None
    return Mixed(call.name) if axis.dim in dims else axis


VALUES_IN_PLACE.update(("cumsum", "cumprod"))


@axis_rule(*_SHUFFLING)
def _shuffling(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    dims = _dims(call, *_SHUFFLING[call.name], source.ndim)
    return Mixed(call.name) if dims is None or axis.dim in dims else axis


@axis_rule("fliplr", "flipud")
def _flip_fixed(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return Mixed(call.name) if axis.dim == (1 if call.name == "fliplr" else 0) else axis


@axis_rule("cosine_similarity", "pairwise_distance", joint=True)
def _compare(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed | None:
    default = 1 if call.name == "cosine_similarity" else -1
    ndim = max(value.ndim for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
    dim = (call.argument(2, "dim", default=default) if call.name == "cosine_similarity" else -1) % ndim
    moved = axis.shifted(ndim - source.ndim)
    if moved.dim == dim:
        return Mixed(call.name)
    return moved if call.out.ndim == ndim else moved.shifted(-1 if dim < moved.dim else 0)


@axis_rule("multinomial", "_sample_dirichlet")
def _rows_of_weights(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    """Draws by the weights in each row."""
    return axis if axis.dim < source.ndim - 1 else Mixed(call.name)
