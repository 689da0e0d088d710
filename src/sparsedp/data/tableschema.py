"""What the columns of a table are for, by their names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from sparsedp.data.codes import Form
from sparsedp.data.tablefiles import LABEL, PERIOD, TIME, USER, Wanted
from sparsedp.data.vocabulary import ColumnVocabulary, HashVocabulary, Vocabulary
from sparsedp.errors import ConfigError
from sparsedp.sampling.periods import Every

Transform = Literal["log", "none", "scale", "buckets", "whole"]
_HASHED = HashVocabulary()


@dataclass(frozen=True)
class CategoricalColumn:
    """One value of many. Without a vocabulary of its own it has that of the table."""

    name: str
    vocabulary: Vocabulary | None = None
    form: Form = Form.TEXT


@dataclass(frozen=True)
class NumericColumn:
    """A number x, which enters a model as

    "log": sign(x) log(1 + |x|);  "none": x;  "scale": from -1 at `low` to 1 at `high`, and cut off there;
    "buckets": a category, the number of the `boundaries` that are at most x;  "whole": x, a whole number of 32 bits.
    A missing one enters as 0, and as a category of its own where there are buckets. Nothing of it is taken from the data.
    """

    name: str
    transform: Transform = "log"
    low: float | None = None
    high: float | None = None
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        scaled = self.low is not None or self.high is not None
        if scaled != (self.transform == "scale") or (scaled and (self.low is None or self.high is None)):
            raise ConfigError(f"column {self.name}: low and high are given together, for transform scale alone")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"column {self.name}: low must be below high, got {self.low} and {self.high}")
        if bool(self.boundaries) != (self.transform == "buckets"):
            raise ConfigError(f"column {self.name}: buckets have boundaries, and no other transform has")
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:])):
            raise ConfigError(f"column {self.name}: the boundaries of buckets must rise, got {list(self.boundaries)}")

    @property
    def is_category(self) -> bool:
        return self.transform == "buckets"


@dataclass(frozen=True)
class SequenceColumn:
    """Many values, a list or a text with `separator` between them (None: white space); the last `length` are looked at."""

    name: str
    length: int = 50
    separator: str | None = None
    vocabulary: Vocabulary | None = None
    form: ClassVar[Form] = Form.TEXT


@dataclass(frozen=True)
class TextColumn:
    """Text, of which the first `length` words are looked at: runs of letters and digits, in lower case, hashed to `buckets`."""

    name: str
    length: int = 32
    buckets: int = 20_000


@dataclass(frozen=True)
class TableSchema:
    """The columns that are read, and what for.

    `label`: 0 or 1 (or false and true), unless `positive` lists the texts that mean 1, or `label_above` is what numbers that
    mean 1 are above. With `negative`, the texts that mean 0, labels that are in neither list are malformed. `user`: whose a row
    is. `period`: a whole number; or `time`, which is cut into periods of one hour, day or week (`every`), counted from 1970.
    `columns` names the columns of files without a header; a first line with the label's name is a header all the same.
    """

    label: str
    categorical: tuple[CategoricalColumn, ...] = ()
    numeric: tuple[NumericColumn, ...] = ()
    sequence: tuple[SequenceColumn, ...] = ()
    text: tuple[TextColumn, ...] = ()
    user: str | None = None
    time: str | None = None
    period: str | None = None
    every: Every = "day"
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    label_above: float | None = None
    columns: tuple[str, ...] = ()
    separator: str | None = None  # of text files; None: as the first line looks
    quotes: bool = True  # whether fields of text files may stand in quotes
    vocabulary: Vocabulary = _HASHED
    optional_periods: tuple[str, ...] = ()  # columns that are the period where a file has one of them
    whole_users: bool = False  # users are whole numbers, and other ones are malformed

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigError("a table needs a column to learn from: categorical, numeric, sequence or text")
        used = [column.name for column in self.features] + [self.label]
        for name in used:
            if used.count(name) > 1:
                raise ConfigError(f"the column {name} is named twice")
        others = {"user": self.user, "period": self.period, "time": self.time}
        for what, other in others.items():
            if other is not None and (other == self.label or (what == "user" and other in used)):
                raise ConfigError(
                    f"the {what} column {other!r} is read as something else already: a table that no two users share learns "
                    "nothing that may be told"
                )
        if self.positive and self.label_above is not None:
            raise ConfigError("give what labels mean 1 as texts (positive) or as numbers (label_above), not both")
        if self.negative and not self.positive:
            raise ConfigError("give what labels mean 1 (positive) beside those that mean 0 (negative)")
        if both := [text for text in self.positive if text in self.negative]:
            raise ConfigError(f"the label {both[0]!r} means 1 (positive) and 0 (negative)")
        kinds = {column.transform == "whole" for column in self.numeric if not column.is_category}
        if len(kinds) > 1:
            raise ConfigError("numeric columns are whole, all or none")

    @property
    def features(self) -> list[CategoricalColumn | NumericColumn | SequenceColumn | TextColumn]:
        return [*self.categorical, *self.numeric, *self.sequence, *self.text]

    @property
    def numbers(self) -> list[NumericColumn]:
        """The numeric columns that enter a model as numbers."""
        return [column for column in self.numeric if not column.is_category]

    @property
    def chosen(self) -> list[CategoricalColumn | SequenceColumn]:
        """The columns whose vocabulary can be chosen."""
        return [*self.categorical, *self.sequence]

    @property
    def bags(self) -> list[SequenceColumn | TextColumn]:
        """The columns with many values."""
        return [*self.sequence, *self.text]

    @property
    def bucketed(self) -> list[NumericColumn]:
        """The numeric columns that enter a model as categories, which stand behind the others."""
        return [column for column in self.numeric if column.is_category]

    @property
    def are_whole(self) -> bool:
        return any(column.transform == "whole" for column in self.numeric)

    def wanted(self) -> Wanted:
        """What is read of files."""
        uses = {USER: self.user, TIME: self.time, PERIOD: self.period}
        return Wanted(
            names={
                LABEL: self.label,
                **{column.name: column.name for column in self.features},
                **{use: name for use, name in uses.items() if name is not None},
            },
            numbers=[column.name for column in self.numeric] + [PERIOD] + ([] if self.positive else [LABEL]),
            whole=[column.name for column in self.numbers if self.are_whole],
            plain=self._hashed_where_they_stand(),
            columns=self.columns,
            mark=self.label,
            separator=self.separator,
            quotes=self.quotes,
            optional_periods=self.optional_periods,
        )

    def _hashed_where_they_stand(self) -> list[str]:
        """Columns whose values are not looked for among each other."""
        vocabularies = {c.name: self.vocabulary if c.vocabulary is None else c.vocabulary for c in self.categorical}
        return [
            c.name for c in self.categorical if c.form is Form.HEX and isinstance(vocabularies[c.name], HashVocabulary)
        ]

    def vocabularies(self) -> dict[str, ColumnVocabulary]:
        """The vocabulary of each categorical, sequence and text column, made for one reading."""
        out: dict[str, ColumnVocabulary] = {}
        common = [column for column in self.chosen if column.vocabulary is None]
        if common:
            names = [column.name for column in common]
            out.update(zip(names, self.vocabulary.for_columns(names, [column.form for column in common])))
        for place, column in enumerate(self.chosen):
            if column.vocabulary is not None:
                (out[column.name],) = column.vocabulary.for_columns([column.name], [column.form], place)
        for place, words in enumerate(self.text, len(self.chosen)):
            (out[words.name],) = HashVocabulary(words.buckets).for_columns([words.name], [Form.TEXT], place)
        return {column.name: out[column.name] for column in (*self.categorical, *self.bags)}

    def options(self) -> dict[str, Any]:
        """Plain values that tell this schema from others; the vocabularies' own say what is in them."""
        plain = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("vocabulary", "optional_periods")
        }
        columns = [(c.name, c.form.value) for c in self.categorical]
        sequences = [(c.name, c.length, c.separator) for c in self.sequence]
        others = {"numeric": [asdict(c) for c in self.numeric], "text": [asdict(c) for c in self.text]}
        return {**plain, **others, "categorical": columns, "sequence": sequences}
