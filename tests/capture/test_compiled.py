"""torch.compile: parts run uncompiled in a private module, so that what they mix is seen; the whole is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp import UnitsMixedError, UnsupportedError
from support import Apply, Clicks, assert_exact, capture_uses, clicks, loader_of, make_private, train

D = 5
pytestmark = pytest.mark.filterwarnings("ignore:.*compiled by torch.compile:sparsedp.SparseDPWarning")


class Counted:
    """A backend that counts what it compiles: nothing, while the module is private."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Counted:
    torch._dynamo.reset()
    return Counted()


def keeping(h: Tensor) -> Tensor:
    return torch.tanh(h) * 2 + h.mean(-1, keepdim=True)


def mixing(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Mix(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return mixing(h)


Compile = Callable[[Any, Any], Any]


def _in_place(part: Any, backend: Any) -> Any:
    part.compile(backend=backend)
    return part


def _warm(part: Any, backend: Any) -> Any:
    """It was compiled before the module is private, and would be found in the cache."""
    compiled = torch.compile(part, backend=backend)
    for x in (torch.rand(6, D), torch.rand(6, D, dtype=torch.float64), torch.rand(6, D, requires_grad=True)):
        if not isinstance(part, nn.Module) or not list(part.parameters()) or x.dtype == torch.float32:
            compiled(x)
    return compiled


FUNCTIONS: dict[str, Compile] = {
    "compile": lambda part, backend: torch.compile(part, backend=backend),
    "whole graphs": lambda part, backend: torch.compile(part, backend=backend, fullgraph=True),
    "dynamic": lambda part, backend: torch.compile(part, backend=backend, dynamic=True),
    "used before": _warm,
}
PARTS = FUNCTIONS | {"in place": _in_place}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_functions_are_exact(way: str, backend: Counted) -> None:
    function = FUNCTIONS[way](keeping, backend)
    compiled = backend.graphs
    module = Apply(lambda m, x: m.b(function(m.a(function(x)))), a=nn.Linear(D, D), b=nn.Linear(D, 2))
    assert_exact(module, torch.randn(6, D))
    # What ran alone, without capture, was compiled.
    assert backend.graphs > compiled
    compiled = backend.graphs
    capture_uses(module, [torch.randn(6, D).double()])
    assert backend.graphs == compiled


@pytest.mark.parametrize("way", PARTS)
@pytest.mark.parametrize("frozen", [True, False])
def test_parts_are_exact(way: str, frozen: bool, backend: Counted) -> None:
    part = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU()).requires_grad_(not frozen)
    module = Apply(
        lambda m, x: m.b(m.part(m.a(x))), a=nn.Linear(D, D), part=PARTS[way](part, backend), b=nn.Linear(D, 2)
    )
    found = assert_exact(module, torch.randn(6, D))
    assert len(found.uses) == (4 if frozen else 8)


@pytest.mark.parametrize("way", FUNCTIONS)
@pytest.mark.parametrize("of", ["activations", "inputs", "the output"])
def test_functions_that_mix_are_refused(way: str, of: str, backend: Counted) -> None:
    function = FUNCTIONS[way](mixing, backend)
    forward = {
        "activations": lambda m, x: m.b(function(m.a(x))),
        "inputs": lambda m, x: m.b(m.a(x) * function(x)),
        "the output": lambda m, x: function(m.b(m.a(x))),
    }[of]
    with pytest.raises(UnitsMixedError, match="mean"):
        capture_uses(Apply(forward, a=nn.Linear(D, D), b=nn.Linear(D, 1)), [torch.randn(6, D)])


@pytest.mark.parametrize("way", PARTS)
def test_parts_that_mix_are_refused(way: str, backend: Counted) -> None:
    module = Apply(
        lambda m, x: m.b(m.part(m.a(x))), a=nn.Linear(D, D), part=PARTS[way](Mix(), backend), b=nn.Linear(D, 1)
    )
    for _ in range(2):  # also after a refusal
        with pytest.raises(UnitsMixedError, match="mean"):
            capture_uses(module, [torch.randn(6, D)])
    with pytest.raises(UnitsMixedError, match="mean"):
        sparsedp.check(module, lambda out, y: (out * y).mean(), (torch.randn(6, D), torch.randn(6, 1)))


def test_a_compiled_function_in_a_backward_that_mixes(backend: Counted) -> None:
    function = torch.compile(mixing, backend=backend)

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return function(grads[0])

    module = Apply(lambda m, x: m.b(Back.apply(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 1))
    with pytest.raises(UnitsMixedError):
        capture_uses(module, [torch.randn(6, D)])


def test_statistics_of_the_batch_in_a_compiled_part(backend: Counted) -> None:
    module = nn.Sequential(nn.Linear(D, D), torch.compile(nn.BatchNorm1d(D), backend=backend))
    with pytest.raises(UnsupportedError, match="batch statistics"):
        make_private(module, loader_of(torch.randn(20, D), batch_size=5))


@pytest.mark.parametrize("way", ["compile", "in place"])
def test_a_compiled_module_is_refused(way: str, backend: Counted) -> None:
    module = PARTS[way](nn.Linear(D, 1), backend)
    with pytest.raises(UnsupportedError, match="from before compilation"):
        make_private(module, loader_of(torch.randn(20, D), batch_size=5))
    with pytest.raises(UnsupportedError, match="from before compilation"):
        sparsedp.check(module, lambda out, y: (out * y).mean(), (torch.randn(6, D), torch.randn(6, 1)))


def _clicks_with(compile: Compile | None, backend: Any) -> nn.Module:
    torch.manual_seed(0)
    module: Any = Clicks()
    module.hidden = Apply(lambda m, h: m.l(h), l=module.hidden)  # torch never compiles its own layers alone
    if compile is not None:
        module.hidden = compile(module.hidden, backend)
    return module


@pytest.mark.parametrize("way", [way for way in PARTS if way != "used before"])
@pytest.mark.parametrize(
    "mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=1.0)], ids=lambda m: m.name
)
def test_training_is_as_without(way: str, mechanism: Any, backend: Counted) -> None:
    """Bit for bit, and nothing is compiled meanwhile; afterwards it is."""
    weights = []
    for compile in (None, PARTS[way]):
        module = _clicks_with(compile, backend)
        data = loader_of(*clicks(60), batch_size=10)
        engine, module, optimizer, loader = make_private(module, data, mechanism=copy.deepcopy(mechanism))
        train(module, optimizer, loader)
        weights.append([value.clone() for value in module.state_dict().values()])
        assert backend.graphs == 0
        engine.close()
    assert all(map(torch.equal, *weights))
    module(*clicks(4)[:2])
    assert backend.graphs > 0


def test_the_loop_may_be_compiled_around_it(backend: Counted) -> None:
    """What is compiled outside of forward, a loss say, stays compiled, also after a refusal inside."""
    loss = torch.compile(lambda out, y: F.mse_loss(out, y), backend=backend)
    _, module, optimizer, loader = make_private(nn.Linear(D, 1), loader_of(torch.randn(20, D), batch_size=10))
    for number, (x,) in enumerate(loader):
        loss(module(x), torch.zeros(len(x), 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert backend.graphs > 0, number
    with pytest.raises(UnitsMixedError):
        capture_uses(Apply(lambda m, x: m.b(mixing(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 1)), [torch.randn(6, D)])
    before = backend.graphs
    torch.compile(keeping, backend=backend)(torch.randn(2, D))
    assert backend.graphs == before + 1


def test_it_is_said(backend: Counted) -> None:
    with pytest.warns(sparsedp.SparseDPWarning, match="Module 'hidden' was compiled"):
        make_private(_clicks_with(FUNCTIONS["compile"], backend), loader_of(*clicks(60), batch_size=10))
