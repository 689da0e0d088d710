"""Numbers with fewer digits than float32's: why they are refused on the way of gradients, and that all ways there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from neighbours import clipped_sum
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.capture import Capture, precision, tape
from sparsedp.capture import capture as watching
from sparsedp.clipping import Clipping
from support import Apply, assert_equal, batch_of, capture_uses, loader_of, make_private, one_by_one

D, WIDTH, UNITS = 32, 32, 700
BFLOAT16 = torch.bfloat16


def autocast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=BFLOAT16, enabled=enabled)


def network(forward: Callable[..., Any], middle: torch.dtype = torch.float32) -> nn.Module:
    """A frozen layer between two that are trained."""
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False).to(middle)
    return Apply(forward, a=nn.Linear(D, WIDTH), f=frozen, b=nn.Linear(WIDTH, 1))


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.b(m.f(m.a(x)))


# ---------------------------------------------------------------------- why


def influence(module: nn.Module, around: Callable[[], Any], backward: bool = False, step: bool = False) -> float:
    """By how many times C one unit more moves the clipped sum of units that are alike, under a loss that is their mean."""

    def total(units: int) -> Tensor:
        x = inputs[:units]
        capture = Capture(module, {n: p for n, p in module.named_parameters() if p.requires_grad}, batch_of(units))
        capture.attach()
        try:
            with around() if not (backward or step) else nullcontext():
                out = module(x)
            loss = 1e3 * F.softplus(out.float()).mean()
            with around() if backward else nullcontext():
                loss.backward()
            with around() if step else nullcontext():
                found = capture.collect()
                assert found is not None
                return clipped_sum(found, module, Clipping(1.0 / units)).double() * units
        finally:
            capture.detach()

    inputs = torch.randn(1, D).repeat(UNITS + 1, 1)
    inputs[-1] = torch.randn(D)
    return float((total(UNITS + 1) - total(UNITS)).norm())


def with_summed_positions(m: Any, x: Tensor) -> Tensor:
    """Positions whose gradients partly cancel."""
    return m.b(m.f(m.a(torch.stack([x, x.roll(1, 1), -x], 1)))).mean(1)


BREAKING: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a frozen layer in bfloat16": (lambda: network(lambda m, x: m.b(m.f(m.a(x).bfloat16()).float()), BFLOAT16), {}),
    "a cast and back": (lambda: network(lambda m, x: m.b(m.f(m.a(x).bfloat16().float()))), {}),
    "autocast of a frozen part": (lambda: network(lambda m, x: m.b(_autocast(m.f, m.a(x)).float())), {}),
    "backward in autocast": (lambda: network(plainly), {"around": autocast, "backward": True}),
    "step in autocast": (lambda: network(with_summed_positions), {"around": autocast, "step": True}),
}


def _autocast(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with autocast():
        return part(x)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what refuses low precision."""
    monkeypatch.setattr(watching, "LOW_PRECISION", frozenset())
    for module, name in (
        (precision, "refuse_autocast"), (watching, "refuse_autocast"), (watching, "refuse_rounding"), (tape, "refuse_rounding")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda: None)


@pytest.mark.parametrize("case", BREAKING)
def test_what_would_be_without_the_refusals(case: str, unwatched: None) -> None:
    """Norms and sums are exact or nearly so, and the bound is broken all the same: the others' gradients are rounded anew."""
    make, options = BREAKING[case]
    torch.manual_seed(0)
    module = make()
    assert max(influence(module, **{"around": nullcontext, **options}) for _ in range(6)) > 1.5


def test_float32_keeps_the_bound() -> None:
    for module in (network(plainly), network(with_summed_positions)):
        assert max(influence(module, nullcontext) for _ in range(3)) < 1 + 1e-4


@pytest.mark.parametrize("case", BREAKING)
def test_they_are_refused(case: str) -> None:
    make, options = BREAKING[case]
    with pytest.raises(UnsupportedError, match="one unit more moves the sum of all others"):
        influence(make(), **{"around": nullcontext, **options})


# ---------------------------------------------------------------------- all ways there


