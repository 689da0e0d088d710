"""Trains every run of a sweep with the same canaries, and measures precision and exposure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsedp.audit import CanaryPlan, SecretSharer, planned_repetitions
from sparsedp.cli.config.config import differences
from sparsedp.cli.config.sweepfile import SweepRun, expand, load_sweep
from sparsedp.cli.progress import Reporter
from sparsedp.cli.run import load_with_progress, run_training
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.secret_sharer import AUDIT, audit_run
from sparsedp.errors import SparseDPError

_NAMES = {"non_private": "SGD", "dpsgd": "DP-SGD", "lazydp": "LazyDP", "eana": "EANA", "adafest": "AdaFEST"}
TOP = (1, 5, 10, 20)


@dataclass(frozen=True)
class Row:
    """One run: its mechanism, its noise on the sum over the clipping norm, epsilon, precision@k and exposures."""

    mechanism: str
    noise_multiplier: float
    epsilon: float | str
    precision: dict[str, float]
    popularity: dict[str, float]
    result: SecretSharer

    @property
    def label(self) -> str:
        return self.mechanism if self.noise_multiplier == 0 else f"{self.mechanism}, noise {self.noise_multiplier:.3g}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label}


def measure(
    sweep: Path, folder: Path, repetitions: Sequence[int], canaries: int, references: int, reporter: Reporter
) -> list[Row]:
    """The runs of the sweep, one folder each. What is finished is not run again, and what was stopped goes on."""
    runs = expand(*load_sweep(sweep))
    plan = CanaryPlan.make(AUDIT, planned_repetitions(repetitions, canaries, references), "each", seed=0)
    data = load_with_progress(runs[0].config, reporter)
    if any(run.data_key != runs[0].data_key for run in runs):
        raise SparseDPError(f"{sweep}: the runs must have the same data, for which the canaries are made.")
    rows: list[Row] = []
    for number, run in enumerate(runs, 1):
        reporter.say(f"Run {number} of {len(runs)}: {run.id}")
        path = folder / run.id
        started = (path / "private" / "config.yaml").is_file()
        if started and (changed := differences(RunFolder(path).load_config()[0], run.config)):
            raise SparseDPError(
                f"{path} was run with another {', '.join(changed)}: remove it, or name another --run-dir."
            )
        if not started or not RunFolder(path).is_released:
            run_training(run.config, path, resume=started, reporter=reporter, data=data, canaries=plan)
        row = _row(run, path, audit_run(run.config, path, data, reporter))
        if row.label in (other.label for other in rows):
            raise SparseDPError(
                f"{sweep}: two runs are called {row.label} in tables and plots; the second is {run.id}."
            )
        rows.append(row)
    return rows


def _row(run: SweepRun, path: Path, result: SecretSharer) -> Row:
    values = RunFolder(path).read_result() or {}
    return Row(
        mechanism=_NAMES[run.group.removesuffix("_for")],
        noise_multiplier=values["noise_multiplier"],
        epsilon=values["epsilon"],
        precision={str(k): values[f"precision@{k}"] for k in TOP},
        popularity={str(k): values[f"popularity_precision@{k}"] for k in TOP},
        result=result,
    )
