"""Ways that were tried to get around the guarantee. Each is exact now, or raises."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.noise import Sums
from support import Apply, Clicks, assert_exact, capture_uses, clicks, loader_of, make_private, train, unit_loss

B, D = 6, 4


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {"h": nn.Linear(D, D), "k": nn.Linear(D, D), **more}


def permutation(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x)).flip(0)


# Inside of forward, after a layer and before another: units end up in other places, or in each other.
MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "index_select": lambda h: h.index_select(0, permutation(h)),
    "gather": lambda h: h.gather(0, permutation(h)[:, None].expand_as(h)),
    "indexing": lambda h: h[permutation(h)],
    "unbind and stack": lambda h: torch.stack(h.unbind(0)[::-1]),
    "mixup": lambda h: h + h[permutation(h)],
    "joined with permuted": lambda h: torch.cat([h, h[permutation(h)]], 1)[:, :D],
    "first unit": lambda h: h - h[0],
    "first unit kept": lambda h: h - h[:1],
    "normalize over the batch": lambda h: F.normalize(h, dim=0),
    "layer norm over all": lambda h: F.layer_norm(h, h.shape),
    "cumulative maximum": lambda h: h.cummax(0).values,
    "softmin": lambda h: F.softmin(h, dim=0),
    "differences": lambda h: torch.cat([h[:1], h.diff(dim=0)]),
    "in-batch einsum": lambda h: torch.einsum("id,jd->ij", h, h) @ torch.ones(len(h), D),
    "in-batch distances": lambda h: torch.cdist(h, h) @ torch.ones(len(h), D),
    "in-batch cosine": lambda h: F.cosine_similarity(h[:, None], h[None], dim=-1) @ torch.ones(len(h), D),
    "in-batch inner": lambda h: torch.inner(h, h) @ torch.ones(len(h), D),
    "in-batch tensordot": lambda h: torch.tensordot(h, h.T, 1) @ torch.ones(len(h), D),
    "covariance": lambda h: h @ (h.T @ h),
    "graph": lambda h: torch.ones(len(h), len(h)) @ h,
    "index_add": lambda h: torch.zeros_like(h).index_add(0, permutation(h), h),
    "sorted": lambda h: h.sort(0).values,
    "transposed in place": lambda h: (h @ torch.ones(D, len(h))).transpose_(0, 1)[:, :D],
    "renormalised in place": lambda h: h.clone().renorm_(2, 1, 0.5),
    "attention over the batch": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "instance norm over the batch": lambda h: F.instance_norm(h.T[None])[0].T,
    "pooling over the batch": lambda h: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
}


@pytest.mark.parametrize("case", MIXING)
def test_mixing_between_layers(case: str) -> None:
    module = Apply(lambda m, x: m.k(MIXING[case](m.h(x))), **layers())
    with pytest.raises((UnitsMixedError, UnsupportedError)):
        capture_uses(module, [torch.randn(B, D)])


LAST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ids of the batch as columns": lambda h, y: (h @ torch.ones(D, B))[:, y],
    "token mean with ignore_index": lambda h, y: F.cross_entropy(h, y.masked_fill(y == 1, -100)),
    "mean of valid": lambda h, y: (h.sum(1) * (y > 1)).sum() / (y > 1).sum(),
    "log of the batch": lambda h, y: h.exp().sum().log(),
    "deviation": lambda h, y: h.std(0).sum(),
    "largest of the batch": lambda h, y: h.amax(0).sum(),
    "addmm": lambda h, y: torch.addmm(torch.zeros(B, B), h, h.T),
}


@pytest.mark.parametrize("case", LAST)
def test_mixing_after_the_last_layer(case: str) -> None:
    module = Apply(lambda m, x, y: LAST[case](m.h(x), y), h=nn.Linear(D, D))
    with pytest.raises(UnitsMixedError):
        capture_uses(module, [torch.randn(B, D), torch.arange(B) % D], lambda out: out.sum())


@pytest.mark.parametrize("kind", ["layer", "attention", "transformer"])
def test_batch_first_forgotten(kind: str) -> None:
    """(B, L, D) into a layer that takes (L, B, D): it would attend over the batch."""
    if kind == "layer":
        module: nn.Module = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0)
    elif kind == "attention":
        module = Apply(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(D, 1))
    else:
        module = Apply(lambda m, x: m.t(x, x), t=nn.Transformer(D, 1, 1, 1, 8, dropout=0.0))
    with pytest.raises(UnitsMixedError, match="batch_first"):
        capture_uses(module, [torch.randn(B, 3, D)])


# Reasonable code whose units must be followed, at every size of the batch.
FOLLOWED: dict[str, Callable[..., Any]] = {
    "one-hot beside an embedding": lambda m, i: m.n(torch.stack([F.one_hot(i, 8).to(m.e.weight), m.e(i)], 1)),
    "shifted targets": lambda m, i: m.n(_shift(m.e(i[:, None].expand(-1, 6).contiguous()))),
    "gathered position": lambda m, i: m.n(m.e(i[:, None].expand(-1, 6).contiguous())[torch.arange(len(i)), i % 6]),
    "siamese in one call": lambda m, i: sum(m.n(torch.cat([m.e(i), m.e(i).sin()])).chunk(2)),
    "repeated for negatives": lambda m, i: m.n(m.e(i).repeat_interleave(3, 0)).view(-1, 3, 8),
    "lower triangle": lambda m, i: (m.n(m.e(i[:, None].expand(-1, 6).contiguous())) @ m.n(m.e(i))[:, :, None])[
        :, torch.tensor([0, 1]), torch.tensor([0, 0])
    ],
    "masked to zero": lambda m, i: m.n(_zeroed(m.e(i))),
    "dtype of a weight": lambda m, i: m.n(m.e(i) + m.n(m.e(i).to(m.e.weight))),
    "negative public ids": lambda m, i: m.e(i) * m.e.weight[torch.tensor([-1, 2])].sum(0),
}  # fmt: skip


def _shift(h: torch.Tensor) -> torch.Tensor:
    shifted = torch.zeros_like(h)
    shifted[:, 1:] = h[:, :-1]
    return shifted


def _zeroed(h: torch.Tensor) -> torch.Tensor:
    out = h.clone()
    out[out > 1] = 0
    return out


@pytest.mark.parametrize("case", FOLLOWED)
@pytest.mark.parametrize("units", range(1, 11))
def test_followed_at_every_batch_size(case: str, units: int) -> None:
    torch.manual_seed(units)
    assert_exact(Apply(FOLLOWED[case], e=nn.Embedding(8, 8), n=nn.LayerNorm(8)), torch.randint(8, (units,)))


# ---------------------------------------------------------------------- gradients that are not the batch's own


def test_saliency_before_backward_does_not_count() -> None:
    """torch.autograd.grad with respect to the input runs through the same nodes."""
    found = []
    for saliency in (False, True):
        torch.manual_seed(0)
        module = Clicks()
        ids, x, _ = clicks(64)
        engine, module, optimizer, loader = make_private(
            module, loader_of(ids, x, x[:, 0], batch_size=8), noise_multiplier=0.0
        )
        for i, v, _ in loader:
            optimizer.zero_grad()
            v.requires_grad_(saliency)
            loss = module(i, v).square().mean()
            if saliency:
                torch.autograd.grad(loss, v, retain_graph=True)
            loss.backward()
            optimizer.step()
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_zero_grad_between_two_backwards() -> None:
    module = Apply(lambda m, x: (m.a(m.t(x)), m.b(m.t(x))), t=nn.Linear(3, 3), a=nn.Linear(3, 1), b=nn.Linear(3, 1))
    x = torch.randn(64, 3)
    engine, module, optimizer, loader = make_private(module, loader_of(x, batch_size=8), noise_multiplier=0.0)
    before = copy.deepcopy(module.state_dict())
    (v,) = next(iter(loader))
    one, two = module(v)
    one.mean().backward(retain_graph=True)
    optimizer.zero_grad()
    (one.mean() + two.mean()).backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("poisson", [True, False])
def test_accumulating_batches_by_hand(poisson: bool) -> None:
    engine, module, optimizer, loader = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), poisson_sampling=poisson
    )
    with pytest.raises(SparseDPError, match="batch"):
        for number, (ids, x, _) in enumerate(loader):
            module(ids, x).mean().backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def test_loss_of_the_batch_before() -> None:
    engine, module, optimizer, loader = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=8), poisson_sampling=False
    )
    batches = iter(loader)
    ids, x, _ = next(batches)
    loss = module(ids, x).mean()
    next(batches)
    with pytest.raises(SparseDPError, match="current batch"):
        loss.backward()


def test_activations_changed_between_submodules() -> None:
    module = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
    engine, module, optimizer, loader = make_private(module, loader_of(torch.randn(64, 3), batch_size=8))
    (x,) = next(iter(loader))
    with pytest.raises(UnsupportedError, match="outside of forward"):
        module["head"](module["encoder"](x)[permutation(x)])  # type: ignore[index]
    module["head"](module["encoder"](x)).mean().backward()  # type: ignore[index]
    optimizer.step()


# ---------------------------------------------------------------------- state


class Remembers(nn.Module):
    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.spare, self.write = torch.zeros(3), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return self.linear(x)


def _no_grad_update(module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.linear.weight.add_(x.sum(0))


def _assign(module: Any, x: torch.Tensor) -> None:
    module.seen = x.sum(0)


def _set_data(module: Any, x: torch.Tensor) -> None:
    module.seen.data = x.sum(0)


def _behind_a_stand_in(module: Any, x: torch.Tensor) -> None:
    kept, module.seen = module.seen, torch.zeros(3)
    kept.data.add_(x.sum(0))
    module.seen = kept


def _swap_tensors(module: Any, x: torch.Tensor) -> None:
    other = module.spare
    torch.utils.swap_tensors(module.seen, other)
    other.data.copy_(x.sum(0))
    torch.utils.swap_tensors(module.seen, other)


def _fresh_buffer(module: Any, x: torch.Tensor) -> None:
    module._buffers["seen"] = torch.zeros(3)
    module.frozen.data.zero_()  # a change that is permitted, which must not excuse the other one
    module._buffers["seen"].data.copy_(x.sum(0))


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "in place": lambda m, x: m.seen.add_(x.sum(0)),
    ".data in place": lambda m, x: m.seen.data.add_(x.sum(0)),
    ".data =": _set_data,
    "assigned": _assign,
    "item": lambda m, x: m.seen.__setitem__(0, x.sum()),
    "copy_": lambda m, x: m.seen.copy_(x[0]),
    "frozen parameter": lambda m, x: m.frozen.data.add_(x.sum(0)),
    "trained parameter": _no_grad_update,
    "numpy": lambda m, x: m.seen.numpy().__iadd__(x.sum(0).numpy()),
    "out=": lambda m, x: torch.sum(x, 0, out=m.seen),
    "behind a stand-in": _behind_a_stand_in,
    "swapped": _swap_tensors,
    "a fresh one": _fresh_buffer,
    "lists": lambda m, x: torch._foreach_copy_([m.seen.data], [x.sum(0)]),
}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("grad", [True, False])
def test_data_kept_in_the_module(case: str, grad: bool) -> None:
    engine, module, optimizer, loader = make_private(
        Remembers(WRITES[case]), loader_of(torch.randn(64, 3), batch_size=8)
    )
    (x,) = next(iter(loader))
    with pytest.raises(UnsupportedError, match=r"seen|frozen|linear|numpy"), torch.set_grad_enabled(grad):
        module(x)


def test_a_sparse_buffer() -> None:
    """Such as a graph's adjacency: its product with activations mixes all units."""
    module = nn.Linear(3, 1)
    module.register_buffer("graph", torch.eye(8).to_sparse())
    engine, module, optimizer, loader = make_private(module, loader_of(torch.randn(64, 3), batch_size=8))
    with pytest.raises(UnsupportedError, match="'graph' is a sparse tensor"):
        module(next(iter(loader))[0])


