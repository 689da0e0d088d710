"""Predicts what a step will do to the tables, before any step is taken: rows touched, selected and falsely selected.

A row that c of U counted units touch meets n ~ Binomial(c, B/U) of them in a batch of B. That holds if the U units are
the data, and just as well if they are a random sample of at least B: a batch of the sample has the law of a batch of the
data, so rows that the sample misses need no correction.
AdaFEST then selects the row with probability E[Psi((tau - w n) / (C1 sigma1))], with w the mean of what its units add
(DP-AdaFEST, Algorithm 1 and appendix B.2). Everything else is a sum over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.capture import Capture, RowSpace
from sparsedp.contribution import Contribution
from sparsedp.counting import captured_forwards, count_rows, count_touches
from sparsedp.errors import UnsupportedError
from sparsedp.fallback import selection_kept
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms.expectation import RowCounts
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.preparation import CountScope, Prepared, decide
from sparsedp.sampling import PrivateLoader
from sparsedp.tables import TableSpec

# Counting on the data takes this many batches, but no more than this many units; and some batches at least.
_BATCHES, _UNITS, _FEW_BATCHES = 256, 1 << 20, 16
# Rows are grouped by counts, which are exact up to _DISTINCT, and contributions, to a relative 1 / _FINENESS.
_DISTINCT, _FINENESS = 256, 256


@dataclass(frozen=True)
class RowGroups:
    """The rows of a table, those with equal counts and contributions together."""

    rows: np.ndarray  # in the group
    counts: np.ndarray  # units that touch such a row
    weights: np.ndarray  # what each of these units adds to the mechanism's map of rows, on average
    chosen: np.ndarray  # whether the rows may be selected: False if FEST leaves them out


@dataclass(frozen=True)
class SpanStatistics:
    """How many units touch the rows of each table, in the data of one span of a stream, or in all data."""

    share: float  # of the steps that are on this span
    units: float  # that were counted
    integral: bool  # whether counts are integers; otherwise they are frequencies
    tables: Mapping[str, RowGroups]
    size: float | None = None  # units of the span, of which some were counted; None: all of them


@dataclass(frozen=True)
class TouchStatistics:
    """All that a prediction knows of the data."""

    source: str  # in words
    private: bool  # whether it was counted on the training data
    clip: float | None  # the mechanism's contribution_clip, which the contributions were clipped to
    drawn: bool  # whether it holds a noisy draw of what a mechanism chooses before training
    spans: tuple[SpanStatistics, ...]


@dataclass(frozen=True)
class TablePrediction:
    """What a step is expected to do to one table, on average."""

    rows: int
    dim: int
    rows_touched: float
    rows_selected: float
    rows_false: float  # selected, but not touched
    touches: float  # pairs of a unit and a row that it touches
    touches_kept: float  # of these, pairs whose row is selected

    @property
    def gradient_size(self) -> float:
        """Coordinates of the table's gradient that may differ from zero."""
        return self.rows_selected * self.dim


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to do, on average over the batches and the noise."""

    tables: dict[str, TablePrediction]
    source: str
    private: bool  # if so, computed from private data without noise: for the developer, not for release
    notes: tuple[str, ...] = ()

    @property
    def rows_touched(self) -> float:
        return sum(table.rows_touched for table in self.tables.values())

    @property
    def rows_selected(self) -> float:
        return sum(table.rows_selected for table in self.tables.values())

    @property
    def rows_false(self) -> float:
        return sum(table.rows_false for table in self.tables.values())

    @property
    def gradient_size(self) -> float:
        """Coordinates of the tables' gradients that may differ from zero."""
        return sum(table.gradient_size for table in self.tables.values())

    @property
    def dense_size(self) -> int:
        """Gradient size of a step in which every row of every table changes."""
        return sum(table.rows * table.dim for table in self.tables.values())

    @property
    def reduction(self) -> float:
        """How many times smaller the tables' gradient is than a dense one."""
        return self.dense_size / max(self.gradient_size, 1.0)

    @property
    def kept_rows(self) -> float:
        """Share of the touched rows that are selected."""
        return (self.rows_selected - self.rows_false) / self.rows_touched if self.rows_touched else 1.0

    @property
    def kept_touches(self) -> float:
        """Share of the pairs (unit, row that it touches) whose row is selected: frequent rows count more."""
        touches = sum(table.touches for table in self.tables.values())
        return sum(table.touches_kept for table in self.tables.values()) / touches if touches else 1.0

    def to_dict(self) -> dict[str, Any]:
        names = (
            "rows_touched",
            "rows_selected",
            "rows_false",
            "gradient_size",
            "reduction",
            "kept_rows",
            "kept_touches",
        )
        tables = {n: {**asdict(table), "gradient_size": table.gradient_size} for n, table in self.tables.items()}
        about = {"source": self.source, "private": self.private, "notes": list(self.notes)}
        return {**about, **{name: getattr(self, name) for name in names}, "tables": tables}


