"""Carries out the runs of a sweep, here or in several processes, each with one torch thread and its data kept."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.files import locked
from sparsedp.cli.prepare import Prepared, load_data
from sparsedp.cli.run import run_training
from sparsedp.cli.runfolder import RunFolder
from sparsedp.errors import SparseDPWarning, one_line

ERROR_FILE = "error.txt"


@dataclass(frozen=True)
class Job:
    id: str
    config: Config
    data_key: str  # the same for jobs that can share their data
    folder: Path
    keep_model: bool


@dataclass(frozen=True)
class Outcome:
    id: str
    status: Literal["done", "failed", "stopped"]
    error: str | None = None
    seconds: float = 0.0


class DataCache:
    """The data of the last run, for the next one that has the same."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._data: Data | None = None

    def get(self, job: Job) -> Data:
        if self._data is None or self._key != job.data_key:
            self._key = self._data = None  # freed before the next is loaded
            self._data = load_data(job.config)
            self._key = job.data_key
        return self._data


def perform(job: Job, cache: DataCache, should_stop: Callable[[], bool]) -> Outcome:
    """One run, into its folder, which is emptied before. What goes wrong is written into it as error.txt."""
    started = time.monotonic()
    try:
        if job.folder.exists():
            with locked(RunFolder(job.folder).private):
                shutil.rmtree(job.folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SparseDPWarning)

            def at_end(parts: Prepared) -> dict[str, Any]:
                messages = {
                    str(warning.message): None for warning in caught if issubclass(warning.category, SparseDPWarning)
                }
                return {"warnings": list(messages)}

            result = run_training(
                job.config,
                job.folder,
                should_stop=lambda step: should_stop(),
                data=cache.get(job),
                keep_model=job.keep_model,
                by_halves=True,
                at_end=at_end,
            )
    except Exception as error:
        text = one_line(error)
        _note_error(job, text, traceback.format_exc())
        return Outcome(job.id, "failed", text, time.monotonic() - started)
    if result.failure is not None:
        _note_error(job, result.failure)
        return Outcome(job.id, "failed", result.failure, time.monotonic() - started)
    return Outcome(job.id, "done" if result.finished else "stopped", None, time.monotonic() - started)


def _note_error(job: Job, text: str, more: str = "") -> None:
    """The error in the first line, where it came from after it."""
    private = RunFolder(job.folder).private
    private.mkdir(parents=True, exist_ok=True)
    (private / ERROR_FILE).write_text(f"{text}\n\n{more}")


# ------------------------------------------------------------------ one after another, or side by side


def carry_out(jobs: Sequence[Job], processes: int, should_stop: Callable[[], bool]) -> Iterator[Outcome]:
    """The outcomes of the jobs as they end. Once `should_stop()`, the runs at hand end after their step."""
    if min(processes, len(jobs)) > 1:
        yield from _side_by_side(jobs, min(processes, len(jobs)), should_stop)
        return
    cache = DataCache()
    for job in jobs:
        if should_stop():
            return
        yield perform(job, cache, should_stop)


def _side_by_side(jobs: Sequence[Job], processes: int, should_stop: Callable[[], bool]) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    stop = context.Event()
    waiting = list(reversed(jobs))
    with _workers() as workers:
        while waiting or workers.busy:
            if should_stop():
                stop.set()
                waiting.clear()
            while waiting and len(workers.busy) < processes:
                workers.give(waiting.pop(), context, stop)
            for worker in workers.ready(timeout=0.2):
                yield worker.finish()


class _Worker:
    def __init__(self, context: Any, stop: Any) -> None:
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_work, args=(other_end, stop, os.getpid()), daemon=False)
        self.process.start()
        other_end.close()  # so that a dead worker's pipe ends
        self.job: Job | None = None

    def finish(self) -> Outcome:
        """What became of its job; a worker that died is a failure of that job alone."""
        assert self.job is not None
        job, self.job = self.job, None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            hint = (
                "; there may not be enough memory for so many runs at once (--jobs)" if code == -signal.SIGKILL else ""
            )
            text = f"the process of this run ended with {how}{hint}"
            _note_error(job, text)
            return Outcome(job.id, "failed", text)


class _Workers:
    def __init__(self) -> None:
        self.all: list[_Worker] = []

    @property
    def busy(self) -> list[_Worker]:
        return [worker for worker in self.all if worker.job is not None]

    def give(self, job: Job, context: Any, stop: Any) -> None:
        """To a process that has nothing to do, a new one if there is none."""
        self.all = [worker for worker in self.all if worker.job is not None or worker.process.is_alive()]
        idle = [worker for worker in self.all if worker.job is None]
        if not idle:
            idle = [_Worker(context, stop)]
            self.all.append(idle[0])
        idle[0].job = job
        with suppress(BrokenPipeError):  # it died just now, which `ready` will show
            idle[0].connection.send(job)

    def ready(self, timeout: float) -> list[_Worker]:
        """The busy ones that have an outcome, or died."""
        by_connection = {worker.connection: worker for worker in self.busy}
        return [by_connection[connection] for connection in wait(list(by_connection), timeout)]


@contextmanager
def _workers() -> Iterator[_Workers]:
    """Processes that end with the block: idle ones on their own, others at once."""
    workers = _Workers()
    try:
        yield workers
    finally:
        for worker in workers.all:
            if worker.job is not None:
                worker.process.kill()
            worker.connection.close()
        for worker in workers.all:
            worker.process.join()


def _work(connection: Connection, stop: Any, parent: int) -> None:
    """What a worker does: takes jobs and sends their outcomes, until the pipe is closed or the parent has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach all processes of a group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    cache = DataCache()
    with suppress(EOFError, BrokenPipeError):  # the parent has no more jobs, or is gone
        while True:
            job = connection.recv()
            connection.send(perform(job, cache, lambda: stop.is_set() or os.getppid() != parent))
