"""How much memory steps take at most, each in a process of its own.

For each setting one process makes what the steps share, such as filled tables, and then forks for every variant. A fork has
all of that without a copy, so what it takes beyond is what the variant takes. Until it forks, the process has no threads but
one: those of OpenMP would not be in the fork, which would wait for them.

A small run goes before the one that is measured. It loads and compiles whatever a step needs, and touches its code: a fork
has none of the pages of mapped files at first.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.speed.watch import can_watch, memory_now
from sparsedp.errors import SparseDPError

Runs = Mapping[str, Callable[[], None]]
# Loaded once, before the processes of the settings are forked.
_LOADED = ["benchmarks.speed.bound.measure", "benchmarks.speed.vocabulary.measure"]


@dataclass(frozen=True)
class Peak:
    """Bytes that were resident at most."""

    total: int
    beyond: int  # more than before the run


def peaks(make: Callable[..., Runs], args: tuple, small: tuple) -> dict[str, Peak]:
    """The peak of each of the runs that `make(*args)` returns; `make(*small)` are the same runs on something small.

    `make` is a function of a module, which another process calls.
    """
    if not can_watch():
        raise SparseDPError("Peak memory is read from /proc, which this system does not have. Use --no-memory.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_forked, make, args, small, torch.get_num_threads()).result()
    except BrokenProcessPool as error:
        raise SparseDPError("Measuring memory was ended from outside, maybe for want of it.") from error


def _forked(make: Callable[..., Runs], args: tuple, small: tuple, threads: int) -> dict[str, Peak]:
    torch.set_num_threads(1)
    for run in make(*small).values():
        run()
    before, runs = make(*small), make(*args)  # again, because a model may be made private once
    _give_back()
    return {name: _peak(name, before[name], run, threads) for name, run in runs.items()}


def _give_back() -> None:
    """Returns freed memory to the system: what the allocator still has would hide what a step takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _peak(name: str, small: Callable[[], None], run: Callable[[], None], threads: int) -> Peak:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, json.dumps(_answer(small, run, threads)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    ended = {"error": "it was ended from outside, maybe for want of memory"}
    answer: dict[str, Any] = json.loads(text) if text else ended
    if "error" in answer:
        raise SparseDPError(f"Measuring the memory of {name} failed: {answer['error']}")
    return Peak(answer["total"], answer["total"] - answer["before"])


def _answer(small: Callable[[], None], run: Callable[[], None], threads: int) -> dict[str, Any]:
    try:
        torch.set_num_threads(threads)
        small()
        before = memory_now(b"VmRSS")
        run()
        return {"total": memory_now(b"VmHWM"), "before": before}
    except BaseException:  # whatever it is, the parent process tells it
        return {"error": traceback.format_exc()[-2000:]}
