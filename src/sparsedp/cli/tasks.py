"""What a command shows on the error stream while it works: which task it is at, and how far. The report alone is on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from sparsedp.cli.progress import every_few_seconds
from sparsedp.progress import Advance, Progress, no_progress


@contextmanager
def shown_tasks(quiet: bool = False) -> Iterator[Progress]:
    """Gives what is to be told of tasks: bars on a terminal, elsewhere a line when a task begins and then every few seconds."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield no_progress
    elif console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), _Count(), TimeElapsedColumn())
        with Bars(*columns, console=console, transient=True) as bars:
            yield partial(_bar, bars)
    else:
        yield partial(_lines, console)


@contextmanager
def _bar(bars: Bars, title: str, total: int) -> Iterator[Advance]:
    task = bars.add_task(_sentence(title), total=total or None)
    try:
        yield lambda count: bars.advance(task, count)
    finally:
        bars.remove_task(task)


@contextmanager
def _lines(console: Console, title: str, total: int) -> Iterator[Advance]:
    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(_sentence(title))
    done = 0
    tell = every_few_seconds(lambda count: say(f"{_sentence(title)}: {_count(done, total)}"))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(done)

    yield advance


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_count(int(task.completed), int(task.total or 0)))


def _count(done: int, total: int) -> str:
    if total:
        return f"{done:,} of {total:,}"
    return f"{done:,}" if done else ""


def _sentence(title: str) -> str:
    return title[:1].upper() + title[1:]
