"""Attacks on the clip bound: one unit more or less moves the clipped sum by at most C."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsedp
from cases import CASES
from neighbours import CLIP, clipped_sum, largest_influence
from sparsedp import UnsupportedError
from sparsedp.clipping import Clipping
from support import Apply, capture_uses, dense, loader_of, unit_loss

SOME = [case for case in CASES if "length = batch" not in case]


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_neighbours(case: str, style: str) -> None:
    """In float32, with gradients of every size; the bound is met to a ten-thousandth."""
    torch.manual_seed(1)
    module, *inputs = CASES[case]()
    for size in (1e-3, 1.0, 1e3):
        loss = lambda out, size=size: size * unit_loss(out)  # noqa: E731
        worst = largest_influence(module, inputs, Clipping(CLIP, style), loss)  # type: ignore[arg-type]
        assert worst <= CLIP * (1 + 1e-4)
    assert worst > 0.9 * CLIP  # large gradients do reach the bound: the test could fail


def test_terms_that_cancel_do_not_hide_a_large_gradient() -> None:
    """Two huge uses that cancel leave a gradient larger than C, below the rounding errors of the norm's terms."""
    clipping = Clipping(1.0)
    for scale in (1e3, 1e5, 1e7):
        module = Apply(
            lambda m, x, s=scale: (x * s) @ m.w.T - (x * s) @ m.w.T + 5 * (x @ m.w.T),
            w=nn.Parameter(torch.zeros(1, 4)),
        )
        inputs = torch.nn.functional.normalize(torch.randn(3, 4), dim=1)
        found = capture_uses(module, [inputs], lambda out: out.sum())
        total = clipped_sum(found, module, clipping)
        alone = clipped_sum(capture_uses(module, [inputs[:1]], lambda out: out.sum()), module, clipping)
        assert float(alone.norm()) <= 1 + 1e-3
        assert float(total.norm()) <= 3 * (1 + 1e-3)


def test_positions_that_cancel() -> None:
    """The same within one linear use: large opposite positions."""
    module = nn.Linear(4, 2, bias=False)
    for scale in (1e4, 1e6, 1e8):
        x = torch.randn(1, 1, 4)
        inputs = torch.cat([scale * x, -scale * x, torch.randn(1, 1, 4)], dim=1)
        found = capture_uses(module, [inputs], lambda out: 3 * out.sum())
        assert float(clipped_sum(found, module, Clipping(1.0)).norm()) <= 1 + 1e-3


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=2, max_size=5),
    size=st.sampled_from([1e-2, 1.0, 1e2, 1e4]),
    seed=st.integers(0, 1000),
    tied=st.booleans(),
)
def test_neighbours_on_generated_batches(ids: list[list[int]], size: float, seed: int, tied: bool) -> None:
    torch.manual_seed(seed)
    head = (lambda m, h: h @ m.e.weight.T) if tied else (lambda m, h: m.l(h))
    module = Apply(lambda m, i: head(m, m.e(i).tanh()), e=nn.Embedding(5, 4), l=nn.Linear(4, 2))
    inputs = torch.tensor(ids)
    loss = lambda out: size * unit_loss(out)  # noqa: E731
    assert largest_influence(module, [inputs], Clipping(CLIP), loss) <= CLIP * (1 + 1e-4)


def test_repeated_id_counts_with_its_sum() -> None:
    """Trap 2: a bag of one id n times has a gradient n times as long, and its norm says so."""
    bag = nn.EmbeddingBag(5, 4, mode="sum")
    found = capture_uses(Apply(lambda m, i: m.b(i), b=bag), [torch.full((1, 7), 3)], lambda out: out.sum())
    norm = found.uses["b.weight"].squared_norms(1).sqrt()
    torch.testing.assert_close(norm, torch.tensor([7 * 2.0], dtype=torch.float64), rtol=1e-4, atol=0)
    total = dense(found.uses["b.weight"].weighted_sum(torch.ones(1), bag.weight.shape), bag.weight.shape)
    torch.testing.assert_close(total.norm().double(), norm[0], rtol=1e-4, atol=0)


def test_bias_norm_of_sequences() -> None:
    """Trap 3: a bias that meets L positions gets the norm of the summed gradient, not of the positions apart."""
    module = nn.Linear(2, 3)
    found = capture_uses(module, [torch.randn(2, 5, 2)], lambda out: out.sum())
    torch.testing.assert_close(
        found.uses["bias"].squared_norms(2), torch.full((2,), 3 * 25.0, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_tied_norm_includes_the_cross_term() -> None:
    """Trap 1: the squared norm of a tied table is not the sum of its uses' squared norms."""
    table = nn.Embedding(3, 2)
    module = Apply(lambda m, i: (m.e(i) * m.e.weight[1]).sum(-1), e=table)
    found = capture_uses(module, [torch.tensor([1])], lambda out: out.sum())
    torch.testing.assert_close(
        found.uses["e.weight"].squared_norms(1)[0],
        (2 * table.weight[1]).square().sum().detach().double(),
        rtol=1e-5,
        atol=1e-5,
    )


def test_in_place_relu_does_not_corrupt_inputs() -> None:
    """An in-place operation on a captured input would change what the weight gradient is computed from."""
    module = Apply(
        lambda m, x: F.relu(m.b(F.relu(m.a(x), inplace=True)), inplace=True),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )
    from support import assert_exact

    assert_exact(module, torch.randn(5, 4))
    spoiled = Apply(lambda m, x: m.a(x) + m.a(x.mul_(2)), a=nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="modified in place"):
        capture_uses(spoiled, [torch.randn(5, 4)])


class TwoHeads(nn.Module):
    """Two tables of equal size, used whole: their masked gradients like to lie in the same memory, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(20_000, 4), nn.Embedding(20_000, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.linear(x, self.a.weight), nn.functional.linear(x, self.b.weight)


@pytest.mark.filterwarnings("ignore::sparsedp.SparseDPWarning")
@pytest.mark.parametrize(
    "mechanism", [sparsedp.EANA(), sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=-1e9)], ids=lambda m: m.name
)
def test_one_unit_with_two_tables_used_whole(mechanism: sparsedp.Mechanism) -> None:
    """A cache of norms by memory address once gave the second head the first one's small norm."""
    module, engine = TwoHeads(), sparsedp.PrivacyEngine(seed=1)
    _, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), loss_reduction="sum",
        data_loader=loader_of(torch.randn(1, 4), torch.zeros(1), batch_size=1), noise_multiplier=0.0, max_grad_norm=1.0,
        mechanism=mechanism,
    )  # fmt: skip
    for _ in range(15):
        for x, _ in loader:
            optimizer.zero_grad()
            one, other = module(x)
            ((other * 1e-3).sum() + (one * 100).square().sum()).backward()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            optimizer.step()
            moved = sum((value - before[name]).square().sum() for name, value in module.state_dict().items())
            assert float(moved) ** 0.5 <= 1.001
