"""Softmax losses over a table: against log_softmax, in chunks, captured and under every mechanism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsedp
from sparsedp import UnsupportedError
from sparsedp.capture import Capture, RowSpace
from sparsedp.capture import products as products_module
from sparsedp.capture.uses import logit_gradients
from sparsedp.capture.uses import softmax as softmax_module
from sparsedp.capture.uses.softmax_loss import softmax_pass
from sparsedp.contribution import touched_rows
from sparsedp.errors import UnitsMixedError
from sparsedp.grid import grid_of
from sparsedp.nn import (
    CandidateSampler,
    binary_candidate_loss,
    candidate_scores,
    sequence_loss,
    table_softmax_loss,
)
from sparsedp.nn import softmax as losses_module
from support import Apply, assert_exact, batch_of, loader_of, make_private
from users import assert_exact as assert_exact_for_users


def reference(logits: Tensor, target: Tensor, ignore: int = 0) -> Tensor:
    """Each unit's mean of -log_softmax at its targets, (B,)."""
    if 0 <= ignore < logits.shape[-1]:
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) == ignore, -math.inf)
    valid = target != ignore
    each = -logits.log_softmax(-1).gather(-1, target.masked_fill(~valid, 1)[..., None])[..., 0]
    each = torch.where(valid, each, torch.zeros_like(each))
    return each.flatten(1).sum(1) / valid.flatten(1).sum(1).clamp_min(1)


