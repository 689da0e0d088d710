"""Large parameters that units meet through computed copies, whose gradients are carried to them one unit at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import users
from cases import CASES, COPIES, B, D, L, emb, ids, par, x
from sparsedp import SparseDPError
from sparsedp.capture import Captured, expressions
from sparsedp.capture.ops import helpers
from sparsedp.clipping import Clipping
from sparsedp.errors import UnsupportedError
from support import Apply, assert_exact, capture_uses, dense, unit_loss


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient through a copy is written out for all units. Operations without a rule stay as they are."""
    monkeypatch.setattr(expressions, "SMALL", 0)


def is_carried(found: Captured) -> bool:
    return any(uses.carrieds for uses in found.uses.values())


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact(case: str, nothing_is_small: None) -> None:
    torch.manual_seed(0)
    found = assert_exact(*CASES[case]())
    by_rows_alone = {
        "a bias by relative position in fused attention",
        "scaled positions",
        "copies of padding",
        "positions as a matrix",
        "positions as a transposed matrix",
    }
    assert case not in COPIES or is_carried(found) == (case not in by_rows_alone)


@pytest.mark.parametrize("case", COPIES)
def test_users(case: str, nothing_is_small: None) -> None:
    torch.manual_seed(0)
    module, *inputs = COPIES[case]()
    for owners, units in (([0, 1, 0, 1, 1, 0], 2), ([0, 1, 1, 3, 3, 3], 4)):
        users.assert_exact(module, inputs, owners, units)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("copy", [lambda w: w / 3, lambda w: F.normalize(w), lambda w: w.view(-1, 2, 64)[:, 1]])