class Cast(torch.autograd.Function):
    """Rounds what goes through it, forth or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: bool) -> Tensor:
        ctx.forth = forth
        return x.bfloat16().float() if forth else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (grads[0] * 1 if ctx.forth else grads[0].bfloat16().float()), None


def _into_buffer(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(len(x), WIDTH, dtype=BFLOAT16)
    buffer[:, :] = m.a(x)
    return m.b(buffer.float())


def _in_place(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.zeros(len(x), WIDTH, dtype=BFLOAT16).copy_(m.a(x)).float())


def _out(m: Any, x: Tensor) -> Tensor:
    with autocast():
        return m.b(m.a(x) @ torch.eye(WIDTH)).float()


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "bfloat16()": lambda m, x: m.b(m.a(x).bfloat16().float()),
    "half()": lambda m, x: m.b(m.a(x).half().float()),
    "to a type": lambda m, x: m.b(m.a(x).to(torch.float16).float()),
    "to the type of another": lambda m, x: m.b(m.a(x).to(torch.zeros(1).half()).float()),
    "type": lambda m, x: m.b(m.a(x).type(BFLOAT16).float()),
    "type_as": lambda m, x: m.b(m.a(x).type_as(torch.zeros(1).half()).float()),
    "eight bits": lambda m, x: m.b(m.a(x).to(torch.float8_e4m3fn).float()),
    "a reduction": lambda m, x: m.b(m.a(x).softmax(1, dtype=BFLOAT16).float()),
    "a sum": lambda m, x: m.a(x).sum(1, dtype=BFLOAT16).float(),
    "written into a buffer": _into_buffer,
    "copied into a buffer": _in_place,
    "detached again": lambda m, x: m.b(m.a(x).bfloat16() - m.a(x).bfloat16().detach()),
    "in a dot product": lambda m, x: torch.einsum("ui,ui->u", m.a(x).half(), m.a(x).half()).float(),
    "the output of forward": lambda m, x: m.b(m.a(x)).bfloat16(),
    "one of the outputs": lambda m, x: {"score": m.b(m.a(x)), "other": [m.a(x).half()]},
    "a copy of a parameter": lambda m, x: F.linear(m.a(x), m.b.weight.bfloat16().float()),
    "a bias": lambda m, x: F.linear(m.a(x), m.b.weight) + m.b.bias.half().float(),
    "both in bfloat16": lambda m, x: F.linear(x.bfloat16(), m.a.weight.bfloat16()).float(),
    "a computed parameter": lambda m, x: m.a(x) * m.b.weight.exp().half(),
    "an activation and a parameter": lambda m, x: m.a(x).half() * m.b.weight,
    "a custom function, forth": lambda m, x: m.b(Cast.apply(m.a(x), True)),
    "a custom function, back": lambda m, x: m.b(Cast.apply(m.a(x), False)),
    "autocast of a trained part": lambda m, x: _autocast(m.a, x).float(),
    "autocast of a function": lambda m, x: _autocast(lambda h: h @ torch.eye(WIDTH), m.a(x)).float(),
    "autocast of all": _out,
}


SEEN_IN_FLOAT64 = [way for way in WAYS if "autocast" not in way]  # which leaves float64 alone


@pytest.mark.parametrize(
    ("way", "dtype"), [(way, torch.float32) for way in WAYS] + [(way, torch.float64) for way in SEEN_IN_FLOAT64]
)
def test_all_ways_are_refused(way: str, dtype: torch.dtype) -> None:
    module = Apply(WAYS[way], a=nn.Linear(D, WIDTH), b=nn.Linear(WIDTH, 1)).to(dtype)

    def loss(out: Any) -> Tensor:
        return out["score"].float().sum() if isinstance(out, dict) else out.float().sum()

    with pytest.raises(UnsupportedError, match="one unit more moves the sum of all others"):
        capture_uses(module, [torch.randn(6, D, dtype=dtype)], loss)


@pytest.mark.parametrize("way", [way for way in SEEN_IN_FLOAT64 if "outputs" not in way])
def test_check_refuses_them_too(way: str) -> None:
    """Also those that the step would see and that float64 hides: what is in low precision stays so."""
    module = Apply(WAYS[way], a=nn.Linear(D, WIDTH), b=nn.Linear(WIDTH, 1))
    with pytest.raises(UnsupportedError, match="one unit more moves the sum of all others"):
        sparsedp.check(module, lambda out, y: (out.float() * y).sum(-1).mean(), (torch.randn(6, D), torch.randn(6, 1)))


def test_check_refuses_a_frozen_part_in_low_precision() -> None:
    module = network(lambda m, x: m.b(m.f(m.a(x).to(m.f.weight.dtype)).to(m.b.weight.dtype)), BFLOAT16)
    with pytest.raises(UnsupportedError, match="in module 'f' has numbers in bfloat16"):
        sparsedp.check(module, lambda out, y: (out.float() * y).mean(), (torch.randn(6, D), torch.randn(6, 1)))


def test_check_finds_it_in_the_loss() -> None:
    """Which capture does not see."""
    batch = (torch.randn(6, D), torch.randn(6, 1))
    module = network(plainly)
    sparsedp.check(module, lambda out, y: (out * y).mean(), batch)
    with pytest.raises(UnitsMixedError):
        sparsedp.check(module, lambda out, y: (out.bfloat16().to(y.dtype) * y).mean(), batch)


# ---------------------------------------------------------------------- what remains allowed


def test_a_frozen_encoder_in_low_precision_is_exact() -> None:
    """Nothing is trained before it, so that no gradient passes through."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.f(x.bfloat16()).to(m.b.weight.dtype).tanh())

    module = Apply(forward, f=nn.Linear(D, WIDTH).bfloat16().requires_grad_(False), b=nn.Linear(WIDTH, 2).double())
    x = torch.randn(6, D)
    assert_equal(module, capture_uses(module, [x]), one_by_one(module, [x]))
    module.b.float()
    for features in (x, x.bfloat16()):
        report = sparsedp.check(module, lambda out, y: (out * y).mean(), (features, torch.randn(6, 2)))
        assert report.units == 4


