"""x-transformers: one architecture with many switches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import AsForward, clicks, drawn, normal, square_loss

VOCABULARY, LENGTH, DIM = 40, 9, 16


def tokens(n: int) -> tuple[Tensor, Tensor]:
    ids = drawn(n, LENGTH, high=VOCABULARY)
    return ids, ids


def features(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, LENGTH, DIM), clicks(n)


def pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(n, LENGTH, high=VOCABULARY), drawn(n, LENGTH - 2, high=VOCABULARY, seed=1), clicks(n)


def images(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, 3, 16, 16), clicks(n)


def next_token_loss(logits: Any, ids: Tensor) -> Tensor:
    """The mean over a unit's tokens, then over units."""
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return losses.mean(1).mean()


def own_loss(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _wrapped(layers: str, options: dict[str, Any], **wrapper: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        x = importlib.import_module("x_transformers")
        attention = getattr(x, layers)(**{"dim": DIM, "depth": 2, "heads": 2, "attn_dim_head": 8, **options})
        return x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=attention, **wrapper)

    return build


def _autoregressive(options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        x = importlib.import_module("x_transformers")
        return x.AutoregressiveWrapper(_wrapped("Decoder", options)())

    return build


def _continuous() -> nn.Module:
    x = importlib.import_module("x_transformers")
    layers = x.Encoder(dim=DIM, depth=2, heads=2, attn_dim_head=8)
    return x.ContinuousTransformerWrapper(dim_in=DIM, dim_out=DIM, max_seq_len=16, attn_layers=layers)


def _encoder_decoder() -> nn.Module:
    x = importlib.import_module("x_transformers")
    return x.XTransformer(
        dim=DIM, enc_num_tokens=VOCABULARY, enc_depth=1, enc_heads=2, enc_max_seq_len=16, enc_attn_dim_head=8,
        dec_num_tokens=VOCABULARY, dec_depth=1, dec_heads=2, dec_max_seq_len=16, dec_attn_dim_head=8,
    )  # fmt: skip


def _vision() -> nn.Module:
    x = importlib.import_module("x_transformers")
    layers = x.Encoder(dim=DIM, depth=1, heads=2, attn_dim_head=8)
    return x.ViTransformerWrapper(image_size=16, patch_size=4, num_classes=3, attn_layers=layers)


def _local() -> nn.Module:
    model = importlib.import_module("local_attention").LocalTransformer(
        num_tokens=VOCABULARY,
        dim=DIM,
        depth=1,
        max_seq_len=16,
        heads=2,
        dim_head=8,
        local_attn_window_size=4,
        causal=True,
    )
    return AsForward(model, lambda own, ids: own(ids))


# Case, layers, options of the layers, and options of the wrapper.
SWITCHES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("decoder", "Decoder", {}, {}),
    ("encoder", "Encoder", {}, {}),
    ("rotary", "Decoder", {"rotary_pos_emb": True}, {}),
    ("rotary_xpos", "Decoder", {"rotary_xpos": True}, {}),
    ("alibi", "Decoder", {"alibi_pos_bias": True}, {}),
    ("alibi_learned", "Decoder", {"alibi_pos_bias": True, "alibi_num_heads": 1}, {}),
    ("relative", "Decoder", {"rel_pos_bias": True}, {}),
    ("dynamic_position", "Decoder", {"dynamic_pos_bias": True}, {}),
    ("scaled_sinusoidal", "Decoder", {}, {"scaled_sinu_pos_emb": True}),
    ("no_position", "Decoder", {}, {"use_abs_pos_emb": False}),
    ("rms_norm", "Decoder", {"use_rmsnorm": True}, {}),
    ("simple_rms_norm", "Decoder", {"use_simple_rmsnorm": True}, {}),
    ("scale_norm", "Decoder", {"use_scalenorm": True}, {}),
    ("dynamic_tanh", "Decoder", {"use_dynamic_tanh": True}, {}),
    ("sandwich_norm", "Decoder", {"sandwich_norm": True}, {}),
    ("glu", "Decoder", {"ff_glu": True}, {}),
    ("swish", "Decoder", {"ff_swish": True, "ff_glu": True}, {}),
    ("relu_squared", "Decoder", {"ff_relu_squared": True}, {}),
    ("no_bias", "Decoder", {"ff_no_bias": True}, {}),
    ("flash", "Decoder", {"attn_flash": True}, {}),
    ("one_kv_head", "Decoder", {"attn_one_kv_head": True}, {}),
    ("kv_heads", "Decoder", {"attn_kv_heads": 1}, {}),
    ("qk_norm", "Decoder", {"attn_qk_norm": True}, {}),
    ("qk_norm_scaled", "Decoder", {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True}, {}),
    ("talking_heads", "Decoder", {"attn_pre_talking_heads": True, "attn_post_talking_heads": True}, {}),
    ("memory_key_values", "Decoder", {"attn_num_mem_kv": 3}, {}),
    ("sparse_topk", "Decoder", {"attn_sparse_topk": 3}, {}),
    ("sigmoid_attention", "Decoder", {"attn_sigmoid": True}, {}),
    ("gate_values", "Decoder", {"attn_gate_values": True}, {}),
    ("head_scale", "Decoder", {"attn_head_scale": True}, {}),
    ("on_attention", "Decoder", {"attn_on_attn": True}, {}),
    ("macaron", "Decoder", {"macaron": True}, {}),
    ("gated_residual", "Decoder", {"gate_residual": True}, {}),
    ("scale_residual", "Decoder", {"scale_residual": True}, {}),
    ("residual_attention", "Decoder", {"residual_attn": True}, {}),
    ("shift_tokens", "Decoder", {"shift_tokens": 1}, {}),
    ("weight_tied_layers", "Decoder", {"weight_tie_layers": True}, {}),
    ("hyper_connections", "Decoder", {"num_residual_streams": 2}, {}),
    ("memory_tokens", "Encoder", {}, {"num_memory_tokens": 3}),
    ("tied_embedding", "Decoder", {}, {"tie_embedding": True}),
    ("l2_embedding", "Decoder", {}, {"l2norm_embed": True}),
    ("cls_token", "Encoder", {}, {"use_cls_token": True, "logits_dim": 3}),
    ("average_pool", "Encoder", {}, {"average_pool_embed": True, "logits_dim": 3}),
]


def _loss(name: str) -> Callable[..., Tensor]:
    return pooled_loss if name in ("cls_token", "average_pool") else next_token_loss


def pooled_loss(output: Tensor, ids: Tensor) -> Tensor:
    return square_loss(output, ids[:, 0] / VOCABULARY)


def _case(name: str, build: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Callable[..., Tensor]) -> Case:
    return Case(f"xtransformers.{name}", "x_transformers", build, batch, loss)


CASES = [
    *(
        _case(name, _wrapped(layers, options, **wrapper), tokens, _loss(name))
        for name, layers, options, wrapper in SWITCHES
    ),
    _case("autoregressive", _autoregressive({}), tokens, own_loss),
    _case("autoregressive_rotary", _autoregressive({"rotary_pos_emb": True}), tokens, own_loss),
    _case("continuous", _continuous, features, square_loss),
    _case("encoder_decoder", _encoder_decoder, pairs, own_loss),
    _case("vision", _vision, images, square_loss),
    Case("local_attention.LocalTransformer", "local_attention", _local, tokens, next_token_loss),
]
