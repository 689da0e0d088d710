"""`--nproc`: starts a command in several processes of this machine, as `torchrun --nproc-per-node` does.

Unlike torchrun's, the processes have all the time that they need to write a checkpoint after Ctrl-C, and what is shown when
they fail is what one of them says, and nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

_STARTED = "SPARSEDP_STARTED"  # set for processes that were started here
_GRACE = 60.0  # seconds beyond the ranks' timeout, until those that outlive another's error are killed
_POLL = 0.1  # seconds
_FAILED = 2


def is_started_here() -> bool:
    """Whether `launch` started this process."""
    return _STARTED in os.environ


def launch(count: int, arguments: Sequence[str], timeout: float) -> int:
    """Runs `sparsedp` with these arguments in `count` processes, and returns the exit code of all.

    Ranks wait for each other for at most `timeout` seconds. Signals reach each of them once, through this process.
    """
    # It outlives every rank. (torch documents the name, and its types do not have it.)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", _STARTED: str(os.getpid()),
    }  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks say themselves what they wait for in vain
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; training.threads says otherwise
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _handing_on_signals(ranks):
            for rank in range(count):
                environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, "-m", "sparsedp", *arguments]
                # The pipe tells a rank when this process is gone; the session keeps the terminal's Ctrl-C from it.
                ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True))
            codes = _wait(ranks, timeout + _GRACE)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return _code_of_all(codes)


def end_with_parent() -> None:
    """In a process that `launch` started: asks it to stop if that one is gone."""

    def watch() -> None:
        sys.stdin.buffer.read()  # nothing is written: it ends when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _handing_on_signals(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace: float) -> list[int]:
    """The exit codes. Once a rank has failed, the others have `grace` seconds to notice."""
    failed: float | None = None
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL)
        if failed is None and any(process.poll() for process in ranks):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > grace:
            for process in ranks:
                process.kill()
    return [process.wait() for process in ranks]


def _code_of_all(codes: Sequence[int]) -> int:
    if len(set(codes)) == 1 and codes[0] >= 0:
        return codes[0]
    killed = [f"rank {rank} by {signal.Signals(-code).name}" for rank, code in enumerate(codes) if code < 0]
    if len(killed) == len(codes):  # nobody is left to say so
        print(f"sparsedp: error: All processes were killed: {', '.join(killed)}.", file=sys.stderr)
    return _FAILED
