"""Timing on machines that are shared and noisy: variants take turns, and the best of each is compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over its repeats."""

    best: float
    median: float
    spread: float  # distance of the quartiles

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        return Timing(min(seconds), statistics.median(seconds), quartiles[2] - quartiles[0])

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


_TURN, _RUNS = 0.02, 5


def interleaved(
    variants: Mapping[str, Callable[[], None]],
    repeats: int | Mapping[str, int],
    warmup: int = 2,
    before: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Runs the variants in turns, so that a slow moment of the machine meets all of them.

    Variants with fewer repeats than others sit turns out, evenly, and warm up once. In its turn a variant runs up to
    `_RUNS` times, until `_TURN` seconds are over: short steps follow one another as in training, and find the caches as they
    left them. `before` runs ahead of every run and is not timed.
    """
    counts = dict.fromkeys(variants, repeats) if isinstance(repeats, int) else repeats
    turns = max(counts[name] for name in variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-warmup, turns):
        for name, run in variants.items():
            if turn >= 0 and (turn + 1) * counts[name] // turns == turn * counts[name] // turns:
                continue
            if turn < -1 and counts[name] < turns:
                continue
            left = _TURN
            for _ in range(_RUNS):
                if before is not None:
                    before()
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                if turn >= 0:
                    seconds[name].append(elapsed)
                left -= elapsed
                if left <= 0:
                    break
    return {name: Timing.of(values) for name, values in seconds.items()}


def ratio(one: Timing, other: Timing) -> dict[str, float]:
    """How much longer `one` takes than `other`."""
    return {"best": one.best / other.best, "median": one.median / other.median}


class Stopwatch:
    """Adds up the time of named stages, less that of stages within them; the best repeat of each stage counts."""

    def __init__(self) -> None:
        self._current: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._within = 0.0  # the time of finished stages within the one that runs

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer, self._within = self._within, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._current[stage] = self._current.get(stage, 0.0) + elapsed - self._within
            self._within = outer + elapsed

    def lap(self) -> None:
        """Ends a repeat."""
        for stage, seconds in self._current.items():
            self._best[stage] = min(self._best.get(stage, seconds), seconds)
        self._current.clear()

    def forget(self) -> None:
        """Ends a repeat that does not count."""
        self._current.clear()

    @property
    def stages(self) -> dict[str, float]:
        return dict(self._best)
