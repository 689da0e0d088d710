"""Trains a model privately, as a configuration says, and leaves a folder with the model and its promise."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from sparsedp.check import check
from sparsedp.cli.assemble import (
    Data,
    Prepared,
    limit_threads,
    load_data,
    make_loss,
    make_model,
    model_bytes,
    optimizer_state_share,
    prepare,
    with_collate,
)
from sparsedp.cli.config import Config, differences
from sparsedp.cli.files import require_space
from sparsedp.cli.load import add_config_arguments, covers, explain_config, load_config
from sparsedp.cli.progress import Reporter, every_few_seconds, make_reporter
from sparsedp.cli.result import RunResult
from sparsedp.cli.runfolder import RunFolder, plain, refuse_used_folder, require_run_folder
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.training import Training, command_on_run
from sparsedp.cli.trust import add_code_argument
from sparsedp.errors import ConfigError
from sparsedp.sampling import is_repeatable

NOT_EVALUATED, INTERRUPTED = 3, 130
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
    "training.checkpoint_minutes",
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
  sparsedp train --resume runs/mine --code my.yaml       the same, with code of your own beside my.yaml

Exit codes: 0 done; 2 an error; 3 trained, but the evaluation failed (`sparsedp evaluate RUN` makes up for it); 130 stopped
by Ctrl-C or SIGTERM.

`sparsedp plan` says beforehand what a run will cost. `sparsedp train demo --show-config` explains the keys of a
configuration; a run's own folder holds all of them, with their values, in config.yaml.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser, required=False)
    parser.add_argument(
        "--resume", metavar="RUN", type=Path, help="go on with the run in this folder, from its checkpoint"
    )
    add_code_argument(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the folder to write (runs/<name>-<time>)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet)
    if args.resume is None:
        if args.config is None:
            raise ConfigError("CONFIG is missing: a YAML file or the name of a bundled one, such as demo")
        if args.code is not None:
            raise ConfigError("--code is for --resume; the code of a new run lies beside CONFIG")
        config = load_config(args.config, args.overrides, args.trust)
    else:
        if args.run_dir is not None:
            raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out")
        config = resumed_config(args.resume, args.config, args.overrides, args.trust, args.code)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    resume = args.resume is not None
    result = run_training(config, args.resume or args.run_dir, resume=resume, reporter=reporter, on_signals=True)
    if args.json:
        print(json.dumps(plain(result.to_dict()), indent=2))
    folder = RunFolder(result.run_dir)
    if not result.finished:
        told = f"Stopped after step {result.totals.steps} of {result.planned_steps}; the checkpoint is written. Go on with:"
        _tell(console, f"{told}\n  {command_on_run('train --resume', config, folder)}")
        return INTERRUPTED
    if not args.json:
        if not args.quiet:
            console.print(f"\n{result.statement}", markup=False, soft_wrap=True)
        console.print(result.table())
    if result.failure is None:
        return 0
    told = f"Trained, not evaluated: {result.failure.rstrip('.')}. The model and its statement are in {folder.release}."
    _tell(console, f"{told} Make up for the evaluation with:\n  {command_on_run('evaluate', config, folder)}")
    return INTERRUPTED if result.failure == "interrupted" else NOT_EVALUATED


def _tell(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def resumed_config(
    folder: Path,
    source: str | None,
    overrides: Sequence[str],
    trust: Sequence[str],
    code: str | None,
    may_change: Set[str] = MAY_CHANGE,
) -> Config:
    """The run's own configuration. Another one, or --set, may change what the result does not hang on."""
    require_run_folder(folder)
    old, new = RunFolder(folder).load_config(source, overrides, trust, code)
    refused = sorted(key for key in differences(old, new) if not any(covers(allowed, key) for allowed in may_change))
    if refused:
        raise ConfigError(
            f"{folder} was started with another {', '.join(refused)}. Here only {', '.join(sorted(may_change))} may change; "
            "start a new run for the rest."
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
    with ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        folder: RunFolder | None = None
        if resume:
            assert run_dir is not None
            folder = enter(RunFolder.open(run_dir))  # before data are read: another command may be at work in it
        elif run_dir is not None:
            refuse_used_folder(run_dir)
        limit_threads(config)
        config.make_mechanism()  # what it refuses is refused before any data is read
        data = with_collate(config, load_with_progress(config, reporter) if data is None else data)
        model = make_model(config, data.training)
        checked = None
        if config.training.check:
            options: dict[str, Any] = {"units": _CHECK_UNITS, "loss_reduction": config.privacy.loss_reduction}
            if is_repeatable(data.training, data.collate):
                options["data_loader"] = DataLoader(data.training, batch_size=_CHECK_BATCH, collate_fn=data.collate)
            else:  # negatives are drawn anew
                options |= {"batch": data.examples(_CHECK_BATCH), "take": getattr(data.training, "take", None)}
            checked = check(model, make_loss(config), **options)
            reporter.say(str(checked))
        prepared = prepare(config, data, model)
        if checked is not None:
            prepared.engine.add_check(checked)
        _describe(prepared, reporter)
        if keep_model:
            _require_space(config, model, run_dir, resume)
        if folder is None:
            folder = enter(RunFolder.create(run_dir, config, prepared.engine.plan))
        signals = enter(stop_on_signals()) if on_signals else None
        training = Training(config, prepared, folder, reporter, started, keep_model, at_end, signals)
        if resume:
            training.restore()
            folder.write_config(config)
        reporter.say(f"Run folder: {folder.path}")
        return training.run(lambda step: (signals is not None and signals()) or should_stop(step))


def _require_space(config: Config, model: nn.Module, run_dir: Path | None, resume: bool) -> None:
    """For the weights and two checkpoints: the new one is written beside the old one."""
    weights = model_bytes(model)
    checkpoint = round(weights * (1 + optimizer_state_share(config)))
    room = weights + checkpoint * (1 if resume else 2)
    hint = "" if resume else ", or name another folder with --run-dir"
    require_space(run_dir or Path("runs"), room, "the checkpoints of this run and its weights", hint)


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
