"""Runs a grid over a mechanism's knobs and finds the front of utility against gradient-size reduction."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.cli.config import differences
from sparsedp.cli.files import locked, write_text
from sparsedp.cli.load import add_set_argument
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.cli.signals import stop_on_signals
from sparsedp.cli.sweepfile import Sweep, SweepRun, expand, load_sweep, sweep_names
from sparsedp.cli.sweepjobs import ERROR_FILE, Job, carry_out
from sparsedp.cli.train import MAY_CHANGE
from sparsedp.cli.trust import add_trust_argument
from sparsedp.errors import ConfigError
from sparsedp.report import front, markdown

FAILED, INTERRUPTED = 1, 130
# What runs.jsonl takes over from a run's result.json.
_KEPT = (
    "steps", "auc", "log_loss", "loss", "validation", "test", "planted_auc", "epsilon", "delta", "noise_multiplier",
    "gradient_size", "dense_gradient_size", "reduction", "tables_frozen", "clipped_share", "kept_mass",
    "rows_touched_per_step", "seconds", "training_seconds", "warnings",
)  # fmt: skip

_README = """\
PRIVATE: not for release.
Tables, plots and results of this sweep compare metrics that were computed on private data without noise, and the choice of a
run by them is not covered by any privacy statement. Of a run whose model was kept, `sparsedp export RUN` copies what may leave.
"""

EPILOG = """examples:
  sparsedp sweep demo --list                   the runs of the bundled sweep
  sparsedp sweep demo                          run them: one process per core
  sparsedp sweep mine.yaml --jobs 4 --run-dir runs/mine
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
        "--jobs", metavar="N", type=_positive, help="runs at the same time, each in its own process (the cores)"
    )
    parser.add_argument("--list", action="store_true", help="name the runs, and run nothing")
    parser.add_argument("--report-only", action="store_true", help="write tables and plots of what is finished")
    parser.add_argument("--redo", action="store_true", help="run again what was run with other settings; deletes it")
    parser.add_argument("--keep-models", action="store_true", help="keep the weights and a checkpoint of every run")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    sweep, path = load_sweep(args.config)
    runs = expand(sweep, path, args.overrides, args.trust)
    folder: Path = args.run_dir or Path("runs") / sweep.name
    state = SweepFolder(folder, sweep, runs)
    console = Console(stderr=True, highlight=False, quiet=args.quiet)
    if args.list:
        _list(state, args.json)
        return 0
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


class SweepFolder:
    """A sweep's folder: a folder per run, and beside them, all of it private,

    sweep.json   the sweep, with every default written out
    runs.jsonl   every finished run: group, point, settings, seed, metrics
    front.json   the summary: fronts, best reductions, controls
    report.md    the same as tables; front.png, best.png and heat.png as plots
    """

    def __init__(self, folder: Path, sweep: Sweep, runs: Sequence[SweepRun]) -> None:
        self.folder, self.sweep, self.runs = folder, sweep, runs

    def status(self, run: SweepRun) -> str:
        """done, changed (done with other settings), failed, or open."""
        folder = RunFolder(self.folder / run.id)
        if self._is_done(folder):
            return "changed" if self._changes(run) else "done"
        return "failed" if (folder.private / ERROR_FILE).is_file() else "open"

    @staticmethod
    def _is_done(folder: RunFolder) -> bool:
        return (folder.read_result() or {}).get("evaluation") == "done"

    def _changes(self, run: SweepRun) -> list[str]:
        """The keys in which a finished run differs from what is wanted now."""
        try:
            old, _ = RunFolder(self.folder / run.id).load_config()
        except ConfigError:
            return ["a configuration that cannot be read any more"]
        return sorted(set(differences(old, run.config)) - MAY_CHANGE)

    def refuse(self, changed: Sequence[SweepRun]) -> None:
        """Raises if there are runs that were made with other settings."""
        if changed:
            keys = sorted({key for run in changed for key in self._changes(run)})
            raise ConfigError(
                f"{len(changed)} finished runs in {self.folder}, such as {changed[0].id}, were made with another "
                f"{', '.join(keys)}. Give the sweep another name or --run-dir, or --redo to delete and repeat them."
            )

    def result(self, id: str) -> dict[str, Any]:
        return RunFolder(self.folder / id).read_result() or {}

    def in_brief(self, id: str) -> str:
        """A finished run in half a line."""
        result = self.result(id)
        metric = next(key for key in ("auc", "ndcg@10", "loss") if key in result)
        value = "undefined" if result[metric] is None else f"{result[metric]:.4f}"
        reduction = "" if result["reduction"] is None else f", reduction {result['reduction']:,.4g}x"
        return f"{markdown.METRIC_NAMES[metric]} {value}{reduction}"

    def write_sweep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("README.txt", _README)
        values = {key: value for key, value in vars(self.sweep).items() if key != "controls"}
        groups = {name: vars(group) for name, group in self.sweep.groups().items()}
        self._write("sweep.json", json.dumps({**values, "groups": groups}, indent=2) + "\n")

    def write_report(self, console: Console) -> dict[str, Any]:
        """Everything beside the runs' own folders, of what is finished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        statuses = {run.id: self.status(run) for run in self.runs}
        results = {id: self.result(id) for id, status in statuses.items() if status == "done"}
        rows = [
            {
                "run": run.id,
                "group": run.group,
                "point": run.point,
                "settings": run.settings,
                "seed": run.seed,
                **{key: results[run.id][key] for key in _KEPT if key in results[run.id]},
            }
            for run in self.runs
            if run.id in results
        ]
        self._write("runs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        sweep = self.sweep
        summary = front.summarise(
            [
                front.Run(run.id, run.group, run.point, run.settings, run.seed, results[run.id])
                for run in self.runs
                if run.id in results
            ],
            name=sweep.name,
            points=sweep.points(),
            variants=list(sweep.variants),
            controls=[name for name in sweep.groups() if name not in sweep.variants],
            reference=sweep.reference,
            seeds=sweep.seeds,
            losses=sweep.losses,
            margin=sweep.margin,
            metric=sweep.metric,
        )
        self._write("front.json", json.dumps(plain(summary), indent=2) + "\n")
        plots = self._plots(summary, console) if results else []
        failed = {id: self._error(id) for id, status in statuses.items() if status == "failed"}
        text = markdown.report(
            summary,
            base=sweep.base,
            done=len(results),
            total=len(self.runs),
            failed=failed,
            warnings=Counter(text for result in results.values() for text in result.get("warnings", [])),
            left_over=self._left_over(),
            plots=plots,
        )
        self._write("report.md", text)
        return summary

    def _plots(self, summary: dict[str, Any], console: Console) -> list[str]:
        try:
            from sparsedp.report import plots
        except ImportError:
            console.print("No plots: matplotlib is missing. pip install 'sparsedp[plot]'", markup=False)
            return []
        return plots.write_plots(summary, self.folder)

    def _error(self, id: str) -> str:
        return (RunFolder(self.folder / id).private / ERROR_FILE).read_text().partition("\n")[0]

    def _left_over(self) -> int:
        mine = {run.id for run in self.runs}
        others = {path.parents[1] for path in self.folder.glob("*/private/result.json")}
        return sum(path.name not in mine and self._is_done(RunFolder(path)) for path in others)

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, text)
