"""The cache of a click log: raw arrays and a JSON header, built once from the text in blocks of 16 MB.

    clicklog-<key>/        key: source files (path, size, time of change), vocabulary, user column, version of this format
      labels.bin           uint8 [rows]
      integers.bin         int32 [rows, 13], missing as -2^31
      categories.bin       int32 [rows, 26], rows of the tables
      periods.bin          int32 [rows], where the log has periods
      users.bin            int64 [rows], if a user column is named
      vocabulary.npz       a counted or given vocabulary
      header.json

A build happens in a hidden directory beside it, under a lock, and is renamed when it is complete; so there is
no half cache, and processes that open the same log at once build it once. A cache may be deleted at any time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from glob import glob, has_magic
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp.data.clickparse import (
    CATEGORIES,
    INTEGERS,
    KEPT_MALFORMED,
    Layout,
    ParsedBlock,
    detect_layout,
    explain,
    parse_block,
)
from sparsedp.data.vocabulary import (
    CountVocabulary,
    GivenVocabulary,
    HashVocabulary,
    ValueCounter,
    Vocabulary,
)
from sparsedp.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: no lock; two processes may then build the same cache twice
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "labels": (np.uint8, ()),
    "integers": (np.int32, (INTEGERS,)),
    "categories": (np.int32, (CATEGORIES,)),
    "periods": (np.int32, ()),
    "users": (np.int64, ()),
}
_FIRST_BLOCK = 1 << 19  # small, so that a file of the wrong kind is refused at once
_BLOCK = 1 << 24
_PIECE_ROWS = 1 << 18
_EARLY_LINES = 1000
_BOM = b"\xef\xbb\xbf"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class MalformedLine:
    """`line` counts from 1, as an editor does."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass
class ReadSummary:
    """What reading the text gave: rows kept, malformed lines left out, and the first 20 of those."""

    rows: int = 0
    malformed: int = 0
    first: list[MalformedLine] = field(default_factory=list)

    def check(self, max_malformed: float, *, complete: bool = True) -> None:
        """Raises DataError if too many lines were malformed.

        In the middle of a read a cluster of bad lines proves little, so it stops only at ten times the
        allowed share, or half way from it to all lines.
        """
        lines = self.rows + self.malformed
        limit = max_malformed if complete else min(10 * max_malformed, (1 + max_malformed) / 2)
        if self.malformed <= limit * lines or (not complete and lines < _EARLY_LINES):
            return
        listed = "".join(f"\n  {line}" for line in self.first)
        more = "" if self.malformed <= len(self.first) else f"\n  and {self.malformed - len(self.first)} more"
        raise DataError(
            f"{self.malformed} of {lines} lines are malformed{'' if complete else ' (stopped early)'}, "
            f"more than max_malformed={max_malformed:g} allows:{listed}{more}"
        )


def find_sources(paths: Paths) -> list[Path]:
    """The files of a log in order: a file, a list, or a directory or glob pattern (day_2 before day_10)."""
    if not isinstance(paths, (str, os.PathLike)):
        sources = [Path(path) for path in paths]
    elif Path(paths).is_dir():
        sources = [p for p in Path(paths).iterdir() if p.is_file() and not p.name.startswith(".")]
        sources.sort(key=_natural)
    elif has_magic(os.fspath(paths)) and not Path(paths).exists():
        sources = sorted((Path(p) for p in glob(os.fspath(paths)) if Path(p).is_file()), key=_natural)
    else:
        sources = [Path(paths)]
    if not sources:
        raise DataError(f"no files found: {paths!r}")
    for path in sources:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    return [path.absolute() for path in sources]


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]