def test_state_that_does_not_depend_on_data_is_fine() -> None:
    module = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    engine, module, optimizer, loader = make_private(module, loader_of(torch.randn(64, 3), batch_size=8))
    for (x,) in loader:
        optimizer.zero_grad()
        module(x).mean().backward()
        optimizer.step()


def test_batch_norm_statistics_without_grad() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))
    engine, module, optimizer, loader = make_private(module, loader_of(torch.randn(64, 3), batch_size=8))
    with pytest.raises(UnsupportedError, match="batch_norm"):
        torch.optim.swa_utils.update_bn(loader, module)


def test_batch_hidden_in_an_object() -> None:
    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    module = Apply(lambda m, y, box: m.l(box.x - box.x.mean(0)) * y[:, None], l=nn.Linear(3, 1))
    engine, module, optimizer, loader = make_private(
        module, loader_of(torch.randn(64, 3), torch.ones(64), batch_size=8)
    )
    x, y = next(iter(loader))
    with pytest.raises(UnitsMixedError):
        module(y, Box(x))


# ---------------------------------------------------------------------- the ledger, keys and copies


def test_going_back_does_not_refund(tmp_path: Path) -> None:
    """Steps after a checkpoint stay on record when the run goes back to it, and count against the plan."""
    module = Clicks()
    engine = sparsedp.PrivacyEngine()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(100), batch_size=10), target_epsilon=1.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    engine.save_checkpoint(tmp_path / "start.pt")
    train(module, optimizer, loader)
    spent = engine.get_epsilon()
    engine.load_checkpoint(tmp_path / "start.pt")
    assert engine.ledger.steps == 0 and engine.ledger.abandoned == 10
    assert engine.get_epsilon() == spent
    train(module, optimizer, loader)
    with pytest.raises(SparseDPError, match="budget"):
        train(module, optimizer, loader)
    assert engine.get_epsilon() <= 1.0
    engine.save_checkpoint(tmp_path / "later.pt")
    engine.load_checkpoint(tmp_path / "later.pt")
    assert engine.ledger.steps == 10 and engine.ledger.abandoned == 10


