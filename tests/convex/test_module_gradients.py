"""Clipped sums of a module's gradients against one row at a time, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsedp import ConfigError, NonFiniteGradientError, SparseDPError
from sparsedp.convex import BiasReducedSGD, ModuleGradients


class Words(nn.Module):
    """A table, a dense layer, and a row's words averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, 3, mode="mean")
        self.top = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.top(torch.tanh(self.table(words))).squeeze(1)


def mean_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(out, target)


def data(n: int = 20) -> list[torch.Tensor]:
    words = torch.randint(0, 12, (n, 4))
    return [words, (words[:, 0] > 5).float()]


def test_clipped_sums_against_one_row_at_a_time() -> None:
    module, rows = Words(), data()
    gradients = ModuleGradients(module, mean_loss, rows)
    w = gradients.start
    one_by_one = []
    wide = Words().double()
    gradients.load(w, wide)
    for word, target in zip(*rows):
        wide.zero_grad()
        mean_loss(wide(word[None]), target[None].double()).backward()
        one_by_one.append(np.concatenate([p.grad.reshape(-1).numpy() for p in wide.parameters()]))
    norms = np.linalg.norm(one_by_one, axis=1)
    bound = float(np.median(norms))
    clipped = np.array(one_by_one) * np.minimum(1, bound / norms)[:, None]
    batch = np.array([1, 4, 5, 11, 19])
    first = np.array([True, False, True, True, False])
    sums = gradients.clipped_sums(w, batch, [np.ones(5, bool), first, ~first], bound)
    np.testing.assert_allclose(sums[0], clipped[batch].sum(0), atol=1e-6)
    np.testing.assert_allclose(sums[1], clipped[batch][first].sum(0), atol=1e-6)
    np.testing.assert_allclose(sums[1] + sums[2], sums[0], atol=1e-12)
    # One row more moves a sum by the bound at most, and that row's whole gradient where it is larger.
    more = gradients.clipped_sums(w, np.append(batch, int(norms.argmax())), [np.ones(6, bool)], bound)[0]
    assert np.linalg.norm(more - sums[0]) == pytest.approx(bound, rel=1e-6)
    np.testing.assert_array_equal(gradients.clipped_sums(w, batch[:0], [np.ones(0, bool)], bound)[0], 0.0)


def test_trains_a_module() -> None:
    module, rows = Words(), data(64)
    gradients = ModuleGradients(module, mean_loss, rows)
    assert gradients.columns == 12 * 3 + 3 + 1
    solver = BiasReducedSGD(
        epsilon=300.0, delta=1e-4, bound=0.5, sparsity=12.0, rows=64, columns=gradients.columns, steps=100, step_size=0.3,
        iterate="uniform", seed=0,
    )  # fmt: skip
    result = solver.minimise(gradients)
    assert result.statement.epsilon <= 300.0 and "Seeded" in str(result.statement)
    assert not np.array_equal(result.weights, gradients.start)
    gradients.load(result.weights, module)
    np.testing.assert_allclose(module.table.weight.detach().reshape(-1).numpy(), result.weights[:36], rtol=1e-6)


def test_what_mixes_units_is_refused() -> None:
    class Mixing(Words):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            out = super().forward(words)
            return out - out.mean()

    gradients = ModuleGradients(Mixing(), mean_loss, data())
    with pytest.raises(SparseDPError):
        gradients.clipped_sums(gradients.start, np.arange(5), [np.ones(5, bool)], 1.0)
    with pytest.raises(SparseDPError, match="batch statistics"):
        ModuleGradients(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), mean_loss, data())


def test_refusals() -> None:
    rows = data()
    with pytest.raises(ConfigError, match="as many rows"):
        ModuleGradients(Words(), mean_loss, [rows[0], rows[1][:3]])
    gradients = ModuleGradients(Words(), lambda out, target: mean_loss(out, target) * np.inf, rows)
    with pytest.raises(NonFiniteGradientError):
        gradients.clipped_sums(gradients.start, np.arange(5), [np.ones(5, bool)], 1.0)
    solver = BiasReducedSGD(epsilon=1.0, delta=1e-4, bound=1.0, sparsity=1.0, rows=20, columns=3, steps=2)
    with pytest.raises(ConfigError, match="20 rows of data and 40 weights"):
        solver.minimise(ModuleGradients(Words(), mean_loss, rows))
