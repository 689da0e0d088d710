"""Peak memory in a process of its own, and which runs it refuses."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from benchmarks.speed import peaks as module
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.step.measure import memory_runs

from sparsedp.errors import SparseDPError


def fill(megabytes: int, shared: list[torch.Tensor]) -> None:
    shared[0].add_(1)  # pages of the fork's own, but not more of them
    assert megabytes < 32 or torch.get_num_threads() == 2  # the caller's; the small run comes before the fork, too
    (torch.ones(megabytes, 1 << 18) + 1).sum()  # 2 MB for each


def filling(megabytes: int) -> Runs:
    shared = [torch.ones(64, 1 << 18)]
    return {name: functools.partial(fill, factor * megabytes, shared) for name, factor in (("one", 1), ("three", 3))}


def failing(where: str) -> Runs:
    def fail() -> None:
        raise RuntimeError(f"no such luck in {where}")

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return {"run": {"run": fail, "end": end}.get(where, lambda: None)}


@pytest.fixture(autouse=True)
def two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_what_a_run_takes_beyond_what_was_there() -> None:
    found = peaks(filling, (32,), (1,))
    assert list(found) == ["one", "three"]
    for name, factor in (("one", 1), ("three", 3)):
        taken = 2 * factor * (32 << 20)
        assert 0.95 * taken < found[name].beyond < 1.3 * taken
        assert found[name].total > found[name].beyond + (64 << 20)  # with the tensor from before


def test_failures_are_told() -> None:
    with pytest.raises(SparseDPError, match=r"memory of run failed(.|\n)*no such luck in run"):
        peaks(failing, ("run",), ("small",))
    with pytest.raises(SparseDPError, match="memory of run failed: it was ended from outside"):
        peaks(failing, ("end",), ("small",))
    with pytest.raises(RuntimeError, match="no such luck in run"):  # before any fork
        peaks(failing, ("small",), ("run",))
    with pytest.raises(SparseDPError, match="ended from outside"):
        peaks(failing, ("small",), ("end",))


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_watch", lambda: False)
    with pytest.raises(SparseDPError, match="--no-memory"):
        peaks(filling, (1,), (1,))


@pytest.mark.slow
def test_memory_of_a_step() -> None:
    """DP-SGD holds gradients of all parameters; the activations of a batch are everybody's."""
    small, large = (peaks(memory_runs, ("pctr", batch, 0.1), ("pctr", 8, 0.001)) for batch in (64, 1024))
    assert list(small) == ["plain", "dpsgd", "adafest", "eana"]
    assert all(large[name].beyond > small[name].beyond + 4 * 1024 * 5 * 598 for name in small)
    tables = peaks(memory_runs, ("pctr", 64, 1.0), ("pctr", 8, 0.001))  # large ones: the heap's own moods are megabytes
    assert tables["dpsgd"].beyond > tables["eana"].beyond
