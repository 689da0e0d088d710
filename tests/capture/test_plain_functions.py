"""Custom functions that take private parameters run as the operations of their forward(), or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import sparsedp
from sparsedp.errors import UnitsMixedError, UnsupportedError
from support import Apply, assert_exact, capture_uses, loader_of, make_private

B, D = 5, 4
REFUSED = (UnsupportedError, UnitsMixedError)


def function(forward: Callable, backward: Callable) -> Any:
    return type("Given", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class Hadamard(Function):
    """As LoHa's: (a @ b) * (c @ d) * scale."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b, c, d, scale)
        return (a @ b) * (c @ d) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b, c, d, scale = ctx.saved_tensors
        left, right = grad * scale * (c @ d), grad * scale * (a @ b)
        return left @ b.T, a.T @ left, right @ d.T, c.T @ right, None


class Tanh(Function):
    """In the newer form, and with an output that has no gradient."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x.tanh(), x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh().square())


class Product(Function):
    """Of an activation and a parameter, as linear layers of others are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


def hadamard(m: Any) -> Tensor:
    return Hadamard.apply(m.a, m.b, m.c, m.d, torch.tensor(0.5))  # type: ignore[no-untyped-call, no-any-return]


def parts() -> dict[str, nn.Parameter]:
    shapes = {"a": (D, 2), "b": (2, D), "c": (D, 2), "d": (2, D)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a computed matrix": lambda m, x: F.linear(x, hadamard(m)),
    "it twice, and its parts": lambda m, x: F.linear(F.linear(x, hadamard(m)).sin(), hadamard(m)) @ m.a @ m.b,
    "one after another": lambda m, x: F.linear(x, Tanh.apply(hadamard(m))[0] * Tanh.apply(m.c @ m.d)[1]),
    "with the activation": lambda m, x: Product.apply(Product.apply(x, m.a).sin(), m.b),
    "with what is computed": lambda m, x: Product.apply(x.cos(), hadamard(m)),
    "positions": lambda m, x: Product.apply(x[:, None].expand(-1, 3, -1) * torch.arange(3)[:, None], m.a).sum(1) @ m.d,
}


@pytest.mark.parametrize("form", FORMS)
def test_functions_of_parameters_are_exact(form: str) -> None:
    assert_exact(Apply(FORMS[form], **parts()), torch.randn(B, D))


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_taken_and_check_agrees(form: str) -> None:
    module = Apply(FORMS[form], **parts())
    data = torch.randn(20, D), torch.randn(20)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.sum(1) - y).square().mean()

    sparsedp.check(module, loss, (data[0][:4], data[1][:4]))
    _, module, optimizer, loader = make_private(module, loader_of(*data, batch_size=5))
    for x, y in loader:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()


BATCH: list[Tensor] = []  # what forward() of the module keeps of the batch, where others find it

OTHER_GRADIENTS: dict[str, Any] = {
    "a straight-through estimate": function(lambda ctx, w: w.round(), lambda ctx, grad: grad),
    "a scaled gradient": function(lambda ctx, w: w * 2, lambda ctx, grad: grad),
    "the batch in backward": function(lambda ctx, w: w * 2, lambda ctx, grad: grad * 2 * BATCH[-1].mean()),
    "a number of the batch in backward": function(
        lambda ctx, w: w * 2, lambda ctx, grad: grad * 2 * float(BATCH[-1].abs().max())
    ),
    "random numbers in backward": function(lambda ctx, w: w * 2, lambda ctx, grad: grad * 2 * torch.rand(())),
    "nothing": function(lambda ctx, w: w * 2, lambda ctx, grad: None),
    "changed in place": function(lambda ctx, w: (ctx.mark_dirty(w), w.mul_(2))[1], lambda ctx, grad: grad * 2),
}


def keep(x: Tensor) -> Tensor:
    BATCH.append(x)
    return x


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_backward_that_is_not_the_derivative_is_refused(name: str) -> None:
    given = OTHER_GRADIENTS[name]
    module = Apply(lambda m, x: F.linear(keep(x), given.apply(m.w * 1)), w=nn.Parameter(torch.randn(D, D)))
    with pytest.raises(UnsupportedError, match=r"'Given'.* takes private parameters"):
        capture_uses(module, [torch.randn(B, D)])


CLOSING_OVER: dict[str, Any] = {
    "a mean of the batch": function(lambda ctx, w: w * BATCH[-1].mean(), lambda ctx, grad: grad * BATCH[-1].mean()),
    "the first unit": function(lambda ctx, w: w * BATCH[-1][0], lambda ctx, grad: grad * BATCH[-1][0]),
    "all units": function(lambda ctx, w: w @ BATCH[-1].T @ BATCH[-1], lambda ctx, grad: grad @ BATCH[-1].T @ BATCH[-1]),
    "what became of the batch": function(lambda ctx, w: w * BATCH[-1].sin().amax(), lambda ctx, grad: grad * BATCH[-1].sin().amax()),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSING_OVER)
def test_a_batch_that_is_no_input_does_not_slip_through(name: str) -> None:
    given = CLOSING_OVER[name]
    module = Apply(lambda m, x: F.linear(keep(x), given.apply(m.w)), w=nn.Parameter(torch.randn(D, D)))
    with pytest.raises(REFUSED):
        capture_uses(module, [torch.randn(B, D)])


def test_units_of_their_own_meet_a_parameter_inside_of_a_function() -> None:
    """A closure over the batch that keeps units apart is a use as any other, and is counted."""
    given = function(lambda ctx, w: BATCH[-1].double() @ w, lambda ctx, grad: BATCH[-1].double().T @ grad)
    assert_exact(
        Apply(lambda m, x: given.apply((keep(x), m.w)[1]), w=nn.Parameter(torch.randn(D, D))), torch.randn(B, D)
    )


def test_a_backward_that_changes_its_mind_does_not_run() -> None:
    """Its backward() is compared once; afterwards it would leak, if it ran."""
    asked = []

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        asked.append(True)
        return grad * 2 if len(asked) == 1 else grad * 1e6

    given = function(lambda ctx, w: w * 2, backward)
    module = Apply(lambda m, x: F.linear(x, given.apply(m.w)), w=nn.Parameter(torch.randn(D, D)))
    x = torch.randn(B, D)
    found = capture_uses(module, [x])
    plain = capture_uses(Apply(lambda m, x: F.linear(x, m.w * 2), w=module.w), [x])
    torch.testing.assert_close(found.uses["w"].squared_norms(B), plain.uses["w"].squared_norms(B))
    assert len(asked) == 1
