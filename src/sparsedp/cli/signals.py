"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether to stop. A second signal acts at once, as if this were not here."""
    before: dict[int, Any] = {}
    asked = False

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()
        text = f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once.\n"
        os.write(2, text.encode())  # not print(): the signal may have come in the middle of one

    before.update({number: signal.signal(number, ask) for number in _SIGNALS})
    try:
        yield lambda: asked
    finally:
        restore()
