"""Compares all mechanisms for one run before it starts, at the same epsilon, and recommends one.

`advise` is for Python, `sparsedp plan --compare` for configurations; both show the same table.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from dp_accounting import NonPrivateDpEvent
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sparsedp import concerns
from sparsedp.counting import arguments_of
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, LazyDP, Look, Mechanism, PublicCounts
from sparsedp.mechanisms.look import require_look
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import Prediction, TouchStatistics, find_auto_threshold, predict, statistics_from_release
from sparsedp.progress import Progress, no_progress
from sparsedp.refusals import refuse_optimizer
from sparsedp.settings import SettingsKeywords, takes_settings
from sparsedp.several_optimizers import as_one

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEPT_ENOUGH = (
    0.75  # share of touches that a recommended mechanism keeps; of each table's, where it leaves rows out for good
)
NOISE_ENOUGH = 1.25  # a recommended mechanism's noise on the gradient over the least of all
SMALL_TABLES = 1_000_000  # coordinates of all tables up to which noise on all of them costs next to nothing
NOTE_OF_DATA = "The choice of the mechanism, which was made by looking at the training data without noise."
_WARM_UP, _MEASURED, _SECONDS = 2, 8, 10.0


@dataclass(frozen=True)
class Option:
    """One mechanism: what a run with it would be."""

    label: str
    mechanism: Mechanism  # with the threshold that was found
    guarantee: str
    private: bool  # whether a run with it has a finite epsilon
    noise_multiplier: float | None = None
    gradient_noise: float | None = None  # the noise multiplier of the gradient, without the part that a selection takes
    prediction: Prediction | None = None
    step_size: float | None = None  # coordinates of the tables that a step reads or writes
    gradient_bytes: float | None = None
    memory_bytes: float | None = (
        None  # of all parameters, the optimizer's state, and what a step adds, without activations
    )
    seconds_per_step: float | None = None
    seconds_of_run: float | None = None
    concerns: tuple[str, ...] = ()
    refused: str | None = None  # why a run with it is not possible

    @property
    def kept_touches(self) -> float | None:
        return None if self.prediction is None else self.prediction.kept_touches

    @property
    def false_share(self) -> float | None:
        """The share of selected rows that no unit of the batch touches."""
        if self.prediction is None or not self.prediction.rows_selected:
            return None
        return self.prediction.rows_false / self.prediction.rows_selected

    @property
    def least_kept(self) -> float:
        """The kept share of touches in the table that keeps least."""
        tables = () if self.prediction is None else self.prediction.tables.values()
        return min((t.touches_kept / t.touches for t in tables if t.touches > 0), default=1.0)

    def timed(self, seconds_per_step: float, preparation: float, steps: int) -> Option:
        run = preparation + steps * seconds_per_step
        return replace(self, seconds_per_step=seconds_per_step, seconds_of_run=run)

    def to_dict(self) -> dict[str, Any]:
        names = (
            "label", "guarantee", "private", "noise_multiplier", "gradient_noise", "kept_touches", "false_share", "step_size",
            "gradient_bytes", "memory_bytes", "seconds_per_step", "seconds_of_run", "refused",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        values["mechanism"] = self.mechanism.to_dict()
        values["concerns"] = list(self.concerns)
        if self.prediction is not None:
            values["gradient_size"] = self.prediction.gradient_size
            values["reduction"] = self.prediction.reduction
        return values


@dataclass(frozen=True)
class Advice:
    """All mechanisms for a run, and the one that is recommended. `str()` gives them as a table.

    `settings` are the keywords of `make_private_with_epsilon` for the recommended one; `engine.add_advice(advice)` lets the
    statement say that the choice looked at the data, if it did.
    """

    options: tuple[Option, ...]
    recommended: Option
    reason: str  # in one sentence
    epsilon: float
    delta: float
    steps: int
    source: str  # what was looked at, in words
    private: bool  # whether the table was computed from private data without noise: for the developer, not for release
    release: FrequencyRelease | None = field(default=None, repr=False)  # what was released for it, and has to be paid

    @property
    def mechanism(self) -> Mechanism:
        return self.recommended.mechanism

    @property
    def settings(self) -> dict[str, Any]:
        paid = {} if self.release is None else {"frequencies": self.release}
        return {"mechanism": self.mechanism, **paid}

    @property
    def note(self) -> str | None:
        """What a statement has to say of the choice."""
        return NOTE_OF_DATA if self.private else None

    def with_options(self, options: Sequence[Option]) -> Advice:
        """The same with options that know more, such as times."""
        recommended = next(option for option in options if option.label == self.recommended.label)
        return replace(self, options=tuple(options), recommended=recommended)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            "source": self.source,
            "private": self.private,
            "options": [option.to_dict() for option in self.options],
            "recommended": self.recommended.label,
            "reason": self.reason,
        }

    def refusals(self) -> list[str]:
        """Why some mechanisms are not possible: each reason once, behind all that it is of."""
        labels: dict[str, list[str]] = {}
        for option in self.options:
            if option.refused:
                labels.setdefault(option.refused, []).append(option.label)
        return [f"{'; '.join(refused)}: {reason}" for reason, refused in labels.items()]

    def __str__(self) -> str:
        rows = [HEADINGS, *(cells(option) for option in self.options)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([
            f"{self.steps:,} steps, epsilon {self.epsilon:.4g} at delta {self.delta:g}; rows predicted from {self.source}",
            *lines, LEGEND, *self.refusals(), f"Recommended: {self.recommended.label}. {self.reason}",
        ])  # fmt: skip


HEADINGS = ("mechanism", "noise", "kept", "false", "gradient", "ms/step", "run", "memory", "promise")
LEGEND = (
    "noise: on the gradient, as a multiple of max_grad_norm; kept: of what units touch; false: of the selected rows, those that "
    "no unit touches; gradient: coordinates of tables that a step may change; memory: of parameters, optimizer state and a "
    "step's gradient, without activations; promise: what an (epsilon, delta) covers"
)


def cells(option: Option) -> tuple[str, ...]:
    """A line of the table, for `HEADINGS`."""

    def shown(value: float | None, form: Callable[[float], str]) -> str:
        return "" if value is None else form(value)

    size = None if option.prediction is None else option.prediction.gradient_size
    return (
        option.label,
        shown(option.gradient_noise, lambda v: f"{v:.3g}"),
        shown(option.kept_touches, lambda v: f"{v:.1%}"),
        shown(option.false_share, lambda v: f"{v:.1%}"),
        shown(size, _count),
        shown(option.seconds_per_step, lambda v: f"{1000 * v:.3g}"),
        shown(option.seconds_of_run, lambda v: f"{v:,.0f} s" if v < 7200 else f"{v / 3600:,.1f} h"),
        shown(option.memory_bytes, lambda v: f"{v / 1e6:,.1f} MB"),
        "refused" if option.refused else ("model" if option.private else "nothing"),
    )


def _count(value: float) -> str:
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.0f}"


@takes_settings
def advise(
    *,
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data_loader: DataLoader,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    look_at: Look,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    release: FrequencyRelease | None = None,
    progress: Progress = no_progress,
    **settings: Unpack[SettingsKeywords],
) -> Advice:
    """Compares all mechanisms for a run that `make_private_with_epsilon` would start with these arguments. Trains nothing.

    `look_at` says what rows are predicted from: `PublicCounts`, "release" (frequencies released once with noise, by `release`;
    pass `advice.settings` on, so that the run pays for it), or "data" (without noise; give the advice to `engine.add_advice`,
    so that the statement says it). With `loss_fn(output, target)` some steps of each mechanism are taken and timed, on copies of
    the module: that needs its memory once more. A `mechanism` among the settings is compared with the others. `progress`
    (`sparsedp.progress.Progress`) is told what is being done.
    """
    require_look(look_at, "advise")
    if look_at == "release" and release is None:
        release = FrequencyRelease(epsilon=min(0.1, target_epsilon / 10), delta=min(1e-7, target_delta / 10))
    asked = settings.pop("mechanism", None)
    if release is not None:
        settings["frequencies"] = release

    def begin(
        mechanism: Mechanism, module: nn.Module, optimizer: Optimizer | Sequence[Optimizer], noise: float | None = None
    ) -> tuple[PrivacyEngine, Any, Any]:
        """With this noise, where no noise gives the mechanism an epsilon."""
        engine = PrivacyEngine(progress=progress)
        parts: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        keywords: dict[str, Any] = {**settings, "mechanism": mechanism}
        with concerns.without_warnings():
            if noise is None:
                target: dict[str, Any] = {
                    "target_epsilon": target_epsilon,
                    "target_delta": target_delta,
                    "epochs": epochs,
                }
                _, private, loader = engine.make_private_with_epsilon(**parts, **target, **keywords)
            else:
                _, private, loader = engine.make_private(**parts, noise_multiplier=noise, **keywords)
        return engine, private, loader

    engine = begin(accepted_mechanism(module, optimizer), module, optimizer)[0]
    try:
        advice = compare(engine, look_at, asked, progress)
    finally:
        engine.close()
    if loss_fn is None:
        return advice
    timed = []
    for option in advice.options:
        if option.refused:
            timed.append(option)
            continue
        copied, its_optimizer = copy.deepcopy((module, optimizer))
        noise = None if option.private else option.noise_multiplier
        trial, private, loader = begin(option.mechanism, copied, its_optimizer, noise)
        times = _time_steps(trial, private, loader, copied, loss_fn, option.label, progress)
        timed.append(option.timed(*times, advice.steps))
        trial.close()
    return advice.with_options(timed)


def compare(
    engine: PrivacyEngine, look_at: Look, asked: Mechanism | None = None, progress: Progress = no_progress
) -> Advice:
    """The table for a run that an engine has a plan for. If a release is looked at, it is the engine's own, drawn now."""
    plan, delta = engine.plan, engine.plan.target_delta
    if plan.target_epsilon is None or delta is None or plan.steps is None:
        raise SparseDPError("Mechanisms are compared at the same epsilon: give a target epsilon.")
    release = None
    if look_at == "release":
        assert plan.frequencies is not None
        release = replace(plan.frequencies, drawn=engine.release_frequencies())
    options = []
    candidates = _candidates(engine, look_at, asked)
    looked = _Looked(engine, look_at, [mechanism for _, mechanism in candidates])
    for label, mechanism in candidates:
        with progress(f"predicting {label}", 0):
            try:
                options.append(_assess(engine, label, mechanism, looked))
            except (SparseDPError, ValueError) as error:
                options.append(Option(label, mechanism, "", False, refused=" ".join(str(error).split())))
    recommended, reason = recommend(options)
    source = next((o.prediction.source for o in options if o.prediction is not None), "nothing: no table is trained")
    return Advice(
        options=tuple(options),
        recommended=recommended,
        reason=reason,
        epsilon=plan.target_epsilon,
        delta=delta,
        steps=plan.steps,
        source=source,
        private=look_at == "data",
        release=release,
    )


