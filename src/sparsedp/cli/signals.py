"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Called, says whether to stop.

    The first signal asks for it. The second raises KeyboardInterrupt, but not in a block `with held()`: there it waits for
    the end of the block. The third acts at once, as if this were not here. In a block `with at_once()` the first signal is
    the second.
    """

    def __init__(self, tells: bool = True) -> None:
        """`tells`: whether it says what a signal will do."""
        self.count = 0
        self._tells = tells
        self._held = 0
        self._at_once = 0
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.count > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """For what must not be cut in two: the update of the weights, the writing of a checkpoint."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._waiting and not self._held:
            self._waiting = False
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For what can be left out, such as an evaluation."""
        self._at_once += 1
        try:
            yield
        finally:
            self._at_once -= 1

    def listen(self) -> None:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}

    def restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        name = signal.Signals(number).name
        if self.count == 1 and not self._at_once:
            self._say(f"\n{name}: stopping after this step; once more stops at once.\n")
            return
        if self.count < 3 and self._held:
            self._waiting = True
            self._say(f"\n{name}: waiting for the end of a write; once more stops in the middle of it.\n")
            return
        if self.count >= 3:
            self.restore()
        raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        if self._tells:
            os.write(2, text.encode())  # not print(): the signal may have come in the middle of one


@contextmanager
def stop_on_signals(tells: bool = True) -> Iterator[StopRequests]:
    """Listens to signals in this block."""
    requests = StopRequests(tells)
    requests.listen()
    try:
        yield requests
    finally:
        requests.restore()
