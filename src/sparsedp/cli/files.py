"""Files that are replaced completely or not at all, the disk space that they need, and the lock on a folder."""

from __future__ import annotations

import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sparsedp.errors import SparseDPError

try:
    import fcntl
except ImportError:  # Windows: two commands at work in one folder are then not noticed
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_SPARE = 1 << 20  # what small files beside a large one take


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Lets `write` fill a file beside `path`, which then takes its place: a failure leaves the old one, and nothing else."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None  # nobody asked for the one beside it
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Removes what a killed process had written of the files `names`. For the holder of the folder's lock."""
    for name in names:
        for path in folder.glob(f".{name}.*"):
            path.unlink()


def require_writable(folder: Path, hint: str) -> None:
    """Raises if nothing can be written into `folder`, or if it is not there and cannot be made."""
    existing = _existing(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        where = "it" if existing == folder else str(existing)
        raise SparseDPError(
            f"{folder}: nothing can be written there: {where} is no folder that you may write to. {hint}."
        )


def require_space(folder: Path, needed: int, what: str, hint: str = "") -> None:
    """Raises if the disk under `folder`, which need not exist yet, has not `needed` bytes left for `what`."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed + _SPARE:
        raise SparseDPError(
            f"The disk of {folder} is too full for {what}: {in_units(needed + _SPARE)} are needed, {in_units(free)} are "
            f"free. Make room{hint}."
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def in_units(count: int) -> str:
    """A number of bytes as text, in GB, MB or kB."""
    for power, name in ((9, "GB"), (6, "MB")):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {name}"
    return f"{count / 1000:,.0f} kB"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if need be, against other commands. The system lets go when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SparseDPError(
                    f"Another sparsedp command is at work in {folder}. Wait until it has ended, or stop it."
                ) from None
            _leave_to_this_process(file)
        try:
            yield
        finally:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # a worker that has just been forked may still hold the file


def _leave_to_this_process(file: IO[str]) -> None:
    """Loader workers, which are forked, would hold the lock beyond the death of the process that they work for."""
    reference = weakref.ref(file)

    def close() -> None:
        if (inherited := reference()) is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
