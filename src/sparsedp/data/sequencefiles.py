"""Logs of who did what when, read from the formats that sequence data sets are published in."""

from __future__ import annotations

import gzip
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from sparsedp.data.codes import MISSING
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


def read_actions(path: str | os.PathLike[str], format: str = "auto") -> Actions:
    """Reads a plain or gzipped file. Ids are text, and blank lines are skipped; a malformed line is a DataError.

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
        return _read_lists(path, lines) if format == "lists" else _read_rows(path, lines, format)


def read_action_columns(paths: Paths, *, user: str, item: str, time: str | None = None) -> Actions:
    """Reads files with columns of these names: text, Parquet or Arrow, as `sparsedp.data.open_table` does. Without a time the
    order of the rows is that of time. A malformed line is a DataError.
    """
    named = {"user": user, "item": item, "time": time}
    used = [name for name in named.values() if name is not None]
    if len(set(used)) < len(used):
        raise ConfigError(f"sequences: user, item and time are different columns; got {', '.join(used)}")
    wanted = Wanted({use: name for use, name in named.items() if name is not None})
    numbers: dict[str, dict[bytes, int]] = {"user": {}, "item": {}}
    places: dict[str, list[np.ndarray]] = {"user": [], "item": []}
    times: list[np.ndarray] = []
    for path in find_sources(paths):
        source = open_source(path, wanted)
        for task in source.pieces():
            piece = task()
            if piece.bad:
                raise DataError(f"{path}, {source.unit} {piece.bad[0][0]}: {piece.bad[0][1]}")
            faults = Faults(piece.rows)
            for use, known in numbers.items():
                values = distinct_values(piece.columns[use])
                faults.add(values.places == MISSING, f"the {use} is empty")
                number = [known.setdefault(value, len(known)) for value in values.distinct.to_pylist()]
                places[use].append(np.array([*number, MISSING])[values.places])
            if time is not None:
                times.append(times_of(piece.columns["time"], time, faults))
            for row, reason in faults.first(1):
                raise DataError(f"{path}, {source.unit} {piece.lines_of([row])[0]}: {reason}")
    if not numbers["user"]:
        raise DataError(f"{paths}: no actions in it")
    names = {use: tuple(value.decode("utf-8", "replace") for value in known) for use, known in numbers.items()}
    return Actions(
        np.concatenate(places["user"]),
        np.concatenate(places["item"]),
        np.concatenate(times) if times else None,
        names["item"],
        names["user"],
    )


def _read_rows(path: Path, lines: TextIO, format: str) -> Actions:
    layout = None if format == "csv" else _LAYOUTS[format]
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    user_of, item_of, time_of = array("q"), array("q"), array("q")
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if layout is None:
            layout = _csv_layout(path, number, text)
            continue
        parts = text.split(layout.separator)
        if len(parts) != layout.fields:
            hint = "; is it format='lists'?" if format == "pairs" else ""
            _refuse(path, number, f"{len(parts)} fields where format {format!r} has {layout.fields}{hint}")
        user, item = parts[layout.user].strip(), parts[layout.item].strip()
        if not user or not item:
            _refuse(path, number, f"the {'item' if user else 'user'} is empty")
        if layout.time is not None:
            try:
                time_of.append(int(parts[layout.time]))
            except (ValueError, OverflowError):
                _refuse(path, number, f"the timestamp {parts[layout.time]!r} is not a whole number of 64 bits")
        user_of.append(users.setdefault(user, len(users)))
        item_of.append(items.setdefault(item, len(items)))
    if not user_of:
        raise DataError(f"{path}: no actions in it")
    times = None if layout is None or layout.time is None else _whole(time_of)
    return Actions(_whole(user_of), _whole(item_of), times, tuple(items), tuple(users))


def _read_lists(path: Path, lines: TextIO) -> Actions:
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    user_of, item_of = array("q"), array("q")
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts:
            continue
        user, *items_of_user = parts
        if not items_of_user:
            _refuse(path, number, f"user {user!r} has no items")
        if user in users:
            _refuse(path, number, f"user {user!r} has a line before; format 'lists' has one for each user")
        users[user] = len(users)
        user_of.extend([users[user]] * len(items_of_user))
        item_of.extend(items.setdefault(item, len(items)) for item in items_of_user)
    if not user_of:
        raise DataError(f"{path}: no actions in it")
    return Actions(_whole(user_of), _whole(item_of), None, tuple(items), tuple(users))


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
