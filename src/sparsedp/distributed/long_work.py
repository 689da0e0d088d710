"""Work that may take longer on one rank than ranks otherwise wait for each other: checkpoints, exports, an evaluation on one.

In it ranks wait for each other not in a message, which would fail at its timeout, but at the store that all of them have, for
as long as the others live: from a thread, each says there that it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from sparsedp._torch import default_store
from sparsedp.errors import RankLostError, SparseDPError

_LONGEST_BEAT = 5.0  # seconds between two signs of life, at most; otherwise a part of the timeout
_BEATS = 8  # in a timeout
_SHORTEST_LOOK, _LONGEST_LOOK = 0.001, 0.1  # seconds between two looks at who has come


class LongWork:
    """The long work of one rank, one piece after another. All ranks begin the same pieces, in the same order."""

    def __init__(self, rank: int, count: int, timeout: timedelta) -> None:
        self._rank, self._count, self._timeout = rank, count, timeout.total_seconds()
        self._depth = 0  # of pieces within pieces
        self._pieces = self._points = 0  # that were begun, and in the present piece those at which ranks waited
        self._has_store = True
        self._failure: SparseDPError | None = None  # of the present piece, on another rank

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Within it, this rank may take as long as it needs; at its end ranks wait for each other.

        If it fails on one rank, the others hear of that where they next wait.
        """
        if self._count == 1 or self._depth:
            yield
            return
        self._pieces, self._points, self._failure = self._pieces + 1, 0, None
        ends = threading.Event()
        beating = threading.Thread(target=self._beat, args=(self._name, ends), daemon=True)
        beating.start()
        self._depth = 1
        try:
            yield
            self.meet()
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be gone
                kind = "lost" if isinstance(error, RankLostError) else "failed"
                text = str(error) if isinstance(error, SparseDPError) else f"{type(error).__name__}: {error}"
                default_store().compare_set(f"{self._name}/failed", "", f"{kind} {self._rank} {text}")
            raise
        finally:
            self._depth = 0
            ends.set()
            beating.join()

    def meet(self) -> None:
        """Within a piece, waits until all ranks have come to the same point of it; otherwise does nothing."""
        if self._depth == 0 or not self._has_store:
            return
        if self._failure is not None:
            raise self._failure
        self._points += 1
        point = f"{self._name}/{self._points}"
        try:
            self._failure = self._wait_at(point)
        except RuntimeError:
            # The store went with rank 0, or with whoever launched all: ranks wait in the messages that follow, and no longer than
            # these do. What was trained can be saved yet.
            self._has_store = False
        if self._failure is not None:
            raise self._failure

    @property
    def _name(self) -> str:
        return f"sparsedp/long/{self._pieces}"

    def _wait_at(self, point: str) -> SparseDPError | None:
        """Waits until all have come; what has failed instead."""
        store, pause = default_store(), _SHORTEST_LOOK
        others = [rank for rank in range(self._count) if rank != self._rank]
        begin = time.monotonic()
        heard = dict.fromkeys(others, (-1, begin))  # the latest sign of life, and when it was new
        looked = begin
        here = store.add(point, 1)
        while here < self._count:
            if store.check([f"{self._name}/failed"]):
                return self._said(store.get(f"{self._name}/failed").decode())
            now = time.monotonic()
            if now - looked >= min(_LONGEST_BEAT, self._timeout / _BEATS):
                looked = now
                for rank in others:
                    beats = store.add(f"{self._name}/beats/{rank}", 0)
                    if beats != heard[rank][0]:
                        heard[rank] = beats, now
                missing = [rank for rank, (_, last) in heard.items() if now - last > self._timeout]
                # Whoever has come to the last point of all stops beating there.
                if missing and store.add(point, 0) < self._count:
                    return lost_ranks(missing, self._count)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)
            here = store.add(point, 0)
        return None

    def _said(self, text: str) -> SparseDPError:
        kind, rank, what = text.split(" ", 2)
        return RankLostError(what) if kind == "lost" else SparseDPError(f"On rank {rank}: {what}")

    def _beat(self, name: str, ends: threading.Event) -> None:
        store, every = default_store(), min(_LONGEST_BEAT, self._timeout / _BEATS)
        with suppress(RuntimeError):  # the store is gone: whoever waits finds out
            while not ends.is_set():
                store.add(f"{name}/beats/{self._rank}", 1)
                ends.wait(every)


def lost_ranks(missing: list[int], count: int) -> RankLostError:
    names = ", ".join(map(str, missing)) or "of unknown number"
    return RankLostError(
        f"Rank(s) {names} of {count} did not answer: killed, out of memory, or stopped by an error of their own? "
        "Look at their output. The last checkpoint is whole: resume from it, with as many ranks as there are."
    )
