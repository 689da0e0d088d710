"""A batch of no units: the model sees a stand-in, which moves nothing, whatever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.sampling import draws
from support import make_private
from users import MECHANISMS

ROWS = 30
# FEST counts the data, in which the first example rightly is; LazyDP settles the rows that the stand-in reads (below).
OTHERS = [name for name in MECHANISMS if name not in ("fest", "adafest+", "lazydp")]


class Flattening(nn.Module):
    """Does not run on tensors of no rows: view(0, -1) is ambiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 4), nn.Linear(12, 1)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        self.passes += 1
        h = self.table(ids) * x[:, :, None]
        return self.out(h.view(len(ids), -1)).squeeze(1)


def trained(
    first: tuple[list[int], float, float], mechanism: str, unit: Any, rate: float = 0.0, **options: Any
) -> tuple:
    """A run over data whose first example has these ids, features and label; it is in none of the batches."""
    torch.manual_seed(0)
    ids, x, y = torch.randint(ROWS, (40, 3)), torch.randn(40, 3), torch.rand(40).round()
    ids[0], x[0], y[0] = torch.tensor(first[0]), first[1], first[2]
    data: Any = TensorDataset(ids, x, y)
    data.users = np.arange(40)
    engine, module, optimizer, loader = make_private(
        Flattening(), DataLoader(data, batch_size=2), mechanism=MECHANISMS[mechanism](), unit=unit, seed=3
    )
    reports = []
    for ids, x, y in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
        optimizer.step()
        reports.append(optimizer.last_step)
    return engine, module, optimizer, reports


@pytest.mark.parametrize("mechanism", OTHERS)
@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_the_stand_in_moves_nothing(mechanism: str, unit: Any, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, bit for bit, with any first example: ordinary, or with features and labels that make all gradients NaN."""
    draw = np.random.default_rng(0)
    batches = [1 + np.flatnonzero(draw.random(39) < rate) for _ in range(20)]
    assert any(len(batch) == 0 for batch in batches) and (rate == 0 or any(len(batch) for batch in batches))
    runs = []
    for first in ([1, 2, 3], 1.0, 0.0), ([7, 7, 29], float("nan"), float("inf")), ([0, 0, 0], 3e38, -3e38):
        left = iter(batches)
        monkeypatch.setattr(draws, "poisson_indices", lambda *_, left=left: next(left))
        runs.append(trained(first, mechanism, unit))
    engine, module, optimizer, reports = runs[0]
    assert engine.ledger.steps == 20 and int(module.passes) == 20
    assert [report.units for report in reports] == [len(batch) for batch in batches]
    for other_engine, other, _, other_reports in runs[1:]:
        assert other_engine.ledger == engine.ledger
        assert other_reports == reports
        for name, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_rows_that_are_settled_early_for_the_stand_in_have_the_same_noise(rate: float, monkeypatch: Any) -> None:
    """Without aggregation every step's noise is its own, whenever it is settled."""
    monkeypatch.setitem(MECHANISMS, "one by one", lambda: sparsedp.LazyDP(aggregate=False))
    weights = []
    for first in ([1, 2, 3], 1.0, 0.0), ([7, 7, 29], float("nan"), 1.0):
        draw = np.random.default_rng(0)
        monkeypatch.setattr(draws, "poisson_indices", lambda *_, d=draw: 1 + np.flatnonzero(d.random(39) < rate))
        weights.append(trained(first, "one by one", "example")[1].state_dict())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_an_empty_step_is_that_of_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "poisson_indices", lambda *_: np.arange(0))
    _, module, _, _ = trained(([1, 2, 3], 1.0, 0.0), "dpsgd", "example")
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(ROWS, (40, 3)), torch.randn(40, 3), torch.rand(40).round())
    _, other, optimizer, loader = make_private(Flattening(), DataLoader(data, batch_size=2), seed=3)
    for _ in loader:
        optimizer.step()
    for name, value in module.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], value), name


def test_the_stand_in_is_one_example_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passing other rows through the module while the batch is empty is refused, as with any other batch."""
    monkeypatch.setattr(draws, "poisson_indices", lambda *_: np.arange(0))
    data = TensorDataset(torch.randint(ROWS, (40, 3)), torch.randn(40, 3), torch.rand(40).round())
    _, module, optimizer, loader = make_private(Flattening(), DataLoader(data, batch_size=2), seed=3)
    for ids, x, _ in loader:
        with pytest.raises(sparsedp.SparseDPError, match="not the loader's current batch"):
            module(ids.expand(5, 3), x.expand(5, 3)).sum().backward()
        break


def test_missing_values_are_not_taken_for_another_order() -> None:
    """A collate function is tried on examples with NaN as on others: they are equal to themselves there."""
    data: Any = TensorDataset(torch.full((40, 2), float("nan")), torch.rand(40))
    make_private(nn.Linear(2, 1), DataLoader(data, batch_size=4), unit="user", users=np.arange(40))
    mixed = lambda items: torch.stack([x for x, _ in items])[torch.randperm(len(items))]  # noqa: E731
    make_private(nn.Linear(2, 1), DataLoader(data, batch_size=4, collate_fn=mixed), unit="user", users=np.arange(40))

    def centred(items: list) -> torch.Tensor:
        labels = torch.stack([y for _, y in items])
        return torch.stack([torch.full_like(labels, float("nan")), labels - labels.mean()], 1)

    with pytest.raises(sparsedp.UnsupportedError, match="from other examples of the batch"):
        make_private(nn.Linear(2, 1), DataLoader(data, batch_size=4, collate_fn=centred))