def some(units: int, length: int, rows: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Hidden states, a table and targets, some of which are 0: anywhere, not only at the end."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(units, length, dim, generator=generator, dtype=dtype)
    table = torch.randn(rows, dim, generator=generator, dtype=dtype)
    return hidden, table, torch.randint(rows, (units, length), generator=generator)


def small_chunks(monkeypatch: pytest.MonkeyPatch, elements: int, whole: int) -> None:
    monkeypatch.setattr(logit_gradients, "CHUNK", elements)
    monkeypatch.setattr(softmax_module, "_TOGETHER", 2)
    monkeypatch.setattr(logit_gradients, "WHOLE", whole)
    monkeypatch.setattr(losses_module, "CHUNK", elements)
    monkeypatch.setattr(products_module, "WRITTEN", elements)


# ------------------------------------------------------------------ values and gradients


@settings(max_examples=60, deadline=None)
@given(
    units=st.integers(0, 4),
    length=st.integers(1, 6),
    rows=st.integers(2, 12),
    dim=st.integers(1, 5),
    ignore=st.sampled_from([0, 1, -100]),
    chunk=st.sampled_from([1, 7, 24, 10**6]),
    whole=st.sampled_from([5, 10**6]),
    seed=st.integers(0, 1000),
)
def test_equal_to_log_softmax(
    units: int, length: int, rows: int, dim: int, ignore: int, chunk: int, whole: int, seed: int
) -> None:
    hidden, table, target = some(units, length, rows, dim, seed)
    if ignore == -100:
        target = target.masked_fill(target == 0, -100)
    grads = torch.rand(units, dtype=torch.float64)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk, whole)
        for chunked in (True, False):
            leaves = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
            if chunked:
                losses = table_softmax_loss(*leaves, target, ignore)
            else:
                losses = reference(leaves[0] @ leaves[1].T, target, ignore)
            found.append((losses.detach(), *torch.autograd.grad(losses, leaves, grads)))
        for mine, wanted in zip(*found):
            torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)
        if units:
            logits = [(hidden @ table.T).requires_grad_() for _ in range(2)]
            pair = sequence_loss(logits[0], target, ignore), reference(logits[1], target, ignore).mean()
            torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-12)
            of_logits = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(pair, logits)]
            torch.testing.assert_close(*of_logits, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_float32_is_as_exact_as_log_softmax(size: float) -> None:
    hidden, table, target = some(8, 6, 300, 16, dtype=torch.float32)
    hidden = (hidden * size).requires_grad_()
    exact = reference((hidden.double() @ table.double().T), target)
    theirs = reference(hidden.detach() @ table.T, target)
    mine = table_softmax_loss(hidden, table, target)
    bound = 4 * float((theirs - exact.detach()).abs().max()) + 1e-6 * float(exact.detach().abs().max())
    assert float((mine - exact).detach().abs().max()) <= bound
    torch.testing.assert_close(
        torch.autograd.grad(mine.sum(), hidden)[0], torch.autograd.grad(exact.sum(), hidden)[0], rtol=1e-3, atol=1e-5
    )


def test_padding_is_not_in_the_softmax() -> None:
    hidden, table, target = some(3, 4, 6, 5)
    table.requires_grad_()
    before = table_softmax_loss(hidden, table, target)
    (grad,) = torch.autograd.grad(before.sum(), table)
    assert float(grad[0].abs().max()) == 0 and float(grad[1:].abs().min()) > 0
    with torch.no_grad():
        table[0] += 100
    assert torch.equal(table_softmax_loss(hidden, table, target), before)
    logits = hidden @ table.T
    torch.testing.assert_close(sequence_loss(logits, target), before.mean())
    rest = table_softmax_loss(hidden, table[1:], target - 1, ignore=-1)
    torch.testing.assert_close(rest, before)


def test_units_without_targets() -> None:
    hidden, table, target = some(3, 4, 6, 5)
    target[1] = 0
    hidden.requires_grad_()
    losses = table_softmax_loss(hidden, table, target)
    assert float(losses[1].detach()) == 0
    (grad,) = torch.autograd.grad(losses.sum(), hidden)
    assert float(grad[1].abs().max()) == 0
    assert torch.equal(grad[target == 0], torch.zeros_like(grad[target == 0]))
    hidden = hidden.detach().clone()
    hidden[target == 0] = math.nan  # what is there does not matter
    torch.testing.assert_close(table_softmax_loss(hidden, table, target), losses)
    assert float(sequence_loss(hidden @ table.T, torch.zeros_like(target))) == 0


def test_wrong_inputs_are_refused() -> None:
    hidden, table, target = some(2, 3, 6, 5)
    with pytest.raises(ValueError, match="targets lie between 0 and 6"):
        table_softmax_loss(hidden, table, torch.tensor([[0, 6, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match="targets lie between -1 and 1; they must be rows of the table, from 0 to 5"):
        sequence_loss(hidden @ table.T, torch.tensor([[0, -1, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match="hidden"):
        table_softmax_loss(hidden, table, target[:, :2])
    with pytest.raises(ValueError, match="logits"):
        sequence_loss(hidden, target[:, :2])
    with pytest.raises(ValueError, match="has none"):
        table_softmax_loss(hidden, table[:1], torch.zeros_like(target))


def test_logits_are_never_kept() -> None:
    """The largest tensor that forward and backward make holds a part of the logits: none as large as all of them."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    hidden, table, target = some(16, 8, 400, 4)
    leaves = [hidden.requires_grad_(), table.requires_grad_()]
    with pytest.MonkeyPatch.context() as patch, Largest() as seen:
        small_chunks(patch, 4000, 8 * 400)
        table_softmax_loss(*leaves, target).sum().backward()
    assert 0 < seen.elements <= 4000 < target.numel() * 400 / 10


def test_nothing_but_losses_without_gradients() -> None:
    hidden, table, target = some(3, 4, 6, 5)
    with torch.no_grad():
        losses = table_softmax_loss(hidden, table, target)
    assert not losses.requires_grad
    _, passed = softmax_pass(hidden, table, target - 1, None, gradient=False, norms=False)
    assert passed.hidden_grad is None and passed.square is None


# ------------------------------------------------------------------ captured


def tied(rows: int, dim: int, change: Any = torch.tanh, **options: Any) -> nn.Module:
    def forward(m: Any, history: Tensor, target: Tensor) -> Tensor:
        return table_softmax_loss(change(m.e(history)) * 2, m.e.weight, target, **options)

    return Apply(forward, e=nn.Embedding(rows, dim, padding_idx=0))


@settings(max_examples=50, deadline=None)
@given(
    units=st.integers(1, 4),
    length=st.integers(1, 6),
    rows=st.integers(2, 9),
    dim=st.integers(1, 5),
    chunk=st.sampled_from([1, 7, 24, 10**6]),
    whole=st.sampled_from([5, 10**6]),
    seed=st.integers(0, 1000),
)
def test_exact_with_lookups_of_the_same_table(
    units: int, length: int, rows: int, dim: int, chunk: int, whole: int, seed: int
) -> None:
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk, whole)
        model = tied(rows, dim)
        assert_exact(model, torch.randint(rows, (units, length)), torch.randint(rows, (units, length)))


FORMS: dict[str, Any] = {
    "alone": lambda m, h, t: table_softmax_loss(m.x(h), m.e.weight, t),
    "two softmaxes": lambda m, h, t: (
        table_softmax_loss(m.e(h).sin(), m.e.weight, t) + 2 * table_softmax_loss(m.x(h), m.e.weight, t.flip(1))
    ),
    "with logits": lambda m, h, t: (
        table_softmax_loss(m.e(h).sin(), m.e.weight, t) + F.linear(m.x(h), m.e.weight).sin().sum((1, 2))
    ),
    "with a penalty per unit": lambda m, h, t: (
        table_softmax_loss(m.e(h).sin(), m.e.weight, t) + (m.x(h).sum((1, 2))[:, None, None] * m.e.weight).sum((1, 2))
    ),
    "other padding": lambda m, h, t: table_softmax_loss(m.e(h).sin(), m.e.weight, t, ignore=3),
    "all rows": lambda m, h, t: table_softmax_loss(m.e(h).sin(), m.e.weight, t.masked_fill(t == 0, -7), ignore=-7),
    "some rows": lambda m, h, t: table_softmax_loss(m.e(h).sin(), m.e.weight[2:], t % 5),
    "overlapping rows": lambda m, h, t: (
        table_softmax_loss(m.e(h).sin(), m.e.weight[2:], t % 5) + table_softmax_loss(m.x(h), m.e.weight[:6], t % 6)
    ),
    "a table of its own": lambda m, h, t: table_softmax_loss(m.e(h).sin(), m.x.weight, t),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("units", [1, 5])
def test_exact(form: str, units: int) -> None:
    torch.manual_seed(1)
    model = Apply(FORMS[form], e=nn.Embedding(8, 3, padding_idx=0), x=nn.Embedding(8, 3))
    assert_exact(model, torch.randint(8, (units, 4)), torch.randint(8, (units, 4)))


def test_empty_batch() -> None:
    model = tied(7, 3)
    empty = torch.empty(0, 4, dtype=torch.long)
    capture = Capture(model, dict(model.named_parameters()), batch_of(0))
    capture.attach()
    model(empty, empty).sum().backward()
    found = capture.collect()
    assert found is not None and found.units == 0
    uses = found.uses["e.weight"]
    assert uses.squared_norms(0).shape == (0,)
    assert float(uses.weighted_sum(torch.empty(0), torch.Size([7, 3])).abs().max()) == 0  # type: ignore[union-attr]


def test_restricted_to_some_rows() -> None:
    torch.manual_seed(0)
    model = tied(9, 4).double()
    history, target = torch.randint(9, (5, 6)), torch.randint(9, (5, 6))
    captured = assert_exact(model, history, target)
    found = captured.uses["e.weight"]
    assert found.is_used_in_full and torch.equal(
        touched_rows([captured], RowSpace(("e.weight",), (9,))), torch.arange(9)
    )
    factors = torch.rand(5, dtype=torch.float64)
    for rows in (torch.tensor([0, 2, 3, 7]), torch.tensor([5]), torch.empty(0, dtype=torch.long), torch.arange(9)):
        few = found.restricted(rows, 4)
        everywhere = [found.weighted_sum(torch.eye(5, dtype=torch.float64)[u], torch.Size([9, 4])) for u in range(5)]
        kept = torch.zeros(9, 1, dtype=torch.float64).index_fill_(0, rows, 1)
        alone = torch.stack([total * kept for total in everywhere])  # type: ignore[operator]
        torch.testing.assert_close(few.squared_norms(5), alone.square().sum((1, 2)), rtol=1e-9, atol=1e-12)
        total = few.weighted_sum(factors, torch.Size([9, 4]))
        torch.testing.assert_close(total, (factors[:, None, None] * alone).sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_users_with_several_examples(form: str) -> None:
    torch.manual_seed(2)
    model = Apply(FORMS[form], e=nn.Embedding(8, 3, padding_idx=0), x=nn.Embedding(8, 3))
    owners = [2, 0, 2, 1, 2, 0, 2]
    assert_exact_for_users(model, [torch.randint(8, (7, 4)), torch.randint(8, (7, 4))], owners, 3)


def test_frozen_and_evaluated() -> None:
    torch.manual_seed(0)
    model = Apply(FORMS["alone"], e=nn.Embedding(8, 3), x=nn.Embedding(8, 3))
    model.e.requires_grad_(False)  # type: ignore[union-attr]
    inputs = torch.randint(8, (4, 5)), torch.randint(8, (4, 5))
    assert set(assert_exact(model, *inputs).uses) == {"x.weight"}
    capture = Capture(model, dict(model.named_parameters()), batch_of(4))
    capture.attach()
    with torch.no_grad():
        assert model(*inputs).shape == (4,)
    capture.detach()


def test_changed_weights_are_noticed() -> None:
    model = tied(7, 3)
    capture = Capture(model, dict(model.named_parameters()), batch_of(2))
    capture.attach()
    model(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)).sum().backward()
    with torch.no_grad():
        model.e.weight[1, 1] += 1  # type: ignore[union-attr, index, operator]
    with pytest.raises(UnsupportedError, match="was changed between forward"):
        capture.collect()


def test_what_is_refused() -> None:
    ids = torch.randint(1, 8, (4, 4))
    for forward, error, match in (
        (lambda m, h, t: table_softmax_loss(m.e(h).transpose(0, 1), m.e.weight, t), UnsupportedError, "axis 0"),
        (lambda m, h, t: table_softmax_loss(m.e(h), m.e.weight * 2, t), UnsupportedError, "computed copy"),
        (lambda m, h, t: table_softmax_loss(m.e(h), m.e.weight, torch.ones_like(t)), None, ""),
        (
            lambda m, h, t: table_softmax_loss(m.e(h), m.e.weight, torch.ones(4, 4, dtype=torch.long)),
            UnsupportedError, "do not come from the batch",
        ),
        (lambda m, h, t: sequence_loss(m.e(h).transpose(0, 1), t), UnitsMixedError, "axis|units"),
    ):  # fmt: skip
        model = Apply(forward, e=nn.Embedding(8, 8))
        capture = Capture(model, dict(model.named_parameters()), batch_of(4))
        capture.attach()
        if error is None:
            assert model(ids, ids).shape == (4,)
        else:
            with pytest.raises(error, match=match):
                model(ids, ids)
        capture.detach()


def test_sequence_loss_inside_of_forward() -> None:
    model = Apply(lambda m, h, t: sequence_loss(F.linear(m.e(h).sin(), m.e.weight), t), e=nn.Embedding(8, 3))
    inputs = torch.randint(8, (5, 4)), torch.randint(8, (5, 4))
    found = assert_exact_mean(model, inputs)
    assert found < 1e-9


def assert_exact_mean(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    report = sparsedp.check(model, lambda loss, _: loss, (*inputs, torch.zeros(len(inputs[0]))))
    return report.largest_difference


# ------------------------------------------------------------------ training


class Sequences(nn.Module):
    """A tied model that looks back one position, with a layer of its own."""

    def __init__(self, rows: int = 30, dim: int = 6, how: str = "softmax") -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, padding_idx=0)
        self.layer = nn.Linear(dim, dim)
        self.how = how

    def forward(self, history: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.table(history)))
        if self.how == "softmax":
            return table_softmax_loss(hidden, self.table.weight, target)
        return F.linear(hidden, self.table.weight)


MECHANISMS = {
    "dpsgd": sparsedp.DPSGD,
    "eana": sparsedp.EANA,
    "fest": lambda: sparsedp.FEST(k=12, counts={"table.weight": torch.arange(30, 0, -1)}),
    "adafest": lambda: sparsedp.AdaFEST(threshold=0.5, noise_ratio=2.0),
    "lazydp": sparsedp.LazyDP,
}


def sequences(units: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    items = torch.randint(1, 30, (units, 6), generator=generator)
    items[:, 4:].masked_fill_(torch.arange(units)[:, None] % 2 == 0, 0)
    return items[:, :-1], items[:, 1:]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_every_mechanism_trains_with_it(mechanism: str, physical: int | None) -> None:
    """And takes the same steps as with full logits."""
    ends = []
    for how in ("softmax", "logits"):
        torch.manual_seed(0)
        model = Sequences(how=how)
        options: dict[str, Any] = {} if physical is None else {"max_physical_batch": physical}
        engine, module, optimizer, loader = make_private(
            model, loader_of(*sequences(), batch_size=8), mechanism=MECHANISMS[mechanism](), noise_multiplier=0.5, **options
        )  # fmt: skip
        for history, target in loader:
            optimizer.zero_grad()
            out = module(history, target)
            (out.mean() if how == "softmax" else sequence_loss(out, target)).backward()
            optimizer.step()
        assert engine.ledger.steps == 3
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    # A sum beside the border of two cells of the grid may be rounded to either: in a step, lr times one cell.
    cell = 3 * 0.1 * grid_of(engine.plan.noise_std / engine.plan.divisor)
    for name, value in ends[0].items():
        apart = (value - ends[1][name]).abs() > 1e-6 + 1e-4 * value.abs()
        assert int(apart.sum()) <= 0.05 * value.numel()
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-6 + cell)


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
def test_lazy_noise_is_settled_before_a_softmax() -> None:
    torch.manual_seed(0)
    engine, module, optimizer, loader = make_private(
        Sequences(), loader_of(*sequences(), batch_size=8), mechanism=sparsedp.LazyDP()
    )
    batches = iter(loader)
    history, target = next(batches)
    module(history, target).mean().backward()
    optimizer.step()
    assert engine.pending()["table.weight"] > 0
    history, target = next(batches)
    module(history, target).mean().backward()
    assert engine.pending()["table.weight"] == 0
    optimizer.step()


def test_check_passes() -> None:
    report = sparsedp.check(Sequences(), lambda losses, _: losses.mean(), (*sequences(), torch.zeros(24)))
    assert report.largest_difference < 1e-9
    logits = Sequences(how="logits")
    history, target = sequences()
    wrapped = Apply(lambda m, h: m.inner(h, h), inner=logits)
    assert sparsedp.check(wrapped, sequence_loss, (history, target)).largest_difference < 1e-9


# ------------------------------------------------------------------ sampled candidates


def test_binary_loss() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    valid = torch.rand(3, 4) < 0.7
    valid[1] = False
    labels = torch.zeros_like(scores)
    labels[..., 0] = 1
    each = F.binary_cross_entropy_with_logits(scores, labels, reduction="none").sum(-1) * valid
    wanted = (each.sum(1) / valid.sum(1).clamp_min(1)).mean()
    torch.testing.assert_close(binary_candidate_loss(scores, valid), wanted)
    with_hits = scores.detach().clone()
    with_hits[..., 2] = -math.inf
    with_hits.requires_grad_()
    loss = binary_candidate_loss(with_hits)
    without = binary_candidate_loss(with_hits[..., [0, 1, 3, 4, 5]])
    torch.testing.assert_close(loss, without)
    (grad,) = torch.autograd.grad(loss, with_hits)
    assert torch.isfinite(grad).all() and float(grad[..., 2].abs().max()) == 0


def test_binary_loss_of_a_private_model() -> None:
    torch.manual_seed(0)
    sampler = CandidateSampler(20, 4, generator=torch.Generator().manual_seed(0))

    def forward(m: Any, history: Tensor, candidates: Tensor) -> Tensor:
        return candidate_scores(m.e(history).sin(), m.e, candidates)

    history, target = torch.randint(20, (6, 5)), torch.randint(20, (6, 5))
    report = sparsedp.check(
        Apply(forward, e=nn.Embedding(20, 4)),
        lambda scores, target: binary_candidate_loss(scores, target != 0),
        (history, sampler(target), target),
    )
    assert report.largest_difference < 1e-9


def test_counting_rows_measures_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that no backward pass follows needs neither norms nor gradients of the softmax, and finds the same rows."""
    from sparsedp.capture.uses import softmax_loss

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.other = nn.Embedding(30, 4), nn.Embedding(7, 4)

        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            return table_softmax_loss(self.other(ids), self.table.weight, target)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randint(7, (40, 3)), torch.randint(1, 30, (40, 3)), torch.zeros(40))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    engine, model, optimizer, loader = make_private(Scored(), loader, mechanism=sparsedp.EANA())

    def refuse(*args: Any) -> Any:
        raise AssertionError("measured")

    with monkeypatch.context() as patched:
        patched.setattr(softmax_loss, "Measure", refuse)
        groups = engine.touch_statistics().spans[0].tables
    assert groups["table.weight"].rows[groups["table.weight"].counts == 40].sum() == 30
    distinct = sum(len(ids.unique()) for ids in data.tensors[0])
    assert (groups["other.weight"].rows * groups["other.weight"].counts).sum() == distinct
    ids, target, _ = next(iter(loader))
    optimizer.zero_grad()
    model(ids, target).mean().backward()
    optimizer.step()  # norms are there where they are needed
