"""Texts with labels, or pairs of texts, out of files and frames."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedp.data.arrays import ArrayDataset
from sparsedp.data.codes import MISSING
from sparsedp.data.tablecache import KEPT_MALFORMED, MalformedLine, ReadSummary
from sparsedp.data.tablecolumns import Faults, as_number, distinct_values
from sparsedp.data.tablefiles import LABEL, USER, Paths, Piece, Source, Wanted, find_sources, open_frame, open_source
from sparsedp.data.tokens import TokenizerFolder, Tokens
from sparsedp.errors import ConfigError, DataError

_TEXT, _SECOND = "@text", "@second"


@dataclass(frozen=True)
class TextColumns:
    """Which columns are read, and what labels there are.

    `classes`: how many, where labels are the whole numbers from 0, or their names. Rows with a label of `leave_out` are left out
    without being malformed, as SNLI's "-". `second`: of pairs of texts. `user`: whose a row is. `columns`: the names of the
    columns of files without a header. `quotes`: whether fields of text files may stand in quotes; None: not where tabs stand
    between them.
    """

    text: str
    label: str
    second: str | None = None
    classes: int | Sequence[str] = 2
    leave_out: Sequence[str] = ()
    user: str | None = None
    columns: Sequence[str] = ()
    separator: str | None = None
    quotes: bool | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.text, self.second, self.label, self.user) if name is not None]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the column {name} is named twice")
        if self.count < 2 or len(set(self.names)) < self.count:
            raise ConfigError(f"expected at least two classes, and none twice; got {self.classes}")
        if both := sorted(set(self.names) & set(self.leave_out)):
            raise ConfigError(f"the label {both[0]!r} is a class, and left out as well")

    @property
    def count(self) -> int:
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def names(self) -> list[str]:
        return list(map(str, range(self.classes))) if isinstance(self.classes, int) else list(self.classes)

    def wanted(self) -> Wanted:
        uses = {LABEL: self.label, _TEXT: self.text, _SECOND: self.second, USER: self.user}
        return Wanted(
            names={use: name for use, name in uses.items() if name is not None},
            columns=self.columns,
            mark=self.label,
            separator=self.separator,
            quotes=self.quotes,
        )


class TextDataset(ArrayDataset):
    """Examples (tokens, label); (tokens, tokens of the second text, label) of pairs; with the tokenizer's special tokens
    (tokens of both, which text each is of, label). Tokens are rows of a table of `rows`, int64 [length]; behind a text stands
    `padding`. A label is the number of its class. Every example has the same width, so that no batch tells how long texts are.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        labels: Tensor,
        *,
        rows: int,
        padding: int,
        classes: Sequence[str],
        joined: bool = False,
        has_padding: bool = True,
        users: np.ndarray | None = None,
        summary: ReadSummary | None = None,
    ) -> None:
        super().__init__((*inputs, labels))
        self.rows, self.padding, self.classes = rows, padding, list(classes)
        self.joined, self.has_padding = joined, has_padding
        self.users, self.summary = users, summary or ReadSummary()

    @property
    def labels(self) -> np.ndarray:
        """int64 [n]"""
        return self.arrays[-1].numpy()

    @property
    def texts(self) -> int:
        """How many each example has, as inputs of their own."""
        return 1 if self.joined else len(self.arrays) - 1

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Many items at once, as torch's loader asks for them."""
        return list(zip(*self.read_columns(np.asarray(indices, np.int64))))

    def collate(self, items: Sequence[Any]) -> Any:  # type: ignore[override]
        """The items as one; there may be none."""
        return super().collate(items) if len(items) else self.read_columns(np.empty(0, np.int64))

    def subset(self, indices: np.ndarray) -> TextDataset:
        """The items at `indices`, in that order."""
        out = copy.copy(self)
        ArrayDataset.__init__(out, self.read_columns(np.asarray(indices, np.int64)))
        out.users = None if self.users is None else self.users[indices]
        return out

    def split(self, held_out: float) -> tuple[TextDataset, TextDataset]:
        """(training, held out): the last share of the rows is held out."""
        border = len(self) - round(len(self) * held_out)
        return self.subset(np.arange(border)), self.subset(np.arange(border, len(self)))


@dataclass
class _Read:
    texts: list[str] = field(default_factory=list)
    seconds: list[str] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    summary: ReadSummary = field(default_factory=ReadSummary)


