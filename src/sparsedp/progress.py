"""How the library tells a caller of the progress of what may take long. It draws and prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], object]  # called with how much was done since the last call, by one thread at a time


class Progress(Protocol):
    """Called with the title of a task and its size, 0 where nobody knows it; the context lasts as long as the task and gives the
    `Advance` to call.

    A tqdm bar fits: `with tqdm(desc=title, total=total) as bar: yield bar.update`. What it raises ends the task.
    """

    def __call__(self, title: str, total: int) -> AbstractContextManager[Advance]: ...


@contextmanager
def no_progress(title: str, total: int) -> Iterator[Advance]:
    """Tells nobody."""
    yield lambda count: None
