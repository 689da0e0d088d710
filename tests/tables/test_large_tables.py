"""A table is trained, evaluated, settled, saved and loaded without a second one beside it, by counting allocations.

torch's own are seen by its profiler, those of Python and numpy by tracemalloc. A mapped file is none.
"""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sparsedp
from sparsedp import CheckpointError, checkpoint, mapped
from sparsedp.tables import lazy
from support import loader_of, make_private

ROWS, DIM = 160_000, 64
TABLE = 4 * ROWS * DIM  # bytes
HALF = TABLE // 2


class OneTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).squeeze(1)


RUNS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "lazydp": (sparsedp.LazyDP, lambda p: torch.optim.SGD(p, lr=0.1)),
    "lazydp, momentum": (sparsedp.LazyDP, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adafest": (lambda: sparsedp.AdaFEST(threshold=20.0), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adafest, adagrad": (lambda: sparsedp.AdaFEST(threshold=20.0), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


@pytest.fixture(autouse=True, scope="module")
def loaded_profiler() -> None:
    """What it imports would take tracemalloc long."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        pass


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As small for this table as the real ones are for a large one; and one thread, whose allocations are seen."""
    for module in (mapped, checkpoint):
        monkeypatch.setattr(module, "PIECE", 1 << 20)
    monkeypatch.setattr(lazy, "_CHUNK", 1 << 17)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(kind: str, seed: int = 3) -> tuple[Any, Any, Any, Any]:
    mechanism, optimizer = RUNS[kind]
    module = OneTable()
    loader = loader_of(torch.randint(ROWS, (256,)), torch.rand(256).round(), batch_size=32)
    return make_private(module, loader, seed=seed, optimizer=optimizer(module.parameters()), mechanism=mechanism())


def train(run: tuple[Any, Any, Any, Any], steps: int = 3) -> None:
    _, module, optimizer, loader = run
    for ids, target in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(module(ids), target).backward()
        optimizer.step()
        steps -= 1
        if steps == 0:
            return


def most_allocated(run: Callable[[], Any], file: Path | None = None) -> int:
    """The most bytes at a time that `run` allocated, beyond what there was. `file` is one that it may map."""
    whole = -1 if file is None else file.stat().st_size
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kineto: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        if abs(size) != whole:
            now += size
            most = max(most, now)
    return most + python


def test_the_counter_sees_copies(tmp_path: Path) -> None:
    table = torch.zeros(ROWS, DIM)
    path = tmp_path / "table.pt"
    torch.save(table, path)
    rest = 1 << 20
    for copying in (
        table.clone, table.half, lambda: copy.deepcopy(table), lambda: table.numpy().copy(), path.read_bytes,
        lambda: [table[i : i + 100].clone() for i in range(0, ROWS, 100)], lambda: torch.load(path),
    ):  # fmt: skip
        assert most_allocated(copying, path) >= HALF, copying
    assert most_allocated(lambda: torch.load(path, mmap=True), path) < rest
    assert most_allocated(lambda: table.view(-1)[1:].add_(1)) < rest


@pytest.mark.parametrize("kind", RUNS)
def test_training_settling_and_saving_make_no_second_table(kind: str, tmp_path: Path) -> None:
    run = start(kind)
    engine, module, optimizer, loader = run
    train(run)  # makes momentum and Adagrad's sums, which are state
    assert most_allocated(lambda: train(run)) < HALF
    with torch.no_grad():
        assert most_allocated(lambda: module(torch.arange(100))) < HALF
    train(run)
    assert sum(engine.pending().values()) > 0 or not kind.startswith("lazydp")
    assert most_allocated(engine.settle) < HALF
    train(run)  # so that there is something to settle again
    assert most_allocated(lambda: engine.save_checkpoint(tmp_path / "c.pt")) < HALF
    train(run)
    assert most_allocated(lambda: torch.save(module.state_dict(), tmp_path / "m.pt")) < HALF
    train(run)
    assert most_allocated(engine.close) < HALF


@pytest.mark.parametrize("kind", RUNS)
def test_loading_makes_no_second_table(kind: str, tmp_path: Path) -> None:
    run = start(kind)
    engine, module, optimizer, _ = run
    train(run)
    path = tmp_path / "c.pt"
    engine.save_checkpoint(path)
    weights, state = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(run)
    assert most_allocated(lambda: engine.load_checkpoint(path), path) < HALF
    assert_same((module.state_dict(), optimizer.state_dict()), (weights, state))
    train(run)
    # A new process has no momentum yet: that much is new, and no more.
    new = start(kind)
    needed = TABLE if kind == "lazydp, momentum" else 0
    assert most_allocated(lambda: new[0].load_checkpoint(path), path) < needed + HALF
    assert_same((new[1].state_dict(), new[2].state_dict()), (weights, state))
    train(new)


@pytest.mark.parametrize("kind", ["lazydp, momentum", "adafest, adagrad"])
def test_refusing_makes_no_second_table(kind: str, tmp_path: Path) -> None:
    run = start(kind)
    engine, module, optimizer, _ = run
    train(run)
    path = tmp_path / "c.pt"
    engine.save_checkpoint(path)
    content = torch.load(path, mmap=True)
    content["loader"] = {"nonsense": 1}
    other = tmp_path / "other.pt"
    torch.save(content, other)
    train(run)
    engine.settle()
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))

    def refused() -> None:
        with pytest.raises(CheckpointError, match="does not fit"):
            engine.load_checkpoint(other)

    assert most_allocated(refused, other) < HALF
    assert_same((module.state_dict(), optimizer.state_dict()), before)
    train(run)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_same(*pair)
    else:
        assert one == other