def test_autocast_that_is_off_inside_of_forward() -> None:
    """As in rotary embeddings."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with autocast(enabled=False):
            return m.b(m.f(m.a(x)))

    module = network(forward).double()
    x = torch.randn(6, D).double()
    assert_equal(module, capture_uses(module, [x]), one_by_one(module, [x]))


@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP()])
def test_evaluation_in_autocast(mechanism: Any) -> None:
    module = Apply(lambda m, i: m.b(m.e(i)), e=nn.Embedding(9, WIDTH), b=nn.Linear(WIDTH, 1))
    _, module, optimizer, loader = make_private(module, loader_of(torch.arange(9), batch_size=3), mechanism=mechanism)
    for (ids,) in loader:
        module(ids).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), autocast():
        assert module(torch.arange(4)).dtype == BFLOAT16


# ---------------------------------------------------------------------- settings, between forward and step


def settings() -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Ways to round products of float32 numbers, each with how to undo it."""
    backends = torch.backends

    def set_to(place: Any, value: str) -> Callable[[], None]:
        return lambda: setattr(place, "fp32_precision", value)

    found: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        value: (
            lambda value=value: torch.set_float32_matmul_precision(value),  # type: ignore[misc]
            lambda: torch.set_float32_matmul_precision("highest"),
        )
        for value in ("high", "medium")
    }
    if hasattr(backends.mkldnn, "conv"):
        found["convolutions"] = (set_to(backends.mkldnn.conv, "bf16"), set_to(backends.mkldnn.conv, "none"))
        found["products"] = (set_to(backends.mkldnn.matmul, "bf16"), set_to(backends.mkldnn.matmul, "none"))
    found["small numbers"] = (
        lambda: assert_true(torch.set_flush_denormal(True)), lambda: assert_true(torch.set_flush_denormal(False))
    )  # fmt: skip
    return found


def assert_true(value: bool) -> None:
    assert value


@pytest.mark.parametrize("setting", settings())
@pytest.mark.parametrize("when", ["forward", "backward", "step"])
def test_settings_that_round(setting: str, when: str) -> None:
    on, off = settings()[setting]
    module = nn.Linear(D, 1)
    _, module, optimizer, loader = make_private(module, loader_of(torch.randn(60, D), batch_size=30))
    (x,) = next(iter(loader))
    before = module.weight.detach().clone()

    def loop() -> None:
        for stage in ("forward", "backward", "step"):
            if stage == when:
                on()
            if stage == "forward":
                loss = module(x).mean()
            elif stage == "backward":
                loss.backward()
            else:
                optimizer.step()

    try:
        with pytest.raises(UnsupportedError, match=r"precision|denormal"):
            loop()
    finally:
        off()
    assert torch.equal(module.weight, before)


def test_steps_in_autocast_write_nothing() -> None:
    _, module, optimizer, loader = make_private(nn.Linear(D, 1), loader_of(torch.randn(60, D), batch_size=30))
    batches = iter(loader)
    (x,) = next(batches)
    before = module.weight.detach().clone()
    module(x).mean().backward()
    with pytest.raises(UnsupportedError, match="autocast"), autocast():
        optimizer.step()
    assert torch.equal(module.weight, before)
    optimizer.step()  # outside it goes on
    assert not torch.equal(module.weight, before)


def test_gradient_scaler() -> None:
    """It looks for gradients where there are none, and takes no step."""
    _, module, optimizer, loader = make_private(nn.Linear(D, 1), loader_of(torch.randn(60, D), batch_size=30))
    (x,) = next(iter(loader))
    before = module.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(x).mean()).backward()
    with pytest.raises((AssertionError, SparseDPError), match="inf checks"):
        scaler.step(optimizer)
    assert torch.equal(module.weight, before)
