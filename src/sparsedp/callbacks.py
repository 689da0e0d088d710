"""Callbacks: what a run tells about itself while it goes on, to TensorBoard, MLflow, Weights & Biases or code of the user's own.

A callback is any object that has some of these methods:

    on_step(step, values)     after a step
    on_epoch(epoch, values)   after an epoch, from 1
    on_end(values)            at the end, also of a run that is interrupted

`values` are numbers by name. Those under `public/` follow from the plan and from counts of steps; those under `private/` are
computed on private data without noise, so that where they go belongs to those who may see the data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparsedp.accounting.ledger import Ledger
from sparsedp.sampling import PrivateLoader
from sparsedp.step_report import StepReport

if TYPE_CHECKING:
    from sparsedp.optimizer import PrivateOptimizer

METHODS = ("on_step", "on_epoch", "on_end")
PUBLIC, PRIVATE = "public/", "private/"


def require_callback(callback: Any, every: int = 1) -> Any:
    if not any(callable(getattr(callback, name, None)) for name in METHODS):
        raise TypeError(f"{type(callback).__name__} is no callback: it has none of the methods {', '.join(METHODS)}")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    return callback


def call(callback: Any, name: str, *arguments: Any) -> None:
    """Nothing, if the callback does not have the method."""
    method = getattr(callback, name, None)
    if method is not None:
        method(*arguments)


def finite_values(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values that are finite: trackers refuse others, or draw nonsense."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def step_values(report: StepReport) -> dict[str, float]:
    """What a step did, all of it private."""
    values: dict[str, Any] = {
        "units": report.units,
        "examples": report.examples,
        "clipped_share": report.clipped_share,
        "mean_norm": report.mean_norm,
    }
    if report.tables:
        values |= {
            "rows_touched": report.rows_touched,
            "gradient_size": report.gradient_size,
            "kept_mass": report.kept_mass,
        }
    for name, table in report.tables.items():
        values[f"tables/{name}/touched"] = table.rows_touched
        values[f"tables/{name}/selected"] = table.rows_selected
        values[f"tables/{name}/false"] = table.rows_false
    return finite_values({PRIVATE + name: value for name, value in values.items()})


class SpentEpsilon:
    """An epsilon that is computed so rarely that it does not slow training down: it may be some seconds old."""

    def __init__(self, compute: Callable[[], float]) -> None:
        self._compute = compute
        self._value, self._next = 0.0, 0.0

    def __call__(self, now: bool = False) -> float:
        started = time.monotonic()
        if now or started >= self._next:
            self._value = self._compute()
            took = time.monotonic() - started
            self._next = started + max(0.5, 20 * took)
        return self._value


class StepsTold:
    """Tells a callback of every step whose number `every` divides, of epochs, and of the end."""

    def __init__(
        self, callback: Any, every: int, optimizer: PrivateOptimizer, loader: PrivateLoader, ledger: Ledger,
        epsilon: Callable[[], float],
    ) -> None:  # fmt: skip
        self._callback, self._every = callback, every
        self._optimizer, self._loader, self._ledger = optimizer, loader, ledger
        self._epsilon = SpentEpsilon(epsilon)
        self._latest: dict[str, float] = {}

    def after_step(self) -> None:
        step, report = self._ledger.steps, self._optimizer.last_step
        ends_epoch, is_due = step % self._loader.steps_per_epoch == 0, step % self._every == 0
        if report is None or not (ends_epoch or is_due):
            return
        rates = {f"{PUBLIC}lr/{i}": group["lr"] for i, group in enumerate(self._optimizer.param_groups)}
        values = step_values(report) | finite_values({f"{PUBLIC}epsilon": self._epsilon(), **rates})
        self._latest.update(values)
        if is_due:
            call(self._callback, "on_step", step, values)
        if ends_epoch:
            call(self._callback, "on_epoch", step // self._loader.steps_per_epoch, values)

    def at_end(self) -> None:
        call(self._callback, "on_end", self._latest | finite_values({f"{PUBLIC}epsilon": self._epsilon(now=True)}))
