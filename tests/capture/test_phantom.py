"""Phantom clipping: norms and sums of tables that are looked up in and multiplied by (DPFormer, Claim 4.1 and appendix B)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neighbours import largest_influence
from sparsedp.capture import ParameterUses, kernels
from sparsedp.capture import products as products_module
from sparsedp.capture import softmax as softmax_module
from sparsedp.capture import uses as uses_module
from sparsedp.capture.lengths import is_range, places_of, units_by_length
from sparsedp.capture.products import inner_products, squared_products
from sparsedp.capture.uses import Linear, Lookup
from sparsedp.clipping import Clipping
from sparsedp.nn import sequence_loss, table_softmax_loss
from support import Apply, assert_exact, capture_uses


class Tied(nn.Module):
    """A causal attention layer between the two uses of the table."""

    def __init__(self, rows: int, dim: int, how: str) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, padding_idx=0)
        self.mix = nn.Linear(dim, dim)
        self.how = how

    def forward(self, history: Tensor, target: Tensor) -> Tensor:
        x = self.table(history)
        past = torch.ones(history.shape[1], history.shape[1], dtype=torch.bool).triu(1)
        scores = (x @ x.mT).masked_fill(past, -math.inf)
        hidden = self.mix(scores.softmax(-1) @ x)
        if self.how == "softmax":
            return table_softmax_loss(hidden, self.table.weight, target)
        logits = hidden @ self.table.weight.T if self.how == "matmul" else F.linear(hidden, self.table.weight)
        each = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")  # a gradient that is not row-major
        valid = (target != 0).to(each.dtype)
        return (each * valid).sum(1) / valid.sum(1).clamp_min(1)


def total(losses: Tensor) -> Tensor:
    return losses.sum()


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(["matmul", "linear", "softmax"]),
    units=st.integers(1, 5),
    length=st.integers(1, 7),
    rows=st.integers(2, 12),
    dim=st.integers(1, 6),
    temporary=st.sampled_from([1, 9, 40, 10**7]),
    seed=st.integers(0, 1000),
)
def test_norms_and_sums(how: str, units: int, length: int, rows: int, dim: int, temporary: int, seed: int) -> None:
    """Against one unit at a time: repeated ids, padding, one unit, and vocabularies that do not fit into a chunk."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses_module, "_TEMPORARY", temporary)
        patch.setattr(products_module, "WRITTEN", temporary)
        patch.setattr(softmax_module, "CHUNK", temporary)
        patch.setattr(softmax_module, "WHOLE", temporary)
        model = Tied(rows, dim, how)
        assert_exact(model, torch.randint(rows, (units, length)), torch.randint(rows, (units, length)), loss=total)


@pytest.mark.parametrize("how", ["matmul", "softmax"])
def test_real_shapes_in_float32(how: str) -> None:
    """Norms in float32 are within a thousandth of a per cent of those in float64, and not below by more than rounding."""
    torch.manual_seed(0)
    model = Tied(700, 16, how)
    lengths = torch.randint(3, 41, (12, 1))
    hidden = torch.arange(40) >= lengths
    inputs = [torch.randint(1, 700, (12, 40)).masked_fill(hidden, 0) for _ in range(2)]
    single = capture_uses(model, inputs, total).uses["table.weight"].squared_norms(12).sqrt()
    exact = capture_uses(model.double(), inputs, total).uses["table.weight"].squared_norms(12).sqrt()
    assert float((single / exact - 1).max()) < 1e-3
    assert float((single / exact - 1).min()) > -1e-6


def test_both_losses_have_the_same_uses() -> None:
    torch.manual_seed(0)
    history, target = torch.randint(1, 50, (6, 5)), torch.randint(50, (6, 5))
    table = nn.Embedding(50, 8, padding_idx=0).double()
    logits = Apply(lambda m, h, t: F.linear(m.e(h).sin(), m.e.weight), e=table)
    chunked = Apply(lambda m, h, t: table_softmax_loss(m.e(h).sin(), m.e.weight, t).mean(), e=table)
    one = capture_uses(logits, [history, target], lambda out: sequence_loss(out, target)).uses["e.weight"]
    other = capture_uses(chunked, [history, target], lambda out: out).uses["e.weight"]
    assert one.linears and not one.softmaxes and other.softmaxes and not other.linears
    torch.testing.assert_close(one.squared_norms(6), other.squared_norms(6), rtol=1e-9, atol=0)
    factors = torch.rand(6, dtype=torch.float64)
    shape = torch.Size([50, 8])
    torch.testing.assert_close(one.weighted_sum(factors, shape), other.weighted_sum(factors, shape))


