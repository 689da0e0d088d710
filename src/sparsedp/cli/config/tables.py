"""`data.kind: table`: a user's own files, with columns by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from sparsedp.cli.config.datasets import (
    ClickKind,
    CountedVocabulary,
    FileVocabulary,
    HashedVocabulary,
    RowsRead,
    prepare_cache,
)
from sparsedp.cli.config.limits import Count, HeldOutShare, Share
from sparsedp.cli.config.paths import absolute, absolute_with_variables
from sparsedp.cli.config.schema import Range, SchemaError, build
from sparsedp.data import (
    CategoricalColumn,
    CountVocabulary,
    GivenVocabulary,
    HashVocabulary,
    NumericColumn,
    SequenceColumn,
    Table,
    TableSchema,
    TextColumn,
    open_table,
)
from sparsedp.data.tablecolumns import period_of
from sparsedp.data.vocabulary import Vocabulary
from sparsedp.errors import ConfigError

Buckets = Annotated[int, Range(2)]
T = TypeVar("T")
_HASHED = HashedVocabulary("hash")
_GUESSED = (
    "The configuration of the data, which `sparsedp init` guessed by looking at the first rows: which columns are read and as "
    "what."
)


@dataclass(frozen=True)
class CategoricalOptions:
    """At most one of the three; without any, `data.vocabulary`."""

    buckets: Buckets | None = None  # rows that values are hashed to
    min_count: Count | None = None  # values seen so often have a row each; counted on private data
    file: str | None = None  # a public text file with a value in each line

    def __post_init__(self) -> None:
        if [self.buckets, self.min_count, self.file].count(None) < 2:
            raise SchemaError("", "give one of buckets, min_count and file")

    def vocabulary(self) -> Vocabulary | None:
        if self.buckets is not None:
            return HashVocabulary(self.buckets)
        if self.min_count is not None:
            return CountVocabulary(self.min_count)
        return None if self.file is None else GivenVocabulary.of_values(absolute(self.file))


@dataclass(frozen=True)
class NumericOptions:
    """How a number x enters the model: log, sign(x) log(1 + |x|); none, x itself; with `low` and `high`, from -1 to 1; with
    `buckets`, a list of rising numbers, as the category between two of them. Nothing of it is taken from the data.
    """

    transform: Literal["log", "none"] | None = None
    low: float | None = None
    high: float | None = None
    buckets: list[float] | int | Literal["quantiles", "auto"] | None = None

    def __post_init__(self) -> None:
        if self.buckets is not None and not isinstance(self.buckets, list):
            raise SchemaError(
                "buckets", "boundaries counted on private data have no guarantee: list public ones, as in [1, 10, 100]"
            )
        ways = [self.transform is not None, self.low is not None or self.high is not None, self.buckets is not None]
        if sum(ways) > 1:
            raise SchemaError("", "give one of transform, low and high, and buckets")

    def column(self, name: str) -> NumericColumn:
        if isinstance(self.buckets, list):
            return NumericColumn(name, "buckets", boundaries=tuple(self.buckets))
        if self.low is not None or self.high is not None:
            return NumericColumn(name, "scale", self.low, self.high)
        return NumericColumn(name, self.transform or "log")


@dataclass(frozen=True)
class SequenceOptions(CategoricalOptions):
    length: Count = 50  # the last values of each row that are looked at
    separator: str | None = None  # between the values of a text; null: white space


@dataclass(frozen=True)
class TextOptions:
    length: Count = 32  # the first words of each row that are looked at
    buckets: Buckets = 20_000  # rows that words are hashed to


@dataclass(frozen=True)
class TableData(ClickKind):
    """Rows of files, with columns by name (`sparsedp.data.open_table`)."""

    kind: Literal["table"]
    paths: str | list[str]
    label: str
    positive: str | list[str] | None = None
    negative: str | list[str] | None = None
    label_above: float | None = None
    categorical: list[str] | dict[str, Any] = field(default_factory=list, metadata={"values": CategoricalOptions})
    numeric: list[str] | dict[str, Any] = field(default_factory=list, metadata={"values": NumericOptions})
    sequence: list[str] | dict[str, Any] = field(default_factory=list, metadata={"values": SequenceOptions})
    text: list[str] | dict[str, Any] = field(default_factory=list, metadata={"values": TextOptions})
    user: str | None = None
    time: str | None = None
    every: Literal["hour", "day", "week"] = "day"
    period: str | None = None
    columns: list[str] | None = None
    separator: str | None = None
    vocabulary: HashedVocabulary | CountedVocabulary | FileVocabulary = _HASHED
    cache_dir: str = "runs/cache"
    max_malformed: Share = 0.001
    held_out: HeldOutShare | list[int | str] = 0.1
    guessed: bool = False

    def __post_init__(self) -> None:
        if self.separator is not None and len(self.separator) != 1:
            raise SchemaError("separator", f"expected one character, as in ';'; got {self.separator!r}")
        self.held_out_rows()
        self.make_schema(read_files=False)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (_GUESSED,) if self.guessed else ()

    def held_out_rows(self) -> float | list[int]:
        if not isinstance(self.held_out, list):
            return self.held_out
        periods = []
        for period in self.held_out:
            if isinstance(period, str):
                if self.time is None or self.period is not None:
                    raise SchemaError(
                        "held_out", "dates are held out where data.time gives the periods; give whole numbers"
                    )
                number = period_of(period, self.every)
                if number is None:
                    raise SchemaError("held_out", f"expected a date as in '2026-03-01'; got {period!r}")
                period = number
            periods.append(period)
        return periods

    def make_schema(self, *, read_files: bool = True) -> TableSchema:
        """`read_files`: with the vocabularies that are in files."""

        def vocabulary(options: CategoricalOptions) -> Vocabulary | None:
            return None if options.file is not None and not read_files else options.vocabulary()

        categorical = _columns(self.categorical, CategoricalOptions, "categorical")
        numeric = _columns(self.numeric, NumericOptions, "numeric")
        sequence = _columns(self.sequence, SequenceOptions, "sequence")
        text = _columns(self.text, TextOptions, "text")
        common = self.vocabulary.make() if read_files or self.vocabulary.kind != "given" else HashVocabulary()
        positive, negative = ([t] if isinstance(t, str) else t or [] for t in (self.positive, self.negative))
        make: Callable[[], TableSchema] = lambda: TableSchema(  # noqa: E731
            label=self.label,
            categorical=tuple(CategoricalColumn(name, vocabulary(o)) for name, o in categorical.items()),
            numeric=tuple(o.column(name) for name, o in numeric.items()),
            sequence=tuple(SequenceColumn(n, o.length, o.separator, vocabulary(o)) for n, o in sequence.items()),
            text=tuple(TextColumn(name, o.length, o.buckets) for name, o in text.items()),
            user=self.user,
            time=self.time,
            period=self.period,
            every=self.every,
            positive=tuple(positive),
            negative=tuple(negative),
            label_above=self.label_above,
            columns=tuple(self.columns or ()),
            separator=self.separator,
            vocabulary=common,
        )
        try:
            return make()
        except SchemaError:
            raise
        except ConfigError as error:
            raise SchemaError("", str(error)) from None

    def open(self, progress: RowsRead | None) -> Table:
        prepare_cache(self.cache_dir)
        return open_table(
            self.paths,
            self.make_schema(),
            cache_dir=self.cache_dir,
            max_malformed=self.max_malformed,
            progress=progress,
        )

    def with_absolute_paths(self) -> TableData:
        def filled(path: str) -> str:
            return absolute_with_variables(path, "data.paths")

        def with_files(columns: list[str] | dict[str, Any]) -> list[str] | dict[str, Any]:
            if isinstance(columns, list):
                return columns
            return {
                name: {**options, "file": absolute(options["file"])} if options and options.get("file") else options
                for name, options in columns.items()
            }

        return replace(
            self,
            paths=filled(self.paths) if isinstance(self.paths, str) else [filled(path) for path in self.paths],
            cache_dir=absolute(self.cache_dir),
            vocabulary=self.vocabulary.with_absolute_paths(),
            categorical=with_files(self.categorical),
            sequence=with_files(self.sequence),
        )


def _columns(columns: list[str] | dict[str, Any], kind: type[T], key: str) -> dict[str, T]:
    """The options of each column, by its name."""
    if isinstance(columns, list):
        for name in columns:
            if columns.count(name) > 1:
                raise SchemaError(key, f"the column {name!r} is named twice")
        columns = dict.fromkeys(columns)
    said: dict[str, Any] = {name: {} if options is None else options for name, options in columns.items()}
    return {name: build(kind, options, f"{key}.{name}") for name, options in said.items()}
