"""The kinds of data set that a configuration can name: each a dataclass of its settings that loads the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from torch.utils.data import default_collate

from sparsedp.cli.config.limits import Count, HeldOut, HeldOutShare, NotNegative, Positive, Probability, Seed, Share
from sparsedp.cli.config.paths import absolute, absolute_with_variables
from sparsedp.cli.config.schema import Address, Range, SchemaError
from sparsedp.cli.config.trust import Code
from sparsedp.data import (
    CountVocabulary,
    GivenVocabulary,
    HashVocabulary,
    TableDataset,
    generated_click_log,
    generated_sequences,
    generated_timelines,
    open_click_log,
    open_sequences,
    read_titles,
    split_timelines,
    title_words,
)
from sparsedp.data.sequences import Sequences
from sparsedp.errors import ConfigError

Topic = Literal["clicks", "sequences", "timelines", "text"]
RowsRead = Callable[[int], None]  # called with the number of rows of a click log that were read so far
K = TypeVar("K", bound="DatasetKind")

_CACHE_README = """\
PRIVATE: not for release.
The folders beside this file hold tables as they were read, and the vocabularies that were counted on them.
"""


@dataclass(frozen=True)
class Data:
    """The training set, what is held out (if anything), and how examples become a batch."""

    training: Any
    held_out: Any | None
    collate: Callable[[Any], Any]
    notes: tuple[str, ...] = ()  # what else was taken from private data, for the statement
    validation: Any = None  # what early stopping looks at, apart from what is held out

    def with_validation(self, validation: Any, held_out: Any) -> Data:
        return replace(self, validation=validation, held_out=held_out)

    @property
    def vocabulary_is_private(self) -> bool:
        return bool(getattr(self.training, "vocabulary_is_private", False))

    def examples(self, count: int) -> Any:
        """The first examples of the training set, as a batch."""
        indices = list(range(min(count, len(self.training))))
        if hasattr(self.training, "__getitems__"):  # as torch's own loader does
            return self.collate(self.training.__getitems__(indices))
        return self.collate([self.training[i] for i in indices])


def prepare_cache(cache_dir: str) -> None:
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "README.txt").write_text(_CACHE_README)


class DatasetKind(ABC):
    """What all kinds have in common."""

    kind: str
    topic: ClassVar[Topic | None] = None  # what the data are about; None: a data set of the user's own, about anything
    may_use_torch_seed: ClassVar[bool] = False  # whether torch's global generator may decide what the data are

    @abstractmethod
    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        """Generates or reads the data. `code` finds what the user's configuration names."""

    def with_absolute_paths(self: K) -> K:
        return self


# ------------------------------------------------------------------ clicks


class ClickKind(DatasetKind):
    topic = "clicks"
    held_out: Any
    notes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def open(self, progress: RowsRead | None) -> TableDataset:
        """All rows of the log."""

    def held_out_rows(self) -> float | list[int]:
        """The share, or the numbers of the periods."""
        return self.held_out

    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        log = self.open(progress)
        rows = self.held_out_rows()
        try:
            training, held_out = log.split(rows, by="periods" if isinstance(rows, list) else "tail")
        except ConfigError as error:
            raise ConfigError(f"data.held_out: {str(error).removeprefix('split: ')}") from None
        if len(training) == 0:
            raise ConfigError(f"data.held_out: {self.held_out} leaves nothing of the {len(log)} rows to train on")
        return Data(training, held_out if len(held_out) else None, log.collate, self.notes)


@dataclass(frozen=True)
class GeneratedData(ClickKind):
    """A click log drawn from a planted model (`sparsedp.data.generated_click_log`)."""

    kind: Literal["generated"]
    rows: Count
    seed: Seed = 0
    scale: Positive = 1.0
    skew: NotNegative = 1.1
    days: Count = 1
    drift: Share = 0.0
    click_rate: Probability = 0.25
    users: Count | None = None
    held_out: HeldOut = 0.1

    def open(self, progress: RowsRead | None) -> TableDataset:
        return generated_click_log(
            self.rows,
            seed=self.seed,
            scale=self.scale,
            skew=self.skew,
            days=self.days,
            drift=self.drift,
            click_rate=self.click_rate,
            users=self.users,
        )