# ------------------------------------------------------------------ the bound


@pytest.mark.parametrize("how", ["matmul", "softmax"])
@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_neighbours(how: str, style: Any, size: float) -> None:
    """In float32: leaving a unit out moves the clipped sum by at most C."""
    torch.manual_seed(0)
    model = Tied(30, 6, how)
    inputs = [torch.randint(30, (6, 5)), torch.randint(30, (6, 5))]
    worst = largest_influence(model, inputs, Clipping(0.5, style), lambda out: size * out.sum())
    assert 0 < worst <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("how", ["linear", "softmax"])
def test_terms_that_cancel(how: str) -> None:
    """The lookup's gradient is minus the softmax's on the row that both use: the norm must not pass for a small one."""
    big = 1e4

    def forward(m: Any, ids: Tensor, sign: Tensor) -> Tensor:
        hidden = big * sign[:, :, None].expand(-1, -1, 4)
        if how == "softmax":
            scored = table_softmax_loss(hidden, m.e.weight, ids)
        else:
            logits = F.linear(hidden, m.e.weight)
            scored = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)
        p = torch.softmax(F.linear(hidden, m.e.weight.detach()), -1).gather(2, ids[..., None]).squeeze(2).detach()
        looked_up = (m.e(ids) * hidden * (1 - p)[..., None]).sum((1, 2)) / ids.shape[1]
        return scored + looked_up

    torch.manual_seed(0)
    table = nn.Embedding(5, 4)
    table.weight.data *= 1e-4
    model = Apply(forward, e=table)
    ids, sign = torch.randint(1, 5, (6, 3)), torch.ones(6, 3)
    for style in ("flat", "automatic"):
        worst = largest_influence(model, [ids, sign], Clipping(0.5, style), lambda out: out.sum())  # type: ignore[arg-type]
        assert worst <= 0.5 * (1 + 1e-3)


def test_targets_that_are_almost_certain() -> None:
    """softmax - onehot is nothing but rounding then, each time it is computed another one."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        return table_softmax_loss(m.e(ids), m.e.weight, ids)

    torch.manual_seed(0)
    table = nn.Embedding(40, 40, padding_idx=0)
    table.weight.data = 4 * torch.eye(40) + 1e-3 * torch.randn(40, 40)
    model = Apply(forward, e=table)
    ids = torch.randint(1, 40, (5, 6))
    uses = capture_uses(model, [ids], total).uses["e.weight"]
    norms = uses.squared_norms(5).sqrt()
    for unit in range(5):
        alone = uses.weighted_sum(torch.eye(5)[unit], table.weight.shape)
        assert float(alone.norm()) <= float(norms[unit]) * (1 + 1e-6)  # type: ignore[union-attr]
    assert float(norms.max()) < 1e-2


# ------------------------------------------------------------------ lookups of unequal lengths


def test_lookups_in_any_order() -> None:
    """Positions of a unit that are not side by side, units without any, and two uses of the table by lookups."""
    torch.manual_seed(0)
    units = torch.tensor([4, 0, 2, 0, 4, 4, 4, 4, 4, 1, 2])
    ids = torch.tensor([3, 1, 3, 1, -1, 0, 6, 3, 3, 2, 5])
    lookup = Lookup(ids, units, torch.randn(11, 3, dtype=torch.float64))
    linear = Linear(
        torch.randn(5, 4, 3, dtype=torch.float64), torch.randn(5, 4, 4, dtype=torch.float64), offset=2 * 3
    )  # rows 2 to 5
    found = ParameterUses.of([lookup, linear])
    wanted = torch.zeros(5, 7, 3, dtype=torch.float64)
    for unit, row, grad in zip(units.tolist(), ids.tolist(), lookup.grad):
        if row >= 0:
            wanted[unit, row] += grad
    wanted[:, 2:6] += torch.einsum("bpo,bpi->boi", linear.grad, linear.inputs)
    for temporary in (1, 30, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uses_module, "_TEMPORARY", temporary)
            torch.testing.assert_close(found.squared_norms(5), wanted.square().sum((1, 2)))


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    elements=st.integers(1, 4),
    most=st.integers(1, 60),
)
def test_every_unit_is_in_one_group(lengths: list[int], elements: int, most: int) -> None:
    seen: list[int] = []
    for units, longest in units_by_length(torch.tensor(lengths, dtype=torch.long), elements, most):
        own = [lengths[unit] for unit in units.tolist()]
        assert longest == max(own) <= 2 * min(own)
        assert len(own) == 1 or len(own) * longest * elements <= most
        seen += units.tolist()
    assert sorted(seen) == [unit for unit, length in enumerate(lengths) if length > 0]


def test_places() -> None:
    lengths, places = places_of(torch.tensor([2, 0, 2, 1, 0]), 4)
    assert lengths.tolist() == [2, 1, 2, 0] and places.tolist() == [1, 4, 3, 0, 2]
    assert places_of(torch.tensor([0, 0, 3]), 4)[1].tolist() == [0, 1, 2]
    assert is_range(torch.tensor([4, 5, 6])) and is_range(torch.tensor([4])) and not is_range(torch.tensor([5, 4]))


# ------------------------------------------------------------------ sums of outer products


@pytest.mark.parametrize("positions", [1, 3, 20])
@pytest.mark.parametrize("temporary", [1, 30, 10**6])
def test_products(positions: int, temporary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pairs or written out, in chunks or not."""
    monkeypatch.setattr(products_module, "WRITTEN", temporary)
    torch.manual_seed(0)
    a, g = torch.randn(4, positions, 5, dtype=torch.float64), torch.randn(4, positions, 17, dtype=torch.float64)
    b, h = torch.randn(4, 7, 5, dtype=torch.float64), torch.randn(4, 7, 17, dtype=torch.float64)
    one, other = (torch.einsum("bpo,bpi->boi", grad, inputs) for grad, inputs in ((g, a), (h, b)))
    torch.testing.assert_close(squared_products(a, g, temporary), one.square().sum((1, 2)))
    torch.testing.assert_close(inner_products(a, g, b, h, temporary), (one * other).sum((1, 2)))


