"""Trains a model privately, as a configuration says, and leaves a folder with the model and its promise."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.utils.data import Subset

from sparsedp.check import check
from sparsedp.cli.assemble import (
    Data,
    Prepared,
    limit_threads,
    load_data,
    make_loss,
    make_model,
    prepare,
    with_collate,
)
from sparsedp.cli.config import Config, differences
from sparsedp.cli.evaluate import evaluate, evaluate_on
from sparsedp.cli.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.progress import Reporter, Status, make_reporter
from sparsedp.cli.result import RunResult, Totals
from sparsedp.cli.runfolder import RunFolder, plain, refuse_used_folder
from sparsedp.cli.sequences import SequenceCollate, release_frequencies
from sparsedp.cli.signals import stop_on_signals
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import ConfigError
from sparsedp.refusals import find_tables

INTERRUPTED = 130
# Examples that `sparsedp.check` looks at, and how many of them one by one.
_CHECK_BATCH, _CHECK_UNITS = 4, 2
# What a resumed run may do differently: nothing that the plan, the weights or the data depend on.
MAY_CHANGE = {
    "training.workers",
    "training.threads",
    "training.max_physical_batch",
    "training.evaluate_every",
    "training.evaluate_every_epochs",
    "training.checkpoint_every",
    "training.log_every",
    "training.check",
    "stream.evaluate_next",
}

EPILOG = """examples:
  sparsedp train demo                                    a generated click log, in about a minute
  sparsedp train demo --set privacy.target_epsilon=1     the same with more noise
  sparsedp train stream                                  days in order of time, evaluated on later days
  sparsedp train criteo --set 'data.paths=train.txt.gz'  a click log in Criteo's format
  sparsedp train sequences                               the next item of generated sequences, in less than a minute
  sparsedp train movielens --set data.path=ratings.dat   the next film, a user as the unit
  sparsedp train my.yaml --run-dir runs/mine --json      the result as JSON; progress goes to stderr
  sparsedp train --resume runs/mine                      go on after Ctrl-C or a crash

`sparsedp plan` says beforehand what a run will cost. `sparsedp train demo --show-config` explains the keys of a
configuration; a run's own folder holds all of them, with their values, in config.yaml.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser, required=False)
    parser.add_argument(
        "--resume", metavar="RUN", type=Path, help="go on with the run in this folder, from its checkpoint"
    )
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the folder to write (runs/<name>-<time>)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    if args.resume is None:
        if args.config is None:
            raise ConfigError("CONFIG is missing: a YAML file or the name of a bundled one, such as demo")
        config = load_config(args.config, args.overrides)
    else:
        if args.run_dir is not None:
            raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out")
        config = _resumed_config(args.resume, args.config, args.overrides)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet)
    resume = args.resume is not None
    result = run_training(config, args.resume or args.run_dir, resume=resume, reporter=reporter, on_signals=True)
    if args.json:
        print(json.dumps(plain(result.to_dict()), indent=2))
    if not result.finished:
        console.print(
            f"Stopped after step {result.totals.steps} of {result.planned_steps}; the checkpoint is written. "
            f"Go on with:\n  sparsedp train --resume {result.run_dir}",
            markup=False,
            soft_wrap=True,
        )
        return INTERRUPTED
    if not args.json:
        if not args.quiet:
            console.print(f"\n{result.statement}", markup=False, soft_wrap=True)
        console.print(result.table())
    return 0


def _resumed_config(folder: Path, source: str | None, overrides: list[str]) -> Config:
    """The run's own configuration. Another one, or --set, may change what the result does not hang on."""
    _, old = RunFolder.open(folder)
    new = load_config(folder / "config.yaml" if source is None else source, overrides)
    refused = sorted(set(differences(old, new)) - MAY_CHANGE)
    if refused:
        raise ConfigError(
            f"{folder} was started with another {', '.join(refused)}. A resumed run may change only "
            f"{', '.join(sorted(MAY_CHANGE))}; start a new run for the rest."
        )
    return new


