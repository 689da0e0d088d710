"""A run from its first step to its result, and what is written down on the way.

Whatever happens, the folder can be resumed: after an exception the state after the last complete step is saved, unless a step
was cut in two; a kill leaves the last checkpoint. What was trained is saved and released before it is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparsedp.accounting.ledger import Entry
from sparsedp.cli.collate import SequenceCollate
from sparsedp.cli.config.config import Config
from sparsedp.cli.files import require_space
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.prepare import Prepared, model_bytes, release_frequencies, tensor_bytes
from sparsedp.cli.progress import Reporter, Status
from sparsedp.cli.result import RunResult, Totals
from sparsedp.cli.resume import command_on_run
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.scheduled_evaluation import ScheduledEvaluation
from sparsedp.cli.signals import StopRequests
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import one_line
from sparsedp.tables import find_tables


class _EpsilonSpent:
    """The ledger's epsilon, computed so rarely that it does not slow training down."""

    def __init__(self, engine: PrivacyEngine, delta: float) -> None:
        self._engine, self._delta = engine, delta
        self._value, self._next = 0.0, 0.0

    def __call__(self, last: bool) -> float:
        started = time.monotonic()
        if last or started >= self._next:
            self._value = self._engine.get_epsilon(self._delta)
            took = time.monotonic() - started
            self._next = started + max(0.5, 20 * took)
        return self._value


@dataclass(frozen=True)
class _Position:
    """Where a run is after a complete step. Within the next one the loader and the generators are ahead of it."""

    ledger: tuple[Entry, ...]
    loader: dict[str, int]
    generator: Tensor | None  # torch's, of a seeded run
    drawn: list[int] | None  # of labels and negatives


