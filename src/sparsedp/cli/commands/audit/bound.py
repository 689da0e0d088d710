"""Measures a lower bound on epsilon, beside the claimed one: by gradient canaries on the configuration's mechanism and plan
(white box), and by the losses of examples that are inserted into its data (black box)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.audit import AuditedTraining, CanaryPlan, EpsilonAudit, audit_one_run, audit_scores
from sparsedp.audit.gradient_canaries import Place
from sparsedp.audit.numbers import probability
from sparsedp.cli.canaries import canary_losses
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.config.load import add_config_arguments, explain_config, load_config
from sparsedp.cli.config.trust import add_code_argument
from sparsedp.cli.files import write_text
from sparsedp.cli.prepare import Prepared, limit_threads, load_data, make_model, prepare, with_collate
from sparsedp.cli.progress import Reporter, draw_progress, make_reporter
from sparsedp.cli.resume import command_on_run, resumed_config
from sparsedp.cli.run import load_with_progress, run_training
from sparsedp.cli.runfolder import RunFolder, default_path, plain, refuse_used_folder
from sparsedp.errors import ConfigError, SparseDPError
from sparsedp.noise import RandomKey
from sparsedp.statement import PrivacyStatement

CONTRADICTED, INTERRUPTED = 1, 130
AUDIT = "bound"
_COINS = 8  # a purpose of the canaries' key
_MOST = 100_000  # canaries: the white box's data are as wide as the square root of their number

EPILOG = """examples:
  sparsedp audit bound demo                                  both attacks on the demo's mechanism, data and model
  sparsedp audit bound my.yaml --attack white --on rows      canaries on rows that nobody else touches
  sparsedp audit bound my.yaml --canaries 5000 --significance 0.01
  sparsedp audit bound my.yaml --attack white --set privacy.mechanism.name=eana --set privacy.noise_multiplier=1
  sparsedp audit bound runs/demo-bound-20260101-120000/run   the black-box audit of a run that was stopped and resumed

White box: a small model whose canaries have known gradients is trained three times, with the mechanism, noise, clipping,
sampling rate and number of steps of the configuration; the auditor sees what the mechanism protects. Black box: canaries are
inserted into the data, each by a fair coin, the configuration's model is trained in an ordinary run folder, and the auditor
sees the loss of each. A canary is one unit.

Written to the output folder (of a run that is there: to its private part): bound.json, bound.png, and the run.
Exit codes: 0 done; 1 a claim is contradicted; 2 an error; 130 stopped by Ctrl-C or SIGTERM.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument("--attack", choices=("white", "black", "both"), default="both", help="which of them (both)")
    parser.add_argument(
        "--on", choices=("dense", "rows", "both"), default="both", help="what white-box canaries move (both)"
    )
    parser.add_argument("--rows-per-canary", metavar="N", type=int, default=1, help="rows that each touches (1)")
    parser.add_argument("--canaries", metavar="N", type=int, default=2000, help="of each attack; half are in (2000)")
    parser.add_argument(
        "--significance", metavar="P", type=float, default=0.05, help="1 less the confidence of a bound (0.05)"
    )
    parser.add_argument(
        "--delta", metavar="D", type=float, help="at which epsilon is audited (that of the configuration)"
    )
    parser.add_argument(
        "--method", choices=("one_run", "one_run_fdp"), default="one_run",
        help="one_run_fdp is tighter, for mechanisms whose trade-off curve is a Gaussian mechanism's (one_run)",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=int, help="makes canaries, coins and white-box runs repeatable")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the folder to write (runs/<name>-bound-<time>)")
    add_code_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON; everything else goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="show the result only")


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=args.json, highlight=False)
    reporter = make_reporter(console, args.quiet)
    probability("significance", args.significance)
    if not 2 <= args.canaries <= _MOST:
        raise ConfigError(
            f"--canaries must be at least 2: some have to be in, and some out; and at most {_MOST:,}; got {args.canaries:,}"
        )
    is_run = Path(args.config).is_dir()
    config = _config_of_run(args) if is_run else load_config(args.config, args.overrides, args.trust)
    if args.show_config:
        print(explain_config(config), end="")
        return 0
    folder = args.out or (RunFolder(Path(args.config)).private if is_run else default_path(f"{config.name}-{AUDIT}"))
    audits: list[EpsilonAudit] = []
    if is_run:
        audits.append(_audit_run(args, config, RunFolder(Path(args.config)), None))
    else:
        if args.attack != "white":
            _refuse_used(folder / "run")
        data = load_with_progress(config, reporter)
        if args.attack != "black":
            audits += _white_box(args, config, data, reporter)
        if args.attack != "white":
            audit = _black_box(args, config, data, folder / "run", reporter, console)
            if audit is None:
                return INTERRUPTED
            audits.append(audit)
    _write(folder, audits, console)
    if args.json:
        print(json.dumps(plain([audit.to_dict() for audit in audits]), indent=2))
    else:
        for audit in audits:
            console.print(str(audit), markup=False, soft_wrap=True)
        if not args.quiet:
            console.print(f"Written to {folder}", markup=False, soft_wrap=True)
    return CONTRADICTED if any(audit.contradicts for audit in audits) else 0


