"""What the core asks of tables with a fallback row, asked of one that is not SparseDP's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp.fallback import FallbackTable
from sparsedp.prediction import predict
from support import loader_of, make_private

SOURCE = Path(sparsedp.__file__).parent


class FirstRow(FallbackTable):
    """Row 0 stands for all ids that are not kept."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 4)
        self.register_buffer("mine", torch.ones(rows, dtype=torch.bool))
        self.mapping = True

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.embedding.weight

    @property
    def fallback(self) -> int:
        return 0

    def keep(self, rows: Tensor | Sequence[int]) -> None:
        self.mine.fill_(False)
        self.mine[torch.as_tensor(rows)] = True

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.mine.clone()
        yield
        self.mine.copy_(before)

    @contextmanager
    def real_ids(self) -> Iterator[None]:
        self.mapping = False
        yield
        self.mapping = True

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(torch.where(self.mine[ids], ids, 0) if self.mapping else ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = FirstRow(20), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).squeeze(1)


def test_a_table_of_the_users_own() -> None:
    ids = torch.arange(200) % 20
    counts = {"table.embedding.weight": torch.arange(20.0)}
    engine, module, optimizer, loader = make_private(
        Model(), loader_of(ids, (ids % 2).float(), batch_size=20), mechanism=sparsedp.FEST(k=3, counts=counts)
    )
    predicted = predict(engine.plan, engine.touch_statistics())
    assert predicted.rows_selected == 4 and predicted.kept_touches == 1.0  # all others touch row 0
    assert module.table.mine.all()  # a prediction leaves it as it was
    before = module.table.weight.detach().clone()
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(batch), target).backward()
        optimizer.step()
    assert optimizer.prepared["table.embedding.weight"].tolist() == [0, 17, 18, 19]
    assert module.table.mine.nonzero().flatten().tolist() == [0, 17, 18, 19]
    assert (module.table.weight != before).any(1).nonzero().flatten().tolist() == [0, 17, 18, 19]


def test_what_is_missing_is_told_at_once() -> None:
    class Half(FallbackTable):
        fallback = 0

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_the_core_does_not_import_layers() -> None:
    """`sparsedp.nn` implements what the core asks for, not the other way round."""
    core = [
        *SOURCE.glob("*.py"),
        *(p for part in ("capture", "mechanisms", "sampling", "tables") for p in (SOURCE / part).rglob("*.py")),
    ]
    assert len(core) > 40
    layers = re.compile(r"^\s*(from sparsedp\.nn\b|import sparsedp\.nn\b)", re.MULTILINE)
    assert [path.name for path in core if layers.search(path.read_text())] == []