# ------------------------------------------------------------------ what is known of the data


def statistics_from_data(
    plan: PrivacyPlan,
    module: nn.Module,
    capture: Capture,
    loader: PrivateLoader,
    tables: Mapping[str, TableSpec],
    inputs: Callable[[Any], Any] | None = None,
) -> TouchStatistics:
    """Counts on the training data, with forward passes alone: no noise, no step, no cost.

    At most 256 batches or a million units are looked at, as a random sample, users with as many examples as they bring to a
    batch. To draw FEST's choice of rows, all of the data are gone over, as FEST does. `inputs` is as in `count_rows`.
    """
    spans = 1 if plan.stream is None else len(plan.stream.steps)
    wanted = max(_FEW_BATCHES * plan.batch_size, min(_BATCHES * plan.batch_size, _UNITS) // spans)
    space = RowSpace.of(tables)
    units_counted = units_there = 0  # a user once for each span

    def count(clip: float | None, scope: int | None) -> dict[str, Tensor]:
        return count_rows(module, capture, loader, list(tables), inputs, clip, loader.indices(scope), scope)

    def count_span(span: int | None, clip: float | None, selection: Mapping[str, Tensor] | None) -> _SpanCounts:
        nonlocal units_counted, units_there
        everyone = loader.indices(span)
        indices = everyone = np.arange(loader.dataset_size) if everyone is None else everyone
        if wanted < len(indices):  # the same sample each time, for nothing of it is released
            indices = indices[RandomKey.from_seed(0).generator().choice(len(indices), wanted)]
        units_counted, units_there = units_counted + len(indices), units_there + len(everyone)
        with selection_kept(module, selection or {}) as chosen:
            within = None if selection is None else space.join(chosen)
            # No more at a time than a step takes: nobody said that there is memory for a larger forward pass.
            chunk = max(1, round(loader.expected_examples))
            uses = captured_forwards(module, capture, loader, inputs, np.sort(indices), chunk, span)
            counted = count_touches(uses, space, clip, within)
        counts, sums = (dict(zip(space.names, part.split(list(space.sizes)))) for part in counted)
        return _SpanCounts(
            units=len(indices),
            counts={name: part.numpy() for name, part in counts.items()},
            contributions={name: part.numpy() for name, part in sums.items()},
            selection=None if selection is None else chosen,
            size=len(everyone),
        )

    statistics = _span_by_span(plan, tables, count, count_span)
    size, kind = f"{units_there:,}", f"training {plan.unit}s"
    kind += " of all spans" if units_there > plan.dataset_size else ""
    sample = f"a random sample of {units_counted:,} of the {size} {kind}"
    source = f"all {size} {kind}" if units_counted == units_there else sample
    return replace(statistics, source=source, private=True)


def statistics_from_counts(
    plan: PrivacyPlan, tables: Mapping[str, TableSpec], counts: Mapping[str, Any], units: float
) -> TouchStatistics:
    """From known frequencies instead of the data: of `units` units, `counts[table][row]` touch the row.

    Units are taken to touch equally many rows: their mean, which the counts tell.
    """
    if not 0 < units < math.inf:
        raise ValueError(f"units, the number of units that were counted, must be positive, not {units}")
    checked = {name: _checked_counts(name, table.rows, counts, units) for name, table in tables.items()}
    if unknown := sorted(set(counts) - set(tables)):
        raise ValueError(f"counts are given for {unknown[0]!r}, which is no trained table: {', '.join(sorted(tables))}")
    spans = 1 if plan.stream is None else len(plan.stream.steps)
    # Where nobody has to know how many units a span has, they are taken to be alike.
    sizes = (plan.stream is not None and plan.stream.sizes) or (plan.dataset_size / spans,) * spans

    def contributions(clip: float | None, selection: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        eligible = {n: _only(c, selection[n].numpy()) if n in selection else c for n, c in checked.items()}
        rows_each = sum(float(c.sum()) for c in eligible.values()) / units
        share = float(Contribution(clip).shares(torch.tensor(rows_each, dtype=torch.float64)))
        return {name: share * c for name, c in eligible.items()}

    def count(clip: float | None, scope: int | None) -> dict[str, Tensor]:
        scale = (plan.dataset_size if scope is None else sizes[scope]) / units
        return {name: torch.from_numpy(scale * values) for name, values in contributions(clip, {}).items()}

    def count_span(span: int | None, clip: float | None, selection: Mapping[str, Tensor] | None) -> _SpanCounts:
        return _SpanCounts(units, checked, contributions(clip, selection or {}), selection, sizes[span or 0])

    return replace(_span_by_span(plan, tables, count, count_span), source="given counts")


def statistics_from_release(
    plan: PrivacyPlan,
    tables: Mapping[str, TableSpec],
    release: FrequencyRelease,
    frequencies: Mapping[str, Tensor],
) -> TouchStatistics:
    """From frequencies that were released with noise; whatever follows from them costs nothing more.

    A row with a count of at least four deviations of the noise is taken to have it. What the others have together is known
    better than what each of them has: it is divided evenly among them. What a unit added to each of its n rows is a
    `Contribution`; n follows from the sum over all rows, as if it were the same for all units.
    """
    units, std = plan.dataset_size, release.noise_multiplier * Contribution(release.clip).sensitivity
    shares = {name: frequencies[name].double().numpy() * units for name in tables}
    each = max(1.0, sum(float(values.sum()) for values in shares.values()) / units)  # what a unit added to all rows
    rows_each = each if each <= release.clip**2 else (each / release.clip) ** 2
    scale = max(1.0, rows_each / each)
    counts = {name: np.minimum(scale * _without_noise(values, std), units) for name, values in shares.items()}
    statistics = statistics_from_counts(plan, tables, counts, units)
    return replace(statistics, source=f"frequencies released at epsilon {release.epsilon:g}")


def _without_noise(values: np.ndarray, std: float) -> np.ndarray:
    certain = values >= 4 * std
    rest = max(0.0, float(values[~certain].sum())) / max(1, int((~certain).sum()))
    return np.where(certain, values, rest)


@dataclass(frozen=True)
class _SpanCounts:
    units: float  # that were counted
    counts: Mapping[str, np.ndarray]  # units that touch each row, (rows,)
    contributions: Mapping[str, np.ndarray]  # sum of what they add to the mechanism's map of rows, (rows,)
    selection: Mapping[str, Tensor] | None
    size: float | None = None  # units in all; None: all were counted


def _span_by_span(
    plan: PrivacyPlan,
    tables: Mapping[str, TableSpec],
    count: CountScope,
    count_span: Callable[[int | None, float | None, Mapping[str, Tensor] | None], _SpanCounts],
) -> TouchStatistics:
    """Looks at each span, with a draw of what the mechanism chooses before it, as `Preparation.prepare` does."""
    mechanism = plan.mechanism
    clip = mechanism.contribution_clip
    key, prepared = RandomKey.from_seed(0), Prepared()
    spans: list[tuple[int | None, int]] = [(None, 1)] if plan.stream is None else list(enumerate(plan.stream.steps))
    looks = []
    for span, steps in spans:
        scope = plan.setup_scope(span)
        if mechanism.prepares and scope not in prepared.scopes:
            prepared = decide(plan, tables, count, key, scope, prepared)
        counted = count_span(span, clip, prepared.rows)
        integral = all(_are_integers(counts) for counts in counted.counts.values())
        groups = {name: _grouped(counted, name, integral) for name in counted.counts}
        share = steps / sum(steps for _, steps in spans)
        looks.append(SpanStatistics(share, counted.units, integral, groups, counted.size))
    return TouchStatistics("", False, clip, bool(prepared.scopes) and mechanism.setup_event() is not None, tuple(looks))


def _checked_counts(name: str, rows: int, counts: Mapping[str, Any], units: float) -> np.ndarray:
    if name not in counts:
        raise ValueError(f"counts has nothing for table '{name}'")
    given = np.asarray(counts[name], dtype=np.float64)
    if given.shape != (rows,):
        raise ValueError(f"counts['{name}'] has shape {given.shape}; the table has {rows} rows")
    if not ((given >= 0) & (given <= units)).all():
        raise ValueError(f"counts['{name}'] must lie between 0 and the number of units, {units:g}")
    return given


def _only(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(counts)
    kept[rows] = counts[rows]
    return kept


# ------------------------------------------------------------------ what follows from it


def predict(plan: PrivacyPlan, statistics: TouchStatistics) -> Prediction:
    """What a step of the plan is expected to do. The statistics may serve plans that differ in noise, threshold or batch size."""
    mechanism = plan.mechanism
    if mechanism.contribution_clip is not None and statistics.clip != mechanism.contribution_clip:
        raise ValueError(
            f"the statistics are for map_clip={statistics.clip}, not {mechanism.contribution_clip}: count again"
        )
    dims = {name: math.prod(shape[1:]) for name, shape in plan.parameters}
    tables: dict[str, TablePrediction] = {}
    for span in statistics.spans:
        size = sum(float(groups.rows.sum()) for groups in span.tables.values())
        rate = _rate(plan, span)
        for name, groups in span.tables.items():
            # Of frequencies, and of fewer units than a batch has, all that can be said is that n is about Poisson.
            expected = _expected(plan, groups, rate, span.integral and rate <= 1, size) * span.share
            total = tables.get(name, TablePrediction(round(groups.rows.sum()), dims[name], 0.0, 0.0, 0.0, 0.0, 0.0))
            tables[name] = replace(
                total, **{key: getattr(total, key) + value for key, value in zip(_EXPECTED, expected)}
            )
    notes = [] if mechanism.prediction_note is None else [mechanism.prediction_note]
    if statistics.drawn:
        notes.append("The rows chosen before training will be others than those predicted with: the choice has noise.")
    return Prediction(tables, statistics.source, statistics.private, tuple(notes))


def _rate(plan: PrivacyPlan, span: SpanStatistics) -> float:
    """With which a unit that was counted would have to be sampled for as many units in a batch as are expected."""
    fixed = None if plan.stream is None else plan.stream.sample_rate
    size = span.units if span.size is None else span.size
    return (plan.batch_size if fixed is None else fixed * size) / span.units


@dataclass(frozen=True)
class PartPrediction:
    """Of one table, what the units of a part of a batch are expected to do."""

    touched: float  # distinct rows
    passed: float  # of these, the rows that are selected
    whole: bool  # whether every unit uses all rows


def predict_part(plan: PrivacyPlan, statistics: TouchStatistics, share: float) -> dict[str, PartPrediction]:
    """What a random `share` of a batch's units touch, and find selected by the whole batch: one of several processes' part.

    With q the sampling rate and p(n) the chance of a row that n units touch, the part touches it and it is selected with
    probability E_q[p(n)] - (1 - share q)^c E_q'[p(n)]: the second term is that nobody of the part touches it. The others are
    then Binomial(c, q'), q' = (q - share q) / (1 - share q).
    """
    parts = {name: np.zeros(2) for name in statistics.spans[0].tables}
    whole = dict.fromkeys(parts, True)
    for span in statistics.spans:
        size = sum(float(groups.rows.sum()) for groups in span.tables.values())
        rate = _rate(plan, span)
        exact = span.integral and rate <= 1
        others = (rate - share * rate) / (1 - share * rate) if exact else rate - share * rate
        for name, groups in span.tables.items():

            def at(rate: float, groups: RowGroups = groups) -> RowCounts:
                return RowCounts(groups.counts, groups.weights, groups.chosen, rate, exact, size)  # noqa: B023

            absent, selected = at(share * rate).absent, plan.mechanism.expected_selection
            passed = selected(at(rate), plan.noise_multiplier).selected
            if share < 1:
                passed = passed - absent * selected(at(others), plan.noise_multiplier).selected
            else:
                passed = passed - selected(at(rate), plan.noise_multiplier).false
            parts[name] += span.share * (np.stack([1 - absent, passed.clip(0, 1 - absent)]) @ groups.rows)
            whole[name] &= bool(groups.rows[groups.counts < span.units].sum() == 0)
    return {name: PartPrediction(float(n[0]), float(n[1]), whole[name]) for name, n in parts.items()}


def find_threshold(plan: PrivacyPlan, statistics: TouchStatistics, gradient_size: float) -> float:
    """The mechanism's smallest threshold, from 0 and to four digits, with which the predicted gradient size is within the given.

    That is AdaFEST's `threshold`, or the setting that another mechanism names as its `threshold_setting`.
    """
    _require_threshold(plan)
    if not gradient_size > 0:
        raise ValueError(f"gradient_size must be positive, not {gradient_size}")

    def fits(threshold: float) -> bool:
        return predict(with_threshold(plan, threshold), statistics).gradient_size <= gradient_size

    _, high = _bracket(fits)
    digits = _digits(high)
    return math.ceil(high * 10**digits) / 10**digits  # upwards: the size shrinks as the threshold grows


def find_threshold_keeping(plan: PrivacyPlan, statistics: TouchStatistics, keep: float) -> float:
    """The mechanism's largest threshold, to four digits, with which the predicted share of kept touches is at least `keep`.

    0 if not even that keeps so much: with it, half of the rows that nobody touched are selected.
    """
    _require_threshold(plan)

    def falls_short(threshold: float) -> bool:
        return predict(with_threshold(plan, threshold), statistics).kept_touches < keep

    low, _ = _bracket(falls_short)
    if low == 0:
        return 0.0
    digits = _digits(low)
    return math.floor(low * 10**digits) / 10**digits


def find_auto_threshold(plan: PrivacyPlan, statistics: TouchStatistics) -> PrivacyPlan:
    """The plan with a number in place of the threshold="auto" of its mechanism."""
    mechanism = plan.mechanism
    if mechanism.gradient_size is not None:
        threshold = find_threshold(plan, statistics, mechanism.gradient_size)
    else:
        threshold = find_threshold_keeping(plan, statistics, mechanism.wanted_keep)
    return with_threshold(plan, threshold)


def _require_threshold(plan: PrivacyPlan) -> None:
    if plan.mechanism.threshold_setting is None:
        name = plan.mechanism.name
        raise UnsupportedError(f"Mechanism {name!r} has no threshold (threshold_setting); AdaFEST has one.")


def _bracket(reached: Callable[[float], bool]) -> tuple[float, float]:
    """The largest threshold, from 0 on, that has not `reached` something which large ones have, and one just above."""
    low, high = 0.0, 1.0
    if reached(low):
        return low, low
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return low, high


def _digits(value: float) -> int:
    """Decimals with which a number has four digits."""
    return 0 if value == 0 else 3 - math.floor(math.log10(value))


def with_threshold(plan: PrivacyPlan, threshold: float) -> PrivacyPlan:
    """The plan with another value of the setting that the mechanism names as its `threshold_setting`."""
    return replace(plan, mechanism=plan.mechanism.with_threshold(threshold))


_EXPECTED = ("rows_touched", "rows_selected", "rows_false", "touches", "touches_kept")


def _expected(plan: PrivacyPlan, groups: RowGroups, rate: float, exact: bool, size: float) -> np.ndarray:
    """The numbers that `_EXPECTED` names, of one table; `size` is the number of rows of all tables."""
    rows = RowCounts(groups.counts, groups.weights, groups.chosen, rate, exact, size)
    expected = plan.mechanism.expected_selection(rows, plan.noise_multiplier)
    return np.stack([1 - rows.absent, expected.selected, expected.false, rows.mean, expected.kept]) @ groups.rows


def _grouped(counted: _SpanCounts, name: str, integral: bool) -> RowGroups:
    """Most rows of a long tail have the same few counts, so that groups are few however many rows there are."""
    counts, contributions = counted.counts[name], counted.contributions[name]
    chosen = np.ones(len(counts), dtype=bool)
    if counted.selection is not None and name in counted.selection:
        chosen[:] = False
        chosen[counted.selection[name].numpy()] = True
    at = np.flatnonzero(counts)
    count, kind = counts[at].astype(np.float64), chosen[at]
    weight = np.where(contributions[at] > 0, contributions[at] / count, 1.0)
    near = np.floor(_FINENESS * (np.log(count) + 64)) + _DISTINCT + 1
    bins = np.where((count <= _DISTINCT) & integral, count, near)
    key = (bins * 2.0**16 + np.rint(-_FINENESS * np.log(weight))) * 2 + kind
    _, group, rows = np.unique(key, return_inverse=True, return_counts=True)
    means = [np.bincount(group, values, len(rows)) / rows for values in (count, weight, kind)]
    untouched = np.array([(~chosen).sum() - (~kind).sum(), chosen.sum() - kind.sum()])
    return RowGroups(
        rows=np.concatenate([untouched, rows]).astype(np.float64),
        counts=np.concatenate([np.zeros(2), np.rint(means[0]) if integral else means[0]]),
        weights=np.concatenate([np.ones(2), means[1]]),
        chosen=np.concatenate([[False, True], means[2] > 0]).astype(bool),
    )


def _are_integers(counts: np.ndarray) -> bool:
    return counts.dtype.kind in "iu" or bool((counts == np.floor(counts)).all())
