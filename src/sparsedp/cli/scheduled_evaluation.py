"""The evaluations during a run and at its end: when they are due, the latest metrics, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

from torch.utils.data import Subset

from sparsedp.cli.config.config import Config
from sparsedp.cli.evaluation import evaluate, evaluate_on, refuse_diverged
from sparsedp.cli.prepare import Prepared
from sparsedp.cli.progress import Reporter, evaluation_progress
from sparsedp.cli.result import FAILED, decimals
from sparsedp.cli.runfolder import RunFolder
from sparsedp.cli.signals import StopRequests
from sparsedp.errors import DivergedError, RankLostError, one_line


class ScheduledEvaluation:
    """Evaluates the model of a run after the steps at which that is due, and writes the metrics into the run's folder."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        folder: RunFolder,
        reporter: Reporter,
        signals: StopRequests | None,
        by_halves: bool,
    ) -> None:
        self.config, self.parts, self.folder, self.reporter, self.signals = config, prepared, folder, reporter, signals
        self._by_halves = by_halves  # at the end
        self.metrics: dict[str, Any] = {}  # the latest, after step `evaluated`
        self.evaluated = 0
        self.tried = 0  # the step after which the latest evaluation was tried, with success or not
        self.failure: str | None = None  # of the evaluation after the last step
        self.diverged = False  # whether that is because training has diverged
        self._every = config.training.evaluate_every  # steps
        if config.training.evaluate_every_epochs is not None:
            self._every = config.training.evaluate_every_epochs * prepared.loader.steps_per_epoch

    @property
    def step(self) -> int:
        return self.parts.steps_taken

    def state(self) -> dict[str, Any]:
        return {"evaluation": self.metrics, "evaluated": self.evaluated, "tried": self.tried}

    def restore(self, state: dict[str, Any]) -> None:
        self.metrics, self.evaluated, self.tried = state["evaluation"], state["evaluated"], state["tried"]

    def status(self) -> str:
        """done, not yet, nothing is held out, or failed: and why."""
        if self.failure is not None:
            return FAILED + self.failure
        if self.parts.data.held_out is None:
            return "nothing is held out"
        return "done" if self.evaluated == self.step else "not yet"

    def evaluate_if_due(self) -> None:
        """A failure does not stop the training: its budget is spent, and an evaluation can be made up for."""
        if self.tried == self.step:
            return
        on_held_out = self._every is not None and self.step % self._every == 0 and not self.parts.finished
        span = self._next_span()
        if not on_held_out and span is None:
            return
        try:
            with self._interruptible(), self.parts.engine.long_work():
                if on_held_out:
                    self._evaluate()
                if span is not None:
                    self._evaluate_next(span)
        except (DivergedError, RankLostError):
            raise  # further steps would be wasted, or fail
        except Exception as error:
            self._note_failure(error)
        except KeyboardInterrupt:
            if self.signals is None or self.signals.count != 1:
                raise
            return  # the loop stops, and the run that is resumed evaluates
        self.tried = self.step

    def evaluate_at_end(self, last_losses: Sequence[float]) -> None:
        """The model is saved: an evaluation that fails, or is interrupted, takes nothing away.

        Whether training has diverged is asked whatever is held out, and whatever became of the evaluation.
        """
        if self.evaluated != self.step or self._by_halves:  # a look may stop the run where it was evaluated
            try:
                if self.parts.processes.any(self.signals is not None and self.signals()):
                    raise KeyboardInterrupt
                with self._interruptible(), self.parts.engine.long_work():
                    self._evaluate(self._by_halves)
            except KeyboardInterrupt:
                self.failure = "interrupted"
            except Exception as error:
                self._note_failure(error)
                self.failure, self.diverged = one_line(error), isinstance(error, DivergedError)
        self.tried = self.step
        name = _not_finite(self.parts)
        not_finite = self.parts.processes.any(
            name is not None
        )  # which all processes ask, whatever became of their evaluation
        if self.failure == "interrupted" or self.diverged:
            return
        try:
            if not_finite:
                which = "A parameter" if name is None else f"Parameter '{name}'"  # of another process's part
                raise DivergedError(f"{which} is not finite: training has diverged. Lower optimizer.lr.")
            refuse_diverged(self.config, self.metrics if self.evaluated == self.step else {}, last_losses)
        except DivergedError as error:
            self._note_failure(error)
            self.failure, self.diverged = one_line(error), True

    def _interruptible(self) -> AbstractContextManager[None]:
        if self.signals is None or self.parts.processes.several:  # all processes evaluate together, to the end
            return nullcontext()
        return self.signals.at_once()

    def _evaluate(self, by_halves: bool = False) -> None:
        held_out = self.parts.data.held_out
        progress = evaluation_progress(self.reporter, 0 if held_out is None else len(held_out))
        parts = self.parts
        self.metrics = evaluate(self.config, parts.model, parts.loss, parts.data, progress, by_halves=by_halves)
        self.evaluated = self.step
        if self.metrics:
            epsilon = self.parts.engine.get_epsilon(self.parts.delta)
            self.folder.log({"kind": "evaluation", "step": self.step, **self.metrics, "epsilon": epsilon})
            shown = _in_words(self.metrics)
            self.reporter.say(f"Held out, after step {self.step}: {shown}  (epsilon {epsilon:.3f})")

    def _note_failure(self, error: Exception) -> None:
        self.folder.log({"kind": "failed_evaluation", "step": self.step, "error": one_line(error)})
        self.reporter.say(f"The evaluation after step {self.step} failed: {one_line(error)}")

    # ------------------------------------------------------------------ the next periods of a stream

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
        periods, every = loader.stream.periods[indices], loader.stream.every
        metrics = evaluate_on(self.config, self.parts.model, self.parts.loss, part, data.collate, periods, every=every)
        epsilon = self.parts.engine.get_epsilon(self.parts.delta)
        for period, values in metrics["periods"].items():
            row = {
                "kind": "evaluation",
                "step": self.step,
                "period": period if every else int(period),
                **values,
                "epsilon": epsilon,
            }
            self.folder.log(row)
            self.reporter.say(f"Period {period}, before training on it, after step {self.step}: {_in_words(values)}")


def _in_words(metrics: dict[str, Any]) -> str:
    """Of precision and recall at several k, those at 10: the file has them all."""
    shown = {
        name: v
        for name, v in metrics.items()
        if isinstance(v, float) and v == v and name.rpartition("@")[2] in (name, "10")
    }
    return "  ".join(f"{name.replace('_', ' ')} {decimals(v)}" for name, v in shown.items())


def _not_finite(parts: Prepared) -> str | None:
    """The name of a parameter, or of this process's part of one, that holds NaN or infinity; None if there is none."""
    model = parts.model
    here = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
    tensors = {**here, **parts.optimizer.parameters_by_name()}
    return next((n for n, t in tensors.items() if t.is_floating_point() and not t.detach().isfinite().all()), None)
