"""accelerate.Accelerator: what `make_private` returned goes through `prepare` as it is; settings that would change it are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsedp
from sparsedp.errors import SparseDPError, UnsupportedError

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.models


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """accelerate keeps its settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def made(max_physical_batch: int | None = None) -> tuple[Any, nn.Module, Any, Any]:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2))
    data = torch.utils.data.TensorDataset(torch.randint(20, (64, 3)), torch.randint(2, (64,)))
    engine = sparsedp.PrivacyEngine(seed=1)
    return engine, *engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
        max_physical_batch=max_physical_batch,
    )  # fmt: skip


def run(prepared: bool, max_physical_batch: int | None) -> tuple[list[Tensor], int]:
    engine, module, optimizer, loader = made(max_physical_batch)
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


@pytest.mark.parametrize("way", ["accumulate", "later", "unprepared", "plugin", "environment"])
def test_losses_that_accelerate_divides_are_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerator.backward() would divide the loss by four while each batch is a step."""
    engine, module, optimizer, loader = made()
    given: dict[str, Any] = {} if way in ("later", "environment") else {"gradient_accumulation_steps": 4}
    if way == "environment":
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    if way == "plugin":
        given = {"gradient_accumulation_plugin": accelerate.utils.GradientAccumulationPlugin(num_steps=4)}
    accelerator = accelerate.Accelerator(cpu=True, **given)
    if way != "unprepared":
        module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    if way == "later":
        accelerator.gradient_accumulation_steps = 4
    before = [parameter.detach().clone() for parameter in module.parameters()]
    ids, target = next(iter(loader))
    with accelerator.accumulate(module):
        accelerator.backward(cross_entropy(module(ids), target))
        with pytest.raises(
            UnsupportedError, match=r"gradient_accumulation_steps=4: .*max_physical_batch of make_private"
        ):
            optimizer.step()
    assert engine.ledger.steps == 0
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters()))
    accelerator.gradient_accumulation_steps = 1
    with pytest.raises(SparseDPError, match=r"without a backward\(\)"):  # the gradient of the divided loss is gone
        optimizer.step()


def test_a_setting_that_changes_in_the_middle_of_a_batch_takes_no_half_of_it() -> None:
    engine, module, optimizer, loader = made(max_physical_batch=5)
    accelerator = accelerate.Accelerator(cpu=True)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    batches = iter(loader)
    for steps in (1, 4):
        ids, target = next(batches)
        accelerator.gradient_accumulation_steps = steps
        accelerator.backward(cross_entropy(module(ids), target))
        if steps == 1:
            optimizer.step()
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps=4"):
        optimizer.step()
    accelerator.gradient_accumulation_steps = 1
    ids, target = next(batches)
    accelerator.backward(cross_entropy(module(ids), target))
    with pytest.raises(SparseDPError, match="must all be stepped"):
        optimizer.step()
    assert engine.ledger.steps == 0


@pytest.mark.parametrize("order", ["before", "after"])
def test_bfloat16_is_refused(order: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    module: nn.Module = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 2))
    data = torch.utils.data.TensorDataset(torch.randint(20, (64, 3)), torch.randint(2, (64,)))
    if order == "before":
        module = accelerator.prepare(module)
    engine = sparsedp.PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    if order == "after":
        module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    ids, target = next(iter(loader))
    with pytest.raises(UnsupportedError, match=r"torch\.autocast rounds gradients.*Train in float32"):
        accelerator.backward(cross_entropy(module(ids), target))
        optimizer.step()
    assert engine.ledger.steps == 0
