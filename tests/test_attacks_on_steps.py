"""Steps against steps by hand, and those that fail halfway."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp import FEST, AdaFEST, LazyDP, SparseDPError, UnsupportedError
from sparsedp.capture import Capture
from sparsedp.capture.uses import ParameterUses
from sparsedp.gradient import NoisyGradient
from sparsedp.step import PrivateStep
from support import Apply, assert_equal, loader_of, make_private, one_by_one

D = 6
bce = F.binary_cross_entropy_with_logits


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


V, N = 12, 24
IDS = torch.randint(V, (N, 3), generator=torch.Generator().manual_seed(1))
TARGETS = torch.rand(N, generator=torch.Generator().manual_seed(2)).round().double()


class Plain(nn.Module):
    """Its matrix of 800 x 800 gets memory at its sum alone."""

    def __init__(self, width: int = 800) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.t, self.n, self.l = nn.Embedding(V, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.h, self.o, self.q = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.double()

    def tokens(self, ids: Tensor) -> Tensor:
        return self.n(self.l(self.t(ids)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.q(torch.tanh(self.o(torch.tanh(self.h(self.tokens(ids).mean(1)))))).squeeze(-1)


class Tied(Plain):
    """Parameters that several kinds of operations use: a table as lookup, linear map and bias, a norm's weight as factor."""

    def tokens(self, ids: Tensor) -> Tensor:
        e = super().tokens(ids)
        e = F.layer_norm(e + (e @ self.t.weight.T).softmax(-1) @ self.t.weight, (4,), self.n.weight, self.t.weight[2])
        return e * self.n.weight + (e @ self.l.weight[0])[..., None] + self.n(e)


def by_hand(module: Plain, batches: list[tuple[Tensor, Tensor]], clip: float, expected: int) -> Plain:
    for ids, target in batches:
        total = [torch.zeros_like(p) for p in module.parameters()]
        for i in range(len(ids)):
            grads = torch.autograd.grad(bce(module(ids[i : i + 1]), target[i : i + 1]), list(module.parameters()))
            factor = min(1.0, clip / math.sqrt(sum(float(grad.square().sum()) for grad in grads)))
            total = [t + factor * grad for t, grad in zip(total, grads)]
        with torch.no_grad():
            for parameter, t in zip(module.parameters(), total):
                parameter -= 0.5 * t / expected
    return module


def private(make: type[Plain], mechanism: Any, physical: int | None, clip: float = 0.3) -> Any:
    options = {} if mechanism is None else {"mechanism": mechanism}
    if physical:
        options["max_physical_batch"] = physical
    module = make()
    return make_private(
        module, loader_of(IDS, TARGETS, batch_size=8), optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        noise_multiplier=1e-9, max_grad_norm=clip, **options,
    )  # fmt: skip


