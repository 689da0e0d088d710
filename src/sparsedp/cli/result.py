"""The outcome of a run, and the table that it ends with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsedp.statement import PrivacyStatement


@dataclass
class Totals:
    """Sums over the steps of a run, over its resumptions too."""

    steps: int = 0
    units: int = 0
    rows_touched: int = 0
    gradient_size: int = 0
    training_seconds: float = 0.0
    seconds: float = 0.0  # with set-up, evaluation and checkpoints


@dataclass(frozen=True)
class RunResult:
    run_dir: Path
    finished: bool
    planned_steps: int
    totals: Totals
    dense_size: int  # coordinates of all tables
    statement: PrivacyStatement
    metrics: dict[str, float] = field(default_factory=dict)
    planted_auc: float | None = None

    @property
    def gradient_size(self) -> float:
        """Coordinates of the tables that may change in a step, on average."""
        return self.totals.gradient_size / max(1, self.totals.steps)

    @property
    def rows_touched(self) -> float:
        return self.totals.rows_touched / max(1, self.totals.steps)

    @property
    def examples_per_second(self) -> float:
        return self.totals.units / max(1e-9, self.totals.training_seconds)

    def to_dict(self) -> dict[str, Any]:
        planted = {} if self.planted_auc is None else {"planted_auc": self.planted_auc}
        return {
            "run": str(self.run_dir),
            "finished": self.finished,
            "steps": self.totals.steps,
            "planned_steps": self.planned_steps,
            **self.metrics,
            **planted,
            "epsilon": self.statement.epsilon,
            "delta": self.statement.delta,
            "noise_multiplier": self.statement.noise_multiplier,
            "gradient_size": self.gradient_size,
            "dense_gradient_size": self.dense_size,
            "rows_touched_per_step": self.rows_touched,
            "seconds": self.totals.seconds,
            "training_seconds": self.totals.training_seconds,
            "examples_per_second": self.examples_per_second,
        }

    def table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, value)
        return table

    def _lines(self) -> list[tuple[str, str]]:
        lines = []
        if "auc" in self.metrics:
            planted = "" if self.planted_auc is None else f"; {self.planted_auc:.4f} for the model that drew the clicks"
            lines.append(("AUC, held out", f"{self.metrics['auc']:.4f} (0.5 for guessing{planted})"))
            lines.append(("log loss, held out", f"{self.metrics['log_loss']:.4f}"))
        if "loss" in self.metrics:
            lines.append(("loss, held out", f"{self.metrics['loss']:.4f}"))
        if self.statement.holds:
            lines.append(("privacy", f"epsilon {self.statement.epsilon:.4g} at delta {self.statement.delta:.3g}"))
        else:
            lines.append(("privacy", "NONE (epsilon is infinite)"))
        if self.dense_size:
            times = self.dense_size / max(1.0, self.gradient_size)
            sizes = f"{self.gradient_size:,.0f} of {self.dense_size:,} coordinates a step"
            against = "dense" if times == 1 else f"{times:,.1f} times smaller than dense"
            lines.append(("embedding gradient", f"{sizes} ({against})"))
            lines.append(("rows touched", f"{self.rows_touched:,.0f} a step"))
        lines.append(("time", f"{self.totals.seconds:.1f} s, of which {self.totals.training_seconds:.1f} s in steps"))
        lines.append(("speed", f"{self.examples_per_second:,.0f} examples/s over {self.totals.steps:,} steps"))
        lines.append(("run folder", str(self.run_dir)))
        return lines
