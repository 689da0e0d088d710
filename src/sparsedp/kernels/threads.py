"""Work on all cores, for compiled loops that leave the interpreter's lock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def on_all_cores(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Calls `work` with each item, on as many threads as torch uses, the caller's among them.

    torch's modes, such as no_grad, are those of the thread: `work` has to enter its own.
    """
    if len(items) == 1:
        work(items[0])
        return
    helpers = min(torch.get_num_threads(), len(items)) - 1
    left = iter(items)  # a sequence's: threads may share it

    def run() -> None:
        for item in left:
            work(item)

    others = [_pool(torch.get_num_threads()).submit(run) for _ in range(helpers)]
    try:
        run()
    finally:
        started = [other for other in others if not other.cancel()]  # nothing is left for those that never began
        failures = [failure for other in started if (failure := other.exception()) is not None]
    if failures:
        raise failures[0]


def split(count: int, weight: int) -> list[slice]:
    """The numbers 0 to count - 1 in a few pieces that are worth a thread, if each of them takes `weight` operations."""
    if 0 < count * weight <= _WORTHWHILE:
        return [slice(0, count)]
    size = max(1, _WORTHWHILE // max(1, weight), -(-count // (_PIECES * torch.get_num_threads())))
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


# Operations in a piece of work, some 50 microseconds: it takes about as long to wake a thread. And pieces for each.
_WORTHWHILE, _PIECES = 1 << 16, 4


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="sparsedp")