def test_unfrozen_parameters_cannot_slip_in() -> None:
    module = Clicks()
    module.hidden.requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    engine, module, optimizer, loader = make_private(
        module, loader_of(*clicks(64), batch_size=8), optimizer=torch.optim.SGD(trained, lr=0.1)
    )
    module.hidden.requires_grad_(True)
    optimizer.param_groups[0]["params"].extend(module.hidden.parameters())
    before = module.hidden.weight.detach().clone()
    with pytest.raises(SparseDPError):
        train(module, optimizer, loader)
    assert torch.equal(module.hidden.weight, before)
    module.hidden.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="not those"):
        train(module, optimizer, loader)


def test_copies_of_engine_and_optimizer_are_refused() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    for thing in (engine, optimizer):
        with pytest.raises(TypeError, match="same noise"):
            copy.deepcopy(thing)
    train(module, optimizer, loader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["fill", "add"])
def test_forked_process_draws_no_noise(way: str) -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    child = os.fork()
    if child == 0:
        try:
            getattr(optimizer.noise, way)({0: torch.empty(3) if way == "fill" else Sums(torch.zeros(3))}, 1.0, 0)
        except SparseDPError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_engines_on_one_module() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    with pytest.raises(UnsupportedError, match="close"):
        make_private(module, loader_of(*clicks(64), batch_size=8))
    engine.close()
    second, module, optimizer, loader = make_private(module, loader_of(*clicks(64), batch_size=8))
    train(module, optimizer, loader)
    assert second.ledger.steps == 8 and engine.ledger.steps == 0