@dataclass(frozen=True)
class HashedVocabulary:
    kind: Literal["hash"]
    buckets: Annotated[int, Range(2)] | list[Annotated[int, Range(2)]] = 100_000

    def make(self) -> HashVocabulary:
        return HashVocabulary(self.buckets)

    def with_absolute_paths(self) -> HashedVocabulary:
        return self


@dataclass(frozen=True)
class CountedVocabulary:
    kind: Literal["count"]
    min_count: Count = 10

    def make(self) -> CountVocabulary:
        return CountVocabulary(self.min_count)

    def with_absolute_paths(self) -> CountedVocabulary:
        return self


@dataclass(frozen=True)
class FileVocabulary:
    kind: Literal["given"]
    path: str

    def make(self) -> GivenVocabulary:
        return GivenVocabulary(self.path)

    def with_absolute_paths(self) -> FileVocabulary:
        return replace(self, path=absolute(self.path))


@dataclass(frozen=True)
class ClickLogData(ClickKind):
    """A click log in Criteo's text format (`sparsedp.data.open_click_log`)."""

    kind: Literal["clicklog"]
    paths: str | list[str]
    cache_dir: str = "runs/cache"
    vocabulary: HashedVocabulary | CountedVocabulary | FileVocabulary = HashedVocabulary("hash")
    max_malformed: Share = 0.001
    user_column: str | None = None
    held_out: HeldOut = 0.1

    def open(self, progress: RowsRead | None) -> TableDataset:
        prepare_cache(self.cache_dir)
        return open_click_log(
            self.paths,
            cache_dir=self.cache_dir,
            vocabulary=self.vocabulary.make(),
            max_malformed=self.max_malformed,
            progress=progress,
            user_column=self.user_column,
        )

    def with_absolute_paths(self) -> ClickLogData:
        paths = absolute(self.paths) if isinstance(self.paths, str) else [absolute(path) for path in self.paths]
        vocabulary = self.vocabulary.with_absolute_paths()
        return replace(self, paths=paths, cache_dir=absolute(self.cache_dir), vocabulary=vocabulary)


# ------------------------------------------------------------------ sequences


def require_columns(user: str | None, item: str | None, time: str | None, format: str) -> None:
    """Refuses the name of one column alone, and names beside a format, which knows its columns."""
    if user is None and item is None and time is None:
        return
    for key, name in (("user", user), ("item", item)):
        if name is None:
            raise SchemaError(key, "missing; expected the name of a column, as of user and item together")
    if format != "auto":
        raise SchemaError("format", f"{format} says which columns there are: leave it or user, item and time out")


class SequenceKind(DatasetKind):
    topic = "sequences"
    length: int
    held_out: Literal["test", "validation"]

    @abstractmethod
    def open(self) -> Sequences:
        """The sequences of all users."""

    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        split = self.open().split(self.length, validation=self.held_out == "validation")
        held_out = split.test if split.validation is None else split.validation
        return Data(split.training, held_out, split.training.collate)


@dataclass(frozen=True)
class GeneratedSequencesData(SequenceKind):
    """Sequences drawn from a planted Markov chain (`sparsedp.data.generated_sequences`)."""

    kind: Literal["generated_sequences"]
    users: Count
    items: Count
    length: Count = 50
    seed: Seed = 0
    groups: Count = 20
    structure: Share = 0.9
    skew: NotNegative = 0.8
    mean_length: Annotated[float, Range(4)] = 20.0
    held_out: Literal["test", "validation"] = "test"
    exclude_seen: bool = False

    def open(self) -> Sequences:
        return generated_sequences(
            self.users,
            self.items,
            seed=self.seed,
            groups=self.groups,
            structure=self.structure,
            skew=self.skew,
            mean_length=self.mean_length,
        )


@dataclass(frozen=True)
class SequencesData(SequenceKind):
    """What users did in order of time, from a file (`sparsedp.data.open_sequences`)."""

    kind: Literal["sequences"]
    path: str
    format: Literal["auto", "movielens", "movielens_100k", "amazon", "pairs", "csv", "lists"] = "auto"
    user: str | None = None
    item: str | None = None
    time: str | None = None
    length: Count = 50
    min_actions: Count = 5
    until_stable: bool = False
    max_malformed: Share = 0.001
    held_out: Literal["test", "validation"] = "test"
    exclude_seen: bool = False

    def __post_init__(self) -> None:
        require_columns(self.user, self.item, self.time, self.format)

    def open(self) -> Sequences:
        return open_sequences(
            self.path,
            self.format,
            user=self.user,
            item=self.item,
            time=self.time,
            min_actions=self.min_actions,
            until_stable=self.until_stable,
            max_malformed=self.max_malformed,
        )

    def with_absolute_paths(self) -> SequencesData:
        return replace(self, path=absolute_with_variables(self.path, "data.path"))


