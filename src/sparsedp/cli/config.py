"""What a run is configured by. `configs/demo.yaml` explains the keys; `load.py` reads them from files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal

import torch

from sparsedp.accounting import accountant_names
from sparsedp.cli.mechanism import mechanism_addresses, with_registered_names
from sparsedp.cli.schema import Address, OneOf, Range, SchemaError, suggestion
from sparsedp.cli.trust import Code
from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import Mechanism, mechanism_from_dict
from sparsedp.plan import require_delta
from sparsedp.sampling.stream import COMPOSITIONS

Count = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Share = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, low_open=True)]
NotNegative = Annotated[float, Range(0)]
Dropout = Annotated[float, Range(0, 1, high_open=True)]
# A share of the rows, the last ones, or the periods (days) that are held out.
HeldOut = Annotated[float, Range(0, 1, high_open=True)] | list[int]

# Losses of models of sequences, and those of them that score the target against drawn negatives only.
SEQUENCE_LOSSES = ("softmax", "sampled_softmax", "binary_candidates")
CANDIDATE_LOSSES = ("sampled_softmax", "binary_candidates")


@dataclass(frozen=True)
class GeneratedData:
    """A click log drawn from a planted model (`sparsedp.data.generated_click_log`)."""

    kind: Literal["generated"]
    rows: Count
    seed: Seed = 0
    scale: Positive = 1.0
    skew: NotNegative = 1.1
    days: Count = 1
    drift: Share = 0.0
    click_rate: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.25
    users: Count | None = None
    held_out: HeldOut = 0.1


@dataclass(frozen=True)
class HashedVocabulary:
    kind: Literal["hash"]
    buckets: Annotated[int, Range(2)] | list[Annotated[int, Range(2)]] = 100_000


@dataclass(frozen=True)
class CountedVocabulary:
    kind: Literal["count"]
    min_count: Count = 10


@dataclass(frozen=True)
class FileVocabulary:
    kind: Literal["given"]
    path: str


@dataclass(frozen=True)
class ClickLogData:
    """A click log in Criteo's text format (`sparsedp.data.open_click_log`)."""

    kind: Literal["clicklog"]
    paths: str | list[str]
    cache_dir: str = "runs/cache"
    vocabulary: HashedVocabulary | CountedVocabulary | FileVocabulary = HashedVocabulary("hash")
    max_malformed: Share = 0.001
    user_column: str | None = None
    held_out: HeldOut = 0.1


@dataclass(frozen=True)
class GeneratedSequencesData:
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


@dataclass(frozen=True)
class SequencesData:
    """What users did in order of time, from a file (`sparsedp.data.open_sequences`)."""

    kind: Literal["sequences"]
    path: str
    format: Literal["auto", "movielens", "movielens_100k", "amazon", "pairs", "csv", "lists"] = "auto"
    length: Count = 50
    min_actions: Count = 5
    until_stable: bool = False
    held_out: Literal["test", "validation"] = "test"
    exclude_seen: bool = False


@dataclass(frozen=True)
class OwnData:
    """A user's callable: its data set, or (training set, held-out set), out of `options`."""

    kind: Address
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PctrModel:
    """The click-through-rate model of the DP-AdaFEST paper (`sparsedp.models.PCTR`)."""

    kind: Literal["pctr"]
    hidden: Count = 598
    hidden_layers: Count = 4
    dim: Count | None = None
    freeze_tables: bool = False


@dataclass(frozen=True)
class TransformerModel:
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
        if self.frequencies is not None and self.kind != "dpformer":
            raise SchemaError("frequencies", "re-attention alone looks at them; choose model.kind dpformer")


@dataclass(frozen=True)
class RecurrentModel:
    """A recurrent model over items (`sparsedp.models.RecurrentRecommender`)."""

    kind: Literal["gru", "lstm"]
    dim: Count = 64
    dropout: Dropout = 0.2
    tied: bool = True
    freeze_tables: bool = False


@dataclass(frozen=True)
class OwnModel:
    """A user's callable: its module, out of the training set and `options`."""

    kind: Address
    options: dict[str, Any] = field(default_factory=dict)
    freeze_tables: bool = False


