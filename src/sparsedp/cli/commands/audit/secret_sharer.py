"""Trains with canaries in the data, and measures how well the model remembers them, by how often they were there."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsedp.audit.canaries import OWNERS, CanaryPlan
from sparsedp.audit.secret_sharers import (
    CANARIES,
    REFERENCES,
    REPETITIONS,
    Quartiles,
    SecretSharer,
    planned_repetitions,
)
from sparsedp.cli.canaries import require_canaries
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.load import add_set_argument, load_config
from sparsedp.cli.config.trust import add_code_argument, add_trust_argument
from sparsedp.cli.progress import Reporter, make_reporter
from sparsedp.cli.resume import command_on_run, resumed_config
from sparsedp.cli.run import load_with_progress, run_training
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.cli.secret_sharer import AUDIT, audit_run, draw
from sparsedp.errors import ConfigError

INTERRUPTED = 130
_MANY = 0.1  # share of the training data from which on canaries are no longer few among them
# What is fixed when a run is started.
_OF_A_NEW_RUN = ("repetitions", "canaries", "references", "owner", "run_dir")

EPILOG = """examples:
  sparsedp audit secret-sharer demo                                  canaries in a generated click log
  sparsedp audit secret-sharer sequences --owner one                 with users as units it must be said whose canaries are
  sparsedp audit secret-sharer sgd.yaml eana.yaml --plot both.png    two configurations in one picture
  sparsedp audit secret-sharer runs/sgd runs/eana --plot both.png    the same of runs that are there
  sparsedp audit secret-sharer --resume runs/eana                    go on after Ctrl-C or a crash

Each number of repetitions has canaries of its own: a canary that is in the data 100 times is remembered sooner than one that
is there once. Exposure is by how many bits a canary's loss stands out from references that were not inserted; one that left no
trace has 1 in the median. --owner says whose canaries are where users are units: `one` new user has all repetitions of a
canary, `each` repetition belongs to a new user of its own, or all belong to an `existing` user, drawn at random.

