"""From a configuration to the objects of a run: data, model, loss, optimizer and the private ones."""

from __future__ import annotations

import inspect
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

from sparsedp.cli.config import (
    SEQUENCE_LOSSES,
    ClickLogData,
    Config,
    CountedVocabulary,
    GeneratedData,
    GeneratedSequencesData,
    HashedVocabulary,
    OwnData,
    OwnModel,
    PctrModel,
    SchedulerConfig,
    SequencesData,
)
from sparsedp.cli.progress import draw_progress
from sparsedp.cli.sequences import (
    SequenceCollate,
    load_sequences,
    make_sequence_loss,
    make_sequence_model,
    tell_noise,
)
from sparsedp.data import (
    ClickDataset,
    CountVocabulary,
    GivenVocabulary,
    HashVocabulary,
    generated_click_log,
    open_click_log,
)
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import ConfigError
from sparsedp.models import PCTR
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.plan import default_delta, require_delta
from sparsedp.sampling import PrivateLoader, Stream
from sparsedp.tables import find_tables

Loss = Callable[[Any, Any], Tensor]

_CACHE_README = """\
PRIVATE: not for release.
The folders beside this file hold click logs as they were read, and the vocabularies that were counted on them.
"""


@dataclass(frozen=True)
class Data:
    """The training set, what is held out (if anything), and how examples become a batch."""

    training: Any
    held_out: Any | None
    collate: Callable[[Any], Any]

    @property
    def vocabulary_is_private(self) -> bool:
        return bool(getattr(self.training, "vocabulary_is_private", False))

    def examples(self, count: int) -> Any:
        """The first examples of the training set, as a batch."""
        indices = list(range(min(count, len(self.training))))
        if hasattr(self.training, "__getitems__"):  # as torch's own loader does
            return self.collate(self.training.__getitems__(indices))
        return self.collate([self.training[i] for i in indices])


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: everything private is in place."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    scheduler: LambdaLR
    loss: Loss
    data: Data
    steps: int
    delta: float


def prepare(config: Config, data: Data, model: nn.Module) -> Prepared:
    """Plans the run, calibrating the noise if the configuration asks for an epsilon."""
    training, privacy = config.training, config.privacy
    loader = DataLoader(
        data.training,
        batch_size=training.batch_size,
        shuffle=True,
        collate_fn=data.collate,
        num_workers=training.workers,
        worker_init_fn=leave_signals_to_the_main_process,
    )
    engine = PrivacyEngine(
        privacy.accountant,
        training.seed,
        allow_large_delta=privacy.allow_large_delta,
        ledger_key=privacy.ledger_key,
        progress=draw_progress,
    )
    units = _units(config, data)
    delta = default_delta(units) if privacy.target_delta is None else privacy.target_delta
    require_delta(delta, units, privacy.allow_large_delta)  # also with given noise, whose statement comes at the end
    common: dict[str, Any] = {
        "module": model,
        "optimizer": make_optimizer(config, model),
        "data_loader": loader,
        "max_grad_norm": privacy.max_grad_norm,
        "mechanism": privacy.make_mechanism(),
        "clipping": privacy.clipping,
        "loss_reduction": privacy.loss_reduction,
        "poisson_sampling": privacy.poisson_sampling,
        "max_physical_batch": training.max_physical_batch,
        "stream": make_stream(config, data),
        "unit": privacy.unit,
        "max_examples_per_user": privacy.max_examples_per_user,
        "frequencies": privacy.make_release(),
    }
    if privacy.target_epsilon is not None:
        model, optimizer, private = engine.make_private_with_epsilon(
            target_epsilon=privacy.target_epsilon, target_delta=delta, epochs=training.epochs, **common
        )
    else:
        assert privacy.noise_multiplier is not None
        model, optimizer, private = engine.make_private(noise_multiplier=privacy.noise_multiplier, **common)
    if data.vocabulary_is_private:
        engine.add_note("The vocabulary, which was counted on the private data without noise.")
    tell_noise(config, model, data.training, engine.plan)
    steps = training.epochs * private.steps_per_epoch
    scheduler = LambdaLR(optimizer, learning_rate_share(config.optimizer.scheduler, steps))
    return Prepared(engine, model, optimizer, private, scheduler, make_loss(config), data, steps, delta)