def cached(
    sources: Sequence[Path],
    cache_dir: Path,
    vocabulary: Vocabulary,
    max_malformed: float,
    progress: Callable[[int], None] | None,
    user_column: str | None = None,
) -> Path:
    """The directory of a complete cache of these files; builds it if there is none."""
    stamps = _stamps(sources)
    key_parts = {"format": FORMAT, "sources": stamps, "vocabulary": vocabulary.options()}
    if user_column is not None:
        key_parts["user_column"] = user_column
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:20]
    directory = cache_dir / f"clicklog-{key}"
    if is_complete(directory):
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir, key):
        _remove_stale(cache_dir, key)
        if not is_complete(directory):  # another process may have built it while this one waited
            partial = _partial(cache_dir, key)
            try:
                partial.mkdir()
                _build(sources, partial, vocabulary, max_malformed, progress, user_column)
                if _stamps(sources) != stamps:
                    raise DataError("a source file changed while it was read; try again when it is complete")
                shutil.rmtree(directory, ignore_errors=True)  # damaged, or it would have been used
                partial.rename(directory)
            except BaseException:  # also an interrupt from the keyboard
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return directory


def is_complete(directory: Path) -> bool:
    """Whether a header is there and every array has the size that it states."""
    try:
        header = read_header(directory)
        return all(
            (directory / f"{name}.bin").stat().st_size
            == header["rows"] * np.dtype(ARRAYS[name][0]).itemsize * int(np.prod(ARRAYS[name][1]))
            for name in header["arrays"]
        )
    except (OSError, ValueError, KeyError):
        return False


def read_header(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "header.json").read_text())


def read_summary(header: dict[str, Any]) -> ReadSummary:
    summary = header["summary"]
    return ReadSummary(summary["rows"], summary["malformed"], [MalformedLine(**m) for m in summary["first"]])


def read_vocabulary(directory: Path, header: dict[str, Any]) -> HashVocabulary | GivenVocabulary:
    options = header["vocabulary"]
    if options["kind"] == "hash":
        return HashVocabulary(options["buckets"])
    with np.load(directory / "vocabulary.npz") as arrays:
        pairs = [(arrays[f"codes{j}"], arrays[f"rows{j}"]) for j in range(CATEGORIES)]
    return GivenVocabulary.from_arrays(pairs, private=header["vocabulary_is_private"])


def open_arrays(directory: Path, header: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a cache, memory-mapped and read-only."""
    return {
        name: np.memmap(directory / f"{name}.bin", ARRAYS[name][0], mode="r", shape=(header["rows"], *ARRAYS[name][1]))
        for name in header["arrays"]
    }


def _stamps(sources: Sequence[Path]) -> list[list[Any]]:
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]


def _partial(cache_dir: Path, key: str) -> Path:
    return cache_dir / f".clicklog-{key}.partial"


@contextmanager
def _lock(cache_dir: Path, key: str, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of one cache; the system releases it even if the process is killed."""
    with open(cache_dir / f".clicklog-{key}.lock", "a") as file:
        held = True
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                held = False
        yield held


def _remove_stale(cache_dir: Path, key: str) -> None:
    """Removes what killed builds left: directories whose lock nobody holds. The lock of `key` is ours."""
    for partial in cache_dir.glob(".clicklog-*.partial"):
        other = partial.name.removeprefix(".clicklog-").removesuffix(".partial")
        if other == key:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with _lock(cache_dir, other, wait=False) as held:
                if held:
                    shutil.rmtree(partial, ignore_errors=True)


def _build(
    sources: Sequence[Path],
    directory: Path,
    vocabulary: Vocabulary,
    max_malformed: float,
    progress: Callable[[int], None] | None,
    user_column: str | None,
) -> None:
    layouts = [_layout(path, user_column) for path in sources]
    from_column = all(layout.has_period for layout in layouts if layout is not None)
    has_periods = from_column or len(sources) > 1
    absent = {"periods": not has_periods, "users": user_column is None}
    names = [name for name in ARRAYS if not absent.get(name, False)]
    encoder = vocabulary.counter() if isinstance(vocabulary, CountVocabulary) else vocabulary
    summary = ReadSummary()
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(directory / f"{name}.bin", "wb")) for name in names}
        for index, (path, layout) in enumerate(zip(sources, layouts)):
            if layout is None:  # an empty file: a day without rows
                continue
            for block in _parsed_blocks(path, layout, summary):
                arrays = {
                    "labels": block.labels,
                    "integers": block.integers,
                    "categories": encoder.encode(block.categories),
                    "periods": block.periods if from_column else np.full(len(block.labels), index, np.int32),
                    "users": block.users,
                }
                for name, file in files.items():
                    arrays[name].tofile(file)
                summary.check(max_malformed, complete=False)
                if progress is not None:
                    progress(summary.rows)
    summary.check(max_malformed)
    if summary.rows == 0:
        raise DataError(f"no rows in {', '.join(path.name for path in sources)}")
    final: HashVocabulary | GivenVocabulary
    if isinstance(encoder, ValueCounter):
        final, number_to_row = encoder.finish()
        _renumber(directory / "categories.bin", summary.rows, number_to_row)
    else:
        final = encoder
    if isinstance(final, GivenVocabulary):
        parts: dict[str, Any] = {}
        for j, (codes, rows) in enumerate(final.arrays()):
            parts[f"codes{j}"], parts[f"rows{j}"] = codes, rows
        np.savez(directory / "vocabulary.npz", **parts)
    header = {
        "rows": summary.rows,
        "arrays": names,
        "vocabulary": vocabulary.options(),
        "vocabulary_sizes": final.sizes,
        "vocabulary_is_private": final.is_private,
        "summary": asdict(summary),
    }
    (directory / "header.json").write_text(json.dumps(header, indent=1))


