"""A run from its first step to its result, and what is written down on the way.

Whatever happens, the folder can be resumed: after an exception the state after the last complete step is saved, unless a step
was cut in two; a kill leaves the last checkpoint. What was trained is saved and released before it is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsedp.accounting.ledger import Entry
from sparsedp.callbacks import SpentEpsilon
from sparsedp.cli.adapters import table_adapters
from sparsedp.cli.callbacks import Callbacks
from sparsedp.cli.collate import SequenceCollate
from sparsedp.cli.config.config import Config
from sparsedp.cli.files import require_space
from sparsedp.cli.looks import Looks
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.prepare import Prepared, model_bytes, release_frequencies, tensor_bytes
from sparsedp.cli.progress import Reporter, Status
from sparsedp.cli.provenance import peak_memory
from sparsedp.cli.result import RunResult, Totals
from sparsedp.cli.resume import command_on_run
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.scheduled_evaluation import ScheduledEvaluation
from sparsedp.cli.signals import StopRequests
from sparsedp.cli.stopwatch import Stopwatch
from sparsedp.errors import DivergedError, one_line
from sparsedp.tables import find_tables


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
        watch: Stopwatch,
        by_halves: bool,
    ) -> None:
        self.config, self.parts, self.folder, self.reporter = config, prepared, folder, reporter
        self.watch = prepared.optimizer.stage = watch
        self.keep_model, self.at_end, self.signals = keep_model, at_end, signals
        self.processes = prepared.processes
        self.adapters = table_adapters(prepared.model)
        self.totals = Totals()
        self.started = started
        self.earlier_seconds = 0.0  # of the runs that this one resumes
        self.earlier_parts: dict[str, float] = {}
        self.evaluations = ScheduledEvaluation(config, prepared, folder, reporter, signals, by_halves)
        self.looks = None if prepared.stopping is None else Looks(config, prepared)
        self.saved: int | None = None  # the step of the checkpoint in the folder
        self._saving = False
        self._saved_totals: dict[int, dict[str, Any]] = {}
        self._last_save = time.monotonic()
        self.epsilon_spent = SpentEpsilon(lambda: prepared.engine.get_epsilon(prepared.delta))
        self._position = self._current_position()
        self.callbacks = Callbacks(config, folder.path, reporter)
        folder.listen = self.callbacks.note

    @property
    def step(self) -> int:
        """Steps taken in all."""
        return self.parts.steps_taken

    @property
    def finished(self) -> bool:
        return self.parts.finished

    def run(self, should_stop: Callable[[int], bool]) -> RunResult:
        self.folder.begin_session(self.step)
        try:
            return self._run(should_stop)
        finally:
            self.callbacks.tell_steps(epsilon := self.epsilon_spent(now=True))
            self.callbacks.tell_end(
                {"public/epsilon": epsilon, "public/steps": self.step, "public/finished": self.finished}
            )
            with suppress(OSError):  # such as a full disk, of which the exception at hand tells
                self.folder.end_session(self.step)

    def _run(self, should_stop: Callable[[int], bool]) -> RunResult:
        try:
            self.callbacks.begin()
            self._train(should_stop)
            if self.saved != self.step:
                self.save()
            if self.finished and self.keep_model and not self.processes.from_first(self.folder.is_released):
                self._release()
        except BaseException as error:
            self._save_after_error(error)
            raise
        result = self._result()
        if not self.finished:
            return result
        if self.keep_model:
            self.folder.write_result(result.to_dict())  # what an evaluation completes, this one or one later
        with self.watch("evaluation"):
            self.evaluations.evaluate_at_end(self.totals.last_losses)
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
            if self.parts.engine.plan.frequencies is not None:
                self.folder.write_plan(self.parts.engine.plan)  # with what was found on the release
            self._position = self._current_position()
        self.reporter.begin(self.step, self.parts.steps)
        try:
            if self.step:
                self.evaluations.evaluate_if_due()  # what a run that is resumed had not come to
                self._look_if_due()
            while not self.finished and not should_stop(self.step):
                for _ in steps_of_epoch(self.parts, self._held, self._completed, self.watch):
                    with self.watch("evaluation"):
                        self.evaluations.evaluate_if_due()
                    self._look_if_due()
                    self.callbacks.tell_steps(self.epsilon_spent())
                    if self.parts.stopped_early or should_stop(self.step):
                        return
                    if self._checkpoint_is_due():
                        self.save()
                self.callbacks.tell_epoch(self.step // self.parts.loader.steps_per_epoch)
        finally:
            self.reporter.end()

    def _look_if_due(self) -> None:
        """A look is paid for, and in the checkpoint, before anybody reads what it gave. One that fails stops nothing."""
        if self.looks is None or not self.looks.are_due:
            return
        try:
            with self._held(), self.watch("validation"):
                value = self.looks.look()
                self._position = replace(self._position, ledger=tuple(self.parts.engine.ledger.entries))
        except DivergedError:
            raise
        except Exception as error:
            self.folder.log({"kind": "failed_look", "step": self.step, "error": one_line(error)})
            self.reporter.say(f"The look at the validation set after step {self.step} failed: {one_line(error)}")
            return
        self.save()
        self.folder.log({"kind": "validation", "step": self.step, "validation": value})
        stops = "; it is not getting better: training stops" if self.parts.stopped_early else ""
        self.reporter.say(f"Validation, after step {self.step}: {value:.4f}{stops}")

    def _held(self) -> AbstractContextManager[None]:
        return nullcontext() if self.signals is None else self.signals.held()

    def _completed(self, done: Step) -> None:
        """Adds a step to the totals, the position, the metrics and what is shown."""
        report, totals = done.report, self.totals
        totals.add(report, done.seconds)
        if report.units:
            totals.add_loss(done.loss, self.parts.loader.steps_per_epoch)
        self._position = self._current_position()
        if not self.processes.is_first:
            return
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
        dense_size = report.dense_size + self.adapters.dense_size
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
            "gradient_size": (gradient_size := report.gradient_size + self.adapters.gradient_size),
            "reduction": dense_size / max(1, gradient_size) if dense_size else None,
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
        return self.processes.any(by_steps or by_time) and not self.finished  # at the end it is saved anyway

    def save(self) -> None:
        """The totals first: they keep those of the checkpoint that is there, so that a kill between leaves a pair."""
        if not self.keep_model:
            return
        several = self.processes.several
        self._saving = True
        with self._held(), self.watch("checkpoints"), self.parts.engine.long_work():
            needed = self._bytes()
            if self.processes.is_first:
                require_space(self.folder.path, needed, "the next checkpoint")
            self._write_totals()
            extra = {"scheduler": self.parts.scheduler.state_dict(), "negatives": self._position.drawn}
            if self.looks is not None:
                extra["looks"] = self.looks.state()
            self.parts.engine.save_checkpoint(self.folder.place_of_checkpoint(several), extra=extra)
            self.folder.keep_checkpoint(several)
            self.saved = self.step
        self._saving = False
        self._last_save = time.monotonic()

    def _write_totals(self) -> None:
        self._sum_up_time()
        of_checkpoint = {step: values for step, values in self._saved_totals.items() if step == self.saved}
        now = {"totals": asdict(self.totals), **self.evaluations.state()}
        self._saved_totals = of_checkpoint | {self.step: now}
        self.folder.write_totals(self._saved_totals, self.saved)

    def _sum_up_time(self) -> None:
        """The time and the memory of this run and of those that it resumes."""
        totals, seconds = self.totals, self.watch.seconds
        totals.seconds = self.earlier_seconds + time.monotonic() - self.started
        names = self.earlier_parts | seconds  # in order of the first time
        totals.parts = {name: self.earlier_parts.get(name, 0.0) + seconds.get(name, 0.0) for name in names}
        totals.peak_memory = max(totals.peak_memory or 0, peak_memory() or 0) or None

    def _release(self) -> None:
        engine, model = self.parts.engine, self.parts.model
        self._saving = True
        with self._held(), engine.long_work():
            if self.processes.is_first:
                require_space(self.folder.path, model_bytes(model), "the weights")
            frequencies = None if engine.plan.frequencies is None else engine.release_frequencies()
            self.folder.write_release(engine.save_state_dict, frequencies, engine.statement(self.parts.delta))
        self._saving = False

    def _bytes(self) -> int:
        """Bytes of the tensors in a checkpoint; of several processes, at most."""
        state = [value for entries in self.parts.optimizer.state.values() for value in entries.values()]
        own = sum(tensor_bytes(value) for value in state if isinstance(value, Tensor))
        return model_bytes(self.parts.model) + round(self.processes.add_up(own))

    def restore(self) -> None:
        """Goes on from the checkpoint; from the beginning, if the run was stopped before its first one."""
        if not self.processes.from_first(self.folder.has_checkpoint):
            self.folder.require_no_checkpoint_lost()
            self.folder.forget_after(0)
            self.reporter.say("There is no checkpoint yet: the run starts from its beginning")
            return
        extra = self.parts.engine.load_checkpoint(self.processes.from_first(self.folder.checkpoint))
        self.parts.scheduler.load_state_dict(extra["scheduler"])
        if self.looks is not None:
            self.looks.restore(extra["looks"])
        self.saved = self.step
        self._saved_totals[self.step] = values = self.folder.read_totals(self.step)
        self.totals = Totals(**values["totals"])
        self.earlier_seconds, self.earlier_parts = self.totals.seconds, self.totals.parts
        self.evaluations.restore(values)
        if isinstance(collate := self.parts.data.collate, SequenceCollate):
            collate.restore(extra["negatives"])
        self.folder.forget_after(self.step, evaluated=self.evaluations.tried == self.step)
        if not self.finished:
            self.folder.withdraw_release()
        self._position = self._current_position()
        self.reporter.say(f"Resumed after step {self.step} of {self.parts.steps}")

    def _save_after_error(self, error: BaseException) -> None:
        """Saves what there is after an exception, unless saving is what failed or a step was cut in two.

        Several processes save if they all failed alike.
        """
        position = self._position
        step_is_complete = tuple(self.parts.engine.ledger.entries) == position.ledger
        can_save = self.keep_model and step_is_complete and self.saved != self.step and not self._saving
        if can_save and self.processes.all_failed(self.step, error):
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
        self._sum_up_time()
        return RunResult(
            run_dir=self.folder.path,
            finished=self.finished,
            planned_steps=self.parts.steps,
            totals=self.totals,
            dense_size=self.adapters.dense_size + sum(size for name, size in sizes.items() if name in tables),
            adapters=self.adapters,
            statement=self.parts.engine.statement(self.parts.delta),
            metrics=self.evaluations.metrics if self.evaluations.evaluated == self.step else {},
            planted_auc=getattr(self.parts.data.held_out, "planted_auc", None),
            tables_frozen=self.config.model.freeze_tables,
            extra=extra or {},
            diverged=self.evaluations.diverged,
            evaluation=self.evaluations.status(),
            stopped_early=self.parts.stopped_early,
        )
