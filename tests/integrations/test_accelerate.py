"""accelerate.Accelerator: what `make_private` returned goes through `prepare` as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsedp

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.models


def run(prepared: bool, max_physical_batch: int | None) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2))
    data = torch.utils.data.TensorDataset(torch.randint(20, (64, 3)), torch.randint(2, (64,)))
    engine = sparsedp.PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
        max_physical_batch=max_physical_batch,
    )  # fmt: skip
    backward = Tensor.backward
    if prepared:
        accelerator = accelerate.Accelerator(cpu=True)
        module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
        backward = accelerator.backward
    for _ in range(2):
        for ids, target in loader:
            optimizer.zero_grad()
            backward(cross_entropy(module(ids), target))
            optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()], engine.ledger.steps


@pytest.mark.parametrize("max_physical_batch", [None, 5])
def test_a_prepared_run_is_the_plain_one(max_physical_batch: int | None) -> None:
    (plain, steps), (prepared, prepared_steps) = (run(prepared, max_physical_batch) for prepared in (False, True))
    assert steps == prepared_steps == 8
    assert all(torch.equal(one, other) for one, other in zip(plain, prepared))


def test_settings_that_would_change_the_batches_change_nothing() -> None:
    """accelerate divides and splits batches of loaders that it wraps: not of this one."""
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True)
    )
    data = torch.utils.data.TensorDataset(torch.randn(8, 2))
    module = nn.Linear(2, 1)
    _, optimizer, loader = sparsedp.PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    assert accelerator.prepare(loader) is loader and accelerator.prepare(optimizer) is optimizer