def _refuse_used(run_dir: Path) -> None:
    """Before the white box takes its time."""
    try:
        refuse_used_folder(run_dir)
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} exists and is not empty: it is of an earlier audit. Name another folder with --out; or go on with its "
            f"run: sparsedp train --resume {run_dir}, then sparsedp audit {AUDIT} {run_dir}"
        ) from error


def _config_of_run(args: argparse.Namespace) -> Config:
    """The configuration of a run folder, whose canaries and statement are what they are."""
    if args.attack == "white" or args.delta is not None:
        raise ConfigError("A run folder is audited by its losses and its own statement: leave out --attack and --delta")
    return resumed_config(Path(args.config), None, args.overrides, args.trust, args.code)


def _white_box(args: argparse.Namespace, config: Config, data: Data, reporter: Reporter) -> list[EpsilonAudit]:
    if config.stream is not None:
        raise ConfigError("stream: a white-box audit has no periods. Use --attack black, or --set stream=null")
    limit_threads(config)
    data = with_collate(config, data)
    prepared = prepare(config, data, make_model(config, data.training))
    plan = prepared.engine.plan
    training = AuditedTraining(
        noise_multiplier=plan.noise_multiplier,
        mechanism=plan.mechanism,
        steps=prepared.steps,
        sample_rate=plan.sample_rate,
        max_grad_norm=plan.clipping.max_norm,
        clipping=plan.clipping.style,
        accountant=plan.accountant,
        poisson_sampling=plan.poisson_sampling,
    )
    prepared.engine.close()
    audits = []
    places: Sequence[Place] = ("dense", "rows") if args.on == "both" else (args.on,)
    for on in places:
        reporter.say(f"White box: {args.canaries:,} canaries ({on}), {prepared.steps:,} steps, three times")
        audits.append(
            audit_one_run(
                training, delta=args.delta or prepared.delta, canaries=args.canaries, on=on, rows=args.rows_per_canary,
                significance=args.significance, method=args.method, seed=args.seed, progress=draw_progress,
            )
        )  # fmt: skip
    return audits


def _black_box(
    args: argparse.Namespace, config: Config, data: Data, run_dir: Path, reporter: Reporter, console: Console
) -> EpsilonAudit | None:
    """None: the run was stopped."""
    statements: list[PrivacyStatement] = []

    def state(parts: Prepared) -> dict[str, Any]:
        statements.append(parts.engine.statement(args.delta or parts.delta))
        return {}

    result = run_training(
        config, run_dir, reporter=reporter, on_signals=True, data=data, at_end=state,
        canaries=_coins(args.canaries, config, args.seed),
    )  # fmt: skip
    folder = RunFolder(result.run_dir)
    if not result.finished:
        train, audit = (command_on_run(name, config, folder) for name in ("train --resume", f"audit {AUDIT}"))
        console.print(
            f"Stopped; the checkpoint is written. Go on with:\n  {train}\n  {audit}", markup=False, soft_wrap=True
        )
        return None
    if result.failure is not None:
        reporter.alert(f"The model was trained, but not evaluated, which the audit does not need: {result.failure}")
    return _audit_run(args, config, folder, data, statements[0] if statements else None)


def _coins(count: int, config: Config, seed: int | None) -> CanaryPlan:
    """A canary is in, once, by a fair coin; where users are units, each is a new user's."""
    key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
    is_in = key.generator(_COINS).random(count) < 0.5
    return CanaryPlan.make(AUDIT, is_in.tolist(), "each" if config.privacy.unit == "user" else None, seed)


def _audit_run(
    args: argparse.Namespace, config: Config, folder: RunFolder, data: Data | None,
    statement: PrivacyStatement | None = None,
) -> EpsilonAudit:  # fmt: skip
    """The audit of a finished run by the losses of its canaries. Without a `statement` it is the run's own."""
    plan = folder.read_canaries()
    if plan is not None and (plan.audit != AUDIT or max(plan.repetitions) > 1):
        raise SparseDPError(
            f"The canaries of {folder.path} are those of another audit ({plan.audit}): for a bound each must be in once or not "
            "at all, by a fair coin. Give the audit a configuration, and it trains with such canaries."
        )
    trained = canary_losses(config, folder, load_data(config) if data is None else data)
    is_in = trained.repetitions > 0
    return audit_scores(
        -trained.losses[is_in], -trained.losses[~is_in], statement=statement or folder.read_statement(),
        significance=args.significance, method=args.method, attack="black box, losses of inserted examples",
    )  # fmt: skip


def _write(folder: Path, audits: Sequence[EpsilonAudit], console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "bound.json", json.dumps(plain([audit.to_dict() for audit in audits]), indent=2) + "\n")
    try:
        from sparsedp.report.bound_plot import bound_plot
    except ImportError:
        console.print("No plot: matplotlib is missing. pip install 'sparsedp[plot]'", markup=False)
        return
    bound_plot(audits).savefig(folder / "bound.png", dpi=130)
