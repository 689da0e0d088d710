"""The sections of a configuration beside data and model: optimizer, training, privacy, stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from sparsedp.accounting import accountant_names
from sparsedp.cli.config.limits import Count, NotNegative, Positive, Probability, Seed, Share
from sparsedp.cli.config.mechanism import mechanism_addresses, with_registered_names
from sparsedp.cli.config.paths import absolute, absolute_with_variables
from sparsedp.cli.config.schema import OneOf, Range, SchemaError, suggestion
from sparsedp.cli.config.trust import Code
from sparsedp.cli.counts import read_public_counts, read_release
from sparsedp.distributed.placement import read_place
from sparsedp.errors import ConfigError, SparseDPError, UnsupportedError
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import Mechanism, mechanism_from_dict
from sparsedp.plan import require_delta
from sparsedp.row_wise_adagrad import RowWiseAdagrad
from sparsedp.sampling.stream import COMPOSITIONS
from sparsedp.tables import find_tables

# The share of the learning rate after warm-up, by the share of the steps that are done and the share at the end.
_DECAYS: dict[str, Callable[[float, float], float]] = {
    "none": lambda done, final: 1.0,
    "linear": lambda done, final: 1 - done * (1 - final),
    "cosine": lambda done, final: final + (1 - final) * (1 + math.cos(math.pi * done)) / 2,
}


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

    def shares(self, steps: int) -> Callable[[int], float]:
        """The share of the learning rate for each step, from 0."""
        warmup = self.warmup or round(self.warmup_share * steps)

        def share(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return _DECAYS[self.kind](min(1.0, (step - warmup) / max(1, steps - warmup)), self.final)

        return share


@dataclass(frozen=True)
class OneOptimizerConfig:
    """An optimizer of torch.optim and its settings, such as that of the tables beside that of the dense parameters."""

    name: str
    lr: Positive
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_optimizer(self.name, self.options, "optimizer.tables")

    def make(self, groups: list[dict[str, Any]], key: str = "optimizer.tables") -> Optimizer:
        """The optimizer of some parameter groups; `key` is where it is configured."""
        kind = _optimizers()[self.name]
        try:
            return kind(groups, lr=self.lr, **self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {self.name} refuses its settings: {error}") from error

    def state_share(self, key: str = "optimizer.tables") -> float:
        """Bytes of optimizer state per byte of parameter, measured at a small parameter of its own."""
        probe = nn.Parameter(torch.zeros(32, 32))
        optimizer = self.make([{"params": [probe]}], key)
        probe.grad = torch.zeros_like(probe)
        if isinstance(optimizer, torch.optim.SparseAdam):
            probe.grad = probe.grad.to_sparse(1)
        optimizer.step()
        tensors = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.dim()) / probe.nbytes


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of all parameters; of the dense ones, if there is one of the `tables`."""

    name: str
    lr: Positive
    table_lr: Positive | None = None  # of the tables; None: lr
    options: dict[str, Any] = field(default_factory=dict)
    tables: OneOptimizerConfig | None = None
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        _refuse_optimizer(self.name, self.options, "optimizer")
        if self.tables is not None and self.table_lr is not None:
            raise SchemaError(
                "table_lr", "the tables have an optimizer of their own: give the rate as optimizer.tables.lr"
            )

    def make(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """With `table_lr` there are two parameter groups, with `tables` two optimizers: the dense parameters, then the tables."""
        names = find_tables(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dense = [p for name, p in trained.items() if name not in names]
        tables = [p for name, p in trained.items() if name in names]
        if self.tables is not None and tables:
            of_tables = self.tables.make([{"params": tables}])
            return [self._of_all.make([{"params": dense}], "optimizer"), of_tables] if dense else of_tables
        groups: list[dict[str, Any]] = [{"params": list(trained.values())}]
        if self.table_lr is not None:
            groups = [{"params": dense}, {"params": tables, "lr": self.table_lr}]
        return self._of_all.make([group for group in groups if group["params"]], "optimizer")

    @property
    def _of_all(self) -> OneOptimizerConfig:
        return OneOptimizerConfig(self.name, self.lr, self.options)

    def require_settings(self) -> None:
        """Raises if an optimizer refuses its settings."""
        self.state_share()
        self.table_state_share()

    def state_share(self) -> float:
        """Bytes of optimizer state per byte of a dense parameter."""
        return self._of_all.state_share("optimizer")

    def table_state_share(self) -> float:
        """Bytes of optimizer state per byte of a table."""
        return self.state_share() if self.tables is None else self.tables.state_share()


def _optimizers() -> dict[str, Any]:
    """torch.optim's classes and ours, by their names."""
    base = torch.optim.Optimizer
    classes = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    of_torch = {name: kind for name, kind in classes.items() if issubclass(kind, base) and kind is not base}
    return {**of_torch, RowWiseAdagrad.__name__: RowWiseAdagrad}


def _refuse_optimizer(name: str, options: dict[str, Any], key: str) -> None:
    names = list(_optimizers())
    if name not in names:
        problem = f"expected an optimizer of torch.optim or SparseDP ({', '.join(names)}); got {name!r}"
        raise SchemaError("name", problem + suggestion(name, names))
    if "lr" in options:
        raise SchemaError("options.lr", f"give the learning rate as {key}.lr")


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """Stopping by looks at half of what is held out (`sparsedp.EarlyStopping`); the other half is what a run reports."""

    validation: Literal["public", "private"] | None = None  # null is refused: nobody can guess it
    every: Count | None = None  # steps
    every_epochs: Count | None = None
    patience: Count = 2
    min_improvement: NotNegative = 0.0
    std: Positive | None = None
    clip: Positive | None = None

    def __post_init__(self) -> None:
        if self.validation is None:
            raise SchemaError(
                "validation",
                "missing; say private (each look has noise, and target_epsilon pays for all of them), or public (nobody in the "
                "held-out data is protected)",
            )
        if self.every is not None and self.every_epochs is not None:
            raise SchemaError("every_epochs", "give it or every (steps), not both")
        if self.validation == "private" and self.std is None:
            raise SchemaError("std", "missing; expected the deviation of the noise on each mean loss, such as 0.005")
        for name in ("std", "clip"):
            if self.validation == "public" and getattr(self, name) is not None:
                raise SchemaError(name, "is for validation: private; a public set has no noise")


@dataclass(frozen=True)
class TrainingConfig:
    epochs: Count
    batch_size: Count
    max_physical_batch: Count | None = None
    workers: Annotated[int, Range(0)] = 0
    threads: Count | None = None
    evaluate_every: Count | None = None
    evaluate_every_epochs: Count | None = None
    early_stopping: EarlyStoppingConfig | None = None
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
    """How often users have each item, released once with noise (`sparsedp.FrequencyRelease`).

    `drawn` is the file of a release that was made before, by `sparsedp plan --release`: it says itself what it cost.
    """

    epsilon: Positive = 0.5
    delta: Probability = 1e-7
    clip: Positive = 1.0
    drawn: str | None = None

    def __post_init__(self) -> None:
        if self.drawn is not None and (self.epsilon, self.delta, self.clip) != (0.5, 1e-7, 1.0):
            raise SchemaError("drawn", "the file says what its release cost: leave epsilon, delta and clip out")


@dataclass(frozen=True)
class PrivacyConfig:
    max_grad_norm: Positive
    target_epsilon: Positive | None = None
    target_delta: Probability | None = None
    allow_large_delta: bool = False
    ledger_key: str | None = None
    noise_multiplier: NotNegative | None = None
    noise_on_mean: NotNegative | None = None
    clipping: Literal["flat", "automatic"] = "flat"
    mechanism: dict[str, Any] = field(default_factory=lambda: {"name": "dpsgd"})
    accountant: Annotated[str, OneOf(accountant_names)] = "pld"
    poisson_sampling: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    unit: Literal["example", "user"] = "example"
    max_examples_per_user: Count | None = None
    frequencies: FrequencyConfig | None = None
    counts: str | None = (
        None  # a file of public counts, for a mechanism with look_at: counts, or FEST with counts: public
    )
    chosen_on_data: bool = False  # whether the mechanism was chosen by a look at the data: the statement then says so

    def __post_init__(self) -> None:
        if self.unit == "example" and self.max_examples_per_user is not None:
            raise SchemaError("max_examples_per_user", "is for privacy.unit: user; with unit: example leave it out")
        noise = [self.target_epsilon, self.noise_multiplier, self.noise_on_mean]
        if noise.count(None) != 2:
            raise SchemaError(
                "target_epsilon",
                "give exactly one of target_epsilon and noise_multiplier, or noise_on_mean in their place (null takes the "
                f"others back); got {', '.join(map(str, noise[:-1]))} and {noise[-1]}",
            )
        if self.target_delta is not None:
            try:
                require_delta(self.target_delta, None, self.allow_large_delta)
            except UnsupportedError as error:
                raise SchemaError("target_delta", str(error)) from None
        if not mechanism_addresses(self.mechanism, "mechanism"):  # others are made when their code may be loaded
            self.make_mechanism()  # what it refuses is refused before any data is read

    def make_release(self) -> FrequencyRelease | None:
        settings = self.frequencies
        if settings is None:
            return None
        if settings.drawn is not None:
            return read_release(Path(settings.drawn), "privacy.frequencies.drawn")
        return FrequencyRelease(settings.epsilon, settings.delta, settings.clip)

    def with_absolute_paths(self) -> PrivacyConfig:
        drawn = None if self.frequencies is None else self.frequencies.drawn
        frequencies = self.frequencies
        if frequencies is not None and drawn is not None:
            frequencies = replace(frequencies, drawn=absolute(drawn))
        return replace(self, frequencies=frequencies, counts=self._counts_file())

    def _counts_file(self) -> str | None:
        return None if self.counts is None else absolute_with_variables(self.counts, "privacy.counts")

    def make_mechanism(self, code: Code | None = None) -> Mechanism:
        """`code` says where a mechanism of the user's own may come from; without it, only registered ones are known."""
        if "name" not in self.mechanism:
            raise SchemaError("mechanism", "the key 'name' is missing, as in {name: adafest, threshold: 10.0}")
        values = with_registered_names(self.mechanism, "privacy.mechanism", code or Code())
        looks, taken = values.get("look_at") == "counts", _takes_counts(values)
        if (looks or taken) != (self.counts is not None):
            raise SchemaError(
                "counts" if code is None else "privacy.counts",
                "is for a mechanism with look_at: counts, or FEST with counts: public, which need it",
            )
        if (file := self._counts_file()) is not None:
            public = read_public_counts(Path(file), "privacy.counts")
            values = _with_counts(values, dict(public.counts))
            if looks:
                values["look_at"] = public
        try:
            return mechanism_from_dict(values)
        except (TypeError, ValueError, SparseDPError) as error:
            raise SchemaError("mechanism" if code is None else "privacy.mechanism", str(error)) from None


def _takes_counts(values: Mapping[str, Any]) -> bool:
    """Whether a mechanism, or one among its settings, is to choose by the public counts."""
    return any(
        _takes_counts(value) if isinstance(value, Mapping) else (key, value) == ("counts", "public")
        for key, value in values.items()
    )


def _with_counts(values: Mapping[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_counts(value, counts)
        if isinstance(value, Mapping)
        else counts
        if (key, value) == ("counts", "public")
        else value
        for key, value in values.items()
    }


@dataclass(frozen=True)
class DistributedConfig:
    """How several processes train together (`--nproc`, torchrun); nothing to one."""

    sharding: Literal["row_wise", "table_wise", "column_wise", "data_parallel", "planned"] = "row_wise"
    tables: dict[str, Any] = field(default_factory=dict)
    rank_timeout: Positive = 60.0

    def __post_init__(self) -> None:
        if (self.sharding == "planned") != bool(self.tables):
            raise SchemaError(
                "tables",
                "where each table is goes with sharding: planned, and the one with the other; sparsedp plan CONFIG --nproc N "
                "writes both",
            )
        for name, text in self.tables.items():
            try:
                read_place(text if isinstance(text, str) else repr(text))
            except ValueError as error:
                raise SchemaError(f"tables.{name}", str(error)) from None

    @property
    def of_tables(self) -> str | dict[str, str]:
        """What `shard_tables` takes."""
        return self.tables if self.sharding == "planned" else self.sharding


@dataclass(frozen=True)
class StreamConfig:
    """Training on spans of periods in order of time (`sparsedp.Stream`)."""

    composition: Literal["parallel", "sequential"] | None = None  # null is refused: nobody can guess it
    span: Count = 1
    sample_rate: Probability | None = None
    evaluate_next: bool = False

    def __post_init__(self) -> None:
        if self.composition is None:
            raise SchemaError("composition", f"missing; say {COMPOSITIONS}")
