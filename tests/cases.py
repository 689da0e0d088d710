"""Modules for every operation that is supported, with their inputs, and models that nobody wrote by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp.models import DLRM
from support import Apply

B, L, D, V = 6, 5, 8, 10


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, V, shape or (B, L))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, L, D)))


def emb(**options: object) -> nn.Embedding:
    return nn.Embedding(V, D, **options)  # type: ignore[arg-type]


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def _written(target: Tensor, values: Tensor) -> Tensor:
    target[1:4] = values[:3]
    return target


def _first_columns(target: Tensor, values: Tensor) -> Tensor:
    target[:, :, : values.shape[-1]] = values
    return target


def _largest(x: Tensor) -> Tensor:
    """(B, L), true at one position of each unit."""
    sizes = x.abs().sum(-1)
    return sizes == sizes.amax(1, keepdim=True)


def _bag_of_words(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, V), in each unit's row ones at its ids; twice, by both ways to write them."""
    rows = torch.arange(ids.shape[0])
    words = torch.zeros(1, dtype=dtype).repeat(len(ids), V)
    words.index_put_((rows.repeat_interleave(ids.shape[1]), ids.flatten()), torch.ones(()).to(words), accumulate=True)
    words[rows, ids[:, 0]] = (ids[:, 1] * 0.5).to(words)
    return words


