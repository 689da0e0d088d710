"""Hooks and custom functions in forward may do anything to gradients: hooks are refused, functions are tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import sparsedp
from sparsedp.capture import Capture
from sparsedp.capture.functions import _AGAIN, Functions
from sparsedp.errors import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.noise import RandomKey
from support import Apply, assert_exact, batch_of, capture_uses, loader_of, make_private

B, L, D = 5, 3, 4


def function(forward: Callable, backward: Callable, name: str = "Given") -> Any:
    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class Swish(Function):
    """The memory-saving swish that many models bring along."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return grad * (sigmoid * (1 + x * (1 - sigmoid)))


class SwishWithContext(Function):
    """The same in the newer form."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Swish.backward


def _kept(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x * 2


def _changed(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(3)


HARMLESS: dict[str, Any] = {
    "swish": Swish,
    "swish, newer form": SwishWithContext,
    "gradient reversal": function(lambda ctx, x: x.view_as(x), lambda ctx, grad: -grad),
    "input as it is": function(lambda ctx, x: x, lambda ctx, grad: grad * 0.5),
    "straight through": function(lambda ctx, x: x.round(), lambda ctx, grad: grad),
    "in place": function(_changed, lambda ctx, grad: grad * 3),
    "clipped by unit": function(
        _kept, lambda ctx, grad: grad / grad.flatten(1).norm(dim=1).view(-1, *[1] * (grad.ndim - 1))
    ),
}


@pytest.mark.parametrize("place", ["inside", "last"])
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("shape", [(B, D), (B, L, D)], ids=["2-D", "3-D"])
def test_harmless_functions_work(name: str, place: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    applied = HARMLESS[name].apply  # bound before capture begins, as models do

    def forward(m: Any, x: Tensor) -> Tensor:
        h = applied(m.a(x))
        return m.b(h) if place == "inside" else h

    parts = {"a": nn.Linear(D, D), **({"b": nn.Linear(D, 2)} if place == "inside" else {})}
    assert_exact(Apply(forward, **parts), torch.randn(*shape))


def test_functions_of_several_tensors() -> None:
    two = function(
        lambda ctx, x, y, scale: (x * scale + y, y * 3), lambda ctx, one, other: (one * 2, one + other * 3, None)
    )
    module = Apply(lambda m, x: m.b(torch.cat(two.apply(m.a(x), m.c(x), 2), -1)), a=nn.Linear(D, D), b=nn.Linear(2 * D, 2), c=nn.Linear(D, D))  # fmt: skip
    assert_exact(module, torch.randn(B, L, D))


def test_units_on_another_axis() -> None:
    module = Apply(lambda m, x: m.b(Swish.apply(m.a(x).transpose(0, 1))).transpose(0, 1), a=nn.Linear(D, D), b=nn.Linear(D, 2))  # fmt: skip
    assert_exact(module, torch.randn(B, B, D))


def _mixed_mean(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x.mean(0))
    return x * 2


def _mixed_number(ctx: Any, x: Tensor) -> Tensor:
    ctx.number = x.abs().sum().item()
    return x * 2


MIXING: dict[str, Any] = {
    "a sum of gradients": function(_kept, lambda ctx, grad: grad + grad.sum(0)),
    "the norm of all gradients": function(_kept, lambda ctx, grad: grad / grad.norm()),
    "clipped to the largest": function(_kept, lambda ctx, grad: grad / grad.abs().max()),
    "gradients of others": function(_kept, lambda ctx, grad: grad.flip(0)),
    "gradients on another axis": function(_kept, lambda ctx, grad: grad.transpose(0, 1)),
    "a mean that forward kept": function(_mixed_mean, lambda ctx, grad: grad * ctx.saved_tensors[0]),
    "a number that forward kept": function(_mixed_number, lambda ctx, grad: grad * ctx.number),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_units_are_refused(name: str) -> None:
    module = Apply(lambda m, x: m.b(MIXING[name].apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    x = torch.randn(D, D, D)
    with pytest.raises(UnitsMixedError, match=r"Function 'Given' mixes units in its backward\(\)"):
        capture_uses(module, [x])
    with pytest.raises(UnitsMixedError, match="'Given'"):
        sparsedp.check(module, lambda out, y: out.square().mean((1, 2)).mean(), (x, torch.zeros(D)))


def _mask(ctx: Any, x: Tensor) -> Tensor:
    mask = torch.rand_like(x) < 0.5
    ctx.save_for_backward(mask)
    return x * mask


_count = [0]


def _counting(ctx: Any, x: Tensor) -> Tensor:
    _count[0] += 1
    return x * _count[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "mixes in forward": (function(lambda ctx, x: x - x.mean(0), lambda ctx, grad: grad), "keep units apart"),
    "sorts in forward": (function(lambda ctx, x: x.sort(0)[0], lambda ctx, grad: grad), "keep units apart"),
    "unknown in forward": (
        function(lambda ctx, x: torch.from_numpy(x.numpy() * 2), lambda ctx, grad: grad), "keep units apart"
    ),
    "counts its calls": (function(_counting, lambda ctx, grad: grad), "the second time"),
    "draws a mask": (function(_mask, lambda ctx, grad: grad * ctx.saved_tensors[0]), "the second time"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_cannot_be_judged_are_refused(name: str) -> None:
    given, reason = REFUSED[name]
    module = Apply(lambda m, x: given.apply(m.a(x)), a=nn.Linear(D, D))
    with pytest.raises((UnsupportedError, UnitsMixedError), match=reason):
        capture_uses(module, [torch.randn(B, L, D)])


def test_the_users_generator_is_not_disturbed() -> None:
    module = Apply(lambda m, x: Swish.apply(m.a(x)), a=nn.Linear(D, D))
    x = torch.randn(B, D)
    state = torch.get_rng_state()
    capture_uses(module, [x])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_that_reaches_torch_another_way_is_refused() -> None:
    hidden = torch._C._FunctionBase.__dict__["apply"].__get__(None, Swish)
    for forward in (lambda m, x: m.b(hidden(m.a(x))), lambda m, x: hidden(m.a(x))):
        with pytest.raises(UnsupportedError, match=r"'Swish'.* was applied in a way that capture does not see"):
            capture_uses(Apply(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2)), [torch.randn(B, D)])


def test_functions_of_parameters_are_refused() -> None:
    module = Apply(lambda m, x: F.linear(x, Swish.apply(m.w)), w=nn.Parameter(torch.randn(D, D)))
    with pytest.raises(UnsupportedError, match=r"takes private parameter 'w'.*ordinary gradient"):
        capture_uses(module, [torch.randn(B, D)])


def test_functions_are_left_alone_outside_of_forward() -> None:
    before = Function.apply.__func__  # type: ignore[attr-defined]
    module = Apply(lambda m, x: Swish.apply(m.a(x)), a=nn.Linear(D, D))
    capture_uses(module, [torch.randn(B, D)])
    with pytest.raises(SparseDPError):
        capture_uses(Apply(lambda m, x: MIXING["gradients of others"].apply(m.a(x)), a=nn.Linear(D, D)), [torch.randn(B, D)])  # fmt: skip
    assert Function.apply.__func__ is before  # type: ignore[attr-defined]
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__


def test_functions_of_other_threads_are_left_alone() -> None:
    found, given = [], torch.randn(3, D, requires_grad=True)

    def elsewhere() -> None:
        found.append(MIXING["gradients of others"].apply(given))

    def forward(m: Any, x: Tensor) -> Tensor:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return m.a(x)

    capture_uses(Apply(forward, a=nn.Linear(D, D)), [torch.randn(B, D)])
    assert len(found) == 1


def _tries(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    tried: list[type] = []
    original = Functions._try

    def noted(self: Functions, given: type, *rest: Any) -> None:
        tried.append(given)
        original(self, given, *rest)

    monkeypatch.setattr(Functions, "_try", noted)
    return tried


def test_a_function_is_tried_at_its_first_use_in_each_module_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _tries(monkeypatch)
    layer = Apply(lambda m, x: Swish.apply(m.a(x)), a=nn.Linear(D, D))
    other = Apply(lambda m, x: Swish.apply(m.a(x)), a=nn.Linear(D, D))
    module = nn.Sequential(layer, other)
    capture = Capture(
        module, dict(module.named_parameters()), batch_of(B), generator=RandomKey.from_seed(0).generator()
    )
    capture.attach()
    module(torch.randn(B, D))
    assert len(tried) == 2
    for _ in range(400):
        module(torch.randn(B, D))
    capture.detach()
    later = len(tried) - 2
    assert 0.4 * 800 * _AGAIN < later < 2 * 800 * _AGAIN


def test_a_function_that_begins_to_mix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = [False]
    given = function(_kept, lambda ctx, grad: grad.flip(0) if turned[0] else grad)
    module = Apply(lambda m, x: given.apply(m.a(x)).squeeze(1), a=nn.Linear(D, 1))
    _, module, optimizer, loader = make_private(
        module, loader_of(torch.randn(2000, D), torch.randn(2000), batch_size=20)
    )

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(module(x), y).backward()
            optimizer.step()
            turned[0] = True

    with pytest.raises(UnitsMixedError, match="'Given'"):
        for _ in range(10):
            run()


# ---------------------------------------------------------------------- hooks


def _node_hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.grad_fn.register_prehook(lambda grads: (grads[0].flip(0),))  # type: ignore[union-attr]
    return h


def _tensor_hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    h.register_hook(lambda grad: grad + grad.sum(0))
    return h


def _hook_on_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_hook(lambda grad: grad)
    return m.a(x)


def _hook_after_accumulation(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return m.a(x)


def _hook_of_many(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    torch.autograd.graph.register_multi_grad_hook([h], lambda grads: None)
    return h


def _saved_tensors(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mean(0).expand_as(t)):
        return h.tanh()


HOOKS = {
    "tensor": (_tensor_hook, "'register_hook' of an activation"),
    "node": (_node_hook, "'grad_fn' of an activation"),
    "parameter": (_hook_on_a_parameter, "'register_hook' of an activation or a private parameter"),
    "after accumulation": (_hook_after_accumulation, "'register_post_accumulate_grad_hook'"),
    "many": (_hook_of_many, "a hook may do anything"),
    "saved tensors": (_saved_tensors, "saved_tensors_hooks"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_in_forward_are_refused(name: str) -> None:
    forward, reason = HOOKS[name]
    with pytest.raises(UnsupportedError, match=reason):
        capture_uses(Apply(forward, a=nn.Linear(D, D)), [torch.randn(B, L, D)])


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("when", ["before", "after", "in forward"])
def test_backward_hooks_of_modules_are_refused(register: str, when: str) -> None:
    inner = nn.Linear(D, D)

    def hook(module: nn.Module, *grads: Any) -> None:
        raise AssertionError("ran")

    def forward(m: Any, x: Tensor) -> Tensor:
        if when == "in forward":
            getattr(m.a, register)(hook)
        return m.a(x)

    module = Apply(forward, a=inner)
    if when == "before":
        getattr(inner, register)(hook)
        with pytest.raises(UnsupportedError, match=r"Module 'a' \(Linear\) has a backward hook"):
            make_private(module, loader_of(torch.randn(8, D), batch_size=4))
        return
    _, module, _, loader = make_private(module, loader_of(torch.randn(8, D), batch_size=4))
    if when == "after":
        getattr(inner, register)(hook)
    with pytest.raises(UnsupportedError, match=r"Module 'a' \(Linear\) has a backward hook"):
        module(next(iter(loader))[0])


def test_backward_hooks_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, grads, outputs: None)
    try:
        with pytest.raises(UnsupportedError, match="backward hook for all modules"):
            capture_uses(Apply(lambda m, x: m.a(x), a=nn.Linear(D, D)), [torch.randn(B, D)])
    finally:
        handle.remove()


def test_looking_at_what_has_no_gradient_is_allowed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        assert x.grad_fn is None
        h = m.a(x)
        h.retain_grad()
        return h

    assert_exact(Apply(forward, a=nn.Linear(D, D)), torch.randn(B, D))
