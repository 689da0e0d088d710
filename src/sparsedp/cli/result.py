"""The outcome of a run, and the table that it ends with."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsedp.cli.adapters import TableAdapters
from sparsedp.optimizer import StepReport
from sparsedp.report.metric_names import ONE_CLASS
from sparsedp.statement import PrivacyStatement

FAILED = "failed: "
LAST_LOSSES = 100  # steps by whose losses it is judged whether training has diverged


@dataclass
class Totals:
    """Sums over the steps of a run, over its resumptions too."""

    steps: int = 0
    units: int = 0
    examples: int = 0
    rows_touched: int = 0
    gradient_size: int = 0
    training_seconds: float = 0.0
    seconds: float = 0.0  # with set-up, evaluation and checkpoints
    # Sums over `share_steps` steps: those with units.
    clipped_share: float = 0.0
    kept_mass: float = 0.0
    share_steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each part of a run, by its name
    peak_memory: int | None = None  # bytes
    # Of the last steps with units, of one epoch at most: they are private, as the totals are.
    last_losses: list[float] = field(default_factory=list)

    def add(self, report: StepReport, seconds: float) -> None:
        self.steps += 1
        self.units += report.units
        self.examples += report.examples
        self.rows_touched += report.rows_touched
        self.gradient_size += report.gradient_size
        self.training_seconds += seconds
        if report.units:
            self.clipped_share += report.clipped_share
            self.kept_mass += report.kept_mass
            self.share_steps += 1

    def add_loss(self, loss: float, steps_per_epoch: int) -> None:
        self.last_losses = [*self.last_losses, loss][-min(LAST_LOSSES, steps_per_epoch) :]


@dataclass(frozen=True)
class RunResult:
    run_dir: Path
    finished: bool
    planned_steps: int
    totals: Totals
    dense_size: int  # coordinates of all tables, those beside which adapters are trained among them
    statement: PrivacyStatement
    metrics: dict[str, Any] = field(default_factory=dict)
    planted_auc: float | None = None
    tables_frozen: bool = False
    adapters: TableAdapters = field(default_factory=TableAdapters)  # those beside tables
    extra: dict[str, Any] = field(default_factory=dict)  # what the caller of the run measured at its end
    diverged: bool = False  # whether the trained model is of no use, as weights or losses have grown beyond all bounds
    stopped_early: bool = False
    evaluation: str = "not yet"  # done, not yet, nothing is held out, or failed: and why

    @property
    def gradient_size(self) -> float:
        """Coordinates of the tables, and of adapters beside them, that may change in a step, on average."""
        return self.totals.gradient_size / max(1, self.totals.steps) + self.adapters.gradient_size

    @property
    def reduction(self) -> float | None:
        """How many times smaller the tables' gradient is than a dense one, on average; None if no table is trained."""
        return self.dense_size / max(1.0, self.gradient_size) if self.dense_size else None

    @property
    def _trains_tables(self) -> bool:
        return self.dense_size > self.adapters.dense_size

    @property
    def rows_touched(self) -> float:
        return self.totals.rows_touched / max(1, self.totals.steps)

    @property
    def examples_per_second(self) -> float:
        return self.totals.examples / max(1e-9, self.totals.training_seconds)

    def to_dict(self) -> dict[str, Any]:
        planted = {} if self.planted_auc is None else {"planted_auc": self.planted_auc}
        return {
            "run": str(self.run_dir),
            "finished": self.finished,
            "steps": self.totals.steps,
            "planned_steps": self.planned_steps,
            "stopped_early": self.stopped_early,
            "evaluation": self.evaluation,
            **({"diverged": True} if self.diverged else {}),
            **self.metrics,
            **planted,
            "unit": self.statement.unit,
            "epsilon": self.statement.epsilon,
            "delta": self.statement.delta,
            "noise_multiplier": self.statement.noise_multiplier,
            "gradient_size": self.gradient_size,
            "dense_gradient_size": self.dense_size,
            "reduction": self.reduction,
            "adapter_gradient_size": self.adapters.gradient_size,
            "tables_frozen": self.tables_frozen,
            "clipped_share": self._mean(self.totals.clipped_share),
            "kept_mass": self._mean(self.totals.kept_mass) if self._trains_tables else None,
            "rows_touched_per_step": self.rows_touched,
            "seconds": self.totals.seconds,
            "training_seconds": self.totals.training_seconds,
            "examples_per_second": self.examples_per_second,
            "seconds_of_parts": self.totals.parts,
            "peak_memory_bytes": self.totals.peak_memory,
            **self.extra,
        }

    @property
    def failure(self) -> str | None:
        """Why there is no evaluation of the trained model."""
        return self.evaluation.removeprefix(FAILED) if self.evaluation.startswith(FAILED) else None

    def _mean(self, total: float) -> float | None:
        """The mean over the steps that had units; None if there were none."""
        return total / self.totals.share_steps if self.totals.share_steps else None

    def table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, value)
        return table

    def _lines(self) -> list[tuple[str, str]]:
        lines = metric_lines(self.metrics, self.planted_auc)
        if self.statement.holds:
            whom = " for each user" if self.statement.unit == "user" else ""
            promise = f"epsilon {self.statement.epsilon:.4g} at delta {self.statement.delta:.3g}"
            lines.append(("privacy", promise + whom))
        else:
            lines.append(("privacy", "NONE (epsilon is infinite)"))
        if self.stopped_early:
            steps = f"after {self.totals.steps:,} of {self.planned_steps:,} steps"
            lines.append(("stopped early", f"{steps}; what it costs is what the whole plan costs"))
        if self.tables_frozen:
            lines.append(("tables", "frozen at their start values: nothing of them was trained"))
        if (times := self.reduction) is not None:
            sizes = f"{self.gradient_size:,.0f} of {self.dense_size:,} coordinates a step"
            against = "dense" if times == 1 else f"{times:,.1f} times smaller than dense"
            lines.append(("embedding gradient", f"{sizes} ({against})"))
        if self._trains_tables:
            lines.append(("rows touched", f"{self.rows_touched:,.0f} a step"))
        lines.append(("time", f"{self.totals.seconds:.1f} s, of which {self.totals.training_seconds:.1f} s in steps"))
        lines.append(("speed", f"{self.examples_per_second:,.0f} examples/s over {self.totals.steps:,} steps"))
        lines.append(("run folder", str(self.run_dir)))
        lines.append(("report", f"sparsedp report {self.run_dir} writes one"))
        if self.finished:
            lines.append(("may leave", f"{self.run_dir}/release alone; sparsedp export {self.run_dir} copies it"))
        return lines