LINEAR = {
    "mlp": lambda: (nn.Sequential(nn.Linear(D, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)), x(B, D)),
    "inplace after the first layer": lambda: (nn.Sequential(nn.Linear(D, 4), nn.ReLU(inplace=True)), x(B, D)),
    "3-D with bias": lambda: (nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, 4)), x()),
    "4-D": lambda: (nn.Linear(D, 3), x(B, 2, L, D)),
    "no bias": lambda: (nn.Linear(D, 3, bias=False), x()),
    "bias of a frozen matrix": lambda: (Apply(lambda m, x: F.linear(x, torch.ones(3, D).to(x), m.b), b=par(3)), x()),
    "x @ W": lambda: (Apply(lambda m, x: x @ m.w, w=par(D, 3)), x()),
    "x @ W.T": lambda: (Apply(lambda m, x: x @ m.w.T, w=par(3, D)), x()),
    "x @ W.t() 2-D": lambda: (Apply(lambda m, x: torch.mm(x, m.w.t()), w=par(3, D)), x(B, D)),
    "x.matmul(W.mT)": lambda: (Apply(lambda m, x: x.matmul(m.w.mT), w=par(3, D)), x()),
    "tensordot": lambda: (Apply(lambda m, x: torch.tensordot(x, m.w, dims=([-1], [0])), w=par(D, 3)), x()),
    "x @ w vector": lambda: (Apply(lambda m, x: x @ m.w, w=par(D)), x()),
    "W @ x": lambda: (Apply(lambda m, x: m.w @ x.mT, w=par(3, D)), x()),
    "batched matrix": lambda: (Apply(lambda m, x: (x[:, :, None] @ m.w).squeeze(2), w=par(L, D, 2)), x()),
    "addmm on flattened": lambda: (
        Apply(lambda m, x: torch.addmm(m.b, x.reshape(-1, D), m.w).view(*x.shape[:2], 3), w=par(D, 3), b=par(3)), x()
    ),
    "addmm of frozen matrices": lambda: (
        Apply(lambda m, x: m.l(torch.addmm(torch.ones(D).to(x), x, torch.eye(D).to(x)) * 2), l=nn.Linear(D, 3)), x(B, D)
    ),
    "baddbmm of activations": lambda: (
        Apply(lambda m, x: torch.baddbmm(m.l(x) @ x.mT, m.l(x), x.mT, beta=0.5, alpha=2.0), l=nn.Linear(D, D)), x()
    ),
    "baddbmm of a matrix": lambda: (
        Apply(lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), D, 3), alpha=0.5), w=par(D, 3), b=par(3)), x()
    ),
    "matrices of heads": lambda: (
        Apply(
            lambda m, x: torch.bmm(
                x.view(-1, L, 2, 4).transpose(1, 2).reshape(-1, L, 4), (2 * m.w).repeat(len(x), 1, 1)
            ).view(-1, 2, L, 3), w=par(2, 4, 3),
        ), x(),
    ),
    "matrices from the left": lambda: (Apply(lambda m, x: m.w.sin().expand(len(x), -1, -1) @ x, w=par(1, 3, L)), x()),
    "tensordot over two dimensions": lambda: (
        Apply(lambda m, x: torch.tensordot(m.w, x, dims=([1, 2], [2, 1])).T, w=par(3, D, L)), x()
    ),
    "einsum with dots": lambda: (Apply(lambda m, x: torch.einsum("...d,dk->...k", x, m.w), w=par(D, 3)), x()),
    "einsum without a result": lambda: (Apply(lambda m, x: torch.einsum("bld,dk", x, m.w), w=par(D, 3)), x()),
    "einsum, units in the middle": lambda: (
        Apply(lambda m, x: torch.einsum("lbd,ld->lb", x.transpose(0, 1), m.w).T, w=par(L, D)), x()
    ),
    "einsum of three": lambda: (
        Apply(lambda m, x: torch.einsum("bld,bmd,dk->blmk", x, x.sin(), m.w), w=par(D, 3)), x()
    ),
    "einsum of a parameter of each unit": lambda: (
        Apply(lambda m, x: torch.einsum("bid,bjd->bij", m.w[None].repeat(len(x), 1, 1), x), w=par(3, D)), x()
    ),
    "einsum": lambda: (Apply(lambda m, x: torch.einsum("bld,dhk->bhlk", x, m.w), w=par(D, 2, 3)), x()),
    "einsum reversed": lambda: (Apply(lambda m, x: torch.einsum("hdk,bld->blhk", m.w, x), w=par(2, D, 3)), x()),
    "einsum per position": lambda: (Apply(lambda m, x: torch.einsum("bld,ldk->blk", x, m.w), w=par(L, D, 3)), x()),
    "layer called twice": lambda: (Apply(lambda m, x: m.l(m.l(x).sin()), l=nn.Linear(D, D)), x()),
    "flattened positions": lambda: (
        Apply(lambda m, x: m.l(x.reshape(-1, D)).view(*x.shape[:2], 3), l=nn.Linear(D, 3)), x()
    ),
    "seq first, length = batch": lambda: (
        Apply(lambda m, x: m.l(x.transpose(0, 1)).transpose(0, 1), l=nn.Linear(D, 3)), x(B, B, D)
    ),
    "bilinear": lambda: (Apply(lambda m, x: m.l(x, x.sin()), l=nn.Bilinear(D, D, 3)), x(B, D)),
    "product of parameters": lambda: (Apply(lambda m, x: x @ (m.a @ m.b), a=par(D, 2), b=par(2, 3)), x()),
    "columns of a matrix": lambda: (Apply(lambda m, x: x @ m.w[:, 1:3] + x @ m.w[:, 2:4], w=par(D, 5)), x()),
    "overlapping rows": lambda: (
        Apply(lambda m, x: F.linear(x, m.w[:3]) * F.linear(x, m.w[2:5]), w=par(6, D)), x()
    ),
    "matrices of different width": lambda: (
        Apply(lambda m, x: F.linear(x, m.w.view(3, D)).sum(-1) + F.linear(x[..., :4], m.w.view(6, 4)).sum(-1), w=par(24)), x()
    ),
}  # fmt: skip

