"""What a run is configured by. `configs/demo.yaml` explains the keys; `load.py` reads them from files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from sparsedp.cli.config.datasets import (
    ClickLogData,
    GeneratedData,
    GeneratedSequencesData,
    GeneratedTimelinesData,
    OwnData,
    SequencesData,
    TimelinesData,
)
from sparsedp.cli.config.losses import CANDIDATE_LOSSES, SEQUENCE_LOSSES, Loss, make_loss
from sparsedp.cli.config.mechanism import mechanism_addresses
from sparsedp.cli.config.models import DlrmModel, DualModel, OwnModel, PctrModel, RecurrentModel, TransformerModel
from sparsedp.cli.config.schema import Address, SchemaError
from sparsedp.cli.config.sections import DistributedConfig, OptimizerConfig, PrivacyConfig, StreamConfig, TrainingConfig
from sparsedp.cli.config.tables import TableData
from sparsedp.cli.config.texts import EncoderModel, TextBagModel, TextData
from sparsedp.cli.config.trust import Code
from sparsedp.mechanisms import Mechanism


@dataclass(frozen=True)
class Config:
    data: (
        GeneratedData
        | TableData
        | ClickLogData
        | GeneratedSequencesData
        | SequencesData
        | GeneratedTimelinesData
        | TimelinesData
        | TextData
        | OwnData
    )
    model: (
        PctrModel | DlrmModel | TransformerModel | RecurrentModel | DualModel | TextBagModel | EncoderModel | OwnModel
    )
    optimizer: OptimizerConfig
    training: TrainingConfig
    privacy: PrivacyConfig
    loss: (
        Literal["binary_cross_entropy", "cross_entropy", "softmax", "sampled_softmax", "binary_candidates"] | Address
    ) = "binary_cross_entropy"
    stream: StreamConfig | None = None
    callbacks: list[Literal["tensorboard"] | Address] = field(default_factory=list)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    name: str = "run"
    # Where the code that it names may come from. Not a key: set by who reads the configuration.
    code: Code = field(default=Code(), compare=False, repr=False, metadata={"given": False})

    def __post_init__(self) -> None:
        require_folder_name(self.name, "run")
        self._check_texts()
        self._check_sequences()
        noise = (self.privacy.noise_multiplier, self.privacy.noise_on_mean)
        if self.training.early_stopping is not None and any(noise):
            raise SchemaError(
                "training.early_stopping",
                "needs privacy.target_epsilon: a run that stops early has the epsilon of its whole plan",
            )

    def _check_texts(self) -> None:
        """Refuses texts with what is about other things, and the other way round."""
        parts = {"data.kind": self.data, "model.kind": self.model}
        if any(part.topic == "text" for part in parts.values()):
            for key, part in parts.items():
                if part.topic not in ("text", None):
                    problem = f"{part.kind} is about {part.topic}, and the rest of the configuration about texts"
                    raise SchemaError(key, problem)
            if self.loss != "cross_entropy" and ":" not in self.loss:
                raise SchemaError("loss", f"expected cross_entropy or a loss of your own for texts; got {self.loss}")
        elif self.loss == "cross_entropy":
            for key, part in parts.items():
                if part.topic is not None:
                    problem = (
                        f"{part.kind} is about {part.topic}, and cross_entropy is the loss of classes, as of texts"
                    )
                    raise SchemaError(key, problem)
        if isinstance(self.model, EncoderModel) and isinstance(self.data, TextData) and not self.data.special_tokens:
            problem = "give true: an encoder reads texts as its tokenizer writes them"
            raise SchemaError("data.special_tokens", problem)

    def _check_sequences(self) -> None:
        """Refuses parts that do not go together, and negatives that no loss looks at."""
        topics = {self.data.topic, self.model.topic}
        of_sequences = bool(topics & {"sequences", "timelines"})
        if of_sequences and self.loss == "binary_cross_entropy":
            losses = ", ".join(SEQUENCE_LOSSES)
            raise SchemaError("loss", f"expected {losses} or a loss of your own for sequences; got {self.loss}")
        if of_sequences or self.loss in SEQUENCE_LOSSES:
            for key, part in (("data.kind", self.data), ("model.kind", self.model)):
                if part.topic == "clicks":
                    problem = f"{part.kind} is about clicks, and the rest of the configuration about sequences"
                    raise SchemaError(key, problem)
        if {"sequences", "timelines"} <= topics:
            problem = (
                f"{self.model.kind} is about {self.model.topic}, and data.kind {self.data.kind} about {self.data.topic}"
            )
            raise SchemaError("model.kind", problem)
        if self.data.topic == "timelines" and self.privacy.unit != "user":
            raise SchemaError("privacy.unit", "a timeline is all that a user did: give user")
        if self.data.topic == "timelines" and self.training.workers:
            raise SchemaError("training.workers", "labels are drawn in the main process: give 0")
        titles = getattr(self.data, "titles", None)
        if titles is not None and isinstance(self.model, DualModel) and not self.model.title_features:
            raise SchemaError("data.titles", "no feature looks at them: add unigrams or bigrams to model.features")
        if self.loss in CANDIDATE_LOSSES and self.training.negatives is None:
            raise SchemaError("training.negatives", f"missing; expected how many negatives {self.loss} draws")
        if self.loss not in CANDIDATE_LOSSES and self.training.negatives is not None:
            raise SchemaError(
                "training.negatives", f"the loss {self.loss} draws none; {' and '.join(CANDIDATE_LOSSES)} do"
            )
        frequencies, looks = self.privacy.frequencies, self.privacy.mechanism.get("look_at") == "release"
        if frequencies is not None and not (self.model.has_reattention or looks or frequencies.drawn):
            problem = (
                "only re-attention looks at them, and a mechanism with look_at: release; choose model.kind dpformer"
            )
            raise SchemaError("privacy.frequencies", problem)
        if self.privacy.frequencies is not None and self.model.frequencies is not None:
            raise SchemaError(
                "privacy.frequencies", "model.frequencies are given, so none need be released: leave one out"
            )
        if self.training.negatives is not None and self.training.workers:
            raise SchemaError("training.workers", "negatives are drawn in the main process: give 0")

    @property
    def noise_multiplier(self) -> float | None:
        """As given, on the sum of clipped gradients; None if it is to be found for an epsilon.

        `noise_on_mean` s is the deviation on the mean over a batch of B: sigma C / B = s, so that sigma is s B / C.
        """
        privacy = self.privacy
        if privacy.noise_on_mean is not None:
            return privacy.noise_on_mean * self.training.batch_size / privacy.max_grad_norm
        return privacy.noise_multiplier

    def make_loss(self) -> Loss:
        return make_loss(self.loss, self.privacy.loss_reduction, self.code)

    def with_absolute_paths(self) -> Config:
        model = self.model.with_absolute_paths()
        return replace(
            self, model=model, data=self.data.with_absolute_paths(), privacy=self.privacy.with_absolute_paths()
        )

    def addresses(self) -> dict[str, str]:
        """The keys that name code of the user's own, and what they name."""
        named: dict[str, str] = {"data.kind": self.data.kind, "model.kind": self.model.kind, "loss": self.loss}
        named |= {f"callbacks[{i}]": name for i, name in enumerate(self.callbacks)}
        mechanisms = mechanism_addresses(self.privacy.mechanism, "privacy.mechanism")
        return {key: address for key, address in named.items() if ":" in address} | mechanisms

    def make_mechanism(self) -> Mechanism:
        return self.privacy.make_mechanism(self.code)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "code"}


def require_folder_name(name: str, whose: str) -> None:
    if not name or name.startswith(".") or any(c in name for c in "/\\\0"):
        raise SchemaError(
            "name",
            f"names the {whose}'s folder, so it must not be empty, begin with a dot or hold a slash; got {name!r}",
        )


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The full paths of the keys in which two configurations differ."""
    if type(old) is type(new) and is_dataclass(old):
        keys = {f.name: f"{path}.{f.name}" if path else f.name for f in fields(old) if f.compare}
        return [
            changed
            for name, key in keys.items()
            for changed in differences(getattr(old, name), getattr(new, name), key)
        ]
    return [] if old == new else [path]
