"""The cache of a table: raw arrays and a JSON header, built once from the files in blocks.

    table-<key>/           key: source files (path, size, time of change), schema, vocabularies, version of this format
      labels.bin           uint8 [rows]
      numbers.bin          float32 [rows, numbers], missing as NaN; int32 where they are whole, missing as -2^31
      categories.bin       int32 [rows, columns], rows of the tables
      bag_<i>.bin          int32 [rows, length] of each column with many values
      periods.bin          int32 [rows], where the table has periods
      times.bin, users.bin int64 [rows], if such a column is named
      vocabulary.json      counted and given vocabularies
      header.json

A build happens in a hidden directory beside it, under a lock, and is renamed when it is complete; so there is
no half cache, and processes that open the same files at once build it once. A cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparsedp.data.tablecolumns import NEITHER, Counted, Encoded, encode
from sparsedp.data.tablefiles import PERIOD, TIME, Piece, Source, open_source
from sparsedp.data.tableschema import TableSchema
from sparsedp.data.vocabulary import ColumnVocabulary, GivenColumn, HashedColumn, ValueCounter
from sparsedp.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: no lock; two processes may then build the same cache twice
    fcntl = None  # type: ignore[assignment]

FORMAT = 3
KEPT_MALFORMED = 20
_MOST_WORKERS = 4
_PIECE_ROWS = 1 << 18
_EARLY_LINES = 1000
_HINTS = {
    NEITHER: "Say which labels mean 1: data.positive lists texts, such as ['yes'], and data.label_above is a number.",
    "is not text in UTF-8": "Save the file as UTF-8.",
    "is not a number": "Fields such as NA and null are missing, and numbers have no separators between thousands; is the column "
    "a categorical one?",
    "fields, expected": "A field with the separator or a line end in it stands in quotes (of texts: data.quotes).",
}

T = TypeVar("T")


@dataclass(frozen=True)
class MalformedLine:
    """`line` counts from 1, as an editor does. Rows of files that are no text count from 1, too."""

    file: str
    line: int
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.line}: {self.reason}"


@dataclass
class ReadSummary:
    """What reading the files gave: rows kept, malformed lines left out, and the first 20 of those."""

    rows: int = 0
    malformed: int = 0
    first: list[MalformedLine] = field(default_factory=list)

    def add(self, line: MalformedLine) -> None:
        """A line that is left out."""
        self.malformed += 1
        if len(self.first) < KEPT_MALFORMED:
            self.first.append(line)

    def check(self, max_malformed: float, *, complete: bool = True) -> None:
        """Raises DataError if too many lines were malformed.

        In the middle of a read a cluster of bad lines proves little, so it stops only at ten times the
        allowed share, or half way from it to all lines.
        """
        lines = self.rows + self.malformed
        limit = max_malformed if complete else min(10 * max_malformed, (1 + max_malformed) / 2)
        if self.malformed <= limit * lines or (not complete and lines < _EARLY_LINES):
            return
        more = [] if self.malformed <= len(self.first) else [f"and {self.malformed - len(self.first)} more"]
        listed = ";".join(f"\n  {line}" for line in [*self.first, *more])  # which may be put into one line
        hints = [text for part, text in _HINTS.items() if any(part in line.reason for line in self.first)]
        raise DataError(
            f"{self.malformed} of {lines} lines are malformed{'' if complete else ' (stopped early)'}, "
            f"more than max_malformed={max_malformed:g} allows:{listed}."
            + "".join(f"\n{hint}" for hint in hints)
            + "\nMend the lines, or let more of them be left out with max_malformed."
        )


def cached(
    sources: Sequence[Path],
    cache_dir: Path,
    schema: TableSchema,
    max_malformed: float,
    progress: Callable[[int], None] | None,
) -> Path:
    """The directory of a complete cache of these files; builds it if there is none."""
    stamps = _stamps(sources)
    vocabularies = {name: vocabulary.options() for name, vocabulary in schema.vocabularies().items()}
    key_parts = {"format": FORMAT, "sources": stamps, "schema": schema.options(), "vocabularies": vocabularies}
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:20]
    directory = cache_dir / f"table-{key}"
    if is_complete(directory):
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir, key):
        _remove_stale(cache_dir, key)
        if not is_complete(directory):  # another process may have built it while this one waited
            partial_directory = _partial(cache_dir, key)
            try:
                partial_directory.mkdir()
                build(
                    [open_source(path, schema.wanted()) for path in sources],
                    partial_directory,
                    schema,
                    max_malformed,
                    progress,
                )
                if _stamps(sources) != stamps:
                    raise DataError("a source file changed while it was read; try again when it is complete")
                shutil.rmtree(directory, ignore_errors=True)  # damaged, or it would have been used
                partial_directory.rename(directory)
            except BaseException:  # also an interrupt from the keyboard
                shutil.rmtree(partial_directory, ignore_errors=True)
                raise
    return directory


def is_complete(directory: Path) -> bool:
    """Whether a header is there and every array has the size that it states."""
    try:
        header = read_header(directory)
        return all(
            (directory / f"{name}.bin").stat().st_size == header["rows"] * np.dtype(kind).itemsize * int(np.prod(shape))
            for name, (kind, shape) in header["arrays"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def read_header(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "header.json").read_text())


def read_summary(header: dict[str, Any]) -> ReadSummary:
    summary = header["summary"]
    return ReadSummary(summary["rows"], summary["malformed"], [MalformedLine(**m) for m in summary["first"]])


def read_vocabulary(directory: Path) -> dict[str, dict[str, int]]:
    """{column: {value: row}} of the counted and given ones."""
    return json.loads((directory / "vocabulary.json").read_text())


def open_arrays(directory: Path, header: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a cache, memory-mapped and read-only."""
    rows, out = header["rows"], {}
    for name, (kind, shape) in header["arrays"].items():
        whole = (rows, *shape)
        empty = 0 in whole  # there is nothing to map
        out[name] = (
            np.empty(whole, kind) if empty else np.memmap(directory / f"{name}.bin", kind, mode="r", shape=whole)
        )
    return out