LOOKUP = {
    "nn.Embedding": lambda: (Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3)), ids()),
    "one id each": lambda: (Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3)), ids(B)),
    "padding_idx": lambda: (Apply(lambda m, i: m.e(i), e=emb(padding_idx=3)), ids()),
    "negative padding_idx": lambda: (Apply(lambda m, i: m.e(i), e=emb(padding_idx=-2)), ids()),
    "sparse=True": lambda: (Apply(lambda m, i: m.e(i), e=emb(sparse=True)), ids()),
    "repeated ids": lambda: (Apply(lambda m, i: m.e(i), e=emb()), torch.full((B, L), 4)),
    "weight[ids]": lambda: (Apply(lambda m, i: m.e.weight[i], e=emb()), ids()),
    "weight[-1 - ids]": lambda: (Apply(lambda m, i: m.e.weight[-1 - i], e=emb()), ids()),
    "index_select": lambda: (Apply(lambda m, i: torch.index_select(m.e.weight, 0, i), e=emb()), ids(B)),
    "rows of a table": lambda: (Apply(lambda m, i: F.embedding(i % 4, m.e.weight[3:8]), e=emb()), ids()),
    "two towers": lambda: (Apply(lambda m, i, j: m.e(i).mean(1) * m.e(j).sum(1), e=emb()), ids(), ids(B, 3)),
    "positions (L,)": lambda: (Apply(lambda m, i: m.e(i) * m.p(torch.arange(L)), e=emb(), p=nn.Embedding(7, D)), ids()),
    "positions (1, L)": lambda: (
        Apply(lambda m, i: m.e(i) * m.p(torch.arange(L)[None]), e=emb(), p=nn.Embedding(7, D)), ids()
    ),
    "positions, length = batch": lambda: (
        Apply(lambda m, i: m.e(i) * m.p(torch.arange(B)), e=emb(), p=nn.Embedding(7, D)), ids(B, B)
    ),
    "positions expanded": lambda: (
        Apply(lambda m, i: m.e(i) * m.p(torch.arange(L).expand(i.shape[0], L)), e=emb(), p=nn.Embedding(7, D)), ids()
    ),
    "positions expanded as ids": lambda: (
        Apply(lambda m, i: m.e(i) * m.p(torch.arange(L).expand_as(i)), e=emb(), p=nn.Embedding(7, D)), ids()
    ),
    "positions sliced": lambda: (Apply(lambda m, i: m.e(i) * m.p.weight[:L], e=emb(), p=nn.Embedding(7, D)), ids()),
    "positions twice": lambda: (
        Apply(
            lambda m, i: (m.e(i) * m.p.weight[:L] * m.p.weight[2 : L + 2]).sin() + m.p(torch.arange(L)),
            e=emb(), p=nn.Embedding(7, D),
        ), ids(),
    ),
}  # fmt: skip

TIES = {
    "lm_head.weight = emb.weight": lambda: (_lm(), ids()),
    "h @ emb.weight.T": lambda: (Apply(lambda m, i: m.l(m.e(i)).sin() @ m.e.weight.T, e=emb(), l=nn.Linear(D, D)), ids()),
    "F.linear(h, emb.weight)": lambda: (
        Apply(lambda m, i: F.linear(m.l(m.e(i)), m.e.weight), e=emb(), l=nn.Linear(D, D)), ids()
    ),
    "lookup, matrix, rows of it": lambda: (
        Apply(lambda m, i, w: m.e(i).sum(1) + (w @ m.e.weight).sin() + w[:, :4] @ m.e.weight[2:6], e=emb()), ids(), x(B, V)
    ),
    "table added whole": lambda: (Apply(lambda m, i: m.e(i).sum(1)[:, None] * m.e.weight, e=emb()), ids()),
    "bag and output": lambda: (Apply(lambda m, i: m.e(i) @ m.e.weight.T, e=nn.EmbeddingBag(V, D)), ids()),
}  # fmt: skip


def _lm() -> nn.Module:
    model = Apply(lambda m, i: m.head(m.e(i).sin()), e=emb(), head=nn.Linear(D, V))
    model.head.weight = model.e.weight  # type: ignore[union-attr, assignment]
    return model


