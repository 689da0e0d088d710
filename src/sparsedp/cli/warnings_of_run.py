"""SparseDP's warnings while a run goes on, for its folder; they are shown as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from sparsedp.errors import SparseDPWarning


class WarningsOfRun:
    """Between `__enter__` and `__exit__`, each message once. Those from before there is a folder wait for it."""

    def __init__(self) -> None:
        self._messages: dict[str, None] = {}
        self._write: Callable[[str], None] | None = None
        self._show: Any = None

    def __enter__(self) -> WarningsOfRun:
        self._show = warnings.showwarning
        warnings.showwarning = self._note
        return self

    def __exit__(self, *exception: object) -> None:
        warnings.showwarning = self._show

    def write_to(self, write: Callable[[str], None]) -> None:
        self._write = write
        for message in self._messages:
            write(message)

    def _note(self, message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        self._show(message, category, *where, **more)
        text = str(message)
        if issubclass(category, SparseDPWarning) and text not in self._messages:
            self._messages[text] = None
            if self._write is not None:
                self._write(text)
