"""The folder of a sweep: which of its runs are done, and the report of those."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.cli.config.config import differences
from sparsedp.cli.config.sweepfile import Sweep, SweepRun
from sparsedp.cli.files import write_text
from sparsedp.cli.resume import MAY_CHANGE
from sparsedp.cli.runfolder import RunFolder, plain
from sparsedp.cli.sweepjobs import ERROR_FILE
from sparsedp.errors import ConfigError
from sparsedp.report import front, markdown

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
        metric = next(key for key in ("auc", "ndcg@10", "accuracy", "loss") if key in result)
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
        """Everything beside the folders of the runs, of what is finished."""
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
        try:
            return plots.write_plots(summary, self.folder)
        except Exception as error:  # hours of runs are behind this, and the report says all without pictures
            console.print(f"No plots: {type(error).__name__}: {error}", markup=False)
            return []

    def _error(self, id: str) -> str:
        return (RunFolder(self.folder / id).private / ERROR_FILE).read_text().partition("\n")[0]

    def _left_over(self) -> int:
        ids = {run.id for run in self.runs}
        folders = {path.parents[1] for path in self.folder.glob("*/private/result.json")}
        return sum(path.name not in ids and self._is_done(RunFolder(path)) for path in folders)

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, text)