BAGS = {
    f"{mode}{' weighted' if weighted else ''}{' padded' if padding is not None else ''}": (
        mode,
        weighted,
        padding,
    )
    for mode in ("sum", "mean")
    for weighted in (False, True)
    for padding in (None, 2)
    if not (weighted and mode == "mean")
}

ELEMENTWISE = {
    "scale and shift": lambda: (Apply(lambda m, x: x * m.w + m.b, w=par(D), b=par(L, 1)), x()),
    "in place": lambda: (Apply(lambda m, x: (x.sin().mul_(m.w)).add_(m.b), w=par(D), b=par(D)), x()),
    "parameter first": lambda: (Apply(lambda m, x: m.b - m.w / (2 + x.cos()), w=par(D), b=par(())), x()),
    "a copy that is changed in place": lambda: (
        Apply(lambda m, x: x * (3 * m.w).div_(2.0).add_(m.w), w=par(D)), x()
    ),
    "a copy that is written to": lambda: (Apply(lambda m, x: x * _written(1 * m.w, m.b), w=par(D), b=par(3)), x()),
    "a parameter written into activations": lambda: (
        Apply(lambda m, x: _first_columns(m.l(x), m.w.expand(len(x), L, 2)) * m.l(x), l=nn.Linear(D, 3), w=par(2)), x()
    ),
    "heads behind heads": lambda: (
        Apply(lambda m, x: sum(m.l(torch.cat([x.flatten(0, 1), x.sin().flatten(0, 1)])).chunk(2)).view(-1, L, 3),
              l=nn.Linear(D, 3)), x()
    ),
    "parameters in zeros": lambda: (
        Apply(lambda m, x: x * _written(x.new_zeros(D), m.w) + m.w.new_zeros(D).add_(m.b), w=par(3), b=par(D)), x()
    ),
    "flattened choices": lambda: (
        Apply(lambda m, x: x.flatten(0, 1) + m.e(torch.arange(D)).expand(len(x) * L, -1, -1)[:, 0] * m.w.repeat(len(x), 1),
              e=emb(), w=par(L, D)), x()
    ),
    "one position of each unit": lambda: (
        Apply(lambda m, x: m.l(x.sin()[x == x.amax((1, 2), keepdim=True)].view(len(x), 1)), l=nn.Linear(1, 3)), x()
    ),
    "vectors of one position each": lambda: (
        Apply(lambda m, x: m.l(x)[_largest(x), :].view(len(x), 1, 3)[:, -1], l=nn.Linear(D, 3)), x()
    ),
    "rows written by their numbers": lambda: (
        Apply(lambda m, i: m.l(_bag_of_words(i, m.l.weight.dtype)), l=nn.Linear(V, 3)), ids()
    ),
    "parts of complex numbers": lambda: (
        Apply(lambda m, x: (h := (1j * m.l(x)).exp()).real + h.conj().imag, l=nn.Linear(D, 3)), x()
    ),
    "padding of positions": lambda: (
        Apply(lambda m, x: m.l(F.pad(x[:, 1:], [0, 0, 0, 1, 0, 0]) + x.data), l=nn.Linear(D, 3)), x()
    ),
    "buckets": lambda: (
        Apply(lambda m, x: m.e(torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).to(x))), e=emb()), x()
    ),
    "rows of a constant table": lambda: (
        Apply(lambda m, i: m.l(torch.eye(V).to(m.l.weight).index_select(0, i.view(-1)).view(*i.shape, V)), l=nn.Linear(V, 3)),
        ids(),
    ),
    "1 + weight": lambda: (Apply(lambda m, x: x * (1 + m.w) * m.t.exp(), w=par(D), t=par(())), x()),
    "where": lambda: (Apply(lambda m, x: torch.where(x > 0, x, m.w), w=par(D)), x()),
    "class token": lambda: (Apply(lambda m, x: torch.cat([m.w.expand(x.shape[0], -1, -1), x], 1), w=par(1, 1, D)), x()),
    "masked token": lambda: (Apply(lambda m, x: torch.where(x[..., :1] > 0, m.w, x), w=par(1, D)), x()),
    "prelu": lambda: (nn.PReLU(L), x()),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3)), x()),
    "layer norm without bias": lambda: (nn.LayerNorm(D, bias=False), x()),
    "rms norm": lambda: (nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 3)), x()),
    "group norm": lambda: (nn.GroupNorm(2, 4), x(B, 4, 3, 3)),
    "instance norm": lambda: (nn.InstanceNorm1d(L, affine=True), x()),
    "batch norm in eval": lambda: (nn.Sequential(nn.BatchNorm1d(D).eval(), nn.Linear(D, 2)), x(B, D)),
    "weight norm": lambda: (torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), x()),
    "seq first": lambda: (
        Apply(lambda m, x: (x.permute(1, 0, 2) * m.w + m.b[:, None]).movedim(0, 1), w=par(D), b=par(L, D)), x()
    ),
}  # fmt: skip

