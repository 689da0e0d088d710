"""Attention. `F.multi_head_attention_forward` has a path of its own, in operations that capture sees one by one.

torch's function is composite and fused in places, so its parameters' uses are not visible from outside. `attention` takes
the same arguments and gives the same result, batch first inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.ops.helpers import bind
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import Call, NotThisForm, axis_rule, use_rule
from sparsedp.capture.units import Mixed, UnitAxis
from sparsedp.errors import UnsupportedError


@axis_rule("scaled_dot_product_attention", joint=True)
def _scaled_dot_product_axis(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    is_mask = source is call.argument(3, "attn_mask")
    if axis.dim >= source.ndim - 2 and not is_mask:
        return Mixed(call.name)
    return axis.shifted(call.out.ndim - source.ndim)


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@use_rule("scaled_dot_product_attention")
def _scaled_dot_product(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """With a mask that is made of parameters, such as a bias by relative position, in operations that have rules."""
    bound = bind(_ARGUMENTS, args, kwargs)
    query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    made_of_parameters = [capture.expression(tensor) is not None for tensor in (query, key, value, mask)]
    if made_of_parameters != [False, False, False, True] or bound.get("enable_gqa") or bound.get("is_causal"):
        raise NotThisForm
    scale, dropout = bound.get("scale"), bound.get("dropout_p") or 0.0
    with capture.resumed():
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        weights = (scores + mask).softmax(-1)
        return (F.dropout(weights, dropout) if dropout else weights) @ value


@use_rule("multi_head_attention_forward")
def _attention(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    with capture.resumed():
        return attention(*args, **kwargs)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask (True: hidden) as one that is added to the scores."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _projections(
    query: Tensor, key: Tensor, value: Tensor, packed: Tensor | None, separate: tuple[Tensor | None, ...],
    bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if packed is None:
        weights: tuple[Tensor, ...] = tuple(weight for weight in separate if weight is not None)
    elif query is key and key is value:
        q, k, v = F.linear(query, packed, bias).chunk(3, dim=-1)
        return q, k, v
    else:
        weights = packed.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    return q, k, v


def attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None, static_v: Tensor | None = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query (Lq, B, E), key and value (Lk, B, .); returns (Lq, B, E) and the attention weights, if asked for."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise UnsupportedError(
            "nn.MultiheadAttention on unbatched input or with static keys is not captured. Give it a batch axis."
        )
    same = query is key and key is value
    first = query.transpose(0, 1)
    pair = (first, first) if same else (key.transpose(0, 1), value.transpose(0, 1))
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    packed = None if use_separate_proj_weight else in_proj_weight
    q, k, v = _projections(first, *pair, packed, separate, in_proj_bias)
    batch = q.shape[0]
    mask = _additive(attn_mask, q.dtype)
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask.unflatten(0, (batch, num_heads))
    padding = _additive(key_padding_mask, q.dtype)
    if padding is not None:
        mask = padding[:, None, None, :] if mask is None else padding[:, None, None, :] + mask
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.reshape(1, 1, -1).expand(batch, 1, -1)], dim=1)
        v = torch.cat([v, bias_v.reshape(1, 1, -1).expand(batch, 1, -1)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, heads, L, E / heads)
    dropout = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores + mask
        weights = F.dropout(scores.softmax(-1), dropout)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    return out, weights