def _units(config: Config, data: Data) -> int:
    """How many units the training data have: examples, or users."""
    if config.privacy.unit == "example":
        return len(data.training)
    users = getattr(data.training, "users", None)
    if users is None:
        raise ConfigError(
            "privacy.unit: user needs to know whose each example is. A generated log has users with data.users, a click log "
            "with data.user_column; a data set of your own needs an attribute `users`, a whole number for each example"
        )
    return len(np.unique(users))


def leave_signals_to_the_main_process(worker: int) -> None:
    """Ctrl-C reaches loader workers too; they must live until the main process has finished its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ------------------------------------------------------------------ data


def load_data(config: Config, progress: Callable[[int], None] | None = None) -> Data:
    """Generates or reads the data. `progress` is called with the rows of a click log read so far."""
    seed_torch(config)
    source = config.data
    if isinstance(source, OwnData):
        made = _call(config, "data", source.options)
        training, held_out = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not hasattr(training, "__len__") or not hasattr(training, "__getitem__"):
            raise ConfigError(
                f"data.kind: {source.kind} returned {type(training).__name__}; expected a data set with "
                "__len__ and __getitem__, or (training set, held-out set)"
            )
        for name, part in (("training", training), ("held-out", held_out)):
            if part is not None and len(part) == 0:
                raise ConfigError(
                    f"data.kind: {source.kind} returned an empty {name} set. To hold nothing out, return one data set alone"
                )
        return Data(training, held_out, getattr(training, "collate", default_collate))
    if isinstance(source, (GeneratedSequencesData, SequencesData)):
        training, held_out = load_sequences(source)
        return Data(training, held_out, training.collate)
    if isinstance(source, GeneratedData):
        log: ClickDataset = generated_click_log(
            source.rows,
            seed=source.seed,
            scale=source.scale,
            skew=source.skew,
            days=source.days,
            drift=source.drift,
            click_rate=source.click_rate,
            users=source.users,
        )
    else:
        cache = Path(source.cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "README.txt").write_text(_CACHE_README)
        log = open_click_log(
            source.paths,
            cache_dir=source.cache_dir,
            vocabulary=_vocabulary(source),
            max_malformed=source.max_malformed,
            progress=progress,
            user_column=source.user_column,
        )
    by_days = isinstance(source.held_out, list)
    training, held_out = log.split(source.held_out, by="periods" if by_days else "tail")
    if len(training) == 0:
        raise ConfigError(f"data.held_out: {source.held_out} leaves nothing of the {len(log)} rows to train on")
    return Data(training, held_out if len(held_out) else None, log.collate)


def with_collate(config: Config, data: Data) -> Data:
    """The data with batches as the loss wants them: one that scores sequences may want negatives."""
    if config.loss not in SEQUENCE_LOSSES:
        return data
    if not hasattr(data.training, "items"):
        raise ConfigError(f"loss: {config.loss} is for sequences; this data set has no attribute items")
    return replace(data, collate=SequenceCollate(config, data.training.items, data.collate))


def _vocabulary(source: ClickLogData) -> HashVocabulary | CountVocabulary | GivenVocabulary:
    chosen = source.vocabulary
    if isinstance(chosen, HashedVocabulary):
        return HashVocabulary(chosen.buckets)
    if isinstance(chosen, CountedVocabulary):
        return CountVocabulary(chosen.min_count)
    return GivenVocabulary(chosen.path)


def make_stream(config: Config, data: Data) -> Stream | None:
    """The periods of the training data, if the configuration asks for a stream. What is held out must be later."""
    if config.stream is None:
        return None
    periods = getattr(data.training, "periods", None)
    if periods is None:
        raise ConfigError(
            "stream: the data have no periods. A generated log has them with data.days above 1, a click log if it is several "
            "files or has a column period, day or block; a data set of your own needs an attribute `periods`, a whole "
            "number for each example"
        )
    assert config.stream.composition is not None
    stream = Stream(periods, config.stream.composition, config.stream.span)
    held_out = getattr(data.held_out, "periods", None)
    last = int(stream.periods.max())
    if held_out is not None and (first := int(np.min(held_out))) <= last:
        raise ConfigError(
            f"data.held_out: period {first} is held out, and the stream trains on periods up to {last}. A stream "
            f"is evaluated on later periods: hold out the last ones whole, as in data.held_out=[{last}]"
        )
    return stream


# ------------------------------------------------------------------ model, loss, optimizer


def limit_threads(config: Config) -> None:
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)


def seed_torch(config: Config) -> None:
    """Fixes the weights that a model starts with. Apart from the noise, whose only seed is training.seed."""
    training = config.training
    seed = training.seed if training.init_seed is None else training.init_seed
    if seed is not None:
        torch.manual_seed(seed)


def make_model(config: Config, training: Any) -> nn.Module:
    model = _new_model(config, training)
    parameters, tables = dict(model.named_parameters()), find_tables(model)
    needs = {"model.freeze_tables": config.model.freeze_tables, "optimizer.table_lr": config.optimizer.table_lr}
    for key, value in needs.items():
        if value and not tables:
            raise ConfigError(f"{key}: the model has no table (nn.Embedding or nn.EmbeddingBag)")
    if config.model.freeze_tables:
        for name in tables:
            parameters[name].requires_grad_(False)
    tell_noise(config, model, training)
    return model


def _new_model(config: Config, training: Any) -> nn.Module:
    seed_torch(config)
    chosen = config.model
    if isinstance(chosen, OwnModel):
        model = _call(config, "model", chosen.options, training)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.kind: {chosen.kind} returned {type(model).__name__}; expected a torch.nn.Module")
        return model
    if not isinstance(chosen, PctrModel):
        return make_sequence_model(chosen, training)
    if not hasattr(training, "vocabulary_sizes"):
        raise ConfigError("model.kind: pctr needs a click log; this data set has no vocabulary_sizes")
    return PCTR(training.vocabulary_sizes, hidden=chosen.hidden, hidden_layers=chosen.hidden_layers, dims=chosen.dim)


def make_loss(config: Config) -> Loss:
    if config.loss in SEQUENCE_LOSSES:
        return make_sequence_loss(config)
    if config.loss != "binary_cross_entropy":
        return config.code.find(config.loss, "loss")
    reduction = config.privacy.loss_reduction

    def binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, target, reduction=reduction)

    return binary_cross_entropy


def forward(model: nn.Module, loss: Loss, batch: Any) -> tuple[Any, Any, Tensor]:
    """(output, target, loss) of a batch, which is (inputs..., target) or a dict, as for `sparsedp.check`."""
    if isinstance(batch, Mapping):
        output, target = model(**batch), batch
    else:
        *inputs, target = batch
        output = model(*inputs)
    return output, target, loss(output, target)


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """With `optimizer.table_lr` there are two parameter groups: the dense parameters, then the tables."""
    chosen = config.optimizer
    kind = getattr(torch.optim, chosen.name)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [{"params": list(trained.values())}]
    if chosen.table_lr is not None:
        tables = find_tables(model)
        dense = [p for name, p in trained.items() if name not in tables]
        rows = [p for name, p in trained.items() if name in tables]
        groups = [{"params": dense}, {"params": rows, "lr": chosen.table_lr}]
    try:
        return kind([group for group in groups if group["params"]], lr=chosen.lr, **chosen.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {chosen.name} refuses its settings: {error}") from error


def model_bytes(model: nn.Module) -> int:
    """Of its parameters and buffers."""
    return sum(map(tensor_bytes, (*model.parameters(), *model.buffers())))


def tensor_bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:  # momentum of a table can be
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.numel() * tensor.element_size()


def optimizer_state_share(config: Config) -> float:
    """Bytes of optimizer state per byte of parameter, seen at a small parameter of its own."""
    probe = nn.Linear(32, 32, bias=False)
    optimizer = make_optimizer(config, probe)
    probe.weight.grad = torch.zeros_like(probe.weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[probe.weight].values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim()) / probe.weight.nbytes


def learning_rate_share(config: SchedulerConfig, steps: int) -> Callable[[int], float]:
    """The share of the learning rate for each step, from 0."""
    warmup = config.warmup or round(config.warmup_share * steps)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        if config.kind == "linear":
            return 1 - progress * (1 - config.final)
        if config.kind == "cosine":
            return config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    return share


# ------------------------------------------------------------------ a user's own


def _call(config: Config, section: str, options: dict[str, Any], *positional: Any) -> Any:
    address = config.addresses()[f"{section}.kind"]
    function = config.code.find(address, f"{section}.kind")
    try:
        inspect.signature(function).bind(*positional, **options)
    except TypeError as error:
        raise ConfigError(f"{section}.options: {address} cannot be called with them: {error}") from error
    return function(*positional, **options)