@dataclass(frozen=True)
class SchedulerConfig:
    """The learning rate as a share of `optimizer.lr`: it rises in `warmup` steps, then falls to `final`.

    `warmup_share` gives the steps in which it rises as a share of all.
    """

    kind: Literal["none", "linear", "cosine"] = "none"
    warmup: Annotated[int, Range(0)] = 0
    warmup_share: Share = 0.0
    final: Share = 0.0

    def __post_init__(self) -> None:
        if self.warmup and self.warmup_share:
            raise SchemaError("warmup_share", f"give it or warmup, not both; got {self.warmup_share} and {self.warmup}")
        if self.kind == "none" and self.final != 0:
            raise SchemaError(
                "final", "a learning rate that does not decay has no final share; choose linear or cosine"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    name: str
    lr: Positive
    table_lr: Positive | None = None  # of the tables; None: lr
    options: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        base = torch.optim.Optimizer
        classes = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        known = [name for name, kind in classes.items() if issubclass(kind, base) and kind is not base]
        if self.name not in known:
            problem = f"expected an optimizer of torch.optim ({', '.join(known)}); got {self.name!r}"
            raise SchemaError("name", problem + suggestion(self.name, known))
        if "lr" in self.options:
            raise SchemaError("options.lr", "give the learning rate as optimizer.lr")


@dataclass(frozen=True)
class TrainingConfig:
    epochs: Count
    batch_size: Count
    max_physical_batch: Count | None = None
    workers: Annotated[int, Range(0)] = 0
    threads: Count | None = None
    evaluate_every: Count | None = None
    evaluate_every_epochs: Count | None = None
    checkpoint_every: Count | None = 1000
    checkpoint_minutes: Positive | None = 10.0
    log_every: Count = 10
    check: bool = True
    seed: Seed | None = None
    init_seed: Seed | None = None
    negatives: Count | None = None
    shared_negatives: bool = False

    def __post_init__(self) -> None:
        if self.evaluate_every is not None and self.evaluate_every_epochs is not None:
            raise SchemaError("evaluate_every_epochs", "give it or evaluate_every (steps), not both")
        if self.shared_negatives and self.negatives is None:
            raise SchemaError("shared_negatives", "there are no negatives to share; give training.negatives")


@dataclass(frozen=True)
class FrequencyConfig:
    """How often users have each item, released once with noise (`sparsedp.FrequencyRelease`)."""

    epsilon: Positive = 0.5
    delta: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 1e-7
    clip: Positive = 1.0


@dataclass(frozen=True)
class PrivacyConfig:
    max_grad_norm: Positive
    target_epsilon: Positive | None = None
    target_delta: Annotated[float, Range(0, 1, low_open=True, high_open=True)] | None = None
    allow_large_delta: bool = False
    ledger_key: str | None = None
    noise_multiplier: NotNegative | None = None
    clipping: Literal["flat", "automatic"] = "flat"
    mechanism: dict[str, Any] = field(default_factory=lambda: {"name": "dpsgd"})
    accountant: Annotated[str, OneOf(accountant_names)] = "pld"
    poisson_sampling: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    unit: Literal["example", "user"] = "example"
    max_examples_per_user: Count | None = None
    frequencies: FrequencyConfig | None = None

    def __post_init__(self) -> None:
        if self.unit == "example" and self.max_examples_per_user is not None:
            raise SchemaError("max_examples_per_user", "is for privacy.unit: user; with unit: example leave it out")
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise SchemaError(
                "target_epsilon",
                "give exactly one of target_epsilon and noise_multiplier (null takes the other one back); "
                f"got {self.target_epsilon} and {self.noise_multiplier}",
            )
        if self.target_delta is not None:
            try:
                require_delta(self.target_delta, None, self.allow_large_delta)
            except UnsupportedError as error:
                raise SchemaError("target_delta", str(error)) from None
        if not mechanism_addresses(self.mechanism, "mechanism"):  # others are made when their code may be loaded
            self.make_mechanism()  # what it refuses is refused before any data is read

    def make_release(self) -> FrequencyRelease | None:
        given = self.frequencies
        return None if given is None else FrequencyRelease(given.epsilon, given.delta, given.clip)

    def make_mechanism(self, code: Code | None = None) -> Mechanism:
        """`code` says where a mechanism of the user's own may come from; without it, only registered ones are known."""
        if "name" not in self.mechanism:
            raise SchemaError("mechanism", "the key 'name' is missing, as in {name: adafest, threshold: 10.0}")
        values = with_registered_names(self.mechanism, "privacy.mechanism", code or Code())
        try:
            return mechanism_from_dict(values)
        except (TypeError, ValueError, SparseDPError) as error:
            raise SchemaError("mechanism" if code is None else "privacy.mechanism", str(error)) from None


@dataclass(frozen=True)
class StreamConfig:
    """Training on spans of periods in order of time (`sparsedp.Stream`)."""

    composition: Literal["parallel", "sequential"] | None = None  # null is refused: nobody can guess it
    span: Count = 1
    evaluate_next: bool = False

    def __post_init__(self) -> None:
        if self.composition is None:
            raise SchemaError("composition", f"missing; say {COMPOSITIONS}")


@dataclass(frozen=True)
class Config:
    data: GeneratedData | ClickLogData | GeneratedSequencesData | SequencesData | OwnData
    model: PctrModel | TransformerModel | RecurrentModel | OwnModel
    optimizer: OptimizerConfig
    training: TrainingConfig
    privacy: PrivacyConfig
    loss: Literal["binary_cross_entropy", "softmax", "sampled_softmax", "binary_candidates"] | Address = (
        "binary_cross_entropy"
    )
    stream: StreamConfig | None = None
    name: str = "run"
    # Where the code that it names may come from: no key, but told by who reads it.
    code: Code = field(default=Code(), compare=False, repr=False, metadata={"given": False})

    def __post_init__(self) -> None:
        require_folder_name(self.name, "run")
        self._check_sequences()

    def _check_sequences(self) -> None:
        """Refuses parts that do not go together, and negatives that no loss looks at."""
        of_clicks, of_sequences = (GeneratedData, ClickLogData, PctrModel), (GeneratedSequencesData, SequencesData)
        losses = ", ".join(SEQUENCE_LOSSES)
        sequential = isinstance(self.data, of_sequences) or isinstance(self.model, (TransformerModel, RecurrentModel))
        if sequential and self.loss == "binary_cross_entropy":
            raise SchemaError("loss", f"expected {losses} or a loss of your own for sequences; got {self.loss}")
        clicks = next((part for part in (self.data, self.model) if isinstance(part, of_clicks)), None)
        if clicks is not None and (sequential or self.loss in SEQUENCE_LOSSES):
            key = "data.kind" if clicks is self.data else "model.kind"
            raise SchemaError(key, f"{clicks.kind} is about clicks, and the rest of the configuration about sequences")
        if self.loss in CANDIDATE_LOSSES and self.training.negatives is None:
            raise SchemaError("training.negatives", f"missing; expected how many negatives {self.loss} draws")
        if self.loss not in CANDIDATE_LOSSES and self.training.negatives is not None:
            raise SchemaError(
                "training.negatives", f"the loss {self.loss} draws none; {' and '.join(CANDIDATE_LOSSES)} do"
            )
        if self.privacy.frequencies is not None and getattr(self.model, "kind", None) != "dpformer":
            raise SchemaError("privacy.frequencies", "re-attention alone looks at them; choose model.kind dpformer")
        if self.privacy.frequencies is not None and getattr(self.model, "frequencies", None) is not None:
            raise SchemaError(
                "privacy.frequencies", "model.frequencies are given, so none need be released: leave one out"
            )
        if self.training.negatives is not None and self.training.workers:
            raise SchemaError("training.workers", "negatives are drawn in the main process: give 0")

    def addresses(self) -> dict[str, str]:
        """The keys that name code of the user's own, and what they name."""
        named = {"data.kind": self.data.kind, "model.kind": self.model.kind, "loss": self.loss}
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
        names = [f.name for f in fields(old) if f.compare]
        return [
            found
            for name in names
            for found in differences(getattr(old, name), getattr(new, name), f"{path}.{name}" if path else name)
        ]
    return [] if old == new else [path]