def test_gradient_hooks_are_refused() -> None:
    module = Clicks()
    module.out.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UnsupportedError, match=r"out\.weight"):
        make_private(module, loader_of(*clicks(64), batch_size=8))


# ---------------------------------------------------------------------- numbers at the edge of float32


@pytest.mark.parametrize("width", [300, 4096, 100_000])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("use", ["lookup", "inputs", "gradients"])
def test_long_rows_with_many_small_elements(use: str, layout: str, width: int) -> None:
    """Each small square vanishes beside the largest in float32; all of them together do not."""
    long = torch.full((2, width), 4 * 2.42e-4)
    long[:, 0] = 4.0
    long = long.T.contiguous().T if layout == "transposed" else long
    module: nn.Module
    if use == "lookup":
        module, inputs = Apply(lambda m, i: m.e(i) * long, e=nn.Embedding(3, width)), torch.ones(2, dtype=torch.long)
    elif use == "inputs":
        module, inputs = nn.Linear(width, 1, bias=False), long
    else:
        module, inputs = Apply(lambda m, x: m.l(x) * long, l=nn.Linear(1, width, bias=False)), torch.ones(2, 1)
    (uses,) = capture_uses(module, [inputs], lambda out: out.sum()).uses.values()
    exact = long.double().square().sum(1)
    torch.testing.assert_close(uses.squared_norms(2), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("bag", [False, True])
def test_lookups_that_cancel(scale: float, bag: bool) -> None:
    table = nn.Embedding(3, 4)
    weights = torch.tensor([[scale, -scale, 5.0]])
    if bag:
        module = Apply(lambda m, i: F.embedding_bag(i, m.e.weight, mode="sum", per_sample_weights=weights), e=table)
    else:
        module = Apply(lambda m, i: (m.e(i) * weights[..., None]).sum(1), e=table)
    found = capture_uses(module, [torch.tensor([[1, 1, 1]])], lambda out: out.sum())
    uses = found.uses["e.weight"]
    factor = sparsedp.Clipping(1.0).factors(uses.squared_norms(1).sqrt()).float()
    assert float(uses.weighted_sum(factor, table.weight.shape).values.norm()) <= 1 + 1e-3


@pytest.mark.parametrize("positions", [1, 3])
def test_products_beyond_the_range_of_float32(positions: int) -> None:
    """|a|^2 underflows and |g|^2 overflows, although |a| |g| is an ordinary number."""
    module = nn.Linear(1, 1, bias=False)
    for a, g in ((2e-23, 1.5e19), (1e-30, 1e30), (1e25, 1e-25)):
        found = capture_uses(module, [torch.full((2, positions, 1), a)], lambda out, g=g: (g * out).sum())
        norm = float(found.uses["weight"].squared_norms(2)[0].sqrt())
        assert norm == pytest.approx(positions * a * g, rel=1e-3)


def test_huge_but_finite_gradients_are_clipped() -> None:
    module = nn.Linear(2, 1)
    engine, module, optimizer, loader = make_private(
        module, loader_of(torch.randn(64, 2), batch_size=8), noise_multiplier=0.0
    )
    (x,) = next(iter(loader))
    x[0] = 1e25
    before = copy.deepcopy(module.state_dict())
    module(x).mean().backward()
    optimizer.step()
    moved = math.sqrt(sum(float((v - before[n]).square().sum()) for n, v in module.state_dict().items()))
    assert 0 < moved <= 0.1 * len(x) / 8 * (1 + 1e-4)


def test_many_repeats_of_one_row_keep_their_precision() -> None:
    units, length = 2048, 300
    table = nn.Embedding(2, 2)
    module = Apply(lambda m, i: m.e(i).sum(1), e=table)
    ids = torch.zeros(units, length, dtype=torch.long)
    uses = capture_uses(module, [ids], unit_loss).uses["e.weight"]
    factors = sparsedp.Clipping(1.0).factors(uses.squared_norms(units).sqrt()).float()
    whole = uses.weighted_sum(factors, table.weight.shape).values.double()
    factors[0] = 0
    without = uses.weighted_sum(factors, table.weight.shape).values.double()
    assert float((whole - without).norm()) <= 1 + 2e-3


@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.EANA()], ids=["dpsgd", "eana"])
def test_units_of_a_failed_step_do_not_join_the_next(mechanism: sparsedp.Mechanism) -> None:
    """The first part of a logical batch was clipped and kept; then a NaN ends the step. The next step starts from nothing."""
    ids, target = torch.randint(5, (8,)), torch.ones(8)
    module = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1), nn.Flatten(0))
    engine, module, optimizer, loader = make_private(
        module, loader_of(ids, target, batch_size=8), noise_multiplier=0.0, max_grad_norm=1.0, mechanism=mechanism,
        max_physical_batch=4, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), poisson_sampling=False,
    )  # fmt: skip
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (module(x) * y * 1e3 * (float("nan") if number == 1 else 1.0)).mean().backward()
        if number == 0:
            optimizer.step()
        else:
            with pytest.raises(sparsedp.NonFiniteGradientError):
                optimizer.step()
    for x, y in loader:
        optimizer.zero_grad()
        (module(x) * y * 1e3).mean().backward()
        optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.units == 8
    assert engine.ledger.steps == 1


