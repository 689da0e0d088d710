"""Captured norms and sums are those of one unit at a time, for every operation that is supported."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsedp
from sparsedp.capture import Capture, products
from support import Apply, assert_exact, batch_of, unit_loss

B, L, D, V = 6, 5, 8, 10


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, V, shape or (B, L))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, L, D)))


def emb(**options: object) -> nn.Embedding:
    return nn.Embedding(V, D, **options)  # type: ignore[arg-type]


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


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


CASES = {**LINEAR, **LOOKUP, **TIES, **ELEMENTWISE, **CONV, **ATTENTION}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact(case: str) -> None:
    assert_exact(*CASES[case]())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact_for_a_batch_of_one(case: str) -> None:
    module, *inputs = CASES[case]()
    assert_exact(module, *[tensor[:1] for tensor in inputs])


@pytest.mark.parametrize("case", [case for case in CASES if "length = batch" not in case])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_nothing_from_an_empty_batch(case: str) -> None:
    module, *inputs = CASES[case]()
    assert_nothing(module, [tensor[:0] for tensor in inputs])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_evaluation_without_gradients(case: str, training: bool) -> None:
    """Under no_grad the module gives what it gives without capture, in train and eval mode."""
    module, *inputs = CASES[case]()
    module.train(training and "eval" not in case)
    with torch.no_grad():
        wanted = module(*inputs)
        capture = Capture(module, dict(module.named_parameters()), batch_of(B))
        capture.attach()
        found = module(*inputs)
        capture.detach()
    for one, other in zip(*(value if isinstance(value, tuple) else (value,) for value in (wanted, found))):
        if isinstance(one, torch.Tensor):
            both = one.isfinite() & other.isfinite()  # torch's fast path fills fully masked rows differently
            torch.testing.assert_close(other[both], one[both])


def assert_nothing(module: nn.Module, inputs: list[torch.Tensor]) -> None:
    from support import capture_uses, dense

    found = capture_uses(module, inputs)
    for name, parameter in module.named_parameters():
        if name in found.uses:
            assert found.uses[name].squared_norms(0).shape == (0,)
            total = dense(found.uses[name].weighted_sum(torch.zeros(0), parameter.shape), parameter.shape)
            assert float(total.abs().max()) == 0


@pytest.mark.parametrize("case", BAGS)
@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
@pytest.mark.parametrize("calls", [1, 2])
def test_bags(case: str, form: str, calls: int) -> None:
    """Every input form of nn.EmbeddingBag, with empty bags and repeated ids."""
    mode, weighted, padding = BAGS[case]
    bag = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding, include_last_offset=form == "last offset")
    lengths = [L] * B if form == "2-D" else [3, 0, 1, 7, 0, 4]
    table = ids(B, 7)
    table[:, 1] = table[:, 0]
    weights = x(B, 7)

    def one(model: nn.Module, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Units come in padded; forward makes the form under test from the lengths of those present."""
        total = 0.0
        present = [lengths[int(r)] for r in rows[:, -1]]
        for call in range(calls):
            flat = torch.cat([row[:n] for row, n in zip((rows[:, :7] + call) % V, present)])
            flat_w = torch.cat([row[:n] for row, n in zip(w, present)])
            if form == "2-D":
                square = ((rows[:, :7] + call) % V)[:, :L]
                out = model.bag(square, per_sample_weights=w[:, :L] if weighted else None)
            else:
                offsets = torch.tensor([0, *present]).cumsum(0)
                offsets = offsets if form == "last offset" else offsets[:-1]
                out = model.bag(flat, offsets, flat_w if weighted else None)
            total = total + out * (1 + call)
        return total

    numbered = torch.cat([table, torch.arange(B)[:, None]], dim=1)
    assert_exact(Apply(one, bag=bag), numbered, weights)


def test_weights_of_a_bag_are_trained() -> None:
    """per_sample_weights that come from a layer get their own gradient."""
    model = Apply(
        lambda m, i, w: m.e(i, per_sample_weights=m.k(w).squeeze(-1)),
        e=nn.EmbeddingBag(V, D, mode="sum"),
        k=nn.Linear(D, 1),
    )
    assert_exact(model, ids(), x())


def test_two_forward_passes_one_backward() -> None:
    """Siamese use: the second pass adds to the same units."""
    tower = Apply(lambda m, i: m.l(m.e(i).sum(1)), e=emb(), l=nn.Linear(D, 3)).double()
    one, two = ids(), ids()

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.tower(a) * self.tower(b)

    assert_exact(Siamese(), one, two)
    from sparsedp.capture import Capture
    from support import one_by_one

    wanted = one_by_one(Siamese(), [one, two])
    capture = Capture(tower, dict(tower.named_parameters()), batch_of(B))
    capture.attach()
    unit_loss(tower(one) * tower(two)).backward()
    found = capture.collect()
    capture.detach()
    assert found is not None
    squares = torch.stack([g["tower.e.weight"].square().sum() for g in wanted])
    torch.testing.assert_close(found.uses["e.weight"].squared_norms(B), squares)


def test_two_backward_passes_add_up() -> None:
    from sparsedp.capture import Capture
    from support import one_by_one

    model = Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3)).double()
    inputs = ids()
    wanted = one_by_one(model, [inputs], lambda out: unit_loss(out) + 3 * out.sum())
    capture = Capture(model, dict(model.named_parameters()), batch_of(B))
    capture.attach()
    out = model(inputs)
    unit_loss(out).backward(retain_graph=True)
    (3 * out.sum()).backward()
    found = capture.collect()
    capture.detach()
    assert found is not None
    for name, used in found.uses.items():
        torch.testing.assert_close(used.squared_norms(B), torch.stack([g[name].square().sum() for g in wanted]))


def test_frozen_parameters_stay_out() -> None:
    model = Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3))
    model.e.weight.requires_grad_(False)  # type: ignore[union-attr]
    found = assert_exact(model, ids())
    assert set(found.uses) == {"l.weight", "l.bias"}


def test_no_grad_inside_forward() -> None:
    def forward(m: nn.Module, i: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = m.e(i)
        return m.l(fixed)

    found = assert_exact(Apply(forward, e=emb(), l=nn.Linear(D, 3)), ids())
    assert set(found.uses) == {"l.weight", "l.bias"}


@pytest.mark.parametrize("case", ["h @ emb.weight.T", "encoder layer", "conv2d", "two towers"])
def test_units_in_chunks_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that would need a large temporary are computed for a few units at a time."""
    monkeypatch.setattr(products, "TEMPORARY", 60)
    assert_exact(*CASES[case]())


def test_autograd_forms_no_weight_gradient() -> None:
    """The largest tensor that a tied model's step makes is the logits, not units x rows x dim."""
    model = Apply(lambda m, i: m.e(i).sin() @ m.e.weight.T, e=nn.Embedding(500, 16))
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    from support import capture_uses

    inputs = torch.randint(500, (32, 4))
    with Watch():
        found = capture_uses(model, [inputs])
        found.uses["e.weight"].squared_norms(32)
        found.uses["e.weight"].weighted_sum(torch.ones(32), torch.Size([500, 16]))
    assert largest <= 32 * 4 * 500 < 32 * 500 * 16