def test_written_out_sums_are_exact_in_float32() -> None:
    """Two million squares: added up in float32 they would lose a ten-thousandth."""
    torch.manual_seed(0)
    a, g = torch.randn(1, 80, 64), torch.randn(1, 80, 30_000)
    exact = squared_products(a.double(), g.double(), 1 << 24)
    assert float((squared_products(a, g, 1 << 24) / exact - 1).abs()) < 1e-6


def test_no_unit_by_rows_by_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary of a norm has more elements than it may, whatever the vocabulary."""
    monkeypatch.setattr(products_module, "WRITTEN", 600)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:  # not a view of an input
                self.elements = max(self.elements, out.numel())
            return out

    inputs, grad = torch.randn(3, 12, 4), torch.randn(3, 12, 900)
    given = [tensor.untyped_storage().data_ptr() for tensor in (inputs, grad)]
    with Largest() as seen:
        found = squared_products(inputs, grad, 1 << 24)
    assert 0 < seen.elements <= 600
    wanted = torch.einsum("bpo,bpi->boi", grad.double(), inputs.double()).square().sum((1, 2))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_compiler", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_squared_sums(with_compiler: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_compiler:
        monkeypatch.setattr(kernels, "compiled", lambda *tensors: False)
    torch.manual_seed(0)
    keys = torch.randint(5, (30,))
    grad, source = torch.randn(9, 4), torch.randint(9, (30,))
    weight = torch.randn(30) if weighted else None
    distinct, begin, order = kernels.group(keys)
    values = grad[source] * (1 if weight is None else weight[:, None])
    wanted = torch.stack([values[keys == key].double().sum(0).square().sum() for key in distinct])
    found = kernels.squared_sums(begin[:-1], begin[1:], order + 3, 3, grad, source, weight)
    torch.testing.assert_close(found, wanted)
    some = torch.tensor([3, 0])
    found = kernels.squared_sums(begin[some], begin[some + 1], order, 0, grad, source, weight)
    torch.testing.assert_close(found, wanted[some])
    none = torch.empty(0, dtype=torch.long)
    _, begin, order = kernels.group(none)
    assert kernels.squared_sums(begin[:-1], begin[1:], order, 0, grad[:0], None, None).shape == (0,)