class Training:
    """The loop of one run in its folder."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        folder: RunFolder,
        reporter: Reporter,
        started: float,
        keep_model: bool,
        at_end: Callable[[Prepared], dict[str, Any]],
        signals: StopRequests | None,
    ) -> None:
        self.config, self.parts, self.folder, self.reporter = config, prepared, folder, reporter
        self.keep_model, self.at_end, self.signals = keep_model, at_end, signals
        self.totals = Totals()
        self.started = started
        self.earlier_seconds = 0.0  # of the runs that this one resumes
        self.evaluations = ScheduledEvaluation(config, prepared, folder, reporter, signals)
        self.saved: int | None = None  # the step of the checkpoint in the folder
        self._saving = False
        self._saved_totals: dict[int, dict[str, Any]] = {}
        self._last_save = time.monotonic()
        self.epsilon_spent = _EpsilonSpent(prepared.engine, prepared.delta)
        self._position = self._current_position()

    @property
    def step(self) -> int:
        """Steps taken in all."""
        return self.parts.steps_taken

    @property
    def finished(self) -> bool:
        return self.parts.finished

    def run(self, should_stop: Callable[[int], bool]) -> RunResult:
        try:
            self._train(should_stop)
            if self.saved != self.step:
                self.save()
            if self.finished and self.keep_model and not self.folder.is_released:
                self._release()
        except BaseException:
            self._save_after_error()
            raise
        result = self._result()
        if not self.finished:
            return result
        if self.keep_model:
            self.folder.write_result(result.to_dict())  # what an evaluation completes, this one or one later
        self.evaluations.evaluate_at_end()
        failed = self.evaluations.failure is not None
        if not failed and self.keep_model:
            self._write_totals()
        result = self._result({} if failed else self.at_end(self.parts))
        if not failed or self.keep_model:
            self.folder.write_result(result.to_dict())
        return result

    # ------------------------------------------------------------------ steps

    def _train(self, should_stop: Callable[[int], bool]) -> None:
        with self._held():
            release_frequencies(self.config, self.parts.model, self.parts.engine)
            self._position = self._current_position()
        self.reporter.begin(self.step, self.parts.steps)
        try:
            if self.step:
                self.evaluations.evaluate_if_due()  # what a run that is resumed had not come to
            while not self.finished and not should_stop(self.step):
                for _ in steps_of_epoch(self.parts, self._held, self._completed):
                    self.evaluations.evaluate_if_due()
                    if should_stop(self.step):
                        return
                    if self._checkpoint_is_due():
                        self.save()
        finally:
            self.reporter.end()

    def _held(self) -> AbstractContextManager[None]:
        return nullcontext() if self.signals is None else self.signals.held()

    def _completed(self, done: Step) -> None:
        """Adds a step to the totals, the position, the metrics and what is shown."""
        report, totals = done.report, self.totals
        totals.add(report, done.seconds)
        self._position = self._current_position()
        speed = totals.examples / totals.training_seconds
        stream = self.parts.loader.stream
        self.reporter.show(
            Status(
                self.step,
                done.loss,
                self.epsilon_spent(self.finished),
                report.rows_touched,
                speed,
                None if stream is None or done.span is None else stream.names[done.span],
            )
        )
        if self.step % self.config.training.log_every and not self.finished:
            return
        self.folder.log({
            "kind": "step",
            "step": self.step,
            **({} if done.span is None else {"span": done.span}),
            "loss": done.loss,
            "lr": done.lr,
            **({} if done.table_lr is None else {"table_lr": done.table_lr}),
            "units": report.units,
            "examples": report.examples,
            "clipped_share": report.clipped_share,
            "mean_norm": report.mean_norm,
            "rows_touched": report.rows_touched,
            "gradient_size": report.gradient_size,
            "reduction": report.reduction if report.tables else None,
            "kept_mass": report.kept_mass if report.tables else None,
            "tables": {
                name: {"touched": table.rows_touched, "selected": table.rows_selected, "false": table.rows_false}
                for name, table in report.tables.items()
            },
            "seconds": done.seconds,
        })  # fmt: skip

    # ------------------------------------------------------------------ checkpoints

    def _current_position(self) -> _Position:
        engine, collate = self.parts.engine, self.parts.data.collate
        seeded = self.config.training.seed is not None
        return _Position(
            tuple(engine.ledger.entries),
            self.parts.loader.state_dict(),
            torch.get_rng_state() if seeded else None,
            collate.state() if isinstance(collate, SequenceCollate) else None,
        )

    def _checkpoint_is_due(self) -> bool:
        settings = self.config.training
        by_steps = settings.checkpoint_every is not None and self.step % settings.checkpoint_every == 0
        minutes = (time.monotonic() - self._last_save) / 60
        by_time = settings.checkpoint_minutes is not None and minutes >= settings.checkpoint_minutes
        return (by_steps or by_time) and not self.finished  # at the end it is saved anyway

    def save(self) -> None:
        """The totals first: they keep those of the checkpoint that is there, so that a kill between leaves a pair."""
        if not self.keep_model:
            return
        self._saving = True
        with self._held():
            require_space(self.folder.path, self._bytes(), "the next checkpoint")
            self._write_totals()
            extra = {"scheduler": self.parts.scheduler.state_dict(), "negatives": self._position.drawn}
            self.parts.engine.save_checkpoint(self.folder.checkpoint, extra=extra)
            self.saved = self.step
        self._saving = False
        self._last_save = time.monotonic()

    def _write_totals(self) -> None:
        self.totals.seconds = self.earlier_seconds + time.monotonic() - self.started
        of_checkpoint = {step: values for step, values in self._saved_totals.items() if step == self.saved}
        now = {"totals": asdict(self.totals), **self.evaluations.state()}
        self._saved_totals = of_checkpoint | {self.step: now}
        self.folder.write_totals(self._saved_totals, self.saved)

    def _release(self) -> None:
        engine, model = self.parts.engine, self.parts.model
        self._saving = True
        with self._held():
            require_space(self.folder.path, model_bytes(model), "the weights")
            frequencies = None if engine.plan.frequencies is None else engine.release_frequencies()
            self.folder.write_release(model.state_dict(), frequencies, engine.statement(self.parts.delta))
        self._saving = False

    def _bytes(self) -> int:
        """Bytes of the tensors in a checkpoint."""
        state = [value for entries in self.parts.optimizer.state.values() for value in entries.values()]
        return model_bytes(self.parts.model) + sum(tensor_bytes(value) for value in state if isinstance(value, Tensor))

    def restore(self) -> None:
        """Goes on from the checkpoint; from the beginning, if the run was stopped before its first one."""
        if not self.folder.checkpoint.is_file():
            self.folder.require_no_checkpoint_lost()
            self.folder.forget_after(0)
            self.reporter.say("There is no checkpoint yet: the run starts from its beginning")
            return
        extra = self.parts.engine.load_checkpoint(self.folder.checkpoint)
        self.parts.scheduler.load_state_dict(extra["scheduler"])
        self.saved = self.step
        self._saved_totals[self.step] = values = self.folder.read_totals(self.step)
        self.totals = Totals(**values["totals"])
        self.earlier_seconds = self.totals.seconds
        self.evaluations.restore(values)
        if isinstance(collate := self.parts.data.collate, SequenceCollate):
            collate.restore(extra["negatives"])
        self.folder.forget_after(self.step, evaluated=self.evaluations.tried == self.step)
        if not self.finished:
            self.folder.withdraw_release()
        self._position = self._current_position()
        self.reporter.say(f"Resumed after step {self.step} of {self.parts.steps}")

    def _save_after_error(self) -> None:
        """Saves what there is after an exception, unless saving is what failed or a step was cut in two."""
        position = self._position
        step_is_complete = tuple(self.parts.engine.ledger.entries) == position.ledger
        if self.keep_model and step_is_complete and self.saved != self.step and not self._saving:
            self.parts.optimizer.forget()
            self.parts.loader.load_state_dict(position.loader)
            if position.generator is not None:
                torch.set_rng_state(position.generator)
            try:
                self.save()
            except Exception as error:
                self.reporter.alert(f"The checkpoint after step {self.step} could not be written: {one_line(error)}")
        if not self.keep_model:
            return
        if self.saved is None:
            checkpoint = "No checkpoint is written yet, so that a resumed run starts from its beginning."
        else:
            checkpoint = f"The checkpoint after step {self.saved} of {self.parts.steps} is written."
        command = command_on_run("train --resume", self.config, self.folder)
        self.reporter.alert(f"The run has stopped. {checkpoint} Go on with:\n  {command}")

    def _result(self, extra: dict[str, Any] | None = None) -> RunResult:
        tables = find_tables(self.parts.model)
        sizes = {name: p.numel() for name, p in self.parts.model.named_parameters() if p.requires_grad}
        self.totals.seconds = self.earlier_seconds + time.monotonic() - self.started
        return RunResult(
            run_dir=self.folder.path,
            finished=self.finished,
            planned_steps=self.parts.steps,
            totals=self.totals,
            dense_size=sum(size for name, size in sizes.items() if name in tables),
            statement=self.parts.engine.statement(self.parts.delta),
            metrics=self.evaluations.metrics if self.evaluations.evaluated == self.step else {},
            planted_auc=getattr(self.parts.data.held_out, "planted_auc", None),
            tables_frozen=self.config.model.freeze_tables,
            extra=extra or {},
            evaluation=self.evaluations.status(),
        )