def run_training(
    config: Config,
    run_dir: Path | None = None,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    should_stop: Callable[[int], bool] = lambda step: False,
    on_signals: bool = False,
    data: Data | None = None,
    keep_model: bool = True,
    at_end: Callable[[Prepared], dict[str, Any]] = lambda parts: {},
) -> RunResult:
    """Runs a configuration to its end, or until `should_stop(step)` or, with `on_signals`, Ctrl-C or SIGTERM.

    With `resume` it goes on from the checkpoint in `run_dir`; otherwise `run_dir` must be new or empty. `data` is what
    `load_data` gave for this configuration, if it was called before. Without `keep_model` neither weights nor
    checkpoints are written, so that the run cannot be resumed. What `at_end` returns joins the result.
    """
    started = time.monotonic()
    reporter = reporter or Reporter()
    if run_dir is not None and not resume:
        refuse_used_folder(run_dir)
    limit_threads(config)
    data = with_collate(config, _load(config, reporter) if data is None else data)
    model = make_model(config, data.training)
    checked = None
    if config.training.check:
        take = getattr(data.training, "take", None)
        batch = data.examples(_CHECK_BATCH)
        reduction = config.privacy.loss_reduction
        checked = check(model, make_loss(config), batch, units=_CHECK_UNITS, loss_reduction=reduction, take=take)
        reporter.say(str(checked))
    prepared = prepare(config, data, model)
    if checked is not None:
        prepared.engine.add_check(checked)
    _describe(prepared, reporter)
    if resume:
        assert run_dir is not None
        folder, _ = RunFolder.open(run_dir)
        training = _Training(config, prepared, folder, reporter, started, keep_model, at_end)
        training.restore()
        folder.write_config(config)
    else:
        folder = RunFolder.create(run_dir, config, prepared.engine.plan)
        training = _Training(config, prepared, folder, reporter, started, keep_model, at_end)
    reporter.say(f"Run folder: {folder.path}")
    if on_signals:
        with stop_on_signals() as asked:
            return training.run(lambda step: asked() or should_stop(step))
    return training.run(should_stop)


