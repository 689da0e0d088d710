"""Work on all cores, for compiled loops that leave the interpreter's lock."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def on_all_cores(work: Callable[[T], None], items: Sequence[T], operations: int | None = None) -> None:
    """Calls `work` with each item, on as many threads as torch uses, the caller's among them.

    torch's modes, such as no_grad, are those of the thread: `work` has to enter its own. Where all items together take so few
    `operations` that there is nothing to share, the caller does them alone.
    """
    if len(items) == 1 or (operations is not None and operations < 2 * _WORTHWHILE):
        for item in items:
            work(item)
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
    if 0 < count * weight < 2 * _WORTHWHILE:
        return [slice(0, count)]
    size = max(1, _WORTHWHILE // max(1, weight), -(-count // (_PIECES * torch.get_num_threads())))
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


# Operations in a piece of work, some 50 microseconds: it takes about as long to wake a thread. And pieces for each.
_WORTHWHILE, _PIECES = 1 << 16, 4


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="sparsedp")


@functools.cache
def let_waiting_threads_sleep() -> None:
    """Makes OpenMP's threads sleep soon when they wait, unless the environment says how they shall wait.

    They spin for up to a millisecond or more at each of torch's parallel operations: beside other work on the same cores an
    epoch then takes ten times as long. OMP_WAIT_POLICY=passive forbids it, but is read once, when torch loads OpenMP. GNU's
    spins a hundredth as long, though, while it has more threads than there are cores: so a thread or two do one parallel
    operation each, and then sleep with the threads that it took.
    """
    if sys.platform != "linux" or os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return
    cores, team = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if team < 2 or (cores - 1) // (team - 1) > _HOLDERS:
        return  # nobody waits, or the other cores are free for those who spin

    def hold() -> None:
        torch.ones(1 << 18).add_(1)
        done.set()
        threading.Event().wait()

    for _ in range((cores - 1) // (team - 1)):
        done = threading.Event()
        threading.Thread(target=hold, name="sparsedp-openmp", daemon=True).start()
        done.wait()


_HOLDERS = 3  # threads that may sleep for this purpose
