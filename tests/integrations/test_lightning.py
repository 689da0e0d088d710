"""PyTorch Lightning, which makes every step with a closure, takes the steps of the ordinary loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsedp
from support import Clicks, clicks, loader_of, make_private, train

lightning = pytest.importorskip("pytorch_lightning")

pytestmark = pytest.mark.models


def run(several: bool) -> tuple[Any, nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = Clicks()
    optimizer: Any = None
    if several:
        tables, others = sparsedp.table_parameters(module), sparsedp.dense_parameters(module)
        optimizer = [torch.optim.Adagrad(tables, lr=0.1), torch.optim.Adam(others, lr=0.01)]
    return make_private(module, loader_of(*clicks(64), batch_size=16), optimizer=optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_trains_as_the_loop_does(several: bool) -> None:
    engine, module, optimizer, loader = run(several)
    train(module, optimizer, loader, epochs=2)
    engine_there, module_there, optimizer_there, loader_there = run(several)

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = module_there

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            *inputs, target = batch
            return nn.functional.binary_cross_entropy_with_logits(self.model(*inputs), target)

        def configure_optimizers(self) -> Any:
            return optimizer_there

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Trained(), loader_there)
    assert engine_there.ledger.steps == engine.ledger.steps == 8
    for name, value in module.state_dict().items():
        torch.testing.assert_close(module_there.state_dict()[name], value, rtol=0, atol=0)
