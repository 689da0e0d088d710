"""Work is divided among threads where each of them gets enough of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from sparsedp.kernels.threads import on_all_cores, split

ENOUGH = 1 << 17  # operations for two threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 1024, 1030, 2047])
def test_a_little_work_is_one_piece(count: int) -> None:
    assert split(count, ENOUGH // 2048) == [slice(0, count)]


def test_pieces_are_all_of_the_work() -> None:
    pieces = split(5000, ENOUGH // 2048)
    assert len(pieces) > 1 and [place for piece in pieces for place in range(5000)[piece]] == list(range(5000))
    assert split(0, 5) == []


@pytest.mark.parametrize(("operations", "alone"), [(ENOUGH - 1, True), (ENOUGH, False), (None, False)])
def test_the_caller_does_a_little_work_alone(operations: int | None, alone: bool) -> None:
    done: list[tuple[int, str]] = []
    both = threading.Barrier(1 if alone else 2, timeout=60)

    def work(item: int) -> None:
        both.wait()  # two threads come here, or one alone
        done.append((item, threading.current_thread().name))

    on_all_cores(work, [0, 1], operations)
    assert sorted(item for item, _ in done) == [0, 1]
    assert len({name for _, name in done}) == (1 if alone else 2)
