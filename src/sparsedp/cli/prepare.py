"""From a configuration to the objects of a run: data, model, optimizer and the private ones."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from sparsedp.advice import NOTE_OF_DATA
from sparsedp.cli.collate import SequenceCollate
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data, RowsRead
from sparsedp.cli.config.losses import SEQUENCE_LOSSES, Loss
from sparsedp.cli.processes import ALONE, Processes
from sparsedp.cli.progress import draw_progress
from sparsedp.cli.validation import plan_validation, with_validation
from sparsedp.data import LabelCollate
from sparsedp.distributed import shard_tables
from sparsedp.distributed.on_disk import take_from_disk
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import ConfigError, UnsupportedError, refuse_labels
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import Mechanism
from sparsedp.models import DPFormer
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.plan import PrivacyPlan, default_delta, require_delta
from sparsedp.progress import Progress, no_progress
from sparsedp.sampling import PrivateLoader, Stream
from sparsedp.settings import setting_names
from sparsedp.tables import find_tables
from sparsedp.validation import EarlyStopping


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
    steps: int  # of the run in all
    delta: float
    processes: Processes = ALONE
    stopping: EarlyStopping | None = None

    @property
    def steps_taken(self) -> int:
        """Those that the ledger has counted, in the runs that this one resumes, too."""
        return self.engine.ledger.steps

    @property
    def finished(self) -> bool:
        return self.steps_taken == self.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        return self.stopping is not None and self.stopping.stopped


def prepare(
    config: Config,
    data: Data,
    model: nn.Module,
    progress: Progress = draw_progress,
    processes: Processes = ALONE,
    *,
    mechanism: Mechanism | None = None,
    release: FrequencyRelease | None = None,
) -> Prepared:
    """Plans the run, calibrating the noise if the configuration asks for an epsilon. `progress` is told of what takes long.

    Of several processes, each keeps its part of the model's tables, if the configuration divides them. `mechanism` and
    `release` take the place of the configuration's own.
    """
    training, privacy = config.training, config.privacy
    if processes.several:
        try:
            shard_tables(model, config.distributed.of_tables)
        except UnsupportedError as error:
            raise ConfigError(f"distributed.sharding: {config.distributed.sharding}: {error}") from error
        take_from_disk(model)
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
        progress=progress if processes.is_first else no_progress,
        rank_timeout=config.distributed.rank_timeout,
    )
    units = _units(config, data)
    delta = default_delta(units) if privacy.target_delta is None else privacy.target_delta
    require_delta(delta, units, privacy.allow_large_delta)  # also with given noise, whose statement comes at the end
    # A setting has the same name in a configuration; what is an object is made of it.
    settings = {name: getattr(privacy, name) for name in setting_names() if hasattr(privacy, name)}
    common: dict[str, Any] = {
        **settings,
        "module": model,
        "optimizer": config.optimizer.make(model),
        "data_loader": loader,
        "mechanism": mechanism or config.make_mechanism(),
        "max_physical_batch": training.max_physical_batch,
        "stream": make_stream(config, data),
        "frequencies": release or privacy.make_release(),
        "validation": plan_validation(config, data, units),
    }
    if privacy.target_epsilon is not None:
        model, optimizer, private = engine.make_private_with_epsilon(
            target_epsilon=privacy.target_epsilon, target_delta=delta, epochs=training.epochs, **common
        )
    else:
        assert config.noise_multiplier is not None
        model, optimizer, private = engine.make_private(noise_multiplier=config.noise_multiplier, **common)
    if privacy.chosen_on_data:
        engine.add_note(NOTE_OF_DATA)
    if data.vocabulary_is_private:
        engine.add_note("The vocabulary, which was counted on the private data without noise.")
    for note in data.notes:
        engine.add_note(note)
    if (unit_is := getattr(data.training, "unit_is", None)) is not None:
        engine.describe_unit(unit_is)
    tell_noise(config, model, data.training, engine.plan)
    steps = training.epochs * private.steps_per_epoch
    scheduler = LambdaLR(optimizer, config.optimizer.scheduler.shares(steps))
    early = training.early_stopping
    stopping = None if early is None else EarlyStopping(early.patience, early.min_improvement)
    loss = config.make_loss()
    return Prepared(engine, model, optimizer, private, scheduler, loss, data, steps, delta, processes, stopping)


def refuse_together(config: Config) -> None:
    """What several processes cannot train, with what to change."""
    divided = config.distributed.sharding != "data_parallel"
    if config.make_mechanism().noise_waits and not divided:
        raise ConfigError(
            "distributed.sharding: with data_parallel every process has all tables whole, and lazydp settles a row where it is "
            "read, of which the others would not hear. Choose row_wise, table_wise or column_wise"
        )
    if divided and config.distributed.sharding != "planned" and config.loss == "softmax":
        raise ConfigError(
            "loss: softmax compares with all rows of a table in every step, and here they are divided among the processes. "
            "Choose sampled_softmax or binary_candidates with training.negatives, or distributed.sharding=data_parallel (or "
            "planned, with a copy of that table on each)"
        )


def _units(config: Config, data: Data) -> int:
    """How many units the training data have: examples, or users."""
    if config.privacy.unit == "example":
        return len(data.training)
    users = getattr(data.training, "users", None)
    if users is None:
        raise ConfigError(
            "privacy.unit: user needs to know whose each example is. A generated log has users with data.users, a click log "
            "with data.user_column, a table with data.user; a data set of your own needs an attribute `users`, a whole number "
            "for each example"
        )
    return len(np.unique(users))


def leave_signals_to_the_main_process(worker: int) -> None:
    """Ctrl-C reaches loader workers too; they must live until the main process has finished its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ------------------------------------------------------------------ data


