"""Why a run is likely to learn little: said before training, from what a step is expected to do, and after its first steps.

Each concern is a sentence for the developer, with what to change. Concerns that were computed from private data are as private
as metrics: they are shown where the run is watched, and are no part of a model's release.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from statistics import fmean

import numpy as np

from sparsedp.errors import SparseDPError, UtilityWarning
from sparsedp.plan import PrivacyPlan
from sparsedp.prediction import Prediction, TouchStatistics
from sparsedp.step_report import StepReport

WATCHED = 20  # steps with units that are looked at before anything is said
SURE = 3  # steps with units after which an adapter that took no part in any of them is refused
LITTLE, LITTLE_OF_A_TABLE = 0.25, 0.05  # shares of touches, or of gradient mass, that are too few
MOSTLY = 0.5  # share of the selected rows that nobody touched
WAYS_TO_LESS_NOISE = (
    "Lower noise_ratio, take larger batches, or take LazyDP (with SGD), whose noise on all rows costs no time."
)
_SMALL_BATCH = 0.1  # noise in a coordinate of the mean gradient, over the clipping norm, that is much
_ENOUGH_UNITS = 32  # to say of a table that no two units share its rows
_SHOWN = 5  # tables that are named
# peft's names of what it trains beside weights; merged or switched off, none of an adapter's takes part in forward.
_ADAPTER = re.compile(r"(?:^|\.)(lora|ia3|hada|lokr|oft|boft|vera|randlora|vblora|fourierft|road|shira)_")


def warn(concerns: Sequence[str], stacklevel: int = 3) -> None:
    for concern in concerns:
        warnings.warn(concern, UtilityWarning, stacklevel=stacklevel)


@contextmanager
def without_warnings() -> Iterator[None]:
    """For trials, whose concerns are told in another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        yield


def of_plan(plan: PrivacyPlan) -> list[str]:
    """What the plan alone shows. Nothing private is looked at."""
    gradient_noise = plan.mechanism.gradient_noise(plan.noise_multiplier)
    if plan.batch_size and gradient_noise / plan.batch_size > _SMALL_BATCH:
        fixed = plan.stream is not None and plan.stream.sample_rate is not None
        of = "Sums are divided by" if fixed else "A batch is expected to have"
        return [
            f"{of} {plan.batch_size} {plan.unit}s: in each coordinate of their mean the noise is "
            f"{gradient_noise / plan.batch_size:.0%} of the most that the whole gradient can be. Take larger batches: with "
            "max_physical_batch they need no more memory."
        ]
    return []


def of_labels(training: np.ndarray | None, held_out: np.ndarray | None) -> list[str]:
    """Labels that are all the same, which is private; None where labels are not known."""
    concerns = []
    if training is not None and (label := _only_value(training)) is not None:
        concerns.append(
            f"All labels to train on are {label}: the model can learn nothing but that. Look at what is read as the label, and "
            "which of its values mean what."
        )
    if held_out is not None and (label := _only_value(held_out)) is not None:
        concerns.append(
            f"All held-out labels are {label}: there is no AUC, and no metric tells how well the model separates classes. Hold "
            "out other rows, or more of them."
        )
    return concerns


def _only_value(labels: np.ndarray) -> str | None:
    """The value that all of several labels have, if it is one."""
    if len(labels) < 2 or labels.ndim != 1 or labels.dtype.kind not in "biuf":
        return None
    low, high = labels.min(), labels.max()
    return f"{low:g}" if low == high else None


