"""One run of a configuration: from the data to the result, in a folder of its own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import SelfComposedDpEvent
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsedp import concerns
from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.audit.canaries import CanaryPlan
from sparsedp.check import CheckReport, check, memory_of_check
from sparsedp.cli.canaries import insert_canaries
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.evaluation import name_the_row
from sparsedp.cli.files import in_units, require_space, require_writable
from sparsedp.cli.memory import memory_left
from sparsedp.cli.prepare import (
    Prepared,
    limit_threads,
    load_data,
    make_model,
    model_bytes,
    prepare,
    refuse_together,
    with_collate,
)
from sparsedp.cli.processes import ALONE, Processes
from sparsedp.cli.progress import Reporter, every_few_seconds
from sparsedp.cli.result import RunResult
from sparsedp.cli.runfolder import RUNS, FolderOfFirst, RunFolder, refuse_used_folder
from sparsedp.cli.same_configuration import require_same_configuration
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.stopwatch import Stopwatch
from sparsedp.cli.training import Training
from sparsedp.cli.warnings_of_run import WarningsOfRun
from sparsedp.distributed.on_disk import large_tensors_on_disk
from sparsedp.errors import ConfigError, DataError, NonFiniteGradientError, SparseDPWarning
from sparsedp.sampling import is_repeatable
from sparsedp.validation import PrivateValidation

# Examples that `sparsedp.check` looks at, and how many of them one by one.
_CHECK_BATCH, _CHECK_UNITS = 4, 2


def run_training(
    config: Config,
    run_dir: Path | None = None,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    should_stop: Callable[[int], bool] = lambda step: False,
    on_signals: bool = False,
    data: Data | None = None,
    canaries: CanaryPlan | None = None,
    keep_model: bool = True,
    processes: Processes = ALONE,
    by_halves: bool = False,
    at_end: Callable[[Prepared], dict[str, Any]] = lambda parts: {},
) -> RunResult:
    """Runs a configuration to its end, or until `should_stop(step)` or, with `on_signals`, Ctrl-C or SIGTERM.

    With `resume` it goes on from the checkpoint in `run_dir`; otherwise `run_dir` must be new or empty. `data` is what
    `load_data` gave for this configuration, if it was called before. `canaries` are inserted into them, for an audit; a run
    that is resumed has those that it was started with. Without `keep_model` neither weights nor checkpoints are written, so
    that the run cannot be resumed. With `by_halves` the trained model is evaluated on two halves of what is held out too, to
    choose by and to report. What `at_end` returns joins the result. Of several `processes`, each calls it.
    """
    started = time.monotonic()
    reporter = reporter or Reporter()
    watch, warned = Stopwatch(), WarningsOfRun()
    with ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        enter(warned)
        folder: RunFolder | None = None
        if resume:
            assert run_dir is not None
            # Before data are read: another command may be at work in it.
            folder = enter(RunFolder.open(run_dir)) if processes.is_first else FolderOfFirst(run_dir)
            canaries = folder.read_canaries()
        elif processes.is_first:
            if run_dir is not None:
                refuse_used_folder(run_dir)
            require_writable(run_dir or RUNS, "Name another folder with --run-dir")
        limit_threads(config)
        config.make_mechanism()  # what it refuses is refused before any data is read
        if processes.several:
            require_same_configuration(config, processes)
            refuse_together(config)
        with watch("data"):
            if data is None:
                data = processes.in_turns(lambda: load_with_progress(config, reporter))
            data = with_collate(config, data, processes)
        if processes.is_first:
            concerns.warn(concerns_of_labels(config, data), stacklevel=2)
        if resume and processes.is_first and folder is not None and (changed := folder.changed_files(config)):
            warnings.warn(
                f"The run was started on other data: {', '.join(changed)} changed since. Its units are counted as if they had "
                "been there from the start. Put the file back as it was, or start a new run.",
                SparseDPWarning,
                stacklevel=2,
            )
        if canaries is not None:
            data = insert_canaries(config, data, canaries)
            reporter.say(f"Canaries: {canaries.insertions:,} examples inserted for an audit ({canaries.audit})")
        with _room_for_tables(config, run_dir, processes):
            model = make_model(config, data.training)
        with watch("check"), _naming_rows(config, model, data, processes):
            checked = _check(config, model, data, reporter, processes) if config.training.check else None
        with watch("plan"):
            prepared = prepare(config, data, model, processes=processes)
        if checked is not None:
            prepared.engine.add_check(checked)
        if canaries is not None:
            prepared.engine.add_note(
                f"{canaries.insertions} canaries, inserted for an audit ({canaries.audit}): this model is for the audit alone."
            )
        _describe(prepared, reporter)
        if keep_model and processes.is_first:
            _require_space(config, model, run_dir, resume)
        if folder is None and processes.is_first:
            folder = enter(RunFolder.create(run_dir, config, prepared.engine.plan, canaries))
        path = processes.from_first(None if folder is None else folder.path)
        folder = FolderOfFirst(path) if folder is None else folder
        signals = enter(stop_on_signals(tells=processes.is_first)) if on_signals else None
        training = Training(config, prepared, folder, reporter, started, keep_model, at_end, signals, watch, by_halves)
        if resume:
            training.restore()
            folder.write_config(config)
        warned.write_to(lambda text: folder.log({"kind": "warning", "step": training.step, "message": text}))
        reporter.say(f"Run folder: {folder.path}")
        with _naming_rows(config, model, data, processes):
            return training.run(lambda step: processes.any((signals is not None and signals()) or should_stop(step)))


@contextmanager
def _naming_rows(config: Config, model: nn.Module, data: Data, processes: Processes) -> Iterator[None]:
    """Lets errors of ids and labels name the row of the training set; one process alone can look for it."""
    try:
        yield
    except (DataError, NonFiniteGradientError):
        if not processes.several:
            name_the_row(config, model, config.make_loss(), data)
        raise


def _room_for_tables(config: Config, run_dir: Path | None, processes: Processes) -> AbstractContextManager[None]:
    """For making tables that several processes then divide: whole ones need not fit into memory."""
    if not processes.several or config.distributed.sharding == "data_parallel":
        return nullcontext()
    wanted = (run_dir or RUNS).absolute()
    return large_tensors_on_disk(next(path for path in (wanted, *wanted.parents) if path.is_dir()))


def _check(config: Config, model: nn.Module, data: Data, reporter: Reporter, processes: Processes) -> CheckReport:
    """`sparsedp.check` on a few examples; of several processes the first does it, for all."""
    return processes.from_first(_checked(config, model, data, reporter) if processes.is_first else None)


def _checked(config: Config, model: nn.Module, data: Data, reporter: Reporter) -> CheckReport:
    needed, left = memory_of_check(model), memory_left()
    if left is not None and needed > left:
        raise ConfigError(
            f"training.check: it compares gradients of whole tables and would take {in_units(needed)} of memory in one process; "
            f"{in_units(left)} are free. Give --set training.check=false here, and check the model once with smaller tables"
        )
    options: dict[str, Any] = {"units": _CHECK_UNITS, "loss_reduction": config.privacy.loss_reduction}
    if is_repeatable(data.training, data.collate):
        options["data_loader"] = DataLoader(data.training, batch_size=_CHECK_BATCH, collate_fn=data.collate)
    else:  # negatives are drawn anew
        options |= {"batch": data.examples(_CHECK_BATCH), "take": getattr(data.training, "take", None)}
    checked = check(model, config.make_loss(), **options)
    reporter.say(str(checked))
    return checked


def _require_space(config: Config, model: nn.Module, run_dir: Path | None, resume: bool) -> None:
    """For the weights and two checkpoints: the new one is written beside the old one."""
    weights = model_bytes(model)
    checkpoint = round(weights * (1 + max(config.optimizer.state_share(), config.optimizer.table_state_share())))
    needed = weights + checkpoint * (1 if resume else 2)
    hint = "" if resume else ", or name another folder with --run-dir"
    require_space(run_dir or RUNS, needed, "the checkpoints of this run and its weights", hint)


def load_with_progress(config: Config, reporter: Reporter) -> Data:
    started = time.monotonic()
    data = load_data(config, every_few_seconds(lambda rows: reporter.say(f"Reading the data: {rows:,} rows so far")))
    held_out = "nothing" if data.held_out is None else f"{len(data.held_out):,}"
    seconds = time.monotonic() - started
    reporter.say(f"Data: {len(data.training):,} examples to train on, {held_out} held out ({seconds:.1f} s)")
    summary = getattr(getattr(data.training, "sequences", data.training), "summary", None)
    if summary is not None and summary.malformed:
        reporter.say(f"Left out: {summary.malformed:,} malformed lines, the first {summary.first[0]}")
    return data


def concerns_of_labels(config: Config, data: Data) -> list[str]:
    """What the labels of classes say about a run, if the data sets tell them."""
    if config.loss not in ("binary_cross_entropy", "cross_entropy"):
        return []
    return concerns.of_labels(_labels_of(data.training), _labels_of(data.held_out))


def _labels_of(part: Any) -> np.ndarray | None:
    """Of a data set of ours, or of one whose last tensor they are."""
    labels = part.tensors[-1].numpy() if isinstance(part, TensorDataset) else getattr(part, "labels", None)
    return labels if isinstance(labels, np.ndarray) else None


def _describe(prepared: Prepared, reporter: Reporter) -> None:
    plan = prepared.engine.plan
    budget = "" if plan.target_epsilon is None else f" for epsilon {plan.target_epsilon:g} at delta {prepared.delta:g}"
    reporter.say(f"Model: {sum(p.numel() for p in prepared.model.parameters()):,} parameters")
    reporter.say(
        f"Plan: {plan.mechanism.name}, noise multiplier {plan.noise_multiplier:.4g}{budget}; "
        f"{prepared.steps:,} steps of {plan.batch_size:,} {plan.unit}s (rate {plan.sample_rate:.3g})"
    )
    if isinstance(plan.validation, PrivateValidation):
        looks, event = plan.validation.looks, plan.validation.event
        alone = epsilon_of(SelfComposedDpEvent(event, looks), prepared.delta, plan.accountant)
        reporter.say(
            f"Early stopping: up to {looks:,} looks at {plan.validation.units:,} private {plan.unit}s, with noise of deviation "
            f"{plan.validation.std:g} on each mean; all looks together cost epsilon {alone:.3g} by themselves, and the target "
            "includes them"
        )
    elif plan.validation == "public":
        reporter.say("Early stopping: half of the held-out data is looked at as public, and nobody in it is protected")
    if (stream := prepared.loader.stream) is not None:
        first, last = stream.period_name(stream.periods.min()), stream.period_name(stream.periods.max())
        reporter.say(
            f"Stream: periods {first} to {last}, {stream.span} at a time; the {len(stream.spans)} spans compose in "
            f"{'parallel' if stream.composition == 'parallel' else 'sequence'}"
        )