def _load(config: Config, reporter: Reporter) -> Data:
    started = last = time.monotonic()

    def progress(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            reporter.say(f"Reading the click log: {rows:,} rows so far")

    data = load_data(config, progress)
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


def _values(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in metrics.items() if isinstance(v, float))


class _EpsilonSpent:
    """The ledger's epsilon, computed so rarely that it does not slow training down."""

    def __init__(self, engine: PrivacyEngine, delta: float) -> None:
        self._engine, self._delta = engine, delta
        self._value, self._next = 0.0, 0.0

    def __call__(self, last: bool) -> float:
        started = time.monotonic()
        if last or started >= self._next:
            self._value = self._engine.get_epsilon(self._delta)
            took = time.monotonic() - started
            self._next = started + max(0.5, 20 * took)
        return self._value


class _Training:
    """The loop, and what is written down on the way."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        folder: RunFolder,
        reporter: Reporter,
        started: float,
        keep_model: bool,
        at_end: Callable[[Prepared], dict[str, Any]],
    ) -> None:
        self.config, self.parts, self.folder, self.reporter = config, prepared, folder, reporter
        self.keep_model, self.at_end = keep_model, at_end
        self.totals = Totals()
        self.started = started
        self.earlier_seconds = 0.0  # of the runs that this one resumes
        self.evaluation: dict[str, Any] = {}  # the latest, after step `evaluated`
        self.evaluated = 0
        self.epsilon_spent = _EpsilonSpent(prepared.engine, prepared.delta)

    @property
    def step(self) -> int:
        """Steps taken in all."""
        return self.parts.engine.ledger.steps

    def run(self, should_stop: Callable[[int], bool]) -> RunResult:
        release_frequencies(self.config, self.parts.model, self.parts.engine)
        self.reporter.begin(self.step, self.parts.steps)
        try:
            self._train(should_stop)
        finally:
            self.reporter.end()
        finished = self.step == self.parts.steps
        if finished:
            self._evaluate()
        self.save()
        result = self._result(finished)
        if finished:
            self.folder.write_result(result.to_dict())
        return result

    def _train(self, should_stop: Callable[[int], bool]) -> None:
        settings = self.config.training
        every = settings.evaluate_every
        if settings.evaluate_every_epochs is not None:
            every = settings.evaluate_every_epochs * self.parts.loader.steps_per_epoch
        while self.step < self.parts.steps and not should_stop(self.step):
            for done in steps_of_epoch(self.parts):
                step, row = self.step, self._count(done)
                if step % settings.log_every == 0 or step == self.parts.steps:
                    self.folder.log(row)
                if every is not None and step % every == 0:
                    self._evaluate()
                self._evaluate_next()
                if should_stop(step):
                    return
                if settings.checkpoint_every is not None and step % settings.checkpoint_every == 0:
                    self.save()

    def _count(self, done: Step) -> dict[str, Any]:
        """Adds a step to the totals and shows it; returns what is logged about it."""
        report, totals = done.report, self.totals
        totals.add(report, done.seconds)
        speed = totals.examples / totals.training_seconds
        stream = self.parts.loader.stream
        self.reporter.show(
            Status(
                self.step,
                done.loss,
                self.epsilon_spent(self.step == self.parts.steps),
                report.rows_touched,
                speed,
                None if stream is None or done.span is None else stream.names[done.span],
            )
        )
        return {
            "kind": "step",
            "step": self.step,
            **({} if done.span is None else {"span": done.span}),
            "loss": done.loss,
            "lr": done.lr,
            **({} if done.table_lr is None else {"table_lr": done.table_lr}),
            "units": report.units,
            "examples": report.examples,
            "clipped_share": report.clipped_share,
            "mean_norm": report.mean_norm,
            "rows_touched": report.rows_touched,
            "gradient_size": report.gradient_size,
            "reduction": report.reduction if report.tables else None,
            "kept_mass": report.kept_mass if report.tables else None,
            "tables": {
                name: {"touched": table.rows_touched, "selected": table.rows_selected, "false": table.rows_false}
                for name, table in report.tables.items()
            },
            "seconds": done.seconds,
        }

    def _evaluate(self) -> None:
        if self.evaluated == self.step:
            return
        self.evaluation = evaluate(self.config, self.parts.model, self.parts.loss, self.parts.data)
        self.evaluated = self.step
        if self.evaluation:
            epsilon = self.parts.engine.get_epsilon(self.parts.delta)
            self.folder.log({"kind": "evaluation", "step": self.step, **self.evaluation, "epsilon": epsilon})
            self.reporter.say(f"Held out, after step {self.step}: {_values(self.evaluation)}  (epsilon {epsilon:.3f})")

    def _evaluate_next(self) -> None:
        """After a span: how good the model is on the next one, by period, before it is trained on it.

        In the first pass over the stream only: later ones have seen all of it.
        """
        settings, loader = self.config.stream, self.parts.loader
        borders = list(accumulate(loader.span_steps))[:-1]
        if settings is None or not settings.evaluate_next or self.step not in borders:
            return
        assert loader.stream is not None
        data, indices = self.parts.data, loader.stream.spans[borders.index(self.step) + 1]
        part = Subset(data.training, indices.tolist())
        periods = loader.stream.periods[indices]
        found = evaluate_on(self.config, self.parts.model, self.parts.loss, part, data.collate, periods)
        epsilon = self.parts.engine.get_epsilon(self.parts.delta)
        for period, values in found["periods"].items():
            row = {"kind": "evaluation", "step": self.step, "period": int(period), **values, "epsilon": epsilon}
            self.folder.log(row)
            self.reporter.say(f"Period {period}, before training on it, after step {self.step}: {_values(values)}")

    def save(self) -> None:
        """The statement first: if a kill comes between, it promises too little for the weights."""
        self.totals.seconds = self.earlier_seconds + time.monotonic() - self.started
        engine = self.parts.engine
        self.folder.write_statement(engine.statement(self.parts.delta))
        if not self.keep_model:
            return
        extra = {
            "scheduler": self.parts.scheduler.state_dict(),
            "totals": asdict(self.totals),
            "evaluation": self.evaluation,
            "evaluated": self.evaluated,
            "negatives": collate.state() if isinstance(collate := self.parts.data.collate, SequenceCollate) else None,
        }
        engine.save_checkpoint(self.folder.checkpoint, extra=extra)
        self.folder.write_weights(self.parts.model.state_dict())

    def restore(self) -> None:
        extra = self.parts.engine.load_checkpoint(self.folder.checkpoint)
        self.parts.scheduler.load_state_dict(extra["scheduler"])
        before = extra["totals"]
        self.totals = Totals(**{"examples": before["units"], **before})  # from before there were users: as many
        self.earlier_seconds = self.totals.seconds
        self.evaluation, self.evaluated = extra["evaluation"], extra["evaluated"]
        if isinstance(collate := self.parts.data.collate, SequenceCollate):
            collate.restore(extra["negatives"])
        self.folder.forget_after(self.step)
        self.reporter.say(f"Resumed after step {self.step} of {self.parts.steps}")

    def _result(self, finished: bool) -> RunResult:
        tables = find_tables(self.parts.model)
        sizes = {name: p.numel() for name, p in self.parts.model.named_parameters() if p.requires_grad}
        return RunResult(
            run_dir=self.folder.path,
            finished=finished,
            planned_steps=self.parts.steps,
            totals=self.totals,
            dense_size=sum(size for name, size in sizes.items() if name in tables),
            statement=self.parts.engine.statement(self.parts.delta),
            metrics=self.evaluation if self.evaluated == self.step else {},
            planted_auc=getattr(self.parts.data.held_out, "planted_auc", None),
            tables_frozen=self.config.model.freeze_tables,
            extra=self.at_end(self.parts) if finished else {},
        )
