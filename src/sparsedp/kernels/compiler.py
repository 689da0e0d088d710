"""Numba's compiler as all loops here use it: without the interpreter's lock, and kept on disk where there is a place for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event
from numba.core.caching import NullCache

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


def compile_loop(**options: Any) -> Callable[[F], F]:
    """Compiles a function at its first call, or reads what an earlier process has compiled.

    Numba keeps that beside the function's file, or else in a folder of the user's. Where it may write to neither, as in a
    container whose user has no home, it would refuse the function: it is then compiled anew in every process.
    """

    def compile_later(function: F) -> F:
        try:
            return cast(F, njit(cache=True, nogil=True, **options)(function))
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
        return cast(F, njit(nogil=True, **options)(function))

    return compile_later


class _Announcement(event.Listener):
    """Says once in a process that loops are being compiled, which takes a while."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.split(".")[0] == __name__.split(".")[0]:
            _is_compiling(isinstance(event.data["dispatcher"]._cache, NullCache))

    def on_end(self, event: Any) -> None:
        pass


@functools.cache
def _is_compiling(each_time: bool) -> None:
    _log.info(
        "Compiling loops, which takes some seconds in every process: there is no folder to keep them in. Set NUMBA_CACHE_DIR to "
        "one that nobody else can write to"
        if each_time
        else "Compiling loops for this machine, which takes some seconds the first time"
    )


event.register("numba:compile", _Announcement())