def of_prediction(plan: PrivacyPlan, prediction: Prediction, statistics: TouchStatistics) -> list[str]:
    """What a step is expected to do."""
    mechanism, noise = plan.mechanism, plan.noise_multiplier
    if noise == 0 or not prediction.tables:
        return []
    concerns = []
    if mechanism.threshold_setting is not None and prediction.rows_false > MOSTLY * prediction.rows_selected > 0:
        concerns.append(mostly_noise(prediction.rows_false, prediction.rows_selected, mechanism.name))
    if mechanism.prepares and (chosen_by_noise := _chosen_by_noise(statistics)) > MOSTLY:
        why = "they are chosen by noise. Lower k, or give the choice a larger epsilon."
        if mechanism.public_counts is not None:
            why = "nothing speaks for them. Lower k."
        concerns.append(
            f"No unit that was counted touches {chosen_by_noise:.0%} of the rows that {mechanism.name} chooses before training: "
            + why
        )
    if mechanism.selects and prediction.kept_touches < LITTLE:
        concerns.append(
            f"Only {prediction.kept_touches:.1%} of what units touch is in the selection: the tables will learn little. "
            + _ways_to_keep_more(plan)
        )
    elif mechanism.selects:
        few = [
            name
            for name, table in prediction.tables.items()
            if table.touches >= 1 and table.touches_kept < LITTLE_OF_A_TABLE * table.touches
        ]
        if few:
            concerns.append(
                f"Of what units touch in table {_names(few)} less than {LITTLE_OF_A_TABLE:.0%} is in the selection, so that it "
                "will learn next to nothing. " + _ways_to_keep_more(plan)
            )
    if alone := _not_shared(statistics):
        concerns.append(
            f"No two units that were counted share a row of table {_names(alone)}. A row that one unit alone touches cannot be "
            "learned under privacy, whatever the mechanism: its gradient is at most the clipping norm, and the noise is larger. "
            + _way_without_table(plan)
        )
    return concerns