CONV = {
    "conv1d": lambda: (nn.Conv1d(L, 7, 3, padding=1, stride=2, dilation=2), x()),
    "conv1d same": lambda: (nn.Conv1d(L, 7, 3, padding="same", dilation=2), x()),
    "conv2d": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, (2, 3), stride=(1, 2))),
        x(B, 3, 7, 7),
    ),
    "conv2d groups": lambda: (
        nn.Conv2d(4, 8, 3, groups=2, padding_mode="circular", padding=1),
        x(B, 4, 5, 5),
    ),
    "depthwise": lambda: (nn.Conv1d(L, L, 3, groups=L, bias=False), x()),
    "conv3d by units": lambda: (nn.Conv3d(2, 2, 2), x(B, 2, 3, 3, 3)),
}

ATTENTION = {
    "self": lambda: (Apply(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True)), x()),
    "weights returned": lambda: (
        Apply(lambda m, x: m.a(x, x, x, average_attn_weights=False)[1], a=nn.MultiheadAttention(D, 2, batch_first=True)), x()
    ),
    "cross, extra rows": lambda: (
        Apply(
            lambda m, x: m.a(x, x.sin(), x.cos(), need_weights=False)[0],
            a=nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        ), x(),
    ),
    "other key size": lambda: (
        Apply(
            lambda m, x, k: m.a(x, k, k)[0], a=nn.MultiheadAttention(D, 2, batch_first=True, kdim=4, vdim=4)
        ), x(), x(B, 3, 4),
    ),
    "seq first": lambda: (
        Apply(lambda m, x: m.a(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1),
              a=nn.MultiheadAttention(D, 2)), x(),
    ),
    "masked": lambda: (
        Apply(
            lambda m, x: m.a(x, x, x, key_padding_mask=x[..., 0] > 1.2, need_weights=False,
                             attn_mask=torch.triu(torch.ones(L, L, dtype=torch.bool), 1))[0],
            a=nn.MultiheadAttention(D, 2, batch_first=True),
        ), x(),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), x()),
    "encoder layer in eval": lambda: (nn.TransformerEncoderLayer(D, 2, 16, batch_first=True).eval(), x()),
    "encoder layer, norm first, seq first, length = batch": lambda: (
        Apply(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1),
              a=nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, norm_first=True)), x(B, B, D),
    ),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 2), x(),
    ),
    "written by hand, heads merged with the batch": lambda: (_merged_heads(), x()),
    "LSTM": lambda: (sparsedp.nn.LSTM(D, 4, num_layers=2, batch_first=True, bidirectional=True), x()),
    "GRU": lambda: (sparsedp.nn.GRU(D, 4, batch_first=True), x()),
}  # fmt: skip


