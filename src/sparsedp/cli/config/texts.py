"""`data.kind: text`, and the models of texts: `text_bag` and `encoder`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from sparsedp.cli.config.datasets import Data, DatasetKind, RowsRead
from sparsedp.cli.config.limits import Count, Dropout, HeldOutShare, Positive, Share
from sparsedp.cli.config.models import ModelKind
from sparsedp.cli.config.paths import absolute_with_variables
from sparsedp.cli.config.schema import Range, SchemaError
from sparsedp.cli.config.trust import Code
from sparsedp.data import HashedWords, TextColumns, TextDataset, TokenizerFolder, WordList, open_texts
from sparsedp.data.tokens import Tokens
from sparsedp.errors import ConfigError
from sparsedp.models.text_bag import TextBag
from sparsedp.models.text_encoder import Lora, TextEncoder, read_encoder, read_rows

_GUESSED = (
    "The configuration of the data, which `sparsedp init` guessed by looking at the first rows: which columns are read, and what "
    "classes there are."
)


@dataclass(frozen=True)
class TextData(DatasetKind):
    """Texts with a label, or pairs of texts (`sparsedp.data.open_texts`)."""

    topic = "text"

    kind: Literal["text"]
    paths: str | list[str]
    text: str = "text"
    label: str = "label"
    second: str | None = None
    classes: Annotated[int, Range(2)] | list[str] = 2
    leave_out: list[str] = field(default_factory=list)
    user: str | None = None
    tokenizer: str | None = None
    vocabulary: str | None = None
    buckets: Annotated[int, Range(2)] | None = None
    split: Literal["words", "whitespace"] | None = None
    special_tokens: bool = False
    length: Count = 64
    columns: list[str] | None = None
    separator: str | None = None
    quotes: bool | None = None
    max_malformed: Share = 0.001
    rows: Count | None = None
    held_out: HeldOutShare | str | list[str] = 0.1
    guessed: bool = False

    def __post_init__(self) -> None:
        if self.separator is not None and len(self.separator) != 1:
            raise SchemaError("separator", f"expected one character, as in ';'; got {self.separator!r}")
        if [self.tokenizer, self.vocabulary, self.buckets].count(None) < 2:
            raise SchemaError("tokenizer", "give one of tokenizer, vocabulary and buckets")
        if self.tokenizer is not None and self.split is not None:
            raise SchemaError("split", "a tokenizer cuts texts itself: leave it out")
        if self.special_tokens and self.tokenizer is None:
            raise SchemaError("special_tokens", "are a tokenizer's: name its folder, data.tokenizer")
        self.make_columns()

    def make_columns(self) -> TextColumns:
        try:
            return TextColumns(
                self.text,
                self.label,
                second=self.second,
                classes=self.classes,
                leave_out=tuple(self.leave_out),
                user=self.user,
                columns=tuple(self.columns or ()),
                separator=self.separator,
                quotes=self.quotes,
            )
        except ConfigError as error:
            raise SchemaError("", str(error)) from None

    def make_tokens(self) -> Tokens:
        if self.tokenizer is not None:
            return TokenizerFolder(self.tokenizer)
        split = self.split or "words"
        if self.vocabulary is not None:
            return WordList(self.vocabulary, split)
        return HashedWords(self.buckets or 20_000, split)

    def load(self, code: Code, progress: RowsRead | None = None) -> Data:
        tokens = self.make_tokens()

        def read(paths: str | list[str], rows: int | None = None) -> TextDataset:
            return open_texts(
                paths,
                self.make_columns(),
                tokens,
                length=self.length,
                special_tokens=self.special_tokens,
                rows=rows,
                max_malformed=self.max_malformed,
                progress=progress,
            )

        training = read(self.paths, self.rows)
        if isinstance(self.held_out, float):
            rows = len(training)
            training, held_out = training.split(self.held_out)
            if not len(training):
                raise ConfigError(f"data.held_out: {self.held_out} leaves nothing of the {rows} rows to train on")
        else:
            held_out = read(self.held_out)
        notes = (_GUESSED,) if self.guessed else ()
        return Data(training, held_out if len(held_out) else None, training.collate, notes)

    def with_absolute_paths(self) -> TextData:
        def filled(paths: Any, key: str) -> Any:
            if isinstance(paths, str):
                return absolute_with_variables(paths, f"data.{key}")
            return (
                [absolute_with_variables(path, f"data.{key}") for path in paths] if isinstance(paths, list) else paths
            )

        keys = ("paths", "tokenizer", "vocabulary", "held_out")
        return replace(self, **{key: filled(getattr(self, key), key) for key in keys})


class TextModelKind(ModelKind):
    topic = "text"

    def make(self, training: Any, code: Code) -> nn.Module:
        if not isinstance(training, TextDataset):
            raise ConfigError(f"model.kind: {self.kind} needs texts: data.kind text")
        return self.make_for(training)

    @abstractmethod
    def make_for(self, training: TextDataset) -> nn.Module:
        """The module, for texts."""


@dataclass(frozen=True)
class TextBagModel(TextModelKind):
    """The mean of a text's rows, and a small network (`sparsedp.models.TextBag`)."""

    kind: Literal["text_bag"]
    dim: Count | None = None
    hidden: list[Count] = field(default_factory=list)
    pair: Literal["one_bag", "towers"] = "one_bag"
    pretrained: str | None = None
    tensor: str | None = None
    scale: Positive = 1.0
    freeze_tables: bool = False

    def __post_init__(self) -> None:
        if self.pretrained is None and (self.tensor is not None or self.scale != 1.0):
            raise SchemaError("pretrained", "missing; expected the file whose rows tensor and scale are about")

    def make_for(self, training: TextDataset) -> TextBag:
        if training.joined:
            raise ConfigError("data.special_tokens: text_bag takes each text by itself: leave it out")
        if self.pair == "towers" and training.texts != 2:
            raise ConfigError("model.pair: towers are for two texts: name the second column, data.second")
        weights = self._rows(training)
        return TextBag(
            training.rows if weights is None else len(weights),
            len(training.classes),
            padding=training.padding,
            dim=(self.dim or 64) if weights is None else weights.shape[1],
            hidden=self.hidden,
            towers=self.pair == "towers",
            weights=weights,
        )

    def _rows(self, training: TextDataset) -> torch.Tensor | None:
        """The rows of the file, times `scale`, and one more for padding if the file has none."""
        if self.pretrained is None:
            return None
        rows = read_rows(self.pretrained, self.tensor)
        if self.dim is not None and self.dim != rows.shape[1]:
            raise ConfigError(f"model.dim: the rows of {self.pretrained} have {rows.shape[1]} numbers, not {self.dim}")
        if len(rows) == training.padding:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        if len(rows) < training.rows:
            raise ConfigError(
                f"model.pretrained: {self.pretrained} has {len(rows):,} rows, and the vocabulary {training.rows:,}: they do not "
                "belong together"
            )
        if not torch.isfinite(rows).all():
            raise ConfigError(f"model.pretrained: {self.pretrained} has numbers that are not finite")
        return rows * self.scale

    def with_absolute_paths(self) -> TextBagModel:
        if self.pretrained is None:
            return self
        return replace(self, pretrained=absolute_with_variables(self.pretrained, "model.pretrained"))