def test_the_rest_of_a_failed_batch_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    _, module, optimizer, loader = make_private(
        module, loader_of(torch.rand(8, 2), torch.ones(8), batch_size=8), noise_multiplier=0.0, max_physical_batch=4,
        poisson_sampling=False,
    )  # fmt: skip
    errors = []
    for number, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        (module(x) * (float("nan") if number == 0 else 1.0)).mean().backward()
        with pytest.raises(sparsedp.SparseDPError) as error:
            optimizer.step()
        errors.append(str(error.value))
    assert "NaN" in errors[0] and "in order" in errors[1]


def test_branches_of_a_run_do_not_share_steps(tmp_path: Path) -> None:
    """Two engines continue one checkpoint. Whoever then loads the other's has seen the steps of both."""

    def engine(steps: int, start: Path | None = None) -> Any:
        parts = make_private(nn.Linear(3, 1), loader_of(torch.rand(40, 3), torch.rand(40), batch_size=4), seed=None)
        if start is not None:
            parts[0].load_checkpoint(start)
        take(parts, steps)
        return parts

    def take(parts: Any, steps: int) -> None:
        made, module, optimizer, loader = parts
        goal = made.ledger.steps + steps
        while made.ledger.steps < goal:
            for x, y in loader:
                optimizer.zero_grad()
                if len(x):
                    (module(x).squeeze(1) - y).square().mean().backward()
                optimizer.step()
                if made.ledger.steps == goal:
                    break

    first = engine(5)
    first[0].save_checkpoint(tmp_path / "early.pt")
    take(first, 5)
    first[0].save_checkpoint(tmp_path / "late.pt")
    second = engine(7, tmp_path / "early.pt")
    second[0].load_checkpoint(tmp_path / "late.pt")
    assert (second[0].ledger.steps, second[0].ledger.abandoned) == (10, 7)
    # Siblings: what they have in common is what they both began with, not what the last one that was read holds.
    for name in ("one", "other"):
        engine(10, tmp_path / "early.pt")[0].save_checkpoint(tmp_path / f"{name}.pt")
    third = engine(3, tmp_path / "one.pt")
    third[0].load_checkpoint(tmp_path / "other.pt")
    assert (third[0].ledger.steps, third[0].ledger.abandoned) == (15, 13)
    third[0].save_checkpoint(tmp_path / "third.pt")
    third[0].load_checkpoint(tmp_path / "one.pt")
    assert (third[0].ledger.steps, third[0].ledger.abandoned) == (15, 13)
    fourth = engine(0, tmp_path / "one.pt")
    fourth[0].load_checkpoint(tmp_path / "third.pt")  # which went through one.pt
    assert (fourth[0].ledger.steps, fourth[0].ledger.abandoned) == (15, 13)
    second[0].load_checkpoint(tmp_path / "early.pt")
    assert (second[0].ledger.steps, second[0].ledger.abandoned) == (5, 12)
    second[0].load_checkpoint(tmp_path / "late.pt")
    assert (second[0].ledger.steps, second[0].ledger.abandoned) == (10, 7)


