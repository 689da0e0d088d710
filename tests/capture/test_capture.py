"""Captured norms and sums are those of one unit at a time, for every operation that is supported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import BAGS, CASES, B, D, L, V, emb, ids, x
from sparsedp.capture import Capture, products
from support import Apply, assert_exact, batch_of, capture_uses, unit_loss


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact(case: str) -> None:
    assert_exact(*CASES[case]())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_exact_for_a_batch_of_one(case: str) -> None:
    module, *inputs = CASES[case]()
    assert_exact(module, *[tensor[:1] for tensor in inputs])


@pytest.mark.parametrize("case", [case for case in CASES if "length = batch" not in case])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_nothing_from_an_empty_batch(case: str) -> None:
    module, *inputs = CASES[case]()
    assert_nothing(module, [tensor[:0] for tensor in inputs])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_evaluation_without_gradients(case: str, training: bool) -> None:
    """Under no_grad the module gives what it gives without capture, in train and eval mode."""
    module, *inputs = CASES[case]()
    module.train(training and "eval" not in case)
    with torch.no_grad():
        wanted = module(*inputs)
        capture = Capture(module, dict(module.named_parameters()), batch_of(B))
        capture.attach()
        found = module(*inputs)
        capture.detach()
    for one, other in zip(*(value if isinstance(value, tuple) else (value,) for value in (wanted, found))):
        if isinstance(one, torch.Tensor):
            both = one.isfinite() & other.isfinite()  # torch's fast path fills fully masked rows differently
            torch.testing.assert_close(other[both], one[both])


def assert_nothing(module: nn.Module, inputs: list[torch.Tensor]) -> None:
    from support import capture_uses, dense

    found = capture_uses(module, inputs)
    for name, parameter in module.named_parameters():
        if name in found.uses:
            assert found.uses[name].squared_norms(0).shape == (0,)
            total = dense(found.uses[name].weighted_sum(torch.zeros(0), parameter.shape), parameter.shape)
            assert float(total.abs().max()) == 0


@pytest.mark.parametrize("case", BAGS)
@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
@pytest.mark.parametrize("calls", [1, 2])
def test_bags(case: str, form: str, calls: int) -> None:
    """Every input form of nn.EmbeddingBag, with empty bags and repeated ids."""
    mode, weighted, padding = BAGS[case]
    bag = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding, include_last_offset=form == "last offset")
    lengths = [L] * B if form == "2-D" else [3, 0, 1, 7, 0, 4]
    table = ids(B, 7)
    table[:, 1] = table[:, 0]
    weights = x(B, 7)

    def one(model: nn.Module, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Units come in padded; forward makes the form under test from the lengths of those present."""
        total = 0.0
        present = [lengths[int(r)] for r in rows[:, -1]]
        for call in range(calls):
            flat = torch.cat([row[:n] for row, n in zip((rows[:, :7] + call) % V, present)])
            flat_w = torch.cat([row[:n] for row, n in zip(w, present)])
            if form == "2-D":
                square = ((rows[:, :7] + call) % V)[:, :L]
                out = model.bag(square, per_sample_weights=w[:, :L] if weighted else None)
            else:
                offsets = torch.tensor([0, *present]).cumsum(0)
                offsets = offsets if form == "last offset" else offsets[:-1]
                out = model.bag(flat, offsets, flat_w if weighted else None)
            total = total + out * (1 + call)
        return total

    numbered = torch.cat([table, torch.arange(B)[:, None]], dim=1)
    assert_exact(Apply(one, bag=bag), numbered, weights)


