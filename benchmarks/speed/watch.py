"""Watches how much anonymous memory a process has, from another process, so that nothing it computes can hide a peak.

Anonymous pages are what a process allocated. Pages of mapped files are not among them: the system takes those back when it
needs them, as it does with its cache of files. Runs as a script of its own, without torch: it would take longer to load
than what is watched.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from types import TracebackType

_EVERY = 0.005  # seconds; a page fault a microsecond would be 20 MB


def memory_of(status: bytes, key: bytes) -> int:
    """A field of /proc/PID/status in bytes, such as RssAnon (anonymous pages now) or VmHWM (most pages of any kind)."""
    line = next(line for line in status.splitlines() if line.startswith(key + b":"))
    return int(line.split()[1]) * 1024


def memory_now(key: bytes = b"RssAnon") -> int:
    """A field of the status of this process, in bytes: by default its anonymous memory now."""
    with open("/proc/self/status", "rb") as file:
        return memory_of(file.read(), key)


def can_watch() -> bool:
    """Whether the system tells how much anonymous memory a process has: Linux does, since 4.5."""
    try:
        return memory_now() > 0
    except (OSError, StopIteration):
        return False


def forget_most_pages() -> bool:
    """Lets VmHWM begin anew; False if this is not permitted."""
    try:
        with open("/proc/self/clear_refs", "wb") as file:
            file.write(b"5")
        return True
    except OSError:
        return False


class Watch:
    """Within it another process looks at this one's anonymous memory every 5 ms."""

    def __enter__(self) -> Watch:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.peak()  # waits until it looks
        return self

    def peak(self) -> int:
        """The most bytes since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _answer(pid: int) -> None:
    """For every byte on stdin, prints the most anonymous memory of a process since the one before, until stdin ends."""
    status = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    most = 0
    while True:
        asked = bool(select.select([0], [], [], _EVERY)[0])
        most = max(most, memory_of(os.pread(status, 1 << 16, 0), b"RssAnon"))
        if asked:
            if not os.read(0, 1):
                return
            os.write(1, b"%d\n" % most)
            most = 0


if __name__ == "__main__":
    _answer(int(sys.argv[1]))