class FirstSteps:
    """Looks at the first steps of a run, and says once what is wrong with them."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan, self._reports = plan, list[StepReport]()

    @property
    def watching(self) -> bool:
        return len(self._reports) < WATCHED and self._plan.noise_multiplier > 0

    def see(self, report: StepReport | None, trained: Sequence[str] = (), used: Set[str] = frozenset()) -> None:
        """Takes the report of a step; with the last of the first steps, it warns. A whole adapter that is not used is an error.

        `used` are those of the `trained` parameters that a unit's gradient came to so far.
        """
        if report is None or not report.units or not self.watching:
            return
        self._reports.append(report)
        if len(self._reports) == SURE:
            refuse_unused_adapters(trained, used, SURE)
        if not self.watching:
            unused = [name for name in trained if name not in used]
            warn(of_first_steps(self._plan, self._reports), stacklevel=6)
            warn(of_unused(unused, len(self._reports)), stacklevel=6)


def of_first_steps(plan: PrivacyPlan, reports: Sequence[StepReport]) -> list[str]:
    """What steps did, which is private: these sentences are for whoever watches the training."""
    mechanism, concerns = plan.mechanism, []
    first = f"In the first {len(reports)} steps"
    trained = [
        name for name in reports[0].tables if all(name in report.tables for report in reports)
    ]  # not frozen since
    tables = {name: [report.tables[name] for report in reports] for name in trained}
    selected = sum(table.rows_selected for steps in tables.values() for table in steps)
    false = sum(table.rows_false for steps in tables.values() for table in steps)
    if mechanism.threshold_setting is not None and false > MOSTLY * selected > 0:
        concerns.append(f"{first}: {mostly_noise(false / len(reports), selected / len(reports), mechanism.name)}")
    kept = fmean(report.kept_mass for report in reports)
    if mechanism.selects and not mechanism.noise_waits and tables and kept < LITTLE:
        concerns.append(
            f"{first} the selection kept {kept:.1%} of the squared gradient on tables: they learn little. "
            + _ways_to_keep_more(plan)
        )
    alone = [
        name
        for name, steps in tables.items()
        if (touched := sum(table.rows_touched for table in steps)) >= _ENOUGH_UNITS
        and all(table.touches is not None for table in steps)
        and sum(table.touches or 0 for table in steps) == touched
        and fmean(report.units for report in reports) >= _ENOUGH_UNITS
    ]
    if alone:
        concerns.append(
            f"{first} no two units of a batch touched the same row of table {_names(alone)}: a row's gradient is then one "
            "unit's, and the noise on it is larger. If no two units of the data share its rows (users' own rows, with "
            "unit='user'), the table cannot learn. " + _way_without_table(plan)
        )
    clipped = fmean(report.clipped_share for report in reports)
    norm, bound = fmean(report.mean_norm for report in reports), plan.clipping.max_norm
    if plan.clipping.style == "flat" and clipped > 0.999:
        concerns.append(
            f"{first} every unit was clipped (mean norm {norm:.3g}, max_grad_norm {bound:g}): units count by direction alone. "
            "Raise max_grad_norm towards the mean norm and lower the learning rate by the same factor, or take "
            "clipping='automatic', which means it."
        )
    if plan.clipping.style == "flat" and clipped == 0 and norm < bound / 2:
        concerns.append(
            f"{first} no unit was clipped (mean norm {norm:.3g}, max_grad_norm {bound:g}), and the noise is proportional to "
            "max_grad_norm: lower it to about the mean norm."
        )
    return concerns


def refuse_unused_adapters(trained: Sequence[str], used: Set[str], steps: int) -> None:
    """Raises where a kind of adapter is trained, and no gradient came to any of its parameters."""
    adapters: dict[str, list[str]] = {}
    for name in trained:
        if found := _ADAPTER.search(name):
            adapters.setdefault(found[1], []).append(name)
    for kind, names in adapters.items():
        if used.isdisjoint(names):
            raise SparseDPError(
                f"In the first {steps} steps no gradient came to any of the {len(names)} trained {kind} parameters of adapters, "
                f"{_names(names)}: they take no part in forward (merged into the weights they stand beside? switched off? "
                "behind torch.no_grad()?), so that noise alone would move them. Unmerge or enable the adapter before "
                "make_private (peft: model.unmerge_adapter(), model.enable_adapter_layers()), or freeze its parameters with "
                "requires_grad_(False)."
            )


def of_unused(unused: Sequence[str], steps: int) -> list[str]:
    """Parameters that noise alone moves."""
    if not unused:
        return []
    return [
        f"In the first {steps} steps no gradient came to parameter {_names(unused)}: the loss does not depend on it (an adapter "
        "that is switched off or merged, a head that is not used?), and noise alone moves it. Use it, or freeze it with "
        "requires_grad_(False)."
    ]


def mostly_noise(false: float, selected: float, name: str) -> str:
    return (
        f"{false:,.0f} of the {selected:,.0f} rows that {name} selects in a step are touched by no unit of the batch: noise "
        f"selects them. {WAYS_TO_LESS_NOISE}"
    )


def _ways_to_keep_more(plan: PrivacyPlan) -> str:
    if plan.mechanism.threshold_setting is not None:
        return 'Lower the threshold (threshold="auto" finds one), take larger batches, or another mechanism (sparsedp.advise).'
    return "Raise k, or take another mechanism (sparsedp.advise)."


def _way_without_table(plan: PrivacyPlan) -> str:
    if plan.unit == "user":
        return "Leave the table out: make what stands for a user of the items that they had, or train it on each user's device."
    return "Leave the table out, or hash its ids into fewer rows."


def _chosen_by_noise(statistics: TouchStatistics) -> float:
    """The share of the rows that were chosen ahead of the steps and that no counted unit touches."""
    groups = [group for span in statistics.spans for group in span.tables.values()]
    chosen = sum(float(group.rows[group.chosen].sum()) for group in groups)
    untouched = sum(float(group.rows[group.chosen & (group.counts == 0)].sum()) for group in groups)
    return untouched / chosen if chosen else 0.0


def _not_shared(statistics: TouchStatistics) -> list[str]:
    """Tables of which several rows are touched, each by one unit alone."""
    alone = []
    for name in statistics.spans[0].tables if statistics.spans else ():
        spans = [span for span in statistics.spans if span.integral and span.units >= _ENOUGH_UNITS]
        touched = [span.tables[name].rows[span.tables[name].counts > 0].sum() for span in spans]
        most = [np.max(span.tables[name].counts, initial=0) for span in spans]
        if spans and sum(touched) >= _ENOUGH_UNITS and max(most) <= 1:
            alone.append(name)
    return alone


def _names(tables: Sequence[str]) -> str:
    more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in tables[:_SHOWN]) + more
