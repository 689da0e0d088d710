"""Logs of who did what when, read from the formats that sequence data sets are published in."""

from __future__ import annotations

import gzip
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from sparsedp.data.codes import MISSING
from sparsedp.data.tablecache import KEPT_MALFORMED, MalformedLine, ReadSummary
from sparsedp.data.tablecolumns import Faults, distinct_values, times_of
from sparsedp.data.tablefiles import Paths, Wanted, find_sources, open_source
from sparsedp.errors import ConfigError, DataError, suggestion

# What a header may call the columns, in lower case and without "_".
_USER = ("user", "userid", "reviewerid")
ITEM_COLUMNS = ("item", "itemid", "movieid", "asin")
_TIME = ("timestamp", "time", "unixreviewtime")


@dataclass(frozen=True)
class _Layout:
    separator: str | None  # None: white space
    fields: int
    user: int = 0
    item: int = 1
    time: int | None = 3


_LAYOUTS = {
    "movielens": _Layout("::", 4),
    "movielens_100k": _Layout("\t", 4),
    "amazon": _Layout(",", 4),
    "pairs": _Layout(None, 2, time=None),
}
FORMATS = ("auto", *_LAYOUTS, "csv", "lists")


@dataclass(frozen=True)
class Actions:
    """A log: action a is of user `users[a]` on item `items[a]`, numbered from 0 in order of first appearance.

    `times` is None if the file has none: then its order is the order of time.
    """

    users: np.ndarray  # int64 [actions]
    items: np.ndarray  # int64 [actions]
    times: np.ndarray | None  # int64 [actions]
    item_names: tuple[str, ...]
    user_names: tuple[str, ...] = ()
    summary: ReadSummary = field(default_factory=ReadSummary)