@pytest.mark.parametrize("case", BAGS)
@pytest.mark.parametrize("form", ["2-D", "offsets"])
def test_bags_of_one_id(case: str, form: str) -> None:
    """Each unit has one, some of them padding: no sum within a bag, and in a second lookup by everybody none either."""
    mode, weighted, padding = BAGS[case]
    bag = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding)
    rows = torch.tensor([2, 0, 2, 1, 1, 5][:B]).view(B, 1)

    def look_up(model: nn.Module, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        weights = w[:, :1] if weighted else None
        if form == "2-D":
            return model.bag(i, per_sample_weights=weights)
        return model.bag(i.flatten(), torch.arange(len(i)), None if weights is None else weights.flatten())

    (lookup,) = capture_uses(Apply(look_up, bag=bag), (rows, x(B, 7))).uses["bag.weight"].lookups
    assert lookup.one_each != weighted
    assert_exact(Apply(look_up, bag=bag), rows, x(B, 7))
    assert_exact(Apply(lambda m, i, w: look_up(m, i, w) * look_up(m, (i + 1) % V, w), bag=bag), rows, x(B, 7))


def test_weights_of_a_bag_are_trained() -> None:
    """per_sample_weights that come from a layer get their own gradient."""
    model = Apply(
        lambda m, i, w: m.e(i, per_sample_weights=m.k(w).squeeze(-1)),
        e=nn.EmbeddingBag(V, D, mode="sum"),
        k=nn.Linear(D, 1),
    )
    assert_exact(model, ids(), x())


def test_two_forward_passes_one_backward() -> None:
    """Siamese use: the second pass adds to the same units."""
    tower = Apply(lambda m, i: m.l(m.e(i).sum(1)), e=emb(), l=nn.Linear(D, 3)).double()
    one, two = ids(), ids()

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.tower(a) * self.tower(b)

    assert_exact(Siamese(), one, two)
    from sparsedp.capture import Capture
    from support import one_by_one

    wanted = one_by_one(Siamese(), [one, two])
    capture = Capture(tower, dict(tower.named_parameters()), batch_of(B))
    capture.attach()
    unit_loss(tower(one) * tower(two)).backward()
    found = capture.collect()
    capture.detach()
    assert found is not None
    squares = torch.stack([g["tower.e.weight"].square().sum() for g in wanted])
    torch.testing.assert_close(found.uses["e.weight"].squared_norms(B), squares)


def test_two_backward_passes_add_up() -> None:
    from sparsedp.capture import Capture
    from support import one_by_one

    model = Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3)).double()
    inputs = ids()
    wanted = one_by_one(model, [inputs], lambda out: unit_loss(out) + 3 * out.sum())
    capture = Capture(model, dict(model.named_parameters()), batch_of(B))
    capture.attach()
    out = model(inputs)
    unit_loss(out).backward(retain_graph=True)
    (3 * out.sum()).backward()
    found = capture.collect()
    capture.detach()
    assert found is not None
    for name, used in found.uses.items():
        torch.testing.assert_close(used.squared_norms(B), torch.stack([g[name].square().sum() for g in wanted]))


def test_frozen_parameters_stay_out() -> None:
    model = Apply(lambda m, i: m.l(m.e(i)), e=emb(), l=nn.Linear(D, 3))
    model.e.weight.requires_grad_(False)  # type: ignore[union-attr]
    found = assert_exact(model, ids())
    assert set(found.uses) == {"l.weight", "l.bias"}


def test_no_grad_inside_forward() -> None:
    def forward(m: nn.Module, i: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = m.e(i)
        return m.l(fixed)

    found = assert_exact(Apply(forward, e=emb(), l=nn.Linear(D, 3)), ids())
    assert set(found.uses) == {"l.weight", "l.bias"}


@pytest.mark.parametrize("case", ["h @ emb.weight.T", "encoder layer", "conv2d", "two towers"])
def test_units_in_chunks_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that would need a large temporary are computed for a few units at a time."""
    monkeypatch.setattr(products, "TEMPORARY", 60)
    assert_exact(*CASES[case]())


def test_autograd_forms_no_weight_gradient() -> None:
    """The largest tensor that a tied model's step makes is the logits, not units x rows x dim."""
    model = Apply(lambda m, i: m.e(i).sin() @ m.e.weight.T, e=nn.Embedding(500, 16))
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    from support import capture_uses

    inputs = torch.randint(500, (32, 4))
    with Watch():
        found = capture_uses(model, [inputs])
        found.uses["e.weight"].squared_norms(32)
        found.uses["e.weight"].weighted_sum(torch.ones(32), torch.Size([500, 16]))
    assert largest <= 32 * 4 * 500 < 32 * 500 * 16
