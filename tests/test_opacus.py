"""Side by side with Opacus 1.6: the same clipped sums where both are right, and a case where its ghost mode is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sparsedp.clipping import Clipping
from support import Apply, capture_uses, dense

opacus = pytest.importorskip("opacus")
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CLIP = 0.5


def mine(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = capture_uses(module, inputs, lambda out: out.sin().sum())
    norms = torch.stack([uses.squared_norms(found.units) for uses in found.uses.values()]).sum(0).sqrt()
    factors = Clipping(CLIP).factors(norms)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    return {name: dense(uses.weighted_sum(factors, shapes[name]), shapes[name]) for name, uses in found.uses.items()}


def by_hooks(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Opacus with per-sample gradients written out."""
    wrapped = GradSampleModule(module, loss_reduction="sum")
    wrapped(*inputs).sin().sum().backward()
    samples = {name: p.grad_sample for name, p in module.named_parameters()}
    norms = torch.stack([g.flatten(1).square().sum(1) for g in samples.values()]).sum(0).sqrt()
    factors = (CLIP / norms).clamp_max(1.0)
    sums = {name: torch.einsum("b,b...->...", factors, g) for name, g in samples.items()}
    wrapped.remove_hooks()
    for parameter in module.parameters():
        parameter.grad = None
        parameter.grad_sample = None
    return sums


def by_ghost(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Opacus' ghost mode: norms from hooks, then a second backward pass of the reweighted loss."""
    wrapped = GradSampleModuleFastGradientClipping(
        module, loss_reduction="sum", max_grad_norm=CLIP, use_ghost_clipping=True
    )
    losses = wrapped(*inputs).sin().flatten(1).sum(1)
    losses.sum().backward(retain_graph=True)
    factors = wrapped.get_clipping_coef()
    for parameter in module.parameters():
        parameter.grad = None
    wrapped.disable_hooks()
    (losses * factors).sum().backward()
    sums = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    wrapped.remove_hooks()
    for parameter in module.parameters():
        parameter.grad = None
    return sums


IDS = torch.randint(10, (6, 5), generator=torch.Generator().manual_seed(0))
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))

SHARED: dict[str, Callable[[], tuple[nn.Module, list[torch.Tensor]]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), [X[:, 0]]),
    "sequences": lambda: (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), [X]),
    "embedding": lambda: (nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3)), [IDS]),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)), [X]),
    "conv": lambda: (nn.Sequential(nn.Conv1d(5, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 2)), [X]),
    "group norm": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), [X.reshape(6, 2, 4, 5)]),
}


@pytest.mark.parametrize("case", SHARED)
def test_same_clipped_sums(case: str) -> None:
    torch.manual_seed(0)
    module, inputs = SHARED[case]()
    ours = mine(module, inputs)
    theirs = by_hooks(module, inputs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["mlp", "sequences", "embedding"])
def test_same_as_ghost_mode_on_plain_models(case: str) -> None:
    torch.manual_seed(0)
    module, inputs = SHARED[case]()
    ours = mine(module, inputs)
    theirs = by_ghost(module, inputs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def _norm(sums: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([value.square().sum() for value in sums.values()]).sum().sqrt())


def test_ghost_mode_exceeds_its_bound_on_a_functional_tie_and_we_do_not() -> None:
    """`h @ emb.weight.T` is invisible to module hooks, so its part of the gradient is not in Opacus' norm."""
    torch.manual_seed(0)
    module = Apply(lambda m, i: (m.emb(i) / 10 + 1) @ m.emb.weight.T * 5, emb=nn.Embedding(10, 8))
    one = [IDS[:1]]
    assert _norm(by_ghost(module, one)) > 3 * CLIP
    assert _norm(mine(module, one)) <= CLIP * (1 + 1e-5)


def test_ghost_mode_refuses_a_module_tie_and_we_are_exact() -> None:
    torch.manual_seed(0)
    module = Apply(lambda m, i: m.head(m.emb(i).tanh()) * 5, emb=nn.Embedding(10, 8), head=nn.Linear(8, 10, bias=False))
    module.head.weight = module.emb.weight  # type: ignore[union-attr, assignment]
    for unit in range(len(IDS)):
        assert _norm(mine(module, [IDS[unit : unit + 1]])) <= CLIP * (1 + 1e-5)
    with pytest.raises(NotImplementedError, match="tying"):
        by_ghost(module, [IDS])