MECHANISMS = {
    "dpsgd": lambda: None,
    "lazydp": LazyDP,
    "adafest": lambda: AdaFEST(threshold=-1e6),
    "fest": lambda: FEST(k=V, counts={"t.weight": torch.ones(V)}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("make", [Plain, Tied])
def test_steps_equal_those_by_hand(make: type[Plain], name: str, physical: int | None, passes: int) -> None:
    _, module, optimizer, loader = private(make, MECHANISMS[name](), physical)
    batches, parts = [], []
    for ids, target in loader:
        parts.append((ids.clone(), target.clone()))
        optimizer.zero_grad()
        for _ in range(passes):
            (bce(module(ids), target) / passes).backward()
        if optimizer._current_batch().last:
            batches.append(tuple(map(torch.cat, zip(*parts))))
            parts = []
        optimizer.step()
    wanted = by_hand(make(), batches, 0.3, 8)
    for mine, parameter in zip(module.parameters(), wanted.parameters()):
        torch.testing.assert_close(mine, parameter, rtol=0, atol=1e-8)


PLACES = {"sum": (ParameterUses, "add_weighted_sum"), "noise": (PrivateStep, "add_noise"), "norms": (PrivateStep, "_norms"),
          "add": (NoisyGradient, "add"), "update": (PrivateStep, "hand_over")}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_failed_halfway(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old uses nor the old graph give another step; a new forward pass does, if the first was not counted."""
    owner, method = PLACES[place]
    original, fails = getattr(owner, method), [False]

    def failing(self: Any, *args: Any) -> Any:
        if fails[0]:
            fails[0] = False
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(owner, method, failing)
    engine, module, optimizer, loader = private(Plain, None, None)
    batches = []
    for number, (ids, target) in enumerate(loader):
        loss = bce(module(ids), target)
        loss.backward(retain_graph=True)
        fails[0] = number == 0
        if number:
            optimizer.step()
        else:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            with pytest.raises(SparseDPError):
                optimizer.step()
            loss.backward(retain_graph=True)
            with pytest.raises(SparseDPError):
                optimizer.step()
            optimizer.zero_grad()
            bce(module(ids), target).backward()
            assert optimizer.ledger.steps == (place == "update")
            if place == "update":
                with pytest.raises(SparseDPError, match="already had its step"):
                    optimizer.step()
                optimizer.zero_grad()
                continue
            optimizer.step()
        batches.append((ids.clone(), target.clone()))
    assert optimizer.ledger.steps == 3
    wanted = by_hand(Plain(), batches, 0.3, 8)
    for mine, parameter in zip(module.parameters(), wanted.parameters()):
        torch.testing.assert_close(mine, parameter, rtol=0, atol=1e-8)


def test_a_collection_that_failed_loses_no_gradient_afterwards() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, 1), nn.Flatten(0)).double()
    x = torch.randn(5, D, dtype=torch.float64)
    true = one_by_one(module, [x], lambda out: out.sin().sum() + out.exp().sum())
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    out, seen = module(x), []
    out.register_hook(seen.append)
    loss = out.sin().sum()
    loss.backward(retain_graph=True)
    seen[0].mul_(2)  # what collect() refuses
    with pytest.raises(UnsupportedError, match="modified in place"):
        capture.collect()
    (loss + module(x).exp().sum()).backward()
    try:
        found = capture.collect()
    except SparseDPError:
        return
    assert found is not None
    assert_equal(module, found, true)


class _Only(nn.Module):
    def __init__(self, place: nn.Parameter) -> None:
        super().__init__()
        self.place = place


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
    "permuted": lambda module: setattr(module.place, "data", module.place.data.mT.contiguous().mT),
    "half": nn.Module.half,
}


@pytest.mark.parametrize("when", ["before forward", "before backward", "before step"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_their_form_after_make_private(change: str, when: str) -> None:
    """Their gradient would have its elements in another order, or be rounded to a grid that noise does not know."""
    module = Apply(lambda m, x: (x + m.place) * 1.5, place=nn.Parameter(torch.randn(1, 2, 3, 4)))
    _, module, optimizer, loader = make_private(
        module, loader_of(torch.randn(8, 2, 3, 4), batch_size=8), optimizer=torch.optim.SGD(module.parameters(), lr=1.0)
    )

    def at(moment: str) -> None:
        if moment == when:
            CHANGES[change](module)

    (batch,) = next(iter(loader))
    at("before forward")
    loss = module(batch).tanh().sum()
    at("before backward")
    loss.backward()
    at("before step")
    before = module.place.detach().clone()
    with pytest.raises(UnsupportedError, match=r"'place' is (not contiguous|torch\.float16) since"):
        optimizer.step()
    assert torch.equal(module.place, before) and optimizer.ledger.steps == 0


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_frozen_parameters_may_have_any_form(change: str | None) -> None:
    """They get no gradient, whether they were made so or became so."""
    made = {
        "short": torch.randn(1, 2, 3, 4).half(),
        "flags": torch.ones(1, 2, 3, 4, dtype=torch.uint8),
        "turned": torch.randn(1, 2, 4, 3).mT,
        "place": torch.randn(1, 2, 3, 4),
    }
    frozen = {name: nn.Parameter(value, requires_grad=False) for name, value in made.items()}
    module = Apply(
        lambda m, x: x * m.factor + m.short.float() + m.flags + m.turned + m.place.float(),
        factor=nn.Parameter(torch.ones(1)),
        **frozen,
    )
    _, module, optimizer, loader = make_private(module, loader_of(torch.randn(8, 2, 3, 4), batch_size=8))
    if change:
        CHANGES[change](_Only(module.place))
    (batch,) = next(iter(loader))
    module(batch).tanh().sum().backward()
    optimizer.step()
    assert optimizer.ledger.steps == 1 and module.factor != 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", [lambda: None, lambda: AdaFEST(threshold=5.0), LazyDP])
def test_threads_change_no_bit(mechanism: Callable) -> None:
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        module = Apply(
            lambda m, i: sum(t(i).mean(1) for t in m.ts).tanh(),
            ts=nn.ModuleList(nn.Embedding(50, 32) for _ in range(3)),
        )
        options = {} if mechanism() is None else {"mechanism": mechanism()}
        ids = torch.randint(50, (3000, 3))
        _, module, optimizer, loader = make_private(module, loader_of(ids, batch_size=1500), **options)
        for (batch,) in loader:
            optimizer.zero_grad()
            module(batch).sum(1).square().mean().backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results))
