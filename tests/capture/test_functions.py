"""Hooks and custom functions in forward may do anything to gradients: hooks are refused, functions are tried."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
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


@torch.jit.script
def scripted_swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@torch.jit.script
def scripted_swish_grad(x: Tensor, grad: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid)))


def _scripted_forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return scripted_swish(x)


def _saved_output(ctx: Any, x: Tensor) -> Tensor:
    y = x.sigmoid()
    ctx.save_for_backward(y)
    return y


def _output_in_attribute(ctx: Any, x: Tensor) -> Tensor:
    ctx.probabilities = F.softmax(x, -1)
    return ctx.probabilities.clone()


def _softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    weighted = grad * ctx.probabilities
    return weighted - ctx.probabilities * weighted.sum(-1, keepdim=True)


def _saved_mask(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x > 0)
    return x.clamp(min=0)


def _masked_copy(ctx: Any, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[~ctx.saved_tensors[0]] = 0
    return grad


def _mish(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return F.mish(x)


def _mish_again(ctx: Any, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        y = F.mish(x)
    return torch.autograd.grad(y, x, grad)[0]


def _in_place(ctx: Any, grad: Tensor) -> Tensor:
    grad[..., 0] = 0
    return grad.clamp_(-0.1, 0.1)


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
    "scripted": function(_scripted_forward, lambda ctx, grad: scripted_swish_grad(ctx.saved_tensors[0], grad)),
    "output that is kept": function(_saved_output, lambda ctx, grad: grad * ctx.saved_tensors[0] * (1 - ctx.saved_tensors[0])),
    "output in an attribute": function(_output_in_attribute, _softmax_backward),
    "mask that is kept": function(_saved_mask, _masked_copy),
    "computed again": function(_mish, _mish_again),
    "gradient changed in place": function(lambda ctx, x: x.clone(), _in_place),
    "constant gradient": function(_kept, lambda ctx, grad: torch.ones_like(grad)),
    "no gradient": function(_kept, lambda ctx, grad: torch.zeros(grad.shape, dtype=grad.dtype)),
}  # fmt: skip


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


def test_functions_of_a_constant() -> None:
    quantized = function(
        lambda ctx, x, scale: (ctx.save_for_backward(x, scale), (x / scale).round().clamp(-4, 3) * scale)[1],
        lambda ctx, grad: (torch.where((ctx.saved_tensors[0] / ctx.saved_tensors[1]).abs() < 4, grad, 0), None),
    )
    module = Apply(lambda m, x: m.b(quantized.apply(m.a(x), m.scale)), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    module.register_buffer("scale", torch.tensor(0.3))
    assert_exact(module, torch.randn(B, L, D))


@pytest.mark.parametrize("units", [0, 1])
def test_functions_in_small_batches(units: int) -> None:
    module = Apply(lambda m, x: m.b(HARMLESS["mask that is kept"].apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    assert capture_uses(module, [torch.randn(units, D)]).units == units


def test_a_graph_that_runs_back_twice() -> None:
    module = Apply(lambda m, x: m.b(Swish.apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2)).double()
    x, found = torch.randn(B, D, dtype=torch.float64), []
    for passes in (1, 2):

        class Twice:
            def __init__(self, loss: Tensor, passes: int = passes) -> None:
                self.loss, self.passes = loss, passes

            def backward(self) -> None:
                for left in reversed(range(self.passes)):
                    self.loss.backward(retain_graph=left > 0)

        captured = capture_uses(module, [x], loss=lambda out: Twice(out.square().sum()))  # type: ignore[arg-type, return-value]
        found.append(captured.uses["a.weight"].squared_norms(B))
    torch.testing.assert_close(found[1], 4 * found[0])


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


# ---------------------------------------------------------------------- what backward() reads


class Box:
    """Holds whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _keeps_object(ctx: Any, x: Tensor, box: Any) -> Tensor:
    ctx.box = box
    return x.clone()