@dataclass(frozen=True)
class LoraConfig:
    """Adapters beside linear maps (`sparsedp.models.Lora`)."""

    rank: Count = 8
    alpha: Positive = 16.0
    targets: list[str] | None = None

    def make(self) -> Lora:
        return Lora(self.rank, self.alpha, tuple(self.targets or ()))


@dataclass(frozen=True)
class EncoderModel(TextModelKind):
    """A pretrained Transformer with a new head (`sparsedp.models.read_encoder`)."""

    kind: Literal["encoder"]
    path: str
    lora: LoraConfig | None = None
    embeddings: Literal["train", "freeze", "lora"] = "train"
    dropout: Dropout | None = None
    freeze_tables: bool = False

    def __post_init__(self) -> None:
        if self.embeddings == "lora" and self.lora is None:
            raise SchemaError("lora", "missing; expected its rank, as in {rank: 8}, for embeddings: lora")
        if self.embeddings == "lora" and self.freeze_tables:
            raise SchemaError(
                "freeze_tables",
                "embeddings: lora trains an adapter beside the table, which is frozen already; expected embeddings: freeze "
                "where nothing of the words is to be trained",
            )

    def make_for(self, training: TextDataset) -> TextEncoder:
        if not training.joined:
            raise ConfigError("data.special_tokens: give true: an encoder reads texts as its tokenizer writes them")
        if not training.has_padding:
            raise ConfigError("data.tokenizer: it has no token for padding, which an encoder needs")
        return read_encoder(
            self.path,
            classes=len(training.classes),
            rows=training.rows,
            padding=training.padding,
            lora=None if self.lora is None else self.lora.make(),
            embeddings=self.embeddings,
            dropout=self.dropout,
        )

    def with_absolute_paths(self) -> EncoderModel:
        return replace(self, path=absolute_with_variables(self.path, "model.path"))
