"""Where time goes: a stopwatch for parts that may lie within one another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("forward"): ...` adds to `watch.seconds["forward"]`; of a part within a part, the inner one alone runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._stop()
        self._running.append(name)
        try:
            yield
        finally:
            self._stop()
            self._running.pop()

    def _stop(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now