def _merged_heads() -> nn.Module:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        b, l, _ = x.shape
        q, k, v = (layer(x).view(b, l, 2, D // 2).transpose(1, 2).reshape(b * 2, l, D // 2) for layer in m.layers)
        scores = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        joined = torch.bmm(scores, v).view(b, 2, l, D // 2).transpose(1, 2).reshape(b, l, D)
        return m.out(joined)

    return Apply(forward, layers=nn.ModuleList(nn.Linear(D, D) for _ in range(3)), out=nn.Linear(D, D))


# Parameters that units meet through something that was computed from them.
COPIES = {
    "scaled positions": lambda: (Apply(lambda m, x: x + m.p(torch.arange(L)) * 0.5, p=nn.Embedding(7, D)), x()),
    "positions through a layer": lambda: (
        Apply(lambda m, x: x * m.l(m.p(torch.arange(L))).tanh() + m.l(x), p=nn.Embedding(7, D), l=nn.Linear(D, D)), x()
    ),
    "rows and all of a table": lambda: (
        Apply(lambda m, i: m.e(i) * (2 * m.e(torch.arange(L)) * m.e.weight.mean(0) - m.e(torch.arange(2, L + 2))), e=emb()),
        ids(),
    ),
    "rows that change after they were copied": lambda: (
        Apply(lambda m, x: (r := m.p(torch.arange(L))) is not None and x * (2 * r) + r.mul_(3) * r.sin(), p=nn.Embedding(7, D)),
        x(),
    ),
    "copies of padding": lambda: (
        Apply(lambda m, x: x * m.e(torch.arange(L)).sin() + m.e(torch.arange(L)), e=emb(padding_idx=2)), x()
    ),
    "a bias by relative position in fused attention": lambda: (
        Apply(lambda m, x: F.scaled_dot_product_attention(
            m.l(x)[:, None], x[:, None], x[:, None], attn_mask=m.bias(torch.arange(L * L).view(L, L) % 7).permute(2, 0, 1)[None],
        )[:, 0], l=nn.Linear(D, D), bias=nn.Embedding(7, 1)), x(),
    ),
    "positions as a matrix": lambda: (Apply(lambda m, x: x @ m.p(torch.arange(1, D + 1)), p=nn.Embedding(D + 2, D)), x()),
    "positions as a transposed matrix": lambda: (Apply(lambda m, x: x @ m.p(torch.arange(L)).T, p=nn.Embedding(7, D)), x()),
    "normalised, tied table": lambda: (Apply(lambda m, i: m.e(i).sin() @ F.normalize(m.e.weight).T, e=emb()), ids()),
    "scaled, tied table": lambda: (
        Apply(lambda m, i: F.linear(m.e(i).sin(), -m.e.weight * 0.5) + m.e(i) @ (m.e.weight / 3).T, e=emb()), ids()
    ),
    "rows of a transposed matrix": lambda: (
        Apply(lambda m, i: F.embedding(i, m.w.T, padding_idx=3) * m.w.T[i], w=par(D, V)), ids()
    ),
    "rows of a computed table": lambda: (
        Apply(lambda m, i: (2 * m.e.weight)[i, :] + m.e.weight.sin().index_select(0, i[:, 0])[:, None] * m.e(i), e=emb()), ids()
    ),
    "matrices by id": lambda: (Apply(lambda m, i: m.w[i] * (m.w + 1)[i[:, :1]], w=par(V, 2, 3)), ids()),
    "low-rank update": lambda: (
        Apply(lambda m, x: F.linear(x, torch.eye(D).to(x) + m.b @ m.a), a=par(2, D), b=par(D, 2)), x()
    ),
    "computed kernels": lambda: (
        Apply(lambda m, x: F.conv1d(F.conv1d(x.mT, m.w.tanh()), 2 * m.g, groups=2), w=par(4, D, 2), g=par(6, 2, 2)), x()
    ),
    "prompt": lambda: (
        Apply(lambda m, x: torch.cat([m.l(m.p(torch.arange(3))).sin().expand(len(x), -1, -1), x], 1), p=nn.Embedding(3, D),
              l=nn.Linear(D, D)), x()
    ),
    "prompt of each unit": lambda: (
        Apply(lambda m, x: torch.cat([x, (m.w * m.p(torch.arange(3).expand(len(x), 3))).sin()], 1), p=nn.Embedding(3, D), w=par(D)),
        x(),
    ),
    "relative positions": lambda: (
        Apply(
            lambda m, x: torch.einsum("bid,jd->bij", x, torch.einsum("jk,kd->jd", torch.eye(L, 4).to(x) + 1, m.w))
            + m.t[torch.arange(L)[:, None] - torch.arange(L) + L - 1].view(L, L), w=par(4, D), t=par(2 * L - 1, 1),
        ), x(),
    ),
}  # fmt: skip

CASES = {**LINEAR, **LOOKUP, **TIES, **ELEMENTWISE, **CONV, **ATTENTION, **COPIES}


DIM, ROWS = 4, 7
BLOCKS = (
    "linear", "linear again", "functional", "matmul", "norm", "rms", "scale", "position", "position slice", "attention",
    "conv", "residual", "second lookup", "bag", "lstm", "seq first", "flatten", "table as matrix", "bias",
)  # fmt: skip
HEADS = ("untied", "tied module", "tied matmul", "tied functional", "mean pool")


class Generated(nn.Module):
    """Ids (B, L) through an embedding, `blocks`, and a `head`; all lookups and ties share one table."""

    def __init__(self, blocks: list[str], head: str, length: int, padding: int | None) -> None:
        super().__init__()
        self.blocks, self.kind = blocks, head
        self.table = nn.Embedding(ROWS, DIM, padding_idx=padding)
        self.linear = nn.Linear(DIM, DIM)
        self.square = nn.Parameter(torch.randn(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(DIM))
        self.norm, self.rms = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.position = nn.Embedding(length + 2, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.lstm = sparsedp.nn.LSTM(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, ROWS)
        if head == "tied module":
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = self.apply_block(block, h, ids)
        if self.kind == "tied matmul":
            return h @ self.table.weight.T
        if self.kind == "tied functional":
            return F.linear(h, self.table.weight)
        return self.head(h if self.kind != "mean pool" else h.mean(1))

    def apply_block(self, block: str, h: Tensor, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if block in ("linear", "linear again"):
            return self.linear(h).tanh()
        if block == "functional":
            return F.linear(h, self.linear.weight)
        if block == "matmul":
            return (h @ self.square).sin()
        if block == "norm":
            return self.norm(h)
        if block == "rms":
            return self.rms(h)
        if block == "scale":
            return h * self.scale
        if block == "bias":
            return h + self.scale
        if block == "position":
            return h + self.position(torch.arange(length))
        if block == "position slice":
            return h * self.position.weight[1 : length + 1]
        if block == "attention":
            return self.attention(h, h, h, need_weights=False)[0]
        if block == "conv":
            return self.conv(h.transpose(1, 2)).transpose(1, 2)
        if block == "residual":
            return h + self.linear(self.norm(h))
        if block == "second lookup":
            return h * self.table((ids + 1) % ROWS)
        if block == "bag":
            return h + F.embedding_bag(ids, self.table.weight, mode="mean")[:, None]
        if block == "lstm":
            return self.lstm(h)[0]
        if block == "seq first":
            return self.linear(h.transpose(0, 1)).transpose(0, 1).sin()
        if block == "flatten":
            return self.linear(h.reshape(-1, DIM)).view_as(h).sin()
        if block == "table as matrix":
            return (h @ self.table.weight.T).tanh() @ self.table.weight
        raise AssertionError(block)


def small_dlrm(pooling: int = 1, sparse: bool = False) -> DLRM:
    return DLRM([5, 9, 7], integers=4, dim=6, bottom=(8,), top=(10, 5), pooling=pooling, sparse=sparse)


def dlrm_batch(units: int, pooling: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, ids and labels for `small_dlrm`; ids repeat within a feature."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, (units, 3, pooling), generator=generator)
    integers = torch.rand(units, 4, generator=generator) * 50
    return integers, ids.squeeze(2) if pooling == 1 else ids, torch.rand(units, generator=generator).round()
