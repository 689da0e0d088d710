"""Norms against one example at a time: their weights' gradients are made again on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neighbours import step_without_noise
from sparsedp import UnsupportedError
from sparsedp.capture import Capture
from support import Apply, assert_equal, assert_exact, capture_uses, one_by_one, unit_loss

B, L, D = 4, 3, 6


def norm(*shape: int, kind: type = nn.LayerNorm, **options: Any) -> nn.Module:
    made = kind(*shape if kind is nn.GroupNorm else (shape,), **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def _in_place_afterwards(m: Any, x: Tensor) -> Tensor:
    y = m.n(m.a(x))
    y.mul_(2)
    y += 1
    return y


def _in_place_before(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.relu_()
    return m.n(h)


def _own_leaf(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return m.a(m.n(x))


def _beside_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.n(m.a(x))
    return m.n(m.a(x)) * z


NORMS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], tuple[int, ...]]] = {
    "several dimensions": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(L, D)}, (B, L, D)),
    "all but the units": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(2, L, D)}, (B, 2, L, D)),
    "no bias": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(D, bias=False)}, (B, L, D)),
    "not affine": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(D, elementwise_affine=False)}, (B, L, D)),
    "large eps": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(D, eps=10.0)}, (B, L, D)),
    "rms, several dimensions": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(L, D, kind=nn.RMSNorm)}, (B, L, D)),
    "twice": (lambda m, x: m.n(m.a(m.n(m.a(x)))), {"n": lambda: norm(D)}, (B, L, D)),
    "weight is bias": (lambda m, x: F.layer_norm(m.a(x), (D,), m.n.weight, m.n.weight), {"n": lambda: norm(D)}, (B, L, D)),
    "1 + weight": (lambda m, x: F.rms_norm(m.a(x), (D,), 1 + m.n.weight), {"n": lambda: norm(D, kind=nn.RMSNorm)}, (B, L, D)),
    "a row and a column of a matrix": (lambda m, x: F.layer_norm(m.a(x), (D,), m.a.weight[1], m.a.weight[:, 2]), {}, (B, L, D)),
    "expanded weight": (
        lambda m, x: F.layer_norm(m.a(x), (L, D), m.n.weight.expand(L, D), m.n.bias.expand(L, D)), {"n": lambda: norm(D)}, (B, L, D)
    ),
    "a row with a public id": (
        lambda m, x: F.layer_norm(m.a(x), (D,), m.e(torch.tensor(2)), m.e.weight[1]), {"e": lambda: nn.Embedding(4, D)}, (B, L, D)
    ),
    "weight in other uses": (
        lambda m, x: m.n(m.a(x)) * m.n.weight + (m.a(x) @ m.n.weight)[..., None] + F.linear(m.n(x), m.n.weight[None]),
        {"n": lambda: norm(D)}, (B, L, D),
    ),
    "parametrised": (
        lambda m, x: m.n(m.a(x)), {"n": lambda: torch.nn.utils.parametrizations.weight_norm(norm(D), dim=None)}, (B, L, D)
    ),
    "units second": (lambda m, x: m.n(m.a(x).transpose(0, 1)).transpose(0, 1), {"n": lambda: norm(D)}, (B, L, D)),
    "units and tokens in one": (lambda m, x: m.n(m.a(x).flatten(0, 1)).unflatten(0, (-1, L)), {"n": lambda: norm(D)}, (B, L, D)),
    "one unit, in one": (lambda m, x: m.n(m.a(x).flatten(0, 1)).unflatten(0, (-1, L)), {"n": lambda: norm(D)}, (1, L, D)),
    "transposed": (lambda m, x: m.n(m.a(x).transpose(1, 2)), {"n": lambda: norm(L)}, (B, L, D)),
    "every other element": (lambda m, x: m.n(m.a(x)[..., ::2]), {"n": lambda: norm(D // 2)}, (B, L, D)),
    "expanded input": (lambda m, x: m.n(m.a(x)[..., :1].expand(-1, -1, D)), {"n": lambda: norm(D)}, (B, L, D)),
    "no tokens": (lambda m, x: m.n(m.a(x)).sum(1), {"n": lambda: norm(D)}, (B, 0, D)),
    "rows without variance": (lambda m, x: m.n(m.a(x) * 0 + 3), {"n": lambda: norm(D)}, (B, L, D)),
    "width of one": (lambda m, x: m.n(m.a(x)[..., :1]), {"n": lambda: norm(1)}, (B, L, D)),
    "input without gradient": (lambda m, x: m.a(m.n(x)), {"n": lambda: norm(D)}, (B, L, D)),
    "detached input": (lambda m, x: m.n(m.a(x).detach()) + m.n(m.a(x)), {"n": lambda: norm(D)}, (B, L, D)),
    "input that asks for its gradient": (_own_leaf, {"n": lambda: norm(D)}, (B, L, D)),
    "no_grad beside it": (_beside_no_grad, {"n": lambda: norm(D)}, (B, L, D)),
    "no gradient comes": (lambda m, x: m.n(m.a(x)) * 0 + m.a(x), {"n": lambda: norm(D)}, (B, L, D)),
    "in place afterwards": (_in_place_afterwards, {"n": lambda: norm(D)}, (B, L, D)),
    "in place before": (_in_place_before, {"n": lambda: norm(D)}, (B, L, D)),
    "group norm": (lambda m, x: m.n(m.a(x)), {"n": lambda: norm(1, L, kind=nn.GroupNorm)}, (B, L, D)),
    "instance norm": (lambda m, x: m.n(m.a(x)), {"n": lambda: nn.InstanceNorm1d(L, affine=True)}, (B, L, D)),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
def test_norms_are_exact(case: str) -> None:
    forward, parts, shape = NORMS[case]
    assert_exact(
        Apply(forward, a=nn.Linear(D, D), **{name: make() for name, make in parts.items()}), torch.randn(shape)
    )


@pytest.mark.parametrize(
    "change", [lambda h, m: h.add_(1), lambda h, m: h[:, 1:].add_(1), lambda h, m: m.n.weight.data.mul_(1)]
)
def test_changes_between_forward_and_backward(change: Callable) -> None:
    """As torch's own: in place is refused; a change that is none is none."""
    module = Apply(lambda m, x: (lambda h: (m.n(h), h))(m.a(x)), a=nn.Linear(D, D), n=norm(D))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    out, h = module(torch.randn(B, D))
    with torch.no_grad():
        change(h, module)
    if h._version:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            unit_loss(out).backward()
    else:
        unit_loss(out).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_few_digits_are_refused(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)).to(dtype)
    with pytest.raises(UnsupportedError, match="rounded to"):
        capture_uses(module, [torch.randn(B, D, dtype=dtype)])