def _renumber(path: Path, rows: int, number_to_row: Sequence[np.ndarray]) -> None:
    """Replaces the numbers of `ValueCounter` by rows, in place and piece by piece."""
    with open(path, "r+b") as file:
        for begin in range(0, rows, _PIECE_ROWS):
            place = begin * CATEGORIES * 4
            file.seek(place)
            count = min(_PIECE_ROWS, rows - begin) * CATEGORIES
            piece = np.fromfile(file, np.int32, count).reshape(-1, CATEGORIES)
            for j, row in enumerate(number_to_row):
                piece[:, j] = row[piece[:, j]]
            file.seek(place)
            piece.tofile(file)


@contextmanager
def _open_text(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """A plain or gzipped file (by its first bytes, not its name) without a byte order mark."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if zipped else open(path, "rb") as stream:
            if stream.read(len(_BOM)) != _BOM:
                stream.seek(0)
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged or cut short: {error}") from error


def _layout(path: Path, user_column: str | None) -> Layout | None:
    with _open_text(path) as stream:
        first_line = stream.readline(_FIRST_BLOCK)
    return detect_layout(first_line, path, user_column) if first_line else None


def _parsed_blocks(path: Path, layout: Layout, summary: ReadSummary) -> Iterator[ParsedBlock]:
    """Parses a file block by block and keeps the summary."""
    before = 0  # lines of the blocks before this one
    header_to_come = layout.has_header
    with _open_text(path) as stream:
        for text in _blocks(stream, path):
            if header_to_come:
                text = text[text.index(b"\n") + 1 :]
                before = 1
                header_to_come = False
            block = parse_block(text, layout)
            summary.rows += len(block.labels)
            summary.malformed += block.malformed
            for line, reason, where in block.bad[: KEPT_MALFORMED - len(summary.first)].tolist():
                summary.first.append(MalformedLine(path.name, before + line + 1, explain(layout, reason, where)))
            before += block.lines
            yield block


def _blocks(stream: gzip.GzipFile | BufferedReader, path: Path) -> Iterator[bytes]:
    """Pieces of the text that end with a newline."""
    carry = b""
    size = _FIRST_BLOCK
    while True:
        piece = stream.read(size)
        size = _BLOCK
        if not piece:
            break
        end = piece.rfind(b"\n") + 1
        if end == 0:
            carry += piece
            if len(carry) > _BLOCK:
                raise DataError(f"{path}: a line of more than {_BLOCK} bytes; this is not a click log")
            continue
        yield carry + piece[:end]
        carry = piece[end:]
    if carry:
        yield carry + b"\n"
