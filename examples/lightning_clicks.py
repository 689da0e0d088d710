"""A click model in PyTorch Lightning, trained privately by one callback.

Run: python examples/lightning_clicks.py  (needs the extra `lightning`)
"""

import tempfile

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.integrations.lightning import PrivacyCallback

CLICKS, ITEMS, BATCH = 20_000, 500, 1000


class Clicks(lightning.LightningModule):
    """Nothing here knows of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = nn.EmbeddingBag(ITEMS, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.items(ids)).squeeze(1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        ids, clicked = batch
        return binary_cross_entropy_with_logits(self(ids), clicked)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        ids, clicked = batch
        self.log("accuracy", ((self(ids) > 0) == (clicked > 0)).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=20.0)


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(ITEMS, (CLICKS, 5))
    clicked = (torch.randn(ITEMS)[ids].sum(1) > 0).float()
    train, held_out = (
        TensorDataset(ids[part], clicked[part]) for part in (slice(CLICKS * 9 // 10), slice(CLICKS * 9 // 10, None))
    )
    private = PrivacyCallback(
        settings=sparsedp.PrivacySettings(max_grad_norm=1.0), target_epsilon=8.0, target_delta=1e-5
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=10,
            accelerator="cpu",
            logger=False,
            callbacks=[private, lightning.callbacks.ModelCheckpoint(folder)],
            enable_progress_bar=False,
        )
        trainer.fit(Clicks(), DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(held_out, batch_size=BATCH))
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} at epsilon {private.epsilon():.2f}")
    print(private.statement())


if __name__ == "__main__":
    main()
