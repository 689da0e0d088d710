"""Trains a model privately, as a configuration says, and leaves a folder with the model and its promise."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from sparsedp.cli.arguments import positive_count
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.config.trust import add_code_argument
from sparsedp.cli.launch import end_with_parent, is_started_here, launch
from sparsedp.cli.prepare import refuse_together
from sparsedp.cli.processes import Processes, run_together, started_together
from sparsedp.cli.progress import Reporter, make_reporter
from sparsedp.cli.result import RunResult
from sparsedp.cli.resume import command_on_run, resumed_config
from sparsedp.cli.run import run_training
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.distributed import require_torchrec
from sparsedp.errors import ConfigError

NOT_EVALUATED, INTERRUPTED = 3, 130
DIVERGED = 2  # as for a refusal
EPILOG = """examples:
  sparsedp train demo                                    a generated click log, in about a minute
  sparsedp train demo --set privacy.target_epsilon=1     the same with more noise
  sparsedp train stream                                  days in order of time, evaluated on later days
  sparsedp train criteo --set 'data.paths=train.txt.gz'  a click log in Criteo's format
  sparsedp train sequences                               the next item of generated sequences, in less than a minute
  sparsedp train movielens --set data.path=ratings.dat   the next film, a user as the unit
  sparsedp train dual                                    the next item with a dual encoder, in about a minute
  sparsedp train my.yaml --run-dir runs/mine --json      the result as JSON; progress goes to stderr
  sparsedp train demo --nproc 2 --set model.dim=16       tables divided among 2 processes of this machine
  torchrun --nproc-per-node 2 -m sparsedp train my.yaml  the same with torchrun, which also starts them on several hosts
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
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=positive_count,
        help="train in N processes of this machine, which divide the tables",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    if args.nproc is not None and not is_started_here():
        if started_together():
            raise ConfigError("torchrun has started processes already: leave --nproc out")
        config = _config(args)  # what it refuses is said once
        if args.nproc > 1 and not args.show_config:
            refuse_together(config)
            if config.distributed.sharding != "data_parallel":
                require_torchrec()
            return launch(args.nproc, args.argv, config.distributed.rank_timeout)
    if is_started_here():
        end_with_parent()
    return run_together("sparsedp", args.debug, lambda processes: _train(args, processes))


def _config(args: argparse.Namespace) -> Config:
    if args.resume is None:
        if args.config is None:
            raise ConfigError("CONFIG is missing: a YAML file or the name of a bundled one, such as demo")
        if args.code is not None:
            raise ConfigError("--code is for --resume; the code of a new run lies beside CONFIG")
        return load_config(args.config, args.overrides, args.trust)
    if args.run_dir is not None:
        raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out")
    return resumed_config(args.resume, args.config, args.overrides, args.trust, args.code)


def _train(args: argparse.Namespace, processes: Processes) -> int:
    config = _config(args)
    if args.show_config:
        print(explain_config(config) if processes.is_first else "", end="")
        return 0
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet) if processes.is_first else Reporter()
    result = run_training(
        config, args.resume or args.run_dir, resume=args.resume is not None, reporter=reporter, on_signals=True,
        processes=processes,
    )  # fmt: skip
    return _close(args, config, result, console) if processes.is_first else _code(result)


def _close(args: argparse.Namespace, config: Config, result: RunResult, console: Console) -> int:
    """Shows the result; returns the exit code."""
    if args.json:
        print(json.dumps(plain(result.to_dict()), indent=2))
    folder = RunFolder(result.run_dir)
    if not result.finished:
        message = f"Stopped after step {result.totals.steps} of {result.planned_steps}; the checkpoint is written."
        _print(console, f"{message} Go on with:\n  {command_on_run('train --resume', config, folder)}")
        return _code(result)
    if not args.json:
        if not args.quiet:
            console.print(f"\n{result.statement}", markup=False, soft_wrap=True)
        console.print(result.table())
    if result.diverged:
        kept = f"The model is in {folder.release}, and the last checkpoint beside it"
        _say_error(f"Trained, and of no use: {(result.failure or '').rstrip('.')}. {kept}.")
    elif result.failure is not None:
        where = f"The model and its statement are in {folder.release}"
        _say_error(f"Trained, not evaluated: {result.failure.rstrip('.')}. {where}.")
        _print(console, f"Make up for the evaluation with:\n  {command_on_run('evaluate', config, folder)}")
    return _code(result)


def _code(result: RunResult) -> int:
    if not result.finished or result.failure == "interrupted":
        return INTERRUPTED
    if result.diverged:
        return DIVERGED
    return 0 if result.failure is None else NOT_EVALUATED


def _say_error(text: str) -> None:
    print(f"sparsedp: error: {text}", file=sys.stderr)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
