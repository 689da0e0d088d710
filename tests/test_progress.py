"""The progress of long tasks: told to the caller, never drawn by the library."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.tables import lazy

ROWS, EXAMPLES, BATCH = 50, 40, 8
SOURCE = Path(__file__).parent.parent / "src/sparsedp"


class Recorder:
    """What a caller was told: (title, total), the parts that were done, and whether the context was left."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int]] = []
        self.done: list[int] = []
        self.left = 0

    @contextmanager
    def __call__(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        self.tasks.append((title, total))
        self.done.append(0)
        try:
            yield self._advance
        finally:
            self.left += 1

    def _advance(self, count: int) -> None:
        self.done[-1] += count


def private(
    mechanism: sparsedp.LazyDP | sparsedp.FEST, recorder: Recorder
) -> tuple[nn.Module, sparsedp.PrivateOptimizer, DataLoader, sparsedp.PrivacyEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, 4), nn.Flatten(), nn.Linear(8, 1))
    data = TensorDataset(torch.randint(0, ROWS, (EXAMPLES, 2)), torch.rand(EXAMPLES, 1))
    engine = sparsedp.PrivacyEngine(seed=0, progress=recorder)
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mechanism=mechanism,
        data_loader=DataLoader(data, batch_size=BATCH, shuffle=True), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    return *made, engine


def step(model: nn.Module, optimizer: sparsedp.PrivateOptimizer, loader: DataLoader) -> None:
    for ids, target in loader:
        optimizer.zero_grad()
        F.mse_loss(model(ids), target).backward()
        optimizer.step()
        return


def test_counting_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    *_, engine = private(sparsedp.FEST(k=5, epsilon=1.0), recorder)
    engine.prepare()
    assert recorder.tasks == [("counting rows", 1)] and recorder.done == [1] and recorder.left == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("large", [True, False])
def test_settling_of_a_large_table_is_told(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_CHUNK", 4 * 7)  # several chunks, which threads share
    if large:
        monkeypatch.setattr(lazy, "_LONG", 10)
    recorder = Recorder()
    model, optimizer, loader, _ = private(sparsedp.LazyDP(), recorder)
    step(model, optimizer, loader)
    model.state_dict()
    assert recorder.tasks == ([("settling 0.weight", ROWS)] if large else [])
    assert recorder.done == ([ROWS] if large else []) and recorder.left == len(recorder.tasks)


def test_the_library_prints_and_draws_nothing() -> None:
    """All but the command line: it imports no rich and calls no print."""
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "rich" for name in names), path
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "print"), path