def open_texts(
    data: Paths | Any,
    columns: TextColumns,
    tokens: Tokens,
    *,
    length: int = 64,
    special_tokens: bool = False,
    rows: int | None = None,
    max_malformed: float = 0.001,
    progress: Callable[[int], None] | None = None,
) -> TextDataset:
    """Reads texts and their labels from files or a frame, as `open_table` does, and keeps their tokens in memory.

    Rows with an empty text or an unknown label are malformed: they are left out, and more than the share `max_malformed` of them
    is a DataError. With `special_tokens` each example is one sequence, as the tokenizer writes it for its model. `rows`: only so
    many are taken, the first ones.
    """
    is_paths = isinstance(data, (str, os.PathLike)) or (
        isinstance(data, (list, tuple)) and all(isinstance(path, (str, os.PathLike)) for path in data)
    )
    wanted = columns.wanted()
    sources = [open_source(p, wanted) for p in find_sources(data)] if is_paths else [open_frame(data, wanted)]
    read = _Read()
    pieces = ((piece, source) for source in sources for piece in source.pieces())
    for piece, source in pieces:
        _take(piece(), source, columns, read)
        read.summary.check(max_malformed, complete=False)
        if progress is not None:
            progress(read.summary.rows)
        if rows is not None and read.summary.rows >= rows:
            break
    read.summary.check(max_malformed)
    if read.summary.rows == 0:
        raise DataError(f"no rows in {', '.join(source.name for source in sources)}")
    texts, seconds, owners = read.texts[:rows], read.seconds[:rows], read.users[:rows]
    pairs = columns.second is not None
    if special_tokens:
        if not isinstance(tokens, TokenizerFolder):
            raise ConfigError("special tokens are a tokenizer's: name its folder (data.tokenizer)")
        inputs = list(tokens.encode_joined(texts, seconds if pairs else None, length))
    else:
        inputs = [tokens.encode(part, length) for part in ((texts, seconds) if pairs else (texts,))]
    users = np.unique(np.array(owners, object), return_inverse=True)[1] if columns.user is not None else None
    return TextDataset(
        [torch.from_numpy(part) for part in inputs],
        torch.from_numpy(np.concatenate(read.labels)[:rows]),
        rows=tokens.rows,
        padding=tokens.padding,
        classes=columns.names,
        joined=special_tokens,
        has_padding=getattr(tokens, "has_padding", True),
        users=users,
        summary=read.summary,
    )


def _take(piece: Piece, source: Source, columns: TextColumns, read: _Read) -> None:
    """Adds the rows of a piece to what was read."""
    faults = Faults(piece.rows)
    labels, left_out = _labels(piece.columns[LABEL], columns, faults)
    texts: dict[str, list[str]] = {}
    for use, name in ((_TEXT, columns.text), (_SECOND, columns.second), (USER, columns.user)):
        if name is not None:
            texts[use] = _texts(piece.columns[use], name, faults, left_out)
    good = np.flatnonzero(~faults.wrong & ~left_out)
    read.labels.append(labels[good])
    for use, into in ((_TEXT, read.texts), (_SECOND, read.seconds), (USER, read.users)):
        if use in texts:
            into.extend(texts[use][row] for row in good)
    named = faults.first(KEPT_MALFORMED)
    lines = piece.lines_of([row for row, _ in named])
    bad = sorted([*piece.bad, *((line, reason) for line, (_, reason) in zip(lines, named))])
    summary = read.summary
    summary.rows += len(good)
    summary.malformed += piece.lost + int(np.count_nonzero(faults.wrong))
    room = KEPT_MALFORMED - len(summary.first)
    summary.first += [MalformedLine(source.name, line, reason, source.unit) for line, reason in bad[:room]]


def _texts(column: Any, name: str, faults: Faults, left_out: np.ndarray) -> list[str]:
    values = distinct_values(column)
    distinct = [value.decode("utf-8", "replace") for value in values.distinct.to_pylist()]
    empty = np.array([not text.strip() for text in distinct] + [True])[values.places]
    faults.add(empty & ~left_out, f"{name} is empty")
    return ["" if place == MISSING else distinct[place] for place in values.places.tolist()]


def _labels(column: Any, columns: TextColumns, faults: Faults) -> tuple[np.ndarray, np.ndarray]:
    """The class of each row, and which rows are left out."""
    values = distinct_values(column)
    known = {name: number for number, name in enumerate(columns.names)}
    expected = f"0 to {columns.count - 1}" if isinstance(columns.classes, int) else ", ".join(columns.names)
    class_of: list[int] = []
    ignored: list[bool] = []
    for place, value in enumerate(values.distinct.to_pylist()):
        text = value.decode("utf-8", "replace").strip()
        number = known.get(text, -1)
        if number < 0 and isinstance(columns.classes, int):
            number = _whole(text, columns.count)
        ignored.append(text in columns.leave_out)
        class_of.append(max(number, 0))
        if number < 0 and not ignored[-1]:
            faults.add(values.places == place, f"the {columns.label} {text!r} is no class; expected {expected}")
    left_out = np.array([*ignored, False])[values.places]
    faults.add(values.places == MISSING, f"{columns.label} is empty")
    return np.array([*class_of, 0], np.int64)[values.places], left_out


def _whole(text: str, count: int) -> int:
    """A class that is spelled as another number, as in 1.0."""
    try:
        x = as_number(text)
    except ValueError:
        return -1
    return int(x) if x in range(count) else -1
