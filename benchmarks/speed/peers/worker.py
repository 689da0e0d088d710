"""What all workers share: limits, events for the process that started them, timing and memory.

A worker is a script `worker_*.py` that is run by its file, with a JSON object as its argument, by an interpreter that need
not have SparseDP. It prints events, lines of "@" and a JSON object; what libraries print besides does not matter.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from problem import KINDS, OUT_OF_MEMORY, Case, Problem, case

_QUICK = 1.0  # seconds; after a first step that is quicker, a second one is not timed either
_SLOW = 5.0  # seconds; after a first step that is slower, a single one is timed


@dataclass(frozen=True)
class Peer:
    """A library's step and answers, for each of its variants."""

    versions: Callable[[], dict[str, str]]
    make_step: Callable[[str, Problem], Callable[[int], None]]  # step(i) is one step on batch i, done when it returns
    epsilon: Callable[[str, Problem], tuple[float, str]] | None = None  # and what computed it; None: not private
    clipped_sum: Callable[[str, Case], Mapping[str, np.ndarray]] | None = None  # of a case's units, without noise


def emit(**event: Any) -> None:
    print("@" + json.dumps(event), flush=True)


def job() -> dict[str, Any]:
    return json.loads(sys.argv[1])


@contextmanager
def importing() -> Iterator[None]:
    """Sets the limits of the job, and says so if what is imported is not there."""
    wanted = job()
    if wanted["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted["memory"], wanted["memory"]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: wanted["threads"]])
    try:
        yield
    except (ImportError, OSError) as error:
        emit(absent=_first_line(error))
        sys.exit(0)


def main(peer: Peer) -> None:
    wanted = job()
    variant, problem = wanted["variant"], Problem(rows=1, **wanted["problem"])
    if wanted["facts"]:
        emit(versions=peer.versions())
        if peer.epsilon is not None:
            value, accountant = peer.epsilon(variant, problem)
            emit(epsilon=None if value == float("inf") else value, accountant=accountant)
        if peer.clipped_sum is not None:
            for kind in KINDS:
                emit(case=kind, **_clipped(peer.clipped_sum, variant, case(kind)))
    if wanted["rows"]:
        # Loads and compiles what a step needs.
        tiny = peer.make_step(variant, replace(problem, rows=100, batch=8))
        tiny(0), tiny(1)
        del tiny
    for rows in wanted["rows"]:
        emit(start=rows)
        try:
            _time(peer, variant, replace(problem, rows=rows), wanted)
        except Exception as error:
            if not any(words in f"{type(error).__name__}: {error}".lower() for words in OUT_OF_MEMORY):
                raise
            emit(out_of_memory=rows)
            break
    emit(done=True)


def _time(peer: Peer, variant: str, problem: Problem, wanted: Mapping[str, Any]) -> None:
    gc.collect()
    _give_back()
    before = _memory("VmRSS")
    run = peer.make_step(variant, problem)
    emit(built=problem.rows)
    steps = iter(range(1 << 60))
    first = _seconds(run, next(steps))
    if first < _QUICK:
        _seconds(run, next(steps))
    _forget_peak()
    seconds: list[float] = []
    least = 1 if first > _SLOW else 2
    while len(seconds) < wanted["steps"] and (len(seconds) < least or sum(seconds) < wanted["seconds"]):
        seconds.append(_seconds(run, next(steps)))
    emit(rows=problem.rows, seconds=seconds, extra=_memory("VmHWM") - before - problem.table_bytes)


def _seconds(run: Callable[[int], None], number: int) -> float:
    start = time.perf_counter()
    run(number)
    elapsed = time.perf_counter() - start
    emit(step=elapsed)
    return elapsed


# ---------------------------------------------------------------------- memory


def _memory(field: str) -> int:
    """A field of this process's status, in bytes: VmRSS is resident memory now, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def _forget_peak() -> None:
    """The peak counts from now. Where the system does not allow it, it still counts from the start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _give_back() -> None:
    """Returns freed memory to the system, so that it does not hide in what the next step needs."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------------- the clip bound


def _clipped(clipped_sum: Callable[[str, Case], Mapping[str, np.ndarray]], variant: str, whole: Case) -> dict:
    """The clipped sums of all units, and of all but each one of them: what they differ by is that one's part."""
    units = np.arange(len(whole.ids))
    without = [units[units != unit] for unit in units] if len(units) > 1 else []
    try:
        sums = []
        for kept in (units, *without):
            clipped = clipped_sum(variant, replace(whole, ids=whole.ids[kept], target=whole.target[kept]))
            sums.append({name: np.asarray(value, np.float64).tolist() for name, value in clipped.items()})
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {_first_line(error)}"}
    return {"all": sums[0], "without": sums[1:]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