def load_data(config: Config, progress: RowsRead | None = None) -> Data:
    """Generates or reads the data. `progress` is called with the rows of a click log read so far."""
    seed_torch(config)
    return with_validation(config, config.data.load(config.code, progress))


def with_collate(config: Config, data: Data, processes: Processes = ALONE) -> Data:
    """The data with batches as the loss wants them, with what is drawn for them: labels and negatives."""
    named = config.loss in SEQUENCE_LOSSES
    if not named and not isinstance(data.collate, LabelCollate):
        return data
    if not hasattr(data.training, "items"):
        raise ConfigError(f"loss: {config.loss} is for sequences; this data set has no attribute items")
    return replace(
        data, collate=SequenceCollate(config.training, data.training.items, data.collate, named, processes.rank)
    )


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
    every = getattr(data.training, "every", None)
    stream = Stream(periods, config.stream.composition, config.stream.span, config.stream.sample_rate, every)
    held_out = getattr(data.held_out, "periods", None)
    last = int(stream.periods.max())
    if held_out is not None and (first := int(np.asarray(held_out).min())) <= last:
        early, late = stream.period_name(first), stream.period_name(last)
        example = f"[{late}]" if every is None else f"['{late}']"
        raise ConfigError(
            f"data.held_out: period {early} is held out, and the stream trains on periods up to {late}. A stream "
            f"is evaluated on later periods: hold out the last ones whole, as in data.held_out={example}"
        )
    return stream


# ------------------------------------------------------------------ model


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
    seed_torch(config)
    model = config.model.make(training, config.code)
    parameters, tables = dict(model.named_parameters()), find_tables(model)
    needs = {
        "model.freeze_tables": config.model.freeze_tables,
        "optimizer.table_lr": config.optimizer.table_lr,
        "optimizer.tables": config.optimizer.tables,
    }
    for key, value in needs.items():
        if value and not tables:
            raise ConfigError(f"{key}: the model has no table (nn.Embedding or nn.EmbeddingBag)")
    if config.model.freeze_tables:
        for name in tables:
            parameters[name].requires_grad_(False)
    tell_noise(config, model, training)
    return model


def tell_noise(config: Config, model: nn.Module, training: Any, plan: PrivacyPlan | None = None) -> None:
    """Tells a model that corrects for noise how much there is. Before there is a plan, an arbitrary amount, so that the model
    can be tried.
    """
    config.model.tell_noise(
        model,
        training,
        noise_multiplier=1.0 if plan is None else plan.mechanism.gradient_noise(plan.noise_multiplier),
        batch_size=config.training.batch_size,
        releases_frequencies=config.privacy.frequencies is not None,
    )


def release_frequencies(config: Config, model: nn.Module, engine: PrivacyEngine) -> None:
    """Once in a run, if it is planned. A run that is resumed has what was released in its checkpoint.

    What is decided by it, such as AdaFEST's threshold, is decided then.
    """
    if engine.plan.frequencies is None:
        return
    released = engine.ledger.setups(None, engine.plan.frequencies.event)
    if not released and isinstance(model, DPFormer) and config.model.has_reattention:
        model.estimate_errors(engine)
    engine.prepare()


def forward(model: nn.Module, loss: Loss, batch: Any) -> tuple[Any, Any, Tensor]:
    """(output, target, loss) of a batch, which is (inputs..., target) or a dict, as for `sparsedp.check`."""
    if isinstance(batch, Mapping):
        output, target = model(**batch), batch
    else:
        *inputs, target = batch
        output = model(*inputs)
    try:
        return output, target, loss(output, target)
    except RuntimeError as error:
        refuse_labels(target, error)
        raise


def model_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of a model."""
    return sum(map(tensor_bytes, (*model.parameters(), *model.buffers())))


def tensor_bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:  # momentum of a table can be
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.numel() * tensor.element_size()