def test_norms_in_float32_are_exact_to_its_digits() -> None:
    module = nn.Sequential(nn.Linear(D, D), norm(D), nn.Tanh(), nn.Linear(D, 2))
    x = torch.randn(64, L, D)
    found = capture_uses(module, [x])
    squares = {n: found.squared_norms(found.uses[n]) for n, _ in module.named_parameters()}
    true = one_by_one(module.double(), [x.double()])
    for name, square in squares.items():
        torch.testing.assert_close(square, torch.stack([t[name].square().sum() for t in true]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_norms_are_refused(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    module = Apply(lambda m, x: checkpoint(m.n, m.a(x), use_reentrant=reentrant), a=nn.Linear(D, D), n=norm(D))
    with pytest.raises(UnsupportedError, match="checkpointing"):
        capture_uses(module, [torch.randn(B, D)])


@pytest.mark.parametrize("way", ["two losses", "autograd.grad between", "anomaly", "no_grad"])
def test_ways_back_through_a_norm(way: str) -> None:
    module = nn.Sequential(nn.Linear(D, D), norm(D), nn.Tanh(), nn.Linear(D, 2)).double()
    x = torch.randn(B, L, D, dtype=torch.float64)
    true = one_by_one(module, [x], lambda out: unit_loss(out) + out.exp().sum())
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    leaf = x.clone().requires_grad_()
    with torch.autograd.set_detect_anomaly(way == "anomaly"):
        out = module(leaf if way == "autograd.grad between" else x)
        if way == "two losses":
            unit_loss(out).backward(retain_graph=True)
            out.exp().sum().backward()
        else:
            loss = unit_loss(out) + out.exp().sum()
            if way == "autograd.grad between":
                torch.autograd.grad(loss, leaf, retain_graph=True)
            with torch.set_grad_enabled(way != "no_grad"):
                loss.backward()
    found = capture.collect()
    assert found is not None
    assert_equal(module, found, true)


def test_norms_of_users() -> None:
    users = np.array([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5])
    x = torch.randn(12, L, D, dtype=torch.float64) * 3
    module = nn.Sequential(nn.Linear(D, D), norm(D), nn.Tanh(), nn.Linear(D, 1)).double()
    got = step_without_noise(module, (x,), lambda m, batch: m(batch[0]).sum(), users=users)
    wanted = torch.zeros_like(got)
    for user in np.unique(users):
        grads = torch.autograd.grad(module(x[torch.from_numpy(users == user)]).sum(), list(module.parameters()))
        whole = torch.cat([grad.flatten() for grad in grads])
        wanted += whole * min(1.0, 1 / float(whole.norm()))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", [nn.LayerNorm, lambda width: nn.Linear(width, width)])
def test_memory_that_is_other_while_backward_runs_is_found(kind: Callable[[int], nn.Module]) -> None:
    """Whoever puts it back before step() has changed what gradients are made of."""

    def forward(module: Any, x: Tensor) -> Tensor:
        nonlocal array
        hidden = module.a(x)
        array = hidden.detach().numpy()
        return module.n(hidden)

    array = np.empty(0)
    module = Apply(forward, a=nn.Linear(5, 5), n=kind(5))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    loss = unit_loss(module(torch.randn(8, 5)))
    array[1:] = array[:1]
    with pytest.raises(UnsupportedError, match="given away by 'numpy' and then changed"):
        loss.backward()
