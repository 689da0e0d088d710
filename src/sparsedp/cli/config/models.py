"""The kinds of model that a configuration can name: each a dataclass of its settings that makes the module."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from sparsedp.cli.config.datasets import Topic
from sparsedp.cli.config.limits import Count, Dropout
from sparsedp.cli.config.paths import absolute_with_variables
from sparsedp.cli.config.schema import Address, SchemaError
from sparsedp.cli.config.trust import Code
from sparsedp.data import title_rows
from sparsedp.data.clicklog import INTEGERS
from sparsedp.errors import ConfigError
from sparsedp.models import DLRM, PCTR, DPFormer, DualEncoder, FeatureDualEncoder, RecurrentRecommender

K = TypeVar("K", bound="ModelKind")
_HEADS, _BUCKETS = 4, 100_000  # of a dual encoder's Transformer, and rows for the words of titles


class ModelKind(ABC):
    """What all kinds have in common."""

    kind: str
    freeze_tables: bool
    topic: ClassVar[Topic | None] = None  # what its data are about; None: a model of the user's own, about anything
    frequencies: str | None = None  # the file with those that re-attention looks at

    @property
    def has_reattention(self) -> bool:
        return False

    @abstractmethod
    def make(self, training: Any, code: Code) -> nn.Module:
        """The module, for this training set. `code` finds what the user's configuration names."""

    def with_absolute_paths(self: K) -> K:
        return self

    def tell_noise(  # noqa: B027
        self, model: nn.Module, training: Any, *, noise_multiplier: float, batch_size: int, releases_frequencies: bool
    ) -> None:
        """Tells the model how much noise there will be, if it is one that corrects for it.

        With `releases_frequencies` the items' frequencies are released in the run, and not known before.
        """


class ClickModelKind(ModelKind):
    topic = "clicks"

    def make(self, training: Any, code: Code) -> nn.Module:
        if not hasattr(training, "vocabulary_sizes"):
            raise ConfigError(
                f"model.kind: {self.kind} needs a table or a click log; this data set has no vocabulary_sizes"
            )
        features = {
            "integers": getattr(training, "number_count", INTEGERS),
            "bags": [(bag.rows, bag.padding) for bag in getattr(training, "bags", ())],
            "log": getattr(training, "raw_numbers", True),
        }
        try:
            return self.make_for(training.vocabulary_sizes, features)
        except ValueError as error:
            raise ConfigError(f"model.kind: {self.kind}: {error}") from error

    @abstractmethod
    def make_for(self, sizes: Sequence[int], features: dict[str, Any]) -> nn.Module:
        """The module, for tables of these numbers of rows, and what it has to know about the other features."""


@dataclass(frozen=True)
class PctrModel(ClickModelKind):
    """The click-through-rate model of the DP-AdaFEST paper (`sparsedp.models.PCTR`)."""

    kind: Literal["pctr"]
    hidden: Count = 598
    hidden_layers: Count = 4
    dim: Count | None = None
    freeze_tables: bool = False

    def make_for(self, sizes: Sequence[int], features: dict[str, Any]) -> PCTR:
        return PCTR(sizes, hidden=self.hidden, hidden_layers=self.hidden_layers, dims=self.dim, **features)


@dataclass(frozen=True)
class DlrmModel(ClickModelKind):
    """MLPerf's DLRM (`sparsedp.models.DLRM`)."""

    kind: Literal["dlrm"]
    dim: Count = 128
    bottom: list[Count] = field(default_factory=lambda: [512, 256])
    top: list[Count] = field(default_factory=lambda: [1024, 1024, 512, 256])
    freeze_tables: bool = False

    def make_for(self, sizes: Sequence[int], features: dict[str, Any]) -> DLRM:
        return DLRM(sizes, dim=self.dim, bottom=self.bottom, top=self.top, **features)


class SequenceModelKind(ModelKind):
    topic = "sequences"

    def make(self, training: Any, code: Code) -> nn.Module:
        if not hasattr(training, "items") or not hasattr(training, "length"):
            raise ConfigError(
                f"model.kind: {self.kind} needs sequences; this data set has no attributes items and length"
            )
        return self.make_for(training.items, training.length)

    @abstractmethod
    def make_for(self, items: int, length: int) -> nn.Module:
        """The module, for histories of up to `length` of the items 1 to `items`."""