def _candidates(engine: PrivacyEngine, look_at: Look, asked: Mechanism | None) -> list[tuple[str, Mechanism]]:
    plan = engine.plan
    assert plan.target_epsilon is not None and plan.target_delta is not None
    rows = sum(table.rows for table in engine.trained_tables().values())
    k = max(len(engine.trained_tables()), rows // 10, 1)
    epsilon, delta = min(0.1, plan.target_epsilon / 10), min(1e-7, plan.target_delta / 10)
    fest = FEST(k=k, epsilon=epsilon, delta=delta, split="tables")
    few = min(1000, max(1, rows // 10))
    candidates: list[tuple[str, Mechanism]] = [] if asked is None else [(f"yours: {asked.name}", asked)]
    candidates += [("DPSGD", DPSGD()), ("LazyDP", LazyDP())]
    if not rows:
        return candidates
    return [
        *candidates,
        ("AdaFEST auto, ratio 5", AdaFEST(threshold="auto", look_at=look_at)),
        ("AdaFEST auto, ratio 2", AdaFEST(threshold="auto", look_at=look_at, noise_ratio=2.0)),
        (f"FEST k={k:,}", fest),
        (f"exponential k={few:,}", ExponentialSelection(k=few, epsilon=plan.target_epsilon / 10)),
        ("EANA", EANA()),
    ]


class _Looked:
    """What the data, or what stands for them, say of the rows of each mechanism.

    They are counted once for all that have the same clip of contributions, or none; what chooses rows before training, such as
    FEST, counts by itself, as its rows have to be drawn.
    """

    def __init__(self, engine: PrivacyEngine, look_at: Look, mechanisms: Sequence[Mechanism]) -> None:
        self._engine, self._look_at = engine, look_at
        shared = [mechanism for mechanism in mechanisms if not mechanism.prepares]
        clips = [clip for mechanism in shared if (clip := mechanism.contribution_clip) is not None]
        self._of_all = clips[0] if clips else None  # of one that has none, any will do
        self._statistics: dict[float | None, TouchStatistics] = {}

    def statistics(self, plan: PrivacyPlan) -> TouchStatistics:
        if plan.mechanism.prepares or plan.mechanism.inputs is not None:
            return _statistics(self._engine, plan, self._look_at)
        clip = plan.mechanism.contribution_clip or self._of_all
        if clip not in self._statistics:
            if clip is not None and plan.mechanism.contribution_clip is None:
                plan = replace(plan, mechanism=AdaFEST(map_clip=clip))
            self._statistics[clip] = _statistics(self._engine, plan, self._look_at)
        return self._statistics[clip]


def _assess(engine: PrivacyEngine, label: str, mechanism: Mechanism, looked: _Looked) -> Option:
    """What a run with this mechanism would be; raises where it is refused."""
    tables = engine.trained_tables()
    engine.refuse(mechanism)
    private = not isinstance(mechanism.step_event(1.0, 1.0), NonPrivateDpEvent)
    plan = _calibrated(engine.plan, mechanism if private else DPSGD())
    plan = replace(plan, mechanism=mechanism)  # what promises nothing gets the noise of DP-SGD
    prediction, worries = None, concerns.of_plan(plan)
    if tables:
        statistics = looked.statistics(plan)
        if plan.mechanism.looks_at is not None:
            plan = find_auto_threshold(plan, statistics)
        prediction = predict(plan, statistics)
        worries += concerns.of_prediction(plan, prediction, statistics)
    changed = _step_size(plan, prediction)
    item = next((table.dtype.itemsize for table in tables.values()), 4)
    dense = sum(math.prod(shape) for name, shape in plan.parameters if name not in tables)
    waiting = 4 * sum(table.rows for table in tables.values()) if plan.mechanism.noise_waits else 0
    gradient = item * (dense + changed) + waiting
    lasting = engine.lasting_bytes()
    return Option(
        label=label,
        mechanism=plan.mechanism,
        guarantee=plan.mechanism.guarantee,
        private=private,
        noise_multiplier=plan.noise_multiplier,
        gradient_noise=plan.mechanism.gradient_noise(plan.noise_multiplier),
        prediction=prediction,
        step_size=changed,
        gradient_bytes=gradient,
        memory_bytes=None if lasting is None else lasting + gradient,
        concerns=tuple(worries),
    )


def _calibrated(base: PrivacyPlan, mechanism: Mechanism) -> PrivacyPlan:
    """The plan of the same run with this mechanism, for the same target."""
    assert base.target_epsilon is not None and base.target_delta is not None and base.steps is not None
    plan = replace(base, mechanism=mechanism)
    return plan.calibrated(target_epsilon=base.target_epsilon, target_delta=base.target_delta, steps=base.steps)


def _statistics(engine: PrivacyEngine, plan: PrivacyPlan, look_at: Look) -> TouchStatistics:
    if isinstance(look_at, PublicCounts):
        return engine.touch_statistics(look_at.counts, look_at.units, plan=plan)
    if look_at == "data":
        return engine.touch_statistics(plan=plan)
    assert plan.frequencies is not None
    return statistics_from_release(plan, engine.trained_tables(), plan.frequencies, engine.release_frequencies())


def _time_steps(
    engine: PrivacyEngine, optimizer: Any, loader: Any, module: nn.Module, loss_fn: Callable[[Any, Any], Tensor], label: str,
    progress: Progress,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a step, as the median of a few, and of what comes before the first."""
    started = time.monotonic()
    engine.prepare()
    preparation = time.monotonic() - started
    seconds: list[float] = []
    started = last = time.monotonic()
    with progress(f"timing steps of {label}", _WARM_UP + _MEASURED) as advance:
        for batch in loader:
            optimizer.zero_grad()
            if loader.current.units:
                args, kwargs, target = arguments_of(batch)
                loss_fn(module(*args, **kwargs), target).backward()
            optimizer.step()
            if loader.current.last:
                now = time.monotonic()
                seconds.append(now - last)
                last = now
                advance(1)
            if len(seconds) == _WARM_UP + _MEASURED or (len(seconds) > _WARM_UP and last - started > _SECONDS):
                break
    return median(seconds[_WARM_UP:] or seconds), preparation


def accepted_mechanism(module: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> Mechanism:
    """A mechanism that the optimizer takes, to have a plan: all others are compared with it."""
    first: Exception | None = None
    for mechanism in (DPSGD(), LazyDP(), AdaFEST()):
        try:
            refuse_optimizer(as_one(optimizer), module, mechanism)
            return mechanism
        except UnsupportedError as error:
            first = first or error
    assert first is not None
    raise first


def _step_size(plan: PrivacyPlan, prediction: Prediction | None) -> float:
    """Coordinates of tables that a step reads or writes: LazyDP changes all rows, in effect, and touches those of the batch."""
    if prediction is None:
        return 0.0
    touched = sum(table.rows_touched * table.dim for table in prediction.tables.values())
    return touched if plan.mechanism.noise_waits else max(touched, prediction.gradient_size)


def recommend(options: Sequence[Option]) -> tuple[Option, str]:
    """The option to take, and why, in one sentence.

    Of the mechanisms with a guarantee that keep most of what units touch, at about the least noise on the gradient, the one
    whose step reads and writes least; DP-SGD, if the tables are small.
    """
    possible = [option for option in options if option.private and option.refused is None]
    if not possible:
        raise SparseDPError("No mechanism can train this run: " + "; ".join(f"{o.label}: {o.refused}" for o in options))
    dense = next((option for option in possible if option.label == "DPSGD"), None)
    if dense is not None and (dense.prediction is None or dense.prediction.dense_size <= SMALL_TABLES):
        return (
            dense,
            "The tables are so small that noise on all of their rows costs next to nothing, and it keeps every touch.",
        )
    least = min(option.gradient_noise or 0.0 for option in possible)
    good = [
        option for option in possible if _keeps_enough(option) and (option.gradient_noise or 0) <= NOISE_ENOUGH * least
    ]
    if not good:
        best = max(possible, key=lambda option: (option.kept_touches or 0.0, -(option.step_size or 0.0)))
        return (
            best,
            f"No mechanism keeps {KEPT_ENOUGH:.0%} of what units touch; this one keeps most, {best.kept_touches:.0%}.",
        )
    chosen = min(good, key=lambda option: option.step_size or 0.0)
    size = f"{chosen.step_size:,.0f} coordinates of tables a step"
    if chosen.mechanism.noise_waits:
        others = [
            o for o in possible if o.mechanism.threshold_setting is not None and (o.false_share or 0) > concerns.MOSTLY
        ]
        because = ", and most rows that AdaFEST would select are noise" if others else ""
        return chosen, f"It has the law of DP-SGD, which keeps every touch, and moves least, {size}{because}."
    return chosen, (
        f"It keeps {chosen.kept_touches:.0%} of what units touch, and of those that keep at least {KEPT_ENOUGH:.0%} with about "
        f"the least noise it moves least: {size}."
    )


def _keeps_enough(option: Option) -> bool:
    if option.kept_touches is None:
        return True
    kept = option.least_kept if option.mechanism.prepares else option.kept_touches  # rows left out are so for good
    return kept >= KEPT_ENOUGH