def test_a_large_table_is_never_written_out_for_all_units(copy: Callable[[Tensor], Tensor]) -> None:
    units, rows = 70, 4000
    module = Apply(lambda m, h: h @ copy(m.w).T, w=par(rows, 64))
    inputs = [torch.randn(units, 64)]
    found = capture_uses(module, inputs)
    uses = found.uses["w"]
    factors = torch.rand(units)
    with Largest() as largest:
        squares = uses.squared_norms(units)
        total = dense(uses.weighted_sum(factors, torch.Size([rows, 64])), torch.Size([rows, 64]))
    assert is_carried(found) and rows * 64 <= largest.elements <= 2 * rows * 64
    doubled = Apply(lambda m, h: h @ copy(m.w).T, w=nn.Parameter(module.w.detach().double()))  # type: ignore[union-attr]
    wanted = torch.zeros(rows, 64, dtype=torch.float64)
    for unit in range(units):
        (grad,) = torch.autograd.grad(
            unit_loss(doubled(inputs[0][unit : unit + 1].double())), list(doubled.parameters())
        )
        assert float(squares[unit]) == pytest.approx(float(grad.square().sum()), rel=1e-4)
        wanted += float(factors[unit]) * grad
    torch.testing.assert_close(total.double(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


# ---------------------------------------------------------------------- the bound


def clipped_sum(found: Captured, module: nn.Module, clipping: Clipping) -> Tensor:
    squares = torch.stack([found.squared_norms(uses) for uses in found.uses.values()]).sum(0)
    factors = found.each(clipping.factors(squares.sqrt()))
    return torch.cat([
        dense(found.uses[name].weighted_sum(factors.to(p.dtype), p.shape), p.shape).flatten()
        for name, p in module.named_parameters() if name in found.uses
    ])  # fmt: skip


@pytest.mark.parametrize("case", COPIES)
def test_neighbours(case: str, nothing_is_small: None) -> None:
    """A unit more moves the clipped sum by the bound at most, in float32 and for gradients of every size."""
    torch.manual_seed(1)
    module, *inputs = COPIES[case]()
    for size in (1e-3, 1.0, 1e6):
        loss = lambda out, size=size: size * unit_loss(out)  # noqa: E731
        whole = clipped_sum(capture_uses(module, inputs, loss), module, Clipping(1.0))
        for unit in range(B):
            rest = torch.arange(B) != unit
            left = clipped_sum(capture_uses(module, [t[rest] for t in inputs], loss), module, Clipping(1.0))
            moved = float((whole - left).norm())
            assert moved <= 1 + 1e-4
    assert moved > 0.5


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("copy", [lambda w: 3 * w, lambda w: w.softmax(0), lambda w: w - w.mean()])
def test_what_cancels_hides_nothing(copy: Callable[[Tensor], Tensor], scale: float, nothing_is_small: None) -> None:
    """Huge gradients, of a user's examples or of the elements of a copy, cancel and leave little more than rounding."""
    torch.manual_seed(0)
    module = Apply(lambda m, x: copy(m.w) * x, w=par(8))
    for _ in range(10):
        large = scale * torch.randn(2, 8)
        examples = torch.cat([large, -large.sum(0, keepdim=True), torch.randn(1, 8), scale + torch.randn(2, 8)])
        for owners, units in (([0, 0, 0, 0, 1, 2], 3), ([0, 0, 0, 0, 1, 1], 2), (list(range(6)), 6)):
            found = users.capture_users(module, [examples], owners, units, lambda out: out.sum())
            for unit in range(units):
                alone = torch.eye(units)[unit]
                squares = found.squared_norms(found.uses["w"])
                factor = found.each(Clipping(1.0).factors(squares.sqrt()) * alone)
                assert (
                    float(dense(found.uses["w"].weighted_sum(factor.float(), torch.Size([8])), torch.Size([8])).norm())
                    <= 1.001
                )


def test_rounding_is_that_of_the_parameter(nothing_is_small: None) -> None:
    """A copy in float64 has gradients in float64, but what reaches the parameter is rounded to its own type."""
    found = capture_uses(
        Apply(lambda m, x: x.double() @ m.w.double() + (x * m.w[:, 0]).sum(-1, True), w=par(D, 3)), [x()]
    )
    assert is_carried(found) and {use.like.dtype for use in found.uses["w"].all} == {torch.float32}


# ---------------------------------------------------------------------- attacks


def changed(target: Tensor, value: Tensor) -> Tensor:
    return target.add_(value)


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scaled by a mean of the batch": lambda m, x: x + m.p(torch.arange(L)) * x.mean(),
    "scaled by a detached mean": lambda m, x: x + m.p(torch.arange(L)) * x.detach().mean(0),
    "changed in place by the batch": lambda m, x: x + changed(m.p(torch.arange(L)) * 2, x.sum(0)),
    "chosen by the batch": lambda m, x: x + 2 * m.p((x.sum((0, 2)) > 0).long()),
    "rows of a copy chosen by the batch": lambda m, x: x + (2 * m.p.weight)[(x.sum((0, 2)) > 0).long()],
    "masked by the batch": lambda m, x: x + torch.where(x.amax(0) > 1, m.p(torch.arange(L)) * 2, 0.0),
    "different parts by place in the batch": lambda m, x: x + (2 * m.p(torch.arange(len(x))))[:, None],
    "rows by place in the batch": lambda m, x: x + m.w[: len(x), None].sin(),
    "matrix of the batch": lambda m, x: x @ (m.q.sin() * x.flatten(0, 1)[:D]),
    "table of the batch": lambda m, x: F.embedding((x[..., 0] > 0).long(), 2 * m.q * x.sum()),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXING)
@pytest.mark.parametrize("small", [0, 1 << 16])
def test_what_depends_on_the_batch_is_no_copy_of_a_parameter(
    case: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "SMALL", small)
    module = Apply(MIXING[case], p=nn.Embedding(7, D), q=par(D, D), w=par(9, D))
    with pytest.raises(SparseDPError):
        capture_uses(module, [x()])


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_a_copy_that_changes_after_its_use(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SMALL", small)

    def forward(m: Any, x: Tensor) -> Tensor:
        copy = 2 * m.w
        out = x @ copy
        copy.add_(m.w)
        return out

    with pytest.raises(UnsupportedError, match="changed in place after it had been used"):
        capture_uses(Apply(forward, w=par(D, 3)), [x()])


@pytest.mark.parametrize("small", [0, 1 << 16])
@pytest.mark.parametrize("apart", [False, True])
def test_numbers_that_are_drawn_stay_where_they_fell(apart: bool, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on positions, once for all or once for each unit: gradients follow the masks of this forward pass."""
    monkeypatch.setattr(expressions, "SMALL", small)
    outputs = []

    def forward(m: Any, x: Tensor) -> Tensor:
        positions = m.p(torch.arange(L)) * 2
        out = x * F.dropout(positions.expand(len(x), -1, -1) if apart else positions, 0.5)
        outputs.append(out.detach())
        return out

    module, inputs = Apply(forward, p=nn.Embedding(L, D)).double(), x().double()
    found = capture_uses(module, [inputs], lambda out: out.sum())
    weight = module.p.weight.detach()  # type: ignore[union-attr]
    masks = outputs[0] / (inputs * 2 * weight)  # 0 or 2
    gradients = 2 * masks * inputs
    assert torch.equal(masks[0].round(), masks[1].round()) != apart
    torch.testing.assert_close(found.uses["p.weight"].squared_norms(B), gradients.square().sum((1, 2)))
    factors = torch.rand(B).double()
    total = dense(found.uses["p.weight"].weighted_sum(factors, weight.shape), weight.shape)
    torch.testing.assert_close(total, (factors[:, None, None] * gradients).sum(0))


# ---------------------------------------------------------------------- what is too large


@pytest.mark.parametrize("use", [
    lambda m, i: m.e(i) @ (2 * m.e.weight).T,
    lambda m, i: m.e(i) + (2 * m.e.weight)[:L],
    lambda m, i: (2 * m.e.weight)[i],
    lambda m, i: F.conv1d(m.e(i).mT, (2 * m.e.weight)[..., None]),
])  # fmt: skip
def test_a_copy_too_large_for_one_unit_is_refused(use: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "MAX_CARRIED", 100)
    with pytest.raises(UnsupportedError, match=r"gradient of one unit would have [0-9]+ elements, more than the 100"):
        capture_uses(Apply(use, e=emb()), [ids()])
    assert_exact(
        Apply(lambda m, i: m.e(i) @ m.e.weight.T + m.e.weight[:1, :1], e=emb()), ids()
    )  # of views there are no copies
