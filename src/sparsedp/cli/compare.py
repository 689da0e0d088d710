"""`sparsedp plan CONFIG --compare`: all mechanisms for one run in a table, and the one that is recommended."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsedp import concerns
from sparsedp.advice import HEADINGS, LEGEND, Advice, Option, accepted_mechanism, cells, compare
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.datasets import Data
from sparsedp.cli.counts import read_public_counts, read_release, write_release
from sparsedp.cli.plan_report import load_with_tasks, measured
from sparsedp.cli.prepare import limit_threads, make_model, prepare, with_collate
from sparsedp.cli.runfolder import plain
from sparsedp.cli.tasks import shown_tasks
from sparsedp.errors import ConfigError
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import Look
from sparsedp.progress import Progress, no_progress


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "comparing mechanisms", "what may be looked at has to be said: --look-at-data, --counts FILE, or --release FILE"
    )
    group.add_argument("--compare", action="store_true", help="all mechanisms in one table, and a recommendation")
    group.add_argument(
        "--look-at-data", action="store_true", help="predict from the data without noise; the statement has to say so"
    )
    group.add_argument(
        "--release",
        metavar="FILE",
        type=Path,
        help="predict from frequencies released with noise into this file (made if there is none), which the run then pays for",
    )


def run_compare(config: Config, args: argparse.Namespace) -> int:
    if [bool(args.look_at_data), args.counts is not None, args.release is not None].count(True) != 1:
        raise ConfigError(
            "--compare predicts what each mechanism does from how often rows are touched. Say what may be looked at: "
            "--look-at-data (without noise, which the statement then says), --counts FILE (public), or --release FILE "
            "(released with noise, and paid for)"
        )
    if args.gradient_size is not None or args.reduction is not None:
        raise ConfigError("--gradient-size and --reduction are about one mechanism; leave them out with --compare")
    with shown_tasks(args.quiet) as progress:
        advice = advise_config(
            config, counts=args.counts, release=args.release, measure=args.measure is not False, progress=progress
        )
    following = _settings(advice, args.release, args.counts)
    if args.json:
        print(json.dumps(plain({**advice.to_dict(), "settings": following}), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(
        f"{advice.steps:,} steps, epsilon {advice.epsilon:.4g} at delta {advice.delta:g}; rows predicted from {advice.source}",
        markup=False,
    )
    console.print(_table(advice))
    console.print(LEGEND, markup=False)
    for refusal in advice.refusals():
        console.print(refusal, markup=False)
    for concern in advice.recommended.concerns:
        console.print(f"warning: {concern}", markup=False)
    console.print(f"Recommended: {advice.recommended.label}. {advice.reason}", markup=False, soft_wrap=True)
    console.print(
        "  " + " ".join(f"--set '{key}={value}'" for key, value in following.items()), markup=False, soft_wrap=True
    )
    if advice.private:
        console.print("Computed from private data without noise: for you, not for release.")
    return 0


def advise_config(
    config: Config,
    *,
    counts: Path | None = None,
    release: Path | None = None,
    measure: bool = True,
    progress: Progress = no_progress,
) -> Advice:
    """The advice for a run of this configuration. It looks at public `counts`, at a `release`, or else at the data."""
    if config.privacy.target_epsilon is None:
        raise ConfigError("--compare is at the same epsilon: give privacy.target_epsilon")
    look_at: Look = "data" if counts is None else read_public_counts(counts, "--counts")
    paid = None
    if release is not None:
        look_at, paid = "release", read_release(release, "--release") if release.exists() else _release_within(config)
    limit_threads(config)
    data = with_collate(config, load_with_tasks(config, progress))
    with concerns.without_warnings():
        with progress("making the model", 0):
            asked, model = config.make_mechanism(), make_model(config, data.training)
        accepted = accepted_mechanism(model, config.optimizer.make(model))
        parts = prepare(config, data, model, progress, mechanism=accepted, release=paid)
        try:
            advice = compare(parts.engine, look_at, asked, progress)
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split())) from error
        if release is not None and not release.exists():
            assert advice.release is not None
            write_release(release, advice.release)
        parts.engine.close()
        if not measure:
            return advice
        return advice.with_options(
            [_timed(config, data, option, advice.release, progress) for option in advice.options]
        )


def _timed(config: Config, data: Data, option: Option, release: FrequencyRelease | None, progress: Progress) -> Option:
    """The same with the time of some steps on a model that is thrown away, so that these spend nobody's budget."""
    if option.refused is not None:
        return option
    if not option.private:  # no noise gives it an epsilon, and so nothing is stopped early at one either
        privacy = replace(config.privacy, target_epsilon=None, noise_multiplier=option.noise_multiplier)
        config = replace(config, privacy=privacy, training=replace(config.training, early_stopping=None))
    model = make_model(config, data.training)
    trial = prepare(config, data, model, progress, mechanism=option.mechanism, release=release)
    took = measured(trial, progress, option.label)[0]
    trial.engine.close()
    return option.timed(took["seconds_per_step"], took["preparation_seconds"], trial.steps)


def _release_within(config: Config) -> FrequencyRelease:
    """The release that the configuration plans, or one at a tenth of its budget at most."""
    privacy = config.privacy
    assert privacy.target_epsilon is not None
    if (planned := privacy.make_release()) is not None:
        return planned
    delta = 1e-7 if privacy.target_delta is None else min(1e-7, privacy.target_delta / 10)
    return FrequencyRelease(epsilon=min(0.1, privacy.target_epsilon / 10), delta=delta)


def _settings(advice: Advice, release: Path | None, counts: Path | None) -> dict[str, str]:
    """What to change in the configuration to train as recommended."""
    mechanism = advice.mechanism
    defaults = {field.name: field.default for field in fields(mechanism)}  # type: ignore[arg-type]
    values = {
        name: value
        for name, value in mechanism.to_dict().items()
        if name not in ("name", "found", "counts", "inputs") and value != defaults[name]
    }
    settings = {}
    if counts is not None and "look_at" in values:
        values["look_at"] = "counts"
        settings["privacy.counts"] = str(counts)
    items = ", ".join(f"{key}: {value}" for key, value in {"name": mechanism.name, **values}.items())
    settings = {"privacy.mechanism": f"{{{items}}}", **settings}
    if release is not None:
        settings["privacy.frequencies"] = f"{{drawn: {release}}}"
    if advice.private:
        settings["privacy.chosen_on_data"] = "true"
    return settings


def _table(advice: Advice) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading != "mechanism")
    for option in advice.options:
        table.add_row(*cells(option), style="bold" if option.label == advice.recommended.label else None)
    return table