def decimals(value: float) -> str:
    """A metric, to read: with four decimals, unless it is too large for them."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def metric_lines(metrics: dict[str, Any], planted_auc: float | None) -> list[tuple[str, str]]:
    """Names and values of an evaluation, to read."""
    lines = []
    if "auc" in metrics:
        planted = "" if planted_auc is None else f"; {decimals(planted_auc)} for the model that drew the clicks"
        shown = (
            f"{decimals(metrics['auc'])} (0.5 for guessing{planted})" if metrics["auc"] == metrics["auc"] else ONE_CLASS
        )
        lines.append(("AUC, held out", shown))
        lines.append(("log loss, held out", decimals(metrics["log_loss"])))
    if metrics.get("calibration_ratio", math.nan) == metrics.get("calibration_ratio"):
        error = f"1 is right; calibration error {decimals(metrics['calibration_error'])}"
        lines.append(("positives expected per positive", f"{decimals(metrics['calibration_ratio'])} ({error})"))
    rankings = [name for name in metrics if re.fullmatch(r"(ndcg|hit|precision|recall)@\d+|mrr", name)]
    for name in rankings:
        baselines = {"popularity": "the most popular items", "planted": "the model that drew the sequences"}
        values = {text: metrics.get(f"{key}_{name}") for key, text in baselines.items()}
        others = "; ".join(f"{decimals(value)} for {text}" for text, value in values.items() if value is not None)
        shown = decimals(metrics[name]) + (f" ({others})" if others else "")
        title = name.upper() if name.startswith(("ndcg", "hit", "mrr")) else name
        lines.append((f"{title}, held out", shown))
    if "accuracy" in metrics:
        lines.append(("accuracy, held out", decimals(metrics["accuracy"])))
    if "precision" in metrics:
        scores = f"{decimals(metrics['precision'])}, {decimals(metrics['recall'])} (means over the classes)"
        lines.append(("precision, recall, held out", scores))
    if "loss" in metrics:
        lines.append(("loss, held out", decimals(metrics["loss"])))
    if "mse" in metrics:
        lines.append(("mean squared error, held out", decimals(metrics["mse"])))
    periods = metrics.get("periods", {})
    for period, of_period in periods.items() if len(periods) > 1 else ():
        name = "auc" if "auc" in of_period else "loss"
        shown = decimals(of_period[name]) if of_period[name] == of_period[name] else ONE_CLASS
        lines.append((f"  period {period}", f"{'AUC' if name == 'auc' else name} {shown}"))
    return lines