@dataclass(frozen=True)
class TransformerModel(SequenceModelKind):
    """A causal Transformer over items (`sparsedp.models.DPFormer`); `dpformer` is the one with re-attention."""

    kind: Literal["transformer", "dpformer"]
    dim: Count = 64
    blocks: Count = 2
    heads: Count = 1
    dropout: Dropout = 0.2
    tied: bool = True
    frequencies: str | None = None
    freeze_tables: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise SchemaError("heads", f"expected a divisor of model.dim, {self.dim}; got {self.heads}")
        if self.frequencies is not None and not self.has_reattention:
            raise SchemaError("frequencies", "re-attention alone looks at them; choose model.kind dpformer")

    @property
    def has_reattention(self) -> bool:
        return self.kind == "dpformer"

    def make_for(self, items: int, length: int) -> DPFormer:
        return DPFormer(
            items,
            length,
            dim=self.dim,
            blocks=self.blocks,
            heads=self.heads,
            dropout=self.dropout,
            tied=self.tied,
            reattention=self.has_reattention,
        )

    def with_absolute_paths(self) -> TransformerModel:
        if self.frequencies is None:
            return self
        return replace(self, frequencies=absolute_with_variables(self.frequencies, "model.frequencies"))

    def tell_noise(
        self, model: nn.Module, training: Any, *, noise_multiplier: float, batch_size: int, releases_frequencies: bool
    ) -> None:
        if not self.has_reattention:
            return
        assert isinstance(model, DPFormer)
        public = torch.ones(model.items + 1) if releases_frequencies else self._public_frequencies(training)
        model.track_errors(noise_multiplier=noise_multiplier, batch_size=batch_size, frequencies=public)

    def _public_frequencies(self, training: Any) -> Tensor:
        """The public share of users that have each item, [items + 1]."""
        sequences = getattr(training, "sequences", None)
        if self.frequencies is None:
            public = getattr(sequences, "public_frequencies", None)
            if public is None:
                raise ConfigError(
                    "model.frequencies: missing. Re-attention has to know which items are rare, and must not count them on "
                    "private data: name a JSON file with the share of users for each item, {item: share}, from public data, "
                    "let them be released with noise (privacy.frequencies={epsilon: 0.5}), or train model.kind=transformer"
                )
            return public
        path = Path(self.frequencies)
        try:
            shares = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.frequencies: {path} cannot be read: {error}") from error
        if not isinstance(shares, dict) or not all(map(_is_share, shares.values())):
            raise ConfigError(f"model.frequencies: {path}: expected {{item: share of users, from 0 to 1}}")
        names = getattr(sequences, "item_names", ()) or tuple(str(item) for item in range(1, training.items + 1))
        if not set(names) & set(shares):
            raise ConfigError(f"model.frequencies: {path} names none of the {training.items} items of the data")
        return torch.tensor([0.0, *(float(shares.get(name, 0.0)) for name in names)])


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


@dataclass(frozen=True)
class RecurrentModel(SequenceModelKind):
    """A recurrent model over items (`sparsedp.models.RecurrentRecommender`)."""

    kind: Literal["gru", "lstm"]
    dim: Count = 64
    dropout: Dropout = 0.2
    tied: bool = True
    freeze_tables: bool = False

    def make_for(self, items: int, length: int) -> RecurrentRecommender:
        return RecurrentRecommender(items, length, cell=self.kind, dim=self.dim, dropout=self.dropout, tied=self.tied)


@dataclass(frozen=True)
class DualModel(ModelKind):
    """A context tower and a label tower, compared (`sparsedp.models.DualEncoder` and `FeatureDualEncoder`)."""

    topic = "timelines"

    kind: Literal["dual"]
    dim: Count = 128
    hidden: list[Count] = field(default_factory=lambda: [128])
    tied: bool = False
    context: Literal["bag", "transformer"] = "bag"
    blocks: Count | None = None
    heads: Count | None = None
    features: list[Literal["items", "unigrams", "bigrams"]] = field(default_factory=lambda: ["items"])
    buckets: Count | None = None
    freeze_tables: bool = False

    @property
    def title_features(self) -> list[str]:
        return [name for name in self.features if name != "items"]

    def __post_init__(self) -> None:
        for key in ("blocks", "heads"):
            if self.context == "bag" and getattr(self, key) is not None:
                raise SchemaError(key, "is for model.context: transformer; for a bag leave it out")
        if self.buckets is not None and not self.title_features:
            raise SchemaError("buckets", "unigrams and bigrams are hashed to them, and features have neither")
        if not self.features or len(set(self.features)) < len(self.features):
            raise SchemaError("features", f"expected at least one feature, and none twice; got {self.features}")
        if self.tied and "items" not in self.features:
            raise SchemaError("tied", "the label's table is tied to the context's items, and features have none")
        if self.context == "transformer" and self.dim % (self.heads or _HEADS):
            raise SchemaError("heads", f"expected a divisor of model.dim, {self.dim}; got {self.heads or _HEADS}")

    def make(self, training: Any, code: Code) -> nn.Module:
        if not hasattr(training, "items"):
            raise ConfigError("model.kind: dual needs timelines; this data set has no attribute items")
        if self.context == "bag" and self.features == ["items"]:
            return DualEncoder(training.items, dim=self.dim, hidden=self.hidden, tied=self.tied)
        of_titles, buckets = self.title_features, self.buckets or _BUCKETS
        words: Any = getattr(training, "words", None)
        if of_titles and words is None:
            raise ConfigError(
                f"model.features: {', '.join(of_titles)} are of titles, and these data have none. Name a file: data.titles"
            )
        rows: dict[str, Tensor] = {name: torch.from_numpy(title_rows(words, name, buckets)) for name in of_titles}
        return FeatureDualEncoder(
            training.items,
            rows,
            buckets,
            training.length,
            dim=self.dim,
            hidden=self.hidden,
            tied=self.tied,
            use_items="items" in self.features,
            context=self.context,
            blocks=self.blocks or 1,
            heads=self.heads or _HEADS,
        )


@dataclass(frozen=True)
class OwnModel(ModelKind):
    """A user's callable: its module, out of the training set and `options`."""

    kind: Address
    options: dict[str, Any] = field(default_factory=dict)
    freeze_tables: bool = False

    def make(self, training: Any, code: Code) -> nn.Module:
        model = code.call(self.kind, "model", self.options, training)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.kind: {self.kind} returned {type(model).__name__}; expected a torch.nn.Module")
        return model