def _stamps(sources: Sequence[Path]) -> list[list[Any]]:
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]


def _partial(cache_dir: Path, key: str) -> Path:
    return cache_dir / f".table-{key}.partial"


@contextmanager
def _lock(cache_dir: Path, key: str, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of one cache; the system releases it even if the process is killed."""
    with open(cache_dir / f".table-{key}.lock", "a") as file:
        held = True
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                held = False
        yield held


def _remove_stale(cache_dir: Path, key: str) -> None:
    """Removes what killed builds left: directories whose lock nobody holds. The lock of `key` is ours."""
    for left in cache_dir.glob(".table-*.partial"):
        other = left.name.removeprefix(".table-").removesuffix(".partial")
        if other == key:
            shutil.rmtree(left, ignore_errors=True)
        else:
            with _lock(cache_dir, other, wait=False) as held:
                if held:
                    shutil.rmtree(left, ignore_errors=True)


# ------------------------------------------------------------------ building


def build(
    sources: Sequence[Source],
    directory: Path,
    schema: TableSchema,
    max_malformed: float,
    progress: Callable[[int], None] | None,
) -> None:
    """Writes the cache of the sources into an empty directory."""
    found = [source.columns for source in sources if source.columns is not None]
    from_column = all(PERIOD in columns or TIME in columns for columns in found)
    specs = _array_specs(schema, with_periods=from_column or len(sources) > 1)
    vocabularies = schema.vocabularies()
    summary = ReadSummary()
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(directory / f"{name}.bin", "wb")) for name in specs}
        for index, source in enumerate(sources):
            for encoded in _encoded(source, schema, vocabularies):
                summary.rows += len(encoded.labels)
                summary.malformed += encoded.malformed
                room = KEPT_MALFORMED - len(summary.first)
                summary.first += [
                    MalformedLine(source.name, line, reason, source.unit) for line, reason in encoded.bad[:room]
                ]
                arrays = _arrays_of(encoded, schema, vocabularies, None if from_column else index)
                for name, file in files.items():
                    arrays[name].tofile(file)
                summary.check(max_malformed, complete=False)
                if progress is not None:
                    progress(summary.rows)
    summary.check(max_malformed)
    if summary.rows == 0:
        raise DataError(f"no rows in {', '.join(source.name for source in sources)}")
    final = _finished(directory, summary.rows, schema, vocabularies)
    entries = {name: column.entry() for name, column in final.items() if isinstance(column, GivenColumn)}
    (directory / "vocabulary.json").write_text(json.dumps(entries))
    header = {
        "rows": summary.rows,
        "arrays": specs,
        "vocabulary_sizes": [final[c.name].size for c in schema.categorical]
        + [len(c.boundaries) + 2 for c in schema.bucketed],
        "categories": [c.name for c in schema.categorical] + [c.name for c in schema.bucketed],
        "numbers": [c.name for c in schema.numbers],
        "raw_numbers": schema.are_whole,
        "bags": [
            {"name": c.name, "rows": final[c.name].size, "padding": final[c.name].missing_row, "length": c.length}
            for c in schema.bags
        ],
        "hashed": {name: column.size for name, column in final.items() if isinstance(column, HashedColumn)},
        "private": [name for name, column in final.items() if column.is_private],
        "every": schema.every if all(TIME in columns and PERIOD not in columns for columns in found) else None,
        "summary": asdict(summary),
    }
    (directory / "header.json").write_text(json.dumps(header, indent=1))


def _array_specs(schema: TableSchema, with_periods: bool) -> dict[str, tuple[str, list[int]]]:
    """The type and the shape of a row of each array."""
    specs: dict[str, tuple[str, list[int]]] = {
        "labels": ("uint8", []),
        "numbers": ("int32" if schema.are_whole else "float32", [len(schema.numbers)]),
        "categories": ("int32", [len(schema.categorical) + len(schema.bucketed)]),
    }
    for i, column in enumerate(schema.bags):
        specs[f"bag_{i}"] = ("int32", [column.length])
    if with_periods:
        specs["periods"] = ("int32", [])
    if schema.time is not None:
        specs["times"] = ("int64", [])
    if schema.user is not None:
        specs["users"] = ("int64", [])
    return specs


def _encoded(source: Source, schema: TableSchema, vocabularies: dict[str, ColumnVocabulary]) -> Iterator[Encoded]:
    def task(piece: Callable[[], Piece]) -> Encoded:
        return encode(piece(), schema, vocabularies, KEPT_MALFORMED)

    return in_order(partial(task, piece) for piece in source.pieces())


def in_order(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of tasks in their order; as many as there are cores run at once, and one more waits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, _MOST_WORKERS)
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _arrays_of(
    encoded: Encoded, schema: TableSchema, vocabularies: dict[str, ColumnVocabulary], period: int | None
) -> dict[str, np.ndarray]:
    def rows(name: str) -> np.ndarray:
        found = encoded.rows[name]
        if isinstance(found, Counted):
            counter = vocabularies[name]
            assert isinstance(counter, ValueCounter)
            return found.number(counter)
        return found

    n = len(encoded.labels)
    categories = np.empty((n, len(schema.categorical) + len(schema.bucketed)), np.int32)
    for j, column in enumerate(schema.categorical):
        categories[:, j] = rows(column.name)
    categories[:, len(schema.categorical) :] = encoded.buckets
    arrays = {"labels": encoded.labels, "numbers": encoded.numbers, "categories": categories}
    for i, bag in enumerate(schema.bags):
        arrays[f"bag_{i}"] = rows(bag.name)
    periods = encoded.periods if period is None else np.full(n, period, np.int32)
    optional = {"periods": periods, "times": encoded.times, "users": encoded.users}
    return arrays | {name: array for name, array in optional.items() if array is not None}


def _finished(
    directory: Path, rows: int, schema: TableSchema, vocabularies: dict[str, ColumnVocabulary]
) -> dict[str, HashedColumn | GivenColumn]:
    """The vocabularies when all is read. The numbers of counted ones are replaced by rows in the arrays."""
    final: dict[str, HashedColumn | GivenColumn] = {}
    row_of: dict[str, np.ndarray] = {}
    for name, vocabulary in vocabularies.items():
        if isinstance(vocabulary, ValueCounter):
            final[name], row_of[name] = vocabulary.finish()
        else:
            final[name] = vocabulary
    width = len(schema.categorical) + len(schema.bucketed)
    counted = {j: row_of[c.name] for j, c in enumerate(schema.categorical) if c.name in row_of}
    if counted:
        _renumber(directory / "categories.bin", rows, width, counted)
    for i, bag in enumerate(schema.bags):
        if bag.name in row_of:
            _renumber(directory / f"bag_{i}.bin", rows * bag.length, 1, {0: row_of[bag.name]})
    return final


def _renumber(path: Path, rows: int, width: int, row_of: dict[int, np.ndarray]) -> None:
    """Replaces the numbers of `ValueCounter` by rows in some columns, in place and piece by piece."""
    with open(path, "r+b") as file:
        for begin in range(0, rows, _PIECE_ROWS):
            place = begin * width * 4
            file.seek(place)
            count = min(_PIECE_ROWS, rows - begin) * width
            piece = np.fromfile(file, np.int32, count).reshape(-1, width)
            for j, row in row_of.items():
                piece[:, j] = row[piece[:, j]]
            file.seek(place)
            piece.tofile(file)