def read_actions(path: str | os.PathLike[str], format: str = "auto", *, max_malformed: float = 0.001) -> Actions:
    """Reads a plain or gzipped file. Ids are text, and blank lines are skipped.

    Malformed lines are left out, and `summary` tells of them; more than the share `max_malformed` of them is a DataError.

    "movielens": `user::item::rating::timestamp` (ratings.dat of MovieLens 1M).
    "movielens_100k": the same with tabs (u.data of MovieLens 100K).
    "amazon": `user,item,rating,timestamp` without a header (ratings_*.csv of 2014).
    "csv": a header names the columns: user, user_id or reviewerID; item, item_id, movie_id or asin; timestamp.
    "pairs": `user item`, separated by white space, in order of time.
    "lists": `user item item ...`, one line for each user, in order of time.
    "auto": what the first line looks like.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"sequences: format must be one of {', '.join(FORMATS)}; got {format!r}{suggestion(format, FORMATS)}"
        )
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if format == "auto":
        with open_text(path) as lines:
            format = _guess(path, next((line for line in lines if line.strip()), ""))
    with open_text(path) as lines:
        reader = _Reader(path, max_malformed)
        return reader.read_lists(lines) if format == "lists" else reader.read_rows(lines, format)


def read_action_columns(
    paths: Paths, *, user: str, item: str, time: str | None = None, max_malformed: float = 0.001
) -> Actions:
    """Reads files with columns of these names: text, Parquet or Arrow, as `sparsedp.data.open_table` does. Without a time the
    order of the rows is that of time. Malformed lines are as in `read_actions`.
    """
    named = {"user": user, "item": item, "time": time}
    used = [name for name in named.values() if name is not None]
    if len(set(used)) < len(used):
        raise ConfigError(f"sequences: user, item and time are different columns; got {', '.join(used)}")
    wanted = Wanted({use: name for use, name in named.items() if name is not None})
    numbers: dict[str, dict[bytes, int]] = {"user": {}, "item": {}}
    places: dict[str, list[np.ndarray]] = {"user": [], "item": []}
    times: list[np.ndarray] = []
    summary = ReadSummary()
    for path in find_sources(paths):
        source = open_source(path, wanted)
        for task in source.pieces():
            piece = task()
            faults = Faults(piece.rows)
            values = {use: distinct_values(piece.columns[use]) for use in numbers}
            for use, of_use in values.items():
                faults.add(of_use.places == MISSING, f"the {use} is empty")
            when = None if time is None else times_of(piece.columns["time"], time, faults)
            good = np.flatnonzero(~faults.wrong)
            for use, known in numbers.items():
                kept = values[use].places[good]
                distinct = values[use].distinct.to_pylist()
                number = np.full(len(distinct), MISSING)
                for place in np.unique(kept).tolist():  # a value of malformed lines alone is not known
                    number[place] = known.setdefault(distinct[place], len(known))
                places[use].append(number[kept])
            if when is not None:
                times.append(when[good])
            faulty = faults.first(KEPT_MALFORMED)
            wrong = zip(piece.lines_of([row for row, _ in faulty]), (reason for _, reason in faulty))
            for line, reason in sorted([*piece.bad, *wrong])[: KEPT_MALFORMED - len(summary.first)]:
                summary.first.append(MalformedLine(str(path), line, reason, source.unit))
            summary.malformed += piece.lost + int(np.count_nonzero(faults.wrong))
            summary.rows += len(good)
            summary.check(max_malformed, complete=False)
    summary.check(max_malformed)
    if not numbers["user"]:
        raise DataError(f"{paths}: no actions in it")
    names = {use: tuple(value.decode("utf-8", "replace") for value in known) for use, known in numbers.items()}
    return Actions(
        np.concatenate(places["user"]),
        np.concatenate(places["item"]),
        np.concatenate(times) if times else None,
        names["item"],
        names["user"],
        summary,
    )


class _Reader:
    """The actions of one file, line by line."""

    def __init__(self, path: Path, max_malformed: float) -> None:
        self.path, self.max_malformed, self.summary = path, max_malformed, ReadSummary()
        self.users: dict[str, int] = {}
        self.items: dict[str, int] = {}
        self.user_of, self.item_of, self.time_of = array("q"), array("q"), array("q")

    def read_rows(self, lines: TextIO, format: str) -> Actions:
        layout = None if format == "csv" else _LAYOUTS[format]
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if not text.strip():
                continue
            if layout is None:
                layout = _csv_layout(self.path, number, text)
                continue
            parts = text.split(layout.separator)
            if len(parts) != layout.fields:
                hint = "; is it format='lists'?" if format == "pairs" else ""
                self._leave_out(number, f"{len(parts)} fields where format {format!r} has {layout.fields}{hint}")
                continue
            user, item = parts[layout.user].strip(), parts[layout.item].strip()
            if not user or not item:
                self._leave_out(number, f"the {'item' if user else 'user'} is empty")
                continue
            if layout.time is not None:
                try:
                    self.time_of.append(int(parts[layout.time]))
                except (ValueError, OverflowError):
                    self._leave_out(number, f"the timestamp {parts[layout.time]!r} is not a whole number of 64 bits")
                    continue
            self.user_of.append(self.users.setdefault(user, len(self.users)))
            self.item_of.append(self.items.setdefault(item, len(self.items)))
            self.summary.rows += 1
        return self._actions(None if layout is None or layout.time is None else _whole(self.time_of))

    def read_lists(self, lines: TextIO) -> Actions:
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if not parts:
                continue
            user, *items = parts
            if not items:
                self._leave_out(number, f"user {user!r} has no items")
                continue
            if user in self.users:
                self._leave_out(number, f"user {user!r} has a line before; format 'lists' has one for each user")
                continue
            self.users[user] = len(self.users)
            self.user_of.extend([self.users[user]] * len(items))
            self.item_of.extend(self.items.setdefault(item, len(self.items)) for item in items)
            self.summary.rows += 1
        return self._actions(None)

    def _leave_out(self, number: int, reason: str) -> None:
        self.summary.add(MalformedLine(str(self.path), number, reason))
        self.summary.check(self.max_malformed, complete=False)

    def _actions(self, times: np.ndarray | None) -> Actions:
        self.summary.check(self.max_malformed)
        if not self.user_of:
            raise DataError(f"{self.path}: no actions in it")
        names = tuple(self.items), tuple(self.users)
        return Actions(_whole(self.user_of), _whole(self.item_of), times, *names, self.summary)


def _whole(values: array[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _refuse(path: Path, number: int, problem: str) -> NoReturn:
    raise DataError(f"{path}, line {number}: {problem}")


def column_name(text: str) -> str:
    """A column's name in a header, in lower case and without "_" and quotes."""
    return text.strip().strip('"').lower().replace("_", "")


def _csv_layout(path: Path, number: int, header: str) -> _Layout:
    names = [column_name(name) for name in header.split(",")]

    def column(what: str, accepted: Sequence[str]) -> int:
        matching = [i for i, name in enumerate(names) if name in accepted]
        if len(matching) != 1:
            problem = "no column is" if not matching else f"{len(matching)} columns are"
            _refuse(path, number, f"{problem} the {what} ({', '.join(accepted)}) in the header {header!r}")
        return matching[0]

    return _Layout(",", len(names), column("user", _USER), column("item", ITEM_COLUMNS), column("time", _TIME))


def _guess(path: Path, line: str) -> str:
    text = line.rstrip("\r\n")
    if "::" in text:
        return "movielens"
    if "," in text:
        names = {column_name(name) for name in text.split(",")}
        return "csv" if names & {*_USER} and names & {*ITEM_COLUMNS} else "amazon"
    if text.count("\t") == 3:
        return "movielens_100k"
    if len(text.split()) >= 2:
        return "pairs" if len(text.split()) == 2 else "lists"
    raise DataError(f"{path}: its first line looks like none of the formats {', '.join(FORMATS[1:])}: {text[:60]!r}")


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A plain or gzipped file, by its first bytes, not its name."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if zipped else open(path, encoding="utf-8-sig") as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged or cut short: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8: {error}") from error
