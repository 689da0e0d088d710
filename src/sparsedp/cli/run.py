"""One run of a configuration: from the data to the result, in a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from sparsedp.audit.canaries import CanaryPlan
from sparsedp.check import CheckReport, check
from sparsedp.cli.canaries import insert_canaries
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.files import require_space
from sparsedp.cli.prepare import (
    Prepared,
    limit_threads,
    load_data,
    make_model,
    model_bytes,
    prepare,
    with_collate,
)
from sparsedp.cli.progress import Reporter, every_few_seconds
from sparsedp.cli.result import RunResult
from sparsedp.cli.runfolder import RunFolder, refuse_used_folder
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.training import Training
from sparsedp.sampling import is_repeatable

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
    at_end: Callable[[Prepared], dict[str, Any]] = lambda parts: {},
) -> RunResult:
    """Runs a configuration to its end, or until `should_stop(step)` or, with `on_signals`, Ctrl-C or SIGTERM.

    With `resume` it goes on from the checkpoint in `run_dir`; otherwise `run_dir` must be new or empty. `data` is what
    `load_data` gave for this configuration, if it was called before. `canaries` are inserted into them, for an audit; a run
    that is resumed has those that it was started with. Without `keep_model` neither weights nor checkpoints are written, so
    that the run cannot be resumed. What `at_end` returns joins the result.
    """
    started = time.monotonic()
    reporter = reporter or Reporter()
    with ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        folder: RunFolder | None = None
        if resume:
            assert run_dir is not None
            folder = enter(RunFolder.open(run_dir))  # before data are read: another command may be at work in it
            canaries = folder.read_canaries()
        elif run_dir is not None:
            refuse_used_folder(run_dir)
        limit_threads(config)
        config.make_mechanism()  # what it refuses is refused before any data is read
        data = with_collate(config, load_with_progress(config, reporter) if data is None else data)
        if canaries is not None:
            data = insert_canaries(config, data, canaries)
            reporter.say(f"Canaries: {canaries.insertions:,} examples inserted for an audit ({canaries.audit})")
        model = make_model(config, data.training)
        checked = _check(config, model, data, reporter) if config.training.check else None
        prepared = prepare(config, data, model)
        if checked is not None:
            prepared.engine.add_check(checked)
        if canaries is not None:
            prepared.engine.add_note(
                f"{canaries.insertions} canaries, inserted for an audit ({canaries.audit}): this model is for the audit alone."
            )
        _describe(prepared, reporter)
        if keep_model:
            _require_space(config, model, run_dir, resume)
        if folder is None:
            folder = enter(RunFolder.create(run_dir, config, prepared.engine.plan, canaries))
        signals = enter(stop_on_signals()) if on_signals else None
        training = Training(config, prepared, folder, reporter, started, keep_model, at_end, signals)
        if resume:
            training.restore()
            folder.write_config(config)
        reporter.say(f"Run folder: {folder.path}")
        return training.run(lambda step: (signals is not None and signals()) or should_stop(step))


def _check(config: Config, model: nn.Module, data: Data, reporter: Reporter) -> CheckReport:
    """`sparsedp.check` on a few examples."""
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
    checkpoint = round(weights * (1 + config.optimizer.state_share()))
    needed = weights + checkpoint * (1 if resume else 2)
    hint = "" if resume else ", or name another folder with --run-dir"
    require_space(run_dir or Path("runs"), needed, "the checkpoints of this run and its weights", hint)


def load_with_progress(config: Config, reporter: Reporter) -> Data:
    started = time.monotonic()
    data = load_data(
        config, every_few_seconds(lambda rows: reporter.say(f"Reading the click log: {rows:,} rows so far"))
    )
    held_out = "nothing" if data.held_out is None else f"{len(data.held_out):,}"
    seconds = time.monotonic() - started
    reporter.say(f"Data: {len(data.training):,} examples to train on, {held_out} held out ({seconds:.1f} s)")
    return data


def _describe(prepared: Prepared, reporter: Reporter) -> None:
    plan = prepared.engine.plan
    budget = "" if plan.target_epsilon is None else f" for epsilon {plan.target_epsilon:g} at delta {prepared.delta:g}"
    reporter.say(f"Model: {sum(p.numel() for p in prepared.model.parameters()):,} parameters")
    reporter.say(
        f"Plan: {plan.mechanism.name}, noise multiplier {plan.noise_multiplier:.4g}{budget}; "
        f"{prepared.steps:,} steps of {plan.batch_size:,} {plan.unit}s (rate {plan.sample_rate:.3g})"
    )
    if (stream := prepared.loader.stream) is not None:
        first, last = int(stream.periods.min()), int(stream.periods.max())
        reporter.say(
            f"Stream: periods {first} to {last}, {stream.span} at a time; the {len(stream.spans)} spans compose in "
            f"{'parallel' if stream.composition == 'parallel' else 'sequence'}"
        )
