"""Runs a grid over a mechanism's knobs and finds the front of utility against gradient-size reduction."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from rich.console import Console

from sparsedp.cli.arguments import positive_count, positive_number
from sparsedp.cli.config.load import add_set_argument
from sparsedp.cli.config.sweepfile import expand, load_sweep, sweep_names
from sparsedp.cli.config.trust import add_trust_argument
from sparsedp.cli.files import locked
from sparsedp.cli.privatesearch import search_privately
from sparsedp.cli.runfolder import RUNS, plain
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.sweepfolder import SweepFolder
from sparsedp.cli.sweepjobs import Job, carry_out
from sparsedp.errors import ConfigError

FAILED, INTERRUPTED = 1, 130

EPILOG = """examples:
  sparsedp sweep demo --list                   the runs of the bundled sweep
  sparsedp sweep demo                          run them: one process per core
  sparsedp sweep mine.yaml --jobs 4 --run-dir runs/mine
  sparsedp sweep mine.yaml --private           choose privately: one winner, with a statement that has paid for the search
  sparsedp sweep mine.yaml --report-only       write the tables and plots again, of what is finished

Runs that are finished are not run again: after Ctrl-C or a crash, or with more values in the file, give the same command.
The keys of a sweep are explained in src/sparsedp/cli/sweeps/demo.yaml.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("config", metavar="CONFIG", help=f"a YAML file, or one of {', '.join(sweep_names())}")
    add_set_argument(parser, "change a key of all runs, as in --set training.epochs=2")
    add_trust_argument(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the sweep's folder (runs/<name>)")
    parser.add_argument(
        "--jobs", metavar="N", type=positive_count, help="runs at the same time, each in its own process (the cores)"
    )
    parser.add_argument("--list", action="store_true", help="name the runs, and run nothing")
    parser.add_argument("--report-only", action="store_true", help="write tables and plots of what is finished")
    parser.add_argument("--redo", action="store_true", help="run again what was run with other settings; deletes it")
    parser.add_argument(
        "--private",
        action="store_true",
        help="search privately: of a random number of runs only the best is shown and kept",
    )
    parser.add_argument(
        "--mean-runs", metavar="N", type=positive_number, default=10.0, help="runs of a private search, on average (10)"
    )
    parser.add_argument("--keep-models", action="store_true", help="keep the weights and a checkpoint of every run")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    sweep, path = load_sweep(args.config)
    runs = expand(sweep, path, args.overrides, args.trust)
    folder: Path = args.run_dir or RUNS / sweep.name
    state = SweepFolder(folder, sweep, runs)
    console = Console(stderr=True, highlight=False, quiet=args.quiet)
    if args.list:
        _list(state, args.json)
        return 0
    if args.private:
        if args.report_only or args.redo or args.keep_models:
            raise ConfigError(
                "--report-only, --redo and --keep-models show more than the best run; leave them out with --private"
            )
        processes = args.jobs or _cores()
        return search_privately(
            sweep, runs, folder, mean=args.mean_runs, processes=processes, console=console, as_json=args.json
        )
    if args.report_only:  # beside a sweep that is at work, too
        outcome, summary = 0, state.write_report(console)
    else:
        with locked(folder):
            outcome, summary = _run(state, args, console), state.write_report(console)
    if args.json:
        print(json.dumps(plain(summary), indent=2))
    else:
        print((folder / "report.md").read_text(), end="")
    console.print(f"Written: {folder}/report.md, front.json, runs.jsonl", markup=False, soft_wrap=True)
    return outcome


def _list(state: SweepFolder, as_json: bool) -> None:
    rows = [{"run": run.id, "status": state.status(run)} for run in state.runs]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['status']:9} {row['run']}")
    print(f"{len(rows)} runs; {sum(row['status'] == 'done' for row in rows)} are done")


def _run(state: SweepFolder, args: argparse.Namespace, console: Console) -> int:
    """Runs what is not done yet; returns the exit code."""
    statuses = {run.id: state.status(run) for run in state.runs}
    if not args.redo:
        state.refuse([run for run in state.runs if statuses[run.id] == "changed"])
    todo = [run for run in state.runs if statuses[run.id] != "done"]
    state.write_sweep()
    jobs = [Job(run.id, run.config, run.data_key, state.folder / run.id, args.keep_models) for run in todo]
    processes = args.jobs or _cores()
    console.print(
        f"{len(todo)} of {len(state.runs)} runs to do, {min(processes, max(1, len(todo)))} at a time, in {state.folder}",
        markup=False,
        soft_wrap=True,
    )
    started, failed, ended = time.monotonic(), 0, 0
    with stop_on_signals() as asked:
        for outcome in carry_out(jobs, processes, asked):
            if outcome.status == "stopped":
                continue
            ended += 1
            failed += outcome.status == "failed"
            left = (time.monotonic() - started) / ended * (len(todo) - ended)
            text = f"FAILED: {outcome.error}" if outcome.status == "failed" else state.in_brief(outcome.id)
            count = f"[{len(state.runs) - len(todo) + ended}/{len(state.runs)}]"
            shown = f"{count} {outcome.id}: {text}  ({outcome.seconds:.0f} s; about {_duration(left)} left)"
            console.print(shown, markup=False, soft_wrap=True)
        stopped = asked()
    if stopped and ended < len(todo):
        console.print("Stopped. What is finished is kept; the same command goes on.", markup=False)
        return INTERRUPTED
    if failed:
        console.print(f"{failed} runs failed; the same command tries them again.", markup=False)
    return FAILED if failed else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