# ------------------------------------------------------------------ timelines


class TimelineKind(DatasetKind):
    """Some users' timelines to train on, with labels that are drawn anew, and labels of the other users to test on."""

    topic = "timelines"
    context: int
    held_out: float
    test_labels: int
    split_seed: int

    @abstractmethod
    def open(self) -> tuple[Sequences, np.ndarray | None]:
        """The timelines of all users, and the words of the items' titles if they have any."""

    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        sequences, words = self.open()
        split = split_timelines(
            sequences,
            context=self.context,
            test_share=self.held_out,
            test_labels=self.test_labels,
            seed=self.split_seed,
            words=words,
        )
        return Data(split.training, split.test, split.training.collate)


@dataclass(frozen=True)
class GeneratedTimelinesData(TimelineKind):
    """Timelines drawn from a planted model of users' tastes (`sparsedp.data.generated_timelines`)."""

    kind: Literal["generated_timelines"]
    users: Count
    items: Count
    context: Count = 20
    seed: Seed = 0
    groups: Count = 20
    structure: Share = 0.7
    skew: NotNegative = 0.8
    mean_length: Annotated[float, Range(4)] = 40.0
    held_out: HeldOutShare = 0.2
    test_labels: Count = 1
    split_seed: Seed = 0
    exclude_seen: bool = False

    def open(self) -> tuple[Sequences, np.ndarray | None]:
        timelines = generated_timelines(
            self.users,
            self.items,
            seed=self.seed,
            groups=self.groups,
            structure=self.structure,
            skew=self.skew,
            mean_length=self.mean_length,
        )
        return timelines, timelines.words


@dataclass(frozen=True)
class TimelinesData(TimelineKind):
    """What users did in order of time, from a file (`sparsedp.data.open_sequences`)."""

    kind: Literal["timelines"]
    path: str
    format: Literal["auto", "movielens", "movielens_100k", "amazon", "pairs", "csv", "lists"] = "auto"
    user: str | None = None
    item: str | None = None
    time: str | None = None
    context: Count = 20
    min_actions: Count = 1
    titles: str | None = None
    until_stable: bool = False
    max_malformed: Share = 0.001
    held_out: HeldOutShare = 0.2
    test_labels: Count = 1
    split_seed: Seed = 0
    exclude_seen: bool = False

    def __post_init__(self) -> None:
        require_columns(self.user, self.item, self.time, self.format)

    def open(self) -> tuple[Sequences, np.ndarray | None]:
        sequences = open_sequences(
            self.path,
            self.format,
            user=self.user,
            item=self.item,
            time=self.time,
            min_actions=self.min_actions,
            until_stable=self.until_stable,
            max_malformed=self.max_malformed,
        )
        if self.titles is None:
            return sequences, None
        return sequences, title_words(read_titles(self.titles), sequences.item_names)

    def with_absolute_paths(self) -> TimelinesData:
        titles = None if self.titles is None else absolute_with_variables(self.titles, "data.titles")
        return replace(self, path=absolute_with_variables(self.path, "data.path"), titles=titles)


# ------------------------------------------------------------------ a user's own


@dataclass(frozen=True)
class OwnData(DatasetKind):
    """A user's callable: its data set, or (training set, held-out set), out of `options`."""

    may_use_torch_seed = True

    kind: Address
    options: dict[str, Any] = field(default_factory=dict)

    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        made = code.call(self.kind, "data", self.options)
        training, held_out = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not hasattr(training, "__len__") or not hasattr(training, "__getitem__"):
            raise ConfigError(
                f"data.kind: {self.kind} returned {type(training).__name__}; expected a data set with "
                "__len__ and __getitem__, or (training set, held-out set)"
            )
        for name, part in (("training", training), ("held-out", held_out)):
            if part is not None and len(part) == 0:
                raise ConfigError(
                    f"data.kind: {self.kind} returned an empty {name} set. To hold nothing out, return one data set alone"
                )
        return Data(training, held_out, getattr(training, "collate", default_collate))