# ---------------------------------------------------------------------- ids of no bag


@pytest.mark.parametrize("surplus", [9, 3], ids=["padding", "ids"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_behind_the_last_offset(mode: str, surplus: int) -> None:
    """Counted as positions, they would shift the gradients of other tables to other units, who would not be clipped."""

    def forward(module: nn.Module, many: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        filled = torch.cat([many.flatten(), torch.full((2,), surplus)])
        return module.bag(filled, torch.arange(len(many) + 1) * many.shape[1]) + module.table(one)

    bag = nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=True, padding_idx=9)
    module = Apply(forward, bag=bag, table=nn.Embedding(10, 4, padding_idx=0))
    with pytest.raises(
        UnsupportedError, match=r"2 ids lie behind the last offset|position of the 4 units in its input"
    ):
        capture_uses(module, [torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor([1, 2, 0, 0])], unit_loss)


# ---------------------------------------------------------------------- memory that a loop uses again


@pytest.mark.parametrize("height", [1, 4])
@pytest.mark.parametrize("mechanism", [sparsedp.LazyDP(), sparsedp.EANA(), sparsedp.DPSGD()], ids=lambda m: m.name)
def test_one_tensor_for_all_physical_batches(mechanism: sparsedp.Mechanism, height: int) -> None:
    """Where a selection waits for the last of them, all would have the last one's data, and its unit count many times."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(10, 2), nn.Linear(5, height, bias=False)

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum(1) + self.table(ids).sum(1)

    def run(reuse: str) -> torch.Tensor:
        torch.manual_seed(0)
        ids, x = torch.arange(8), torch.zeros(8, 5)
        x[7, 4] = 100.0
        model = Model()
        before = model.linear.weight.detach().clone()
        engine, module, optimizer, loader = make_private(
            model, loader_of(ids, x, batch_size=8), mechanism=mechanism, noise_multiplier=0.0, poisson_sampling=False,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_physical_batch=1,
        )  # fmt: skip
        for own_ids, own in loader:
            if reuse == "inputs":
                own = buffer.copy_(own)
            if reuse == "ids":
                own_ids = places.copy_(own_ids)
            optimizer.zero_grad()
            nn.functional.softplus(module(own_ids, own)).mean().backward()
            optimizer.step()
        return 8 * (module.linear.weight.detach() - before)[:, 4].norm()

    buffer, places = torch.zeros(1, 5), torch.zeros(1, dtype=torch.long)
    assert run("nothing") <= 1 + 1e-5
    if height == 1 or not mechanism.selects:  # of one output, the gradients are written out
        assert run("inputs") <= 1 + 1e-5
    else:
        with pytest.raises(UnsupportedError, match="new tensor for every batch"):
            run("inputs")
    if not mechanism.selects:
        assert run("ids") <= 1 + 1e-5
    else:
        with pytest.raises(UnsupportedError, match="new tensor for every batch"):
            run("ids")


Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
USES: dict[str, tuple[Forward, Callable[[], nn.Module]]] = {
    "linear": (lambda m, i, x, w: m.part(x).sum((1, 2)), lambda: nn.Linear(5, 7)),
    "lookup": (lambda m, i, x, w: m.part.weight[i].sum((1, 2)), lambda: nn.Embedding(10, 3)),
    "bag": (
        lambda m, i, x, w: F.embedding_bag(i, m.part.weight, mode="sum", per_sample_weights=w).sum(1),
        lambda: nn.EmbeddingBag(10, 3, mode="sum"),
    ),
    "convolution": (lambda m, i, x, w: m.part(x).sum((1, 2)), lambda: nn.Conv1d(4, 3, 2)),
    "norm": (lambda m, i, x, w: (m.part(x) * x).sum((1, 2)), lambda: nn.LayerNorm(5)),
    "bilinear": (lambda m, i, x, w: m.part(x[:, 0], x[:, 1]).sum(1), lambda: nn.Bilinear(5, 5, 3)),
    "product": (lambda m, i, x, w: (x * m.part.weight[0]).sum((1, 2)), lambda: nn.Linear(5, 1)),
    "activation": (lambda m, i, x, w: m.part(x).sum((1, 2)), nn.PReLU),
    "softmax": (
        lambda m, i, x, w: sparsedp.nn.table_softmax_loss(x, m.part.weight, i),
        lambda: nn.Embedding(10, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("again", ["ids", "features", "weights"])
@pytest.mark.parametrize("use", USES)
def test_memory_used_again_is_refused_or_does_not_matter(use: str, again: str) -> None:
    """For every kind of use, while its physical batch waits for the last one."""
    generator = torch.Generator().manual_seed(0)
    data = {
        "ids": torch.randint(10, (8, 4), generator=generator),
        "features": torch.randn(8, 4, 5, generator=generator),
        "weights": torch.rand(8, 4, generator=generator),
    }

    def run(buffer: torch.Tensor | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        forward, make = USES[use]
        model = Apply(forward, part=make())
        engine, module, optimizer, loader = make_private(
            model, loader_of(*data.values(), batch_size=8), mechanism=sparsedp.EANA(), noise_multiplier=0.0,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), poisson_sampling=False, max_physical_batch=1,
        )  # fmt: skip
        for batch in loader:
            own = dict(zip(data, batch))
            if buffer is not None:
                own[again] = buffer.copy_(own[again])
            optimizer.zero_grad()
            F.softplus(module(*own.values())).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    wanted = run(None)
    try:
        found = run(torch.zeros_like(data[again][:1]))
    except UnsupportedError as error:
        assert "new tensor for every batch" in str(error)
    else:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("height", [1, 3])
def test_huge_inputs_with_tiny_gradients(height: int) -> None:
    """Scaled by its clip factor, the gradient would be so small that float32 rounds it by a third, and then times the input."""
    moved = []
    for part in range(12, 41):
        module = nn.Linear(256, height, bias=False)
        weight = torch.zeros(height, 256)
        weight[:, 0] = -85.0
        module.weight.data.copy_(weight)
        x = torch.zeros(512, 256)
        x[0], x[0, 0] = part / 40 * 3.4e38, 1.0
        engine, module, optimizer, loader = make_private(
            module, loader_of(x, batch_size=512), noise_multiplier=0.0, max_grad_norm=0.01, poisson_sampling=False,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )  # fmt: skip
        try:
            for (own,) in loader:
                optimizer.zero_grad()
                nn.functional.softplus(module(own)).sum(1).mean().backward()
                optimizer.step()
        except sparsedp.NonFiniteGradientError:
            continue
        change = (module.weight.detach() - weight).double()
        change[:, 0] = 0
        moved.append(float(change.norm()) * 512 / 0.01)
    assert max(moved, default=0.0) <= 1 + 1e-5
