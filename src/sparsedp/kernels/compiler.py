"""Numba's compiler as all loops here use it: without the interpreter's lock, and kept on disk where there is a place for it."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent  # of the loops that others call: loops call those of their own file and of this folder


def compile_loop(**options: Any) -> Callable[[F], F]:
    """Compiles a function at its first call, or reads what an earlier process has compiled.

    Numba keeps that beside the function's file, or else in a folder of the user's. Where it may write to neither, as in a
    container whose user has no home, it would refuse the function: it is then compiled anew in every process.
    """

    def compile_later(function: F) -> F:
        loop = njit(nogil=True, **options)(function)
        try:
            loop._cache = _Kept(function)  # as `cache=True` does with Numba's
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
        return cast(F, loop)

    return compile_later


class _Kept(FunctionCache):
    """What Numba keeps of a function, with less trust in its files.

    To read one is to run it: it is read only if those alone can have written it who may change the function's own file. One
    that is broken, as after a crash, is made anew, and without room for it there is none. It is out of date if any file is that
    a loop may be compiled from, not the function's own alone.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, _digest())
        self._file = Path(function.__code__.co_filename)

    @property
    def is_safe(self) -> bool:
        """Whether strangers can have written neither to the folder nor to a file, or may change the code itself anyway."""
        try:
            return self._is_safe()
        except OSError:  # such as a file that another process deletes now
            return False

    def _is_safe(self) -> bool:
        folder = Path(self._cache_path)
        if os.name == "nt" or not folder.exists():  # Windows' modes do not say who may write
            return True
        trusted = {0, os.getuid()}
        if self._file.is_file():  # not in an archive
            if _is_everybodys(self._file) or _is_everybodys(self._file.parent):
                return True
            trusted.add(self._file.stat().st_uid)
        name = self._cache_file._index_name.removesuffix(".nbi")
        parts = [folder, *folder.glob(f"{name}.nbi"), *folder.glob(f"{name}.*.nbc")]  # not what is being written
        strange = any(part.stat().st_uid not in trusted or part.stat().st_mode & stat.S_IWOTH for part in parts)
        return not strange and not _is_everybodys(folder.parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context) if self.is_safe else None
        except Exception:  # whatever broken bytes may raise
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk
            if self.is_safe:
                super().save_overload(sig, data)


def _is_everybodys(path: Path) -> bool:
    """Whether everybody may change a file, or replace what is in a folder."""
    mode = path.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


@functools.cache
def _digest() -> str:
    """Of the files in this folder."""
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Announcement(event.Listener):
    """Says once in a process that loops are being compiled, which takes a while."""

    def on_start(self, event: Any) -> None:
        loop = event.data["dispatcher"]
        if (loop.py_func.__module__ or "").split(".")[0] == __name__.split(".")[0]:  # others' may have no module
            _is_compiling(not (isinstance(loop._cache, _Kept) and loop._cache.is_safe))

    def on_end(self, event: Any) -> None:
        pass


@functools.cache
def _is_compiling(each_time: bool) -> None:
    _log.info(
        "Compiling loops, which takes some seconds in every process: there is no folder to keep them in that nobody else can "
        "write to. Set NUMBA_CACHE_DIR to one"
        if each_time
        else "Compiling loops for this machine, which takes some seconds the first time"
    )


event.register("numba:compile", _Announcement())