The run is an ordinary one, in a folder with its statement; the result lies in its private part, in secret_sharer.json and
.png. The model has learned the canaries: it is for the audit, not for use.
"""


@dataclass(frozen=True)
class _Audited:
    """The result of one run, and what it is called."""

    name: str
    path: Path
    result: SecretSharer

    def privacy(self) -> str:
        statement = json.loads((RunFolder(self.path).release / "statement.json").read_text())
        epsilon = statement["epsilon"]
        promised = "no guarantee" if epsilon == "infinity" else f"epsilon {epsilon:.3g} for each {statement['unit']}"
        return f"{statement['mechanism']}, {promised}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "sources", metavar="CONFIG|RUN", nargs="*", help="a configuration to train with canaries, or a run that was"
    )
    add_set_argument(parser, "change a key of the configurations, as in --set privacy.target_epsilon=1")
    parser.add_argument(
        "--repetitions", metavar="N,N,...", type=_numbers,
        help=f"how often canaries are inserted ({','.join(map(str, REPETITIONS))})",
    )  # fmt: skip
    parser.add_argument("--canaries", metavar="N", type=int, help=f"for each number of repetitions ({CANARIES})")
    parser.add_argument("--references", metavar="N", type=int, help=f"canaries that are not inserted ({REFERENCES})")
    parser.add_argument("--owner", choices=OWNERS, help="whose the canaries are; needed with privacy.unit: user")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder, and audit it")
    add_code_argument(parser)
    add_trust_argument(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path,
        help="the folder to write (runs/<name>-<time>); of several configurations, the folder of their folders",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write one picture of all runs there")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the results only")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers, as in 1,10,100; got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet)
    runs = [source for source in args.sources if Path(source).is_dir()]
    planned = _plan(args, [source for source in args.sources if source not in runs])
    audited = []
    for path in [*map(Path, runs), *([] if args.resume is None else [args.resume])]:
        config = resumed_config(path, None, args.overrides, args.trust, args.code)
        require_canaries(RunFolder(path), AUDIT)
        if path == args.resume and _train(config, path, reporter, console, resume=True) is None:
            return INTERRUPTED
        audited.append(_Audited(config.name, path, audit_run(config, path, None, reporter)))
    for config, run_dir, canaries in planned:
        data = load_with_progress(config, reporter)
        _tell_of_many(canaries, data, reporter)
        trained = _train(config, run_dir, reporter, console, data=data, canaries=canaries)
        if trained is None:
            return INTERRUPTED
        audited.append(_Audited(config.name, trained, audit_run(config, trained, data, reporter)))
    _show(audited, args, console)
    return 0


# ------------------------------------------------------------------ runs


def _plan(args: argparse.Namespace, sources: list[str]) -> list[tuple[Config, Path | None, CanaryPlan]]:
    """What is to be trained, everything checked that can be before data are read."""
    if not args.sources and args.resume is None:
        raise ConfigError(
            "CONFIG is missing: a YAML file or the name of a bundled one, such as demo, or the folder of a run"
        )
    given = [name for name in _OF_A_NEW_RUN if getattr(args, name) is not None]
    if given and not sources:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options}: the canaries of a run are those that it was started with; give this with a CONFIG"
        )
    settings = {name: getattr(args, name) for name in ("repetitions", "canaries", "references")}
    repetitions = planned_repetitions(**{name: value for name, value in settings.items() if value is not None})
    configs = [load_config(source, args.overrides, args.trust) for source in sources]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"the configurations are called {', '.join(names)}: give each a `name` of its own")
    planned = []
    for config in configs:
        if config.privacy.unit == "user" and args.owner is None:
            raise ConfigError(
                f"{config.name}: privacy.unit is user, so that it must be said whose the canaries are: --owner "
                f"{', '.join(OWNERS)}. --help explains them"
            )
        if config.privacy.unit != "user" and args.owner is not None:
            raise ConfigError(
                f"{config.name}: privacy.unit is {config.privacy.unit}: canaries have no owner, leave --owner out"
            )
        several = len(configs) > 1 and args.run_dir is not None
        plan = CanaryPlan.make(AUDIT, repetitions, args.owner, config.training.seed)
        planned.append((config, args.run_dir / config.name if several else args.run_dir, plan))
    return planned


def _train(config: Config, run_dir: Path | None, reporter: Reporter, console: Console, **options: Any) -> Path | None:
    """The folder of the run when it is finished; None if it was stopped before."""
    result = run_training(config, run_dir, reporter=reporter, on_signals=True, **options)
    if not result.finished:
        message = f"Stopped after step {result.totals.steps} of {result.planned_steps}; the checkpoint is written."
        command = command_on_run(f"audit {AUDIT} --resume", config, RunFolder(result.run_dir))
        console.print(f"{message} Go on with:\n  {command}", markup=False, soft_wrap=True)
        return None
    if result.failure is not None:
        reporter.alert(f"{result.run_dir} is trained, but not evaluated: {result.failure}")
    return result.run_dir


def _tell_of_many(plan: CanaryPlan, data: Data, reporter: Reporter) -> None:
    share = plan.insertions / (plan.insertions + len(data.training))
    if share > _MANY:
        reporter.alert(
            f"{plan.insertions:,} canaries among {len(data.training):,} examples are {share:.0%} of what is trained on: the "
            "model is another one than without them. Take fewer (--canaries, --repetitions), or more data."
        )


# ------------------------------------------------------------------ results


def _show(audited: list[_Audited], args: argparse.Namespace, console: Console) -> None:
    if args.json:
        results = [{"name": one.name, "run": str(one.path), **one.result.to_dict()} for one in audited]
        print(json.dumps(plain(results), indent=2))
    else:
        for one in audited:
            console.print(_table(one))
            for text in (str(one.result), _about_fit(one.result), f"Run folder: {one.path} ({one.privacy()})\n"):
                console.print(text, markup=False, soft_wrap=True)
    if args.plot is not None:
        names = [one.name for one in audited]
        labels = [one.name if names.count(one.name) == 1 else str(one.path) for one in audited]
        draw(dict(zip(labels, (one.result for one in audited))), args.plot, make_reporter(console, args.quiet))


def _table(audited: _Audited) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"Exposure in bits: {audited.name}", title_justify="left")
    for name in ("times", "canaries", "by rank", "quartiles", "extrapolated", "quartiles", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in audited.result.exposures:
        cells = [cell for quartiles in (entry.rank, entry.extrapolated) for cell in _cells(quartiles)]
        table.add_row(str(entry.repetitions), str(entry.canaries), *cells, f"{entry.p_value:.2g}")
    return table


def _cells(quartiles: Quartiles) -> tuple[str, str]:
    median, low, high = (_short(value) for value in (quartiles.median, quartiles.low, quartiles.high))
    return median, f"{low} to {high}"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0e}"


def _about_fit(result: SecretSharer) -> str:
    fit = result.fit
    poor = " The fit is poor: what it says beyond the references means nothing." if result.fits_poorly else ""
    return (
        f"{result.references:,} references; the skew normal law is at most {fit.distance:.3f} away from their shares.{poor} "
        "p: how likely losses as small as these are if nothing was remembered."
    )
