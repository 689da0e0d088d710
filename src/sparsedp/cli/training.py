"""A run from its first step to its result, and what is written down on the way.

Whatever happens, the folder can be resumed: after an exception the state after the last complete step is saved, if it is
whole; a kill leaves the last checkpoint. What was trained is saved and released before it is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from sparsedp.accounting.ledger import Entry
from sparsedp.cli.collate import SequenceCollate
from sparsedp.cli.config.config import Config
from sparsedp.cli.evaluation import DivergedError, evaluate, evaluate_on
from sparsedp.cli.files import require_space
from sparsedp.cli.loop import Step, steps_of_epoch
from sparsedp.cli.prepare import Prepared, model_bytes, release_frequencies, tensor_bytes
from sparsedp.cli.progress import Reporter, Status, evaluation_progress
from sparsedp.cli.result import FAILED, RunResult, Totals
from sparsedp.cli.resume import command_on_run
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.signals import StopRequests
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import one_line
from sparsedp.tables import find_tables


def metric_values(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in metrics.items() if isinstance(v, float))


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
class _Place:
    """Where a run is after a complete step. Within the next one the loader and the generators are ahead of it."""

    ledger: tuple[Entry, ...]
    loader: dict[str, int]
    generator: Tensor | None  # torch's, of a seeded run
    negatives: list[int] | None


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
        self.evaluation: dict[str, Any] = {}  # the latest, after step `evaluated`
        self.evaluated = 0
        self.tried = 0  # the step after which the latest evaluation was tried, with success or not
        self.failure: str | None = None  # of the evaluation after the last step
        self.saved: int | None = None  # the step of the checkpoint in the folder
        self._saving = False
        self._saved_totals: dict[int, dict[str, Any]] = {}
        self._last_save = time.monotonic()
        self.epsilon_spent = _EpsilonSpent(prepared.engine, prepared.delta)
        self._place = self._here()

    @property
    def step(self) -> int:
        """Steps taken in all."""
        return self.parts.engine.ledger.steps

    @property
    def finished(self) -> bool:
        return self.step == self.parts.steps

    def run(self, should_stop: Callable[[int], bool]) -> RunResult:
        try:
            self._train(should_stop)
            if self.saved != self.step:
                self.save()
            if self.finished and self.keep_model and not self.folder.is_released:
                self._release()
        except BaseException:
            self._rescue()
            raise
        result = self._result()
        if not self.finished:
            return result
        if self.keep_model:
            self.folder.write_result(result.to_dict())  # what an evaluation completes, this one or one later
        self._evaluate_at_end()
        if self.failure is None and self.keep_model:
            self._write_totals()
        result = self._result(self.at_end(self.parts) if self.failure is None else {})
        if self.failure is None or self.keep_model:
            self.folder.write_result(result.to_dict())
        return result

    # ------------------------------------------------------------------ steps

    def _train(self, should_stop: Callable[[int], bool]) -> None:
        with self._held():
            release_frequencies(self.config, self.parts.model, self.parts.engine)
            self._place = self._here()
        settings = self.config.training
        every = settings.evaluate_every
        if settings.evaluate_every_epochs is not None:
            every = settings.evaluate_every_epochs * self.parts.loader.steps_per_epoch
        self.reporter.begin(self.step, self.parts.steps)
        try:
            if self.step:
                self._evaluate_if_due(every)  # what a run that is resumed had not come to
            while not self.finished and not should_stop(self.step):
                for _ in steps_of_epoch(self.parts, self._held, self._completed):
                    self._evaluate_if_due(every)
                    if should_stop(self.step):
                        return
                    if self._checkpoint_is_due():
                        self.save()
        finally:
            self.reporter.end()

    def _held(self) -> AbstractContextManager[None]:
        return nullcontext() if self.signals is None else self.signals.held()

    def _completed(self, done: Step) -> None:
        """Adds a step to the totals, the place, the metrics and what is shown."""
        report, totals = done.report, self.totals
        totals.add(report, done.seconds)
        self._place = self._here()
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

    # ------------------------------------------------------------------ evaluation

    def _evaluate_if_due(self, every: int | None) -> None:
        """A failure does not stop the training: its budget is spent, and an evaluation can be made up for."""
        if self.tried == self.step:
            return
        on_held_out = every is not None and self.step % every == 0 and not self.finished
        span = self._next_span()
        if not on_held_out and span is None:
            return
        try:
            with nullcontext() if self.signals is None else self.signals.at_once():
                if on_held_out:
                    self._evaluate()
                if span is not None:
                    self._evaluate_next(span)
        except DivergedError:
            raise  # further steps would be wasted
        except Exception as error:
            self._note_failure(error)
        except KeyboardInterrupt:
            if self.signals is None or self.signals.count != 1:
                raise
            return  # the loop stops, and the run that is resumed evaluates
        self.tried = self.step

    def _evaluate(self) -> None:
        held_out = self.parts.data.held_out
        progress = evaluation_progress(self.reporter, 0 if held_out is None else len(held_out))
        self.evaluation = evaluate(self.config, self.parts.model, self.parts.loss, self.parts.data, progress)
        self.evaluated = self.step
        if self.evaluation:
            epsilon = self.parts.engine.get_epsilon(self.parts.delta)
            self.folder.log({"kind": "evaluation", "step": self.step, **self.evaluation, "epsilon": epsilon})
            shown = metric_values(self.evaluation)
            self.reporter.say(f"Held out, after step {self.step}: {shown}  (epsilon {epsilon:.3f})")

    def _evaluate_at_end(self) -> None:
        """The model is saved: an evaluation that fails, or is interrupted, takes nothing away."""
        if self.evaluated == self.step:
            return
        try:
            if self.signals is not None and self.signals():
                raise KeyboardInterrupt
            with nullcontext() if self.signals is None else self.signals.at_once():
                self._evaluate()
        except KeyboardInterrupt:
            self.failure = "interrupted"
        except Exception as error:
            self._note_failure(error)
            self.failure = one_line(error)
        self.tried = self.step

    def _note_failure(self, error: Exception) -> None:
        self.folder.log({"kind": "failed_evaluation", "step": self.step, "error": one_line(error)})
        self.reporter.say(f"The evaluation after step {self.step} failed: {one_line(error)}")

    def _next_span(self) -> int | None:
        """The span of the stream that training comes to next, if the model is to be evaluated on it before.

        In the first pass over the stream only: later ones have seen all of it.
        """
        settings, loader = self.config.stream, self.parts.loader
        borders = list(accumulate(loader.span_steps))[:-1]
        if settings is None or not settings.evaluate_next or self.step not in borders:
            return None
        return borders.index(self.step) + 1

    def _evaluate_next(self, span: int) -> None:
        """How good the model is on a span, by period, before it is trained on it."""
        data, loader = self.parts.data, self.parts.loader
        assert loader.stream is not None
        indices = loader.stream.spans[span]
        part = Subset(data.training, indices.tolist())
        periods = loader.stream.periods[indices]
        found = evaluate_on(self.config, self.parts.model, self.parts.loss, part, data.collate, periods)
        epsilon = self.parts.engine.get_epsilon(self.parts.delta)
        for period, values in found["periods"].items():
            row = {"kind": "evaluation", "step": self.step, "period": int(period), **values, "epsilon": epsilon}
            self.folder.log(row)
            self.reporter.say(
                f"Period {period}, before training on it, after step {self.step}: {metric_values(values)}"
            )

    # ------------------------------------------------------------------ checkpoints

    def _here(self) -> _Place:
        engine, collate = self.parts.engine, self.parts.data.collate
        seeded = self.config.training.seed is not None
        return _Place(
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
            extra = {"scheduler": self.parts.scheduler.state_dict(), "negatives": self._place.negatives}
            self.parts.engine.save_checkpoint(self.folder.checkpoint, extra=extra)
            self.saved = self.step
        self._saving = False
        self._last_save = time.monotonic()

    def _write_totals(self) -> None:
        self.totals.seconds = self.earlier_seconds + time.monotonic() - self.started
        known = {step: values for step, values in self._saved_totals.items() if step == self.saved}
        self._saved_totals = known | {
            self.step: {
                "totals": asdict(self.totals),
                "evaluation": self.evaluation,
                "evaluated": self.evaluated,
                "tried": self.tried,
            }
        }
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
        """Of the tensors in a checkpoint."""
        state = [value for own in self.parts.optimizer.state.values() for value in own.values()]
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
        self.evaluation, self.evaluated, self.tried = values["evaluation"], values["evaluated"], values["tried"]
        if isinstance(collate := self.parts.data.collate, SequenceCollate):
            collate.restore(extra["negatives"])
        self.folder.forget_after(self.step, evaluated=self.tried == self.step)
        if not self.finished:
            self.folder.withdraw_release()
        self._place = self._here()
        self.reporter.say(f"Resumed after step {self.step} of {self.parts.steps}")

    def _rescue(self) -> None:
        """Saves what there is after an exception, unless saving is what failed or a step was cut in two."""
        engine, place = self.parts.engine, self._place
        whole = tuple(engine.ledger.entries) == place.ledger
        if self.keep_model and whole and self.saved != self.step and not self._saving:
            self.parts.optimizer.forget()
            self.parts.loader.load_state_dict(place.loader)
            if place.generator is not None:
                torch.set_rng_state(place.generator)
            try:
                self.save()
            except Exception as error:
                self.reporter.alert(f"The checkpoint after step {self.step} could not be written: {one_line(error)}")
        if not self.keep_model:
            return
        if self.saved is None:
            there = "No checkpoint is written yet, so that a resumed run starts from its beginning."
        else:
            there = f"The checkpoint after step {self.saved} of {self.parts.steps} is written."
        self.reporter.alert(f"The run has stopped. {there} Go on with:\n  {self.command('train --resume')}")

    def command(self, name: str) -> str:
        """A command on this run, with the code that it needs."""
        return command_on_run(name, self.config, self.folder)

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
            metrics=self.evaluation if self.evaluated == self.step else {},
            planted_auc=getattr(self.parts.data.held_out, "planted_auc", None),
            tables_frozen=self.config.model.freeze_tables,
            extra=extra or {},
            evaluation=self._evaluation_status(),
        )

    def _evaluation_status(self) -> str:
        if self.parts.data.held_out is None:
            return "nothing is held out"
        if self.failure is not None:
            return FAILED + self.failure
        return "done" if self.evaluated == self.step else "not yet"