READS: dict[str, tuple[Callable, Callable]] = {
    "an object": (lambda m, y: Box(y), lambda ctx, grad: (grad * ctx.box.value.mean(), None)),
    "an attribute of the module": (
        lambda m, y: (setattr(m, "current", y), m)[1], lambda ctx, grad: (grad * ctx.box.current.max(), None),
    ),
    "a mean in an object": (lambda m, y: Box(y.mean()), lambda ctx, grad: (grad * ctx.box.value, None)),
    "others' values in an object": (lambda m, y: Box(y.flip(0)), lambda ctx, grad: (grad * ctx.box.value[:, None], None)),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_backward_does_not_read_the_batch_another_way(name: str) -> None:
    keep, backward = READS[name]
    given = function(_keeps_object, backward)
    module = Apply(lambda m, x, y: m.b(given.apply(m.a(x), keep(m, y))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises((UnitsMixedError, UnsupportedError), match=r"'Given'.* backward\(\)"):
        capture_uses(module, [torch.randn(B, D), torch.randn(B)])


def test_backward_may_read_a_units_own_values_out_of_an_object() -> None:
    given = function(_keeps_object, lambda ctx, grad: (grad * ctx.box.value[:, None], None))
    module = Apply(lambda m, x, y: m.b(given.apply(m.a(x), Box(y))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    assert_exact(module, torch.randn(B, D), torch.randn(B))


def _iterates(ctx: Any, grad: Tensor) -> Tensor:
    return grad * sum(iter(grad))


HIDES: dict[str, tuple[Callable, str]] = {
    "a decision": (lambda ctx, grad: grad * (1 if grad.norm() < 1e9 else 0), "takes values out of a tensor by 'bool'"),
    "a number": (lambda ctx, grad: grad * (grad.norm().item() < 1e9), "takes values out of a tensor by 'item'"),
    "a comparison": (lambda ctx, grad: grad * (1 + torch.equal(grad, grad + 1)), "takes values out of a tensor by 'equal'"),
    "a list": (lambda ctx, grad: grad * (max(grad.flatten().tolist()) < 1e9), "takes values out of a tensor by 'tolist'"),
    "an array": (lambda ctx, grad: torch.from_numpy(grad.numpy() * 2), "takes values out of a tensor by 'numpy'"),
    "how many there are": (
        lambda ctx, grad: grad * (len(grad[grad.abs() > 1e9]) == 0), "takes values out of a tensor by 'len'",
    ),
    "the shape of some": (
        lambda ctx, grad: grad * (grad[grad.abs() > 1e9].shape[0] == 0), "takes values out of a tensor by 'shape'",
    ),
    "vmap": (lambda ctx, grad: torch.vmap(lambda row: row * 2)(grad), "torch.vmap"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDES)
def test_what_backward_hides_is_refused(name: str) -> None:
    """These do not show on ordinary gradients, so that trials do not see them."""
    backward, reason = HIDES[name]
    given = function(_kept, backward)
    module = Apply(lambda m, x: m.b(given.apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises(UnsupportedError, match=rf"'Given'.* its backward\(\) .*{reason}"):
        capture_uses(module, [torch.randn(B, L, D)])


@pytest.mark.parametrize("name", sorted(MIXING.keys() - {"a number that forward kept"}))  # which trials alone see
def test_backward_is_followed_where_it_is_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Functions, "_is_due", lambda self, is_first: False)
    module = Apply(lambda m, x: m.b(MIXING[name].apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises((UnitsMixedError, UnsupportedError), match=r"'Given'.* backward\(\)"):
        capture_uses(module, [torch.randn(D, D, D)])


def test_a_private_parameter_is_not_differentiated_in_backward() -> None:
    class Again(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = ctx.layer(x)
            return torch.autograd.grad(y, x, grad)[0], None

    module = Apply(lambda m, x: Again.apply(m.a(x), m.b), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises(UnsupportedError, match=r"differentiates a use of private parameter 'b\."):
        _, module, _, loader = make_private(module, loader_of(torch.randn(8, D), batch_size=4, drop_last=True))
        module(next(iter(loader))[0]).sum().backward()


def test_a_function_that_another_one_differentiates_is_refused() -> None:
    """What it does on its way back is not followed there."""

    def again(ctx: Any, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = HARMLESS["gradient reversal"].apply(x) * 2
        return torch.autograd.grad(y, x, grad)[0]

    given = function(_kept, again)
    module = Apply(lambda m, x: m.b(given.apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    with pytest.raises(UnsupportedError, match=r"its backward\(\) does not keep units apart"):
        capture_uses(module, [torch.randn(B, L, D)])


# ---------------------------------------------------------------------- what trials find


def _elsewhere(compute: Callable[[], Tensor]) -> Tensor:
    """Computes where capture does not see it."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(compute()))
    thread.start()
    thread.join()
    return found[0]


def _first_gets_all(ctx: Any, grad: Tensor) -> Tensor:
    total = _elsewhere(lambda: grad.sum(0))
    grad[0] = total
    return grad


def _one_gets_anothers(ctx: Any, grad: Tensor) -> Tensor:
    other = _elsewhere(lambda: grad[17].clone())
    grad[42] = other
    return grad


def _skips(ctx: Any, grad: Tensor) -> Tensor:
    return grad * _elsewhere(lambda: (grad.norm() < 1000).to(grad.dtype))


@pytest.mark.parametrize("backward", [_first_gets_all, _one_gets_anothers, _skips])
def test_trials_find_what_is_not_seen(backward: Callable) -> None:
    """What reaches one unit alone, and what shows with the gradients alone that really arrive."""
    given = function(lambda ctx, x: x.clone(), backward)
    module = Apply(lambda m, x, y: given.apply(x + m.w) * y[:, None], w=nn.Parameter(torch.zeros(D)))
    y = torch.full((64,), -1.0)
    y[-1] = 2000.0
    with pytest.raises(UnitsMixedError, match=r"'Given' mixes units in its backward\(\)"):
        capture_uses(module, [torch.randn(64, D), y], loss=lambda out: out.sum())


def test_trials_see_small_units_beside_a_large_one() -> None:
    given = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad + _elsewhere(lambda: grad.sum(0) * 1e-8))
    module = Apply(lambda m, x, y: given.apply(x + m.w) * y[:, None], w=nn.Parameter(torch.zeros(D)))
    y = torch.ones(64)
    y[-1] = 1e8  # everybody's gradient changes by as much as it is
    with pytest.raises(UnitsMixedError, match="'Given' mixes units"):
        capture_uses(module, [torch.randn(64, D), y], loss=lambda out: out.sum())


def test_halves_part_every_pair() -> None:
    functions = Functions(None, RandomKey.from_seed(0).generator())  # type: ignore[arg-type]
    for units in (2, 3, 7, 64):
        halves = functions.halves(units, parting=True)
        for one in range(units):
            for other in set(range(units)) - {one}:
                assert any(kept[one] and not kept[other] for kept in halves)
        half, rest = functions.halves(units)
        assert int(half.sum()) == units // 2 and torch.equal(rest, ~half)


@torch.jit.script
def scripted_third(x: Tensor) -> Tensor:
    out = x.clone()
    out[2] = x.sum(0)
    return out


def test_a_scripted_function_that_gives_all_to_one_unit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="position of the 9 units"):
        capture_uses(Apply(lambda m, x: m.a(scripted_third(x)), a=nn.Linear(D, D)), [torch.randn(9, D)])


# ---------------------------------------------------------------------- what backward() writes


def _argument(ctx: Any, x: Tensor, kept: Any) -> Tensor:
    ctx.kept = kept
    return x.clone()


WRITES: dict[str, tuple[Callable, Callable]] = {
    "a buffer": (lambda m: m.amax, lambda ctx, grad: ctx.kept.copy_(grad.abs().max())),
    "a buffer's data": (lambda m: m.amax, lambda ctx, grad: ctx.kept.data.copy_(grad.abs().max())),
    "a buffer of an object": (lambda m: m, lambda ctx, grad: ctx.kept.amax.data.copy_(grad.abs().max())),
    "a part of a buffer": (lambda m: m, lambda ctx, grad: ctx.kept.history.data[0].copy_(grad.abs().max())),
    "a counter": (lambda m: m, lambda ctx, grad: ctx.kept.count.data.add_(len(grad))),
    "a weight of an object": (lambda m: m, lambda ctx, grad: ctx.kept.b.weight.data.sub_(grad.sum())),
    "a result": (lambda m: m, lambda ctx, grad: torch.amax(grad.abs(), (0, 1), out=ctx.kept.history.data)),
    "many": (lambda m: m, lambda ctx, grad: torch._foreach_add_([ctx.kept.amax.data], grad.max().item())),
    "a tensor": (lambda m: Box(torch.zeros(())), lambda ctx, grad: ctx.kept.value.copy_(grad.abs().max())),
}


def _with_buffers(forward: Callable) -> Any:
    module = Apply(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2))
    module.register_buffer("amax", torch.zeros(()))
    module.register_buffer("history", torch.zeros(D))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    return module


@pytest.mark.parametrize("name", WRITES)
def test_backward_writes_to_nothing_that_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Functions, "_is_due", lambda self, is_first: False)  # which would write as well
    kept, write = WRITES[name]
    given = function(_argument, lambda ctx, grad: (write(ctx, grad), (grad, None))[1])
    module = _with_buffers(lambda m, x: m.b(given.apply(m.a(x), kept(m))))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(UnsupportedError, match=r"'Given'.* its backward\(\) (writes to|takes values)"):
        capture_uses(module, [torch.randn(B, L, D)])
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_functions_of_a_parameters_memory_are_refused() -> None:
    for view in (lambda w: w.detach(), lambda w: w.data, lambda w: w.detach()[:2]):
        given = function(_argument, lambda ctx, grad: (grad, None))
        module = Apply(lambda m, x: m.b(given.apply(m.a(x), view(m.b.weight))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
        with pytest.raises(UnsupportedError, match=r"memory of private parameter 'b\.weight'"):
            capture_uses(module, [torch.randn(B, D)])


class Amax(Function):
    """Keeps the largest gradient in a tensor, as scaling for 8-bit numbers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor) -> Tensor:  # type: ignore[override]
        ctx.amax = amax
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.amax.copy_(grad.abs().max())
        return grad, None


def _backward_in_the_loss() -> tuple[Any, Any, Any, Any]:
    """A function outside of forward(), where none is followed, has written to a buffer in backward()."""
    engine, module, optimizer, loader = make_private(
        _with_buffers(lambda m, x: m.b(m.a(x))), loader_of(torch.randn(40, D), batch_size=8)
    )
    optimizer.zero_grad()
    out = module(next(iter(loader))[0])
    Amax.apply(out, module.amax).square().sum().backward()
    return engine, module, optimizer, loader


CHANGED = r"'amax' was changed between forward\(\) and step\(\)"


def test_a_buffer_that_changed_in_backward_does_not_leave(tmp_path: Path) -> None:
    engine, module, optimizer, loader = _backward_in_the_loss()
    leaving: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "state_dict": module.state_dict,
        "a part's": module.a.state_dict,
        "checkpoint": lambda: engine.save_checkpoint(tmp_path / "checkpoint"),
        "pickle": lambda: torch.save(module, io.BytesIO()),
        "copy": lambda: copy.deepcopy(module),
        "forward": lambda: module(next(iter(loader))[0]),
        "evaluation": lambda: module.eval()(torch.randn(3, D)),
    }
    for _ in range(2):  # asking again does not help
        for leave in leaving.values():
            with pytest.raises(UnsupportedError, match=CHANGED):
                leave()
        optimizer.zero_grad()
    engine.close()
    with pytest.raises(UnsupportedError, match=CHANGED):
        module.state_dict()


def test_a_new_buffer_in_backward_is_refused() -> None:
    given = function(_argument, lambda ctx, grad: (setattr(ctx.kept, "amax", grad.abs().max()), (grad, None))[1])
    module = _with_buffers(lambda m, x: m.b(m.a(x)))
    _, module, optimizer, loader = make_private(module, loader_of(torch.randn(40, D), batch_size=8))
    given.apply(module(next(iter(loader))[0]), module).square().sum().backward()
    with pytest.raises(UnsupportedError, match=CHANGED):
        optimizer.step()


def test_a_checkpoint_brings_back_what_backward_changed(tmp_path: Path) -> None:
    engine, module, optimizer, loader = make_private(
        _with_buffers(lambda m, x: m.b(m.a(x))), loader_of(torch.randn(40, D), batch_size=8)
    )
    engine.save_checkpoint(tmp_path / "checkpoint")
    Amax.apply(module(next(iter(loader))[0]), module.amax).square().sum().backward()
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert float(module.state_dict()["amax"]) == 0
    module(next(iter(loader))[0]).square().sum().backward()
    optimizer.step()


def test_a_loop_may_change_buffers_before_forward_and_after_step() -> None:
    _, module, optimizer, loader = make_private(
        _with_buffers(lambda m, x: m.b(m.a(x))), loader_of(torch.randn(40, D), batch_size=8)
    )
    for (x,) in loader:
        module.count += 1
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        module.amax.fill_(0.5)
        with torch.no_grad():
            module(x)
        module.state_dict()


# ---------------------------------------------------------------------- gradients changed in place


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_gradient_that_is_changed_in_place_is_not_that_of_others(order: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.c(x) if order == "before" else None
        u = HARMLESS["gradient changed in place"].apply(m.a(x))
        return u + (m.c(x) if h is None else h)

    module = Apply(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)).double()
    x = torch.randn(B, D, dtype=torch.float64)
    found = capture_uses(module, [x], loss=lambda out: out.square().sum())
    grad = 2 * (module.a(x) + module.c(x)).detach()
    squares = (x.square().sum(1) + 1) * grad.square().sum(1)
    torch.testing.assert_close(found.uses["c.weight"].squared_norms(B) + found.uses["c.bias"].squared_norms(B), squares)


def test_a_gradient_that_is_changed_in_place_outside_of_forward_is_refused() -> None:
    doubled = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad.mul_(2))
    _, module, optimizer, loader = make_private(nn.Linear(D, D), loader_of(torch.randn(40, D), batch_size=8))
    (x,) = next(iter(loader))
    (doubled.apply(module(x)) + module(x)).square().sum().backward()
    with pytest.raises(
        UnsupportedError, match=r"gradient of operation 'linear' on parameter 'weight'.*modified in place"
    ):
        optimizer.step()


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
