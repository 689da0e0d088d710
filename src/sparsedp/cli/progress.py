"""What a run shows while it goes on: a bar on a terminal, lines elsewhere, nothing if it is to be quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Status:
    """Where a run is."""

    step: int
    loss: float
    epsilon: float  # spent so far; may be some seconds old
    rows_touched: int
    examples_per_second: float
    periods: str | None = None  # of a stream, those that are trained on now

    def __str__(self) -> str:
        where = "" if self.periods is None else f"{self.periods}  "
        return (
            f"{where}loss {self.loss:.4f}  epsilon {self.epsilon:.3f}  {self.rows_touched:,} rows  "
            f"{self.examples_per_second:,.0f} examples/s"
        )


class Reporter:
    """Shows nothing; the base of those that do."""

    def say(self, text: str) -> None:
        """Shows a message."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts, or goes on, after `step` of `steps` steps."""

    def show(self, status: Status) -> None:
        """A step was taken."""

    def end(self) -> None:
        """Training stopped."""

    def alert(self, text: str) -> None:
        """A message that is shown even if progress is not."""


class Quiet(Reporter):
    def alert(self, text: str) -> None:
        print(text, file=sys.stderr)


class Lines(Quiet):
    """A line every few seconds, and at the last step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._last = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, step: int, steps: int) -> None:
        self._steps = steps
        self._last = time.monotonic()

    def show(self, status: Status) -> None:
        if status.step == self._steps or time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self.say(f"step {status.step}/{self._steps}  {status}")


class Bar(Quiet):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, step: int, steps: int) -> None:
        columns = (
            BarColumn(10),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._progress.add_task("", total=steps, completed=step)
        self._progress.start()

    def show(self, status: Status) -> None:
        assert self._progress is not None
        self._progress.update(self._task, completed=status.step, description=str(status))

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def draw_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A `sparsedp.progress.Progress`: a bar on the error stream while a task lasts, if that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda count: bar.advance(task, count)


def every_few_seconds(tell: Callable[[int], None]) -> Callable[[int], None]:
    """`tell`, at most every SECONDS_BETWEEN_LINES."""
    last = time.monotonic()

    def progress(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            tell(count)

    return progress


def evaluation_progress(reporter: Reporter, total: int, what: str = "held-out examples") -> Callable[[int], None]:
    """To be called with the number of examples of each batch that was evaluated."""
    tell = every_few_seconds(lambda count: reporter.say(f"Evaluating: {count:,} of {total:,} {what}"))
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        tell(done)

    return progress


def make_reporter(console: Console, quiet: bool) -> Reporter:
    if quiet:
        return Quiet()
    return Bar(console) if console.is_terminal else Lines(console)
