"""Forks ranks from a process that has imported what they need, which takes longer than most of them run.

`Warm()` starts `python warm.py` and asks it through its standard input. Several are kept: ranks of one would all hash alike, and
a mistake by the order of a set would show on none of them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = 2


class Warm:
    """A process to fork from."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
        self._process: Any = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, *question: Any) -> Any:
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


class Forked:
    """A process that runs a function, `module.function`; its standard input, output and errors are files by these names."""

    def __init__(
        self, warm: Warm, files: tuple[str, str, str], environment: dict[str, str], function: str, *args: Any
    ) -> None:
        self._warm, self.returncode = warm, None
        self.pid: int = warm.ask("start", files, environment, os.getcwd(), function, args)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask("poll", self.pid)
        return self.returncode

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} did not end within {seconds} seconds"
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is its own until it was asked how it ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.returncode = self._warm.ask("kill", self.pid)


@cache
def warm(number: int) -> Warm:
    return Warm()


# ---------------------------------------------------------------------- in the warm process


def main() -> None:
    """Answers until nobody asks any more."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed here is no answer
    _import_all()
    running: set[int] = set()
    while True:
        try:
            what, *about = pickle.load(questions)
        except EOFError:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        answer: int | None
        if what == "start":
            answer = os.fork()
            if answer == 0:
                _run(*about)
            running.add(answer)
        else:
            (answer,) = about
            if what == "kill":
                os.kill(answer, signal.SIGKILL)
            answer = _ended(answer, 0 if what == "kill" else os.WNOHANG, running)
        pickle.dump(answer, answers)
        answers.flush()


def _import_all() -> None:
    import torch

    importlib.import_module("attacks")  # and the programs
    importlib.import_module("sparsedp.cli.main")
    torch.set_num_threads(1)
    # A fork takes one thread along, and whatever locks the others hold.
    threads = threading.active_count() if sys.platform != "linux" else len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads"


def _ended(pid: int, how: int, running: set[int]) -> int | None:
    ended, status = os.waitpid(pid, how)
    if not ended:
        return None
    running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _run(files: tuple[str, str, str], environment: dict[str, str], folder: str, function: str, args: tuple) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(files[0], os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(files[number], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.closerange(3, 256)  # the questions and answers
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        warnings.filterwarnings("ignore")
        random.seed()
        importlib.import_module("numpy").random.seed()
        module, _, name = function.rpartition(".")
        code = getattr(importlib.import_module(module), name)(*args) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo's threads may abort a process that ends in the ordinary way, after its work is done (pytorch#190489).
        os._exit(code)


if __name__ == "__main__":
    main()
