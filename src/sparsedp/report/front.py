"""The front of utility against gradient-size reduction, out of the finished runs of a sweep.

Settings are chosen on the validation half of the held-out data and reported on the test half. Utility is the metric,
or its negative where less is better (losses). A setting's utility is its mean over seeds; its utility loss is the mean of
(reference - setting) over the seeds that both have. Its reduction is the dense gradient size over the mean gradient size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VALIDATION, TEST = "validation", "test"
_MORE_IS_BETTER = {"auc", "accuracy", "ndcg@10", "hit@10", "precision@10", "recall@10", "mrr"}


@dataclass(frozen=True)
class Run:
    """A finished run."""

    id: str
    group: str
    point: dict[str, Any]
    settings: dict[str, Any]
    seed: int
    result: dict[str, Any]  # as result.json has it


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error (None for one seed), and the smallest and largest value."""

    mean: float
    error: float | None
    low: float
    high: float
    seeds: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return Estimate(statistics.fmean(values), error, min(values), max(values), len(values))

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "error": self.error, "min": self.low, "max": self.high, "seeds": self.seeds}


@dataclass(frozen=True)
class Setting:
    """The runs of one group with the same settings at one point, by seed."""

    group: str
    settings: dict[str, Any]
    runs: dict[int, Run]
    metric: str

    def utilities(self, part: str) -> dict[int, float]:
        sign = 1 if self.metric in _MORE_IS_BETTER else -1
        return {seed: sign * run.result[part][self.metric] for seed, run in self.runs.items()}

    def utility(self, part: str) -> float:
        return statistics.fmean(self.utilities(part).values())

    def value(self, part: str) -> Estimate:
        """The metric itself."""
        return Estimate.of([run.result[part][self.metric] for run in self.runs.values()])

    @property
    def reduction(self) -> float | None:
        """How many times smaller the tables' gradient is than a dense one; None if no table is trained."""
        dense = self._mean("dense_gradient_size")
        return dense / max(1.0, self._mean("gradient_size")) if dense else None

    def _mean(self, key: str) -> float:
        return statistics.fmean(run.result[key] for run in self.runs.values())

    def loss(self, reference: Setting, part: str) -> Estimate | None:
        """Utility lost against the reference, seed by seed; None if they share no seed."""
        mine, theirs = self.utilities(part), reference.utilities(part)
        common = [theirs[seed] - mine[seed] for seed in mine if seed in theirs]
        return Estimate.of(common) if common else None

    def to_dict(self, reference: Setting | None) -> dict[str, Any]:
        results = [run.result for run in self.runs.values()]
        reductions = [r["reduction"] for r in results if r["reduction"] is not None]
        losses = {part: self.loss(reference, part) if reference else None for part in (VALIDATION, TEST)}
        return {
            "settings": self.settings,
            "seeds": sorted(self.runs),
            "metric": {part: self.value(part).to_dict() for part in (VALIDATION, TEST)},
            "loss": {part: None if loss is None else loss.to_dict() for part, loss in losses.items()},
            "reduction": self.reduction,
            "reduction_range": [min(reductions), max(reductions)] if reductions else None,
            "gradient_size": self._mean("gradient_size"),
            "clipped_share": _mean_of(results, "clipped_share"),
            "kept_mass": _mean_of(results, "kept_mass"),
            "epsilon": max((_number(r["epsilon"]) for r in results), default=math.inf),
            "seconds": self._mean("seconds"),
            "runs": [run.id for run in self.runs.values()],
        }


def _mean_of(results: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [r[key] for r in results if r.get(key) is not None]
    return statistics.fmean(values) if values else None


def _number(value: Any) -> float:
    return math.inf if value == "infinity" else float(value)


# ------------------------------------------------------------------ settings, and what is best among them


def is_better_when_more(metric: str) -> bool:
    return metric in _MORE_IS_BETTER


def metric_of(runs: Sequence[Run]) -> str:
    """What the runs are compared by unless someone says: AUC or NDCG where there is one, else the loss."""
    shared = (name for name in ("auc", "ndcg@10") if all(name in run.result.get(TEST, {}) for run in runs))
    return next(shared, "loss")


def has_utility(run: Run, metric: str) -> bool:
    """Whether the metric is there; a half without clicks, for instance, has no AUC."""
    return all(run.result.get(part, {}).get(metric) is not None for part in (VALIDATION, TEST))


def settings_at(runs: Sequence[Run], group: str, point: Mapping[str, Any], metric: str) -> list[Setting]:
    """The settings of a group at a point; runs that lack an axis of the point count at all of its values."""
    settings: list[Setting] = []
    for run in runs:
        if run.group != group or not _lies_at(run, point):
            continue
        setting_of_run = next((setting for setting in settings if setting.settings == run.settings), None)
        if setting_of_run is None:
            setting_of_run = Setting(group, run.settings, {}, metric)
            settings.append(setting_of_run)
        setting_of_run.runs[run.seed] = run
    return settings


def fullest(settings: Sequence[Setting]) -> list[Setting]:
    """Those with the most seeds: a lucky seed alone must not win against a mean over all."""
    most = max((len(setting.runs) for setting in settings), default=0)
    return [setting for setting in settings if len(setting.runs) == most]


def best(settings: Sequence[Setting]) -> Setting | None:
    """The setting of the highest utility on the validation half."""
    return max(fullest(settings), key=lambda setting: setting.utility(VALIDATION), default=None)


def best_reduction(settings: Sequence[Setting], reference: Setting, loss: float) -> Setting | None:
    """The largest reduction among the settings that lose at most `loss` on the validation half."""
    fitting = []
    for setting in fullest(settings):
        lost = setting.loss(reference, VALIDATION)
        # Differences of decimal numbers: 0.755 - 0.750 is a little above 0.005.
        if lost is not None and lost.mean <= loss + 1e-12 and setting.reduction is not None:
            fitting.append(setting)
    return max(fitting, key=lambda setting: (setting.reduction, setting.utility(VALIDATION)), default=None)


def front(settings: Sequence[Setting]) -> list[Setting]:
    """The settings that no other beats in reduction without losing utility on the validation half, by reduction."""
    usable = [setting for setting in fullest(settings) if setting.reduction is not None]
    ranked = sorted(usable, key=lambda s: (-(s.reduction or 0.0), -s.utility(VALIDATION)))
    kept: list[Setting] = []
    for setting in ranked:
        if not kept or setting.utility(VALIDATION) > kept[-1].utility(VALIDATION):
            kept.append(setting)
    return kept[::-1]


# ------------------------------------------------------------------ the whole sweep


def summarise(
    runs: Sequence[Run],
    *,
    name: str,
    points: Sequence[Mapping[str, Any]],
    variants: Sequence[str],
    controls: Sequence[str],
    reference: str,
    seeds: Sequence[int],
    losses: Sequence[float],
    margin: float,
    metric: str | None = None,
) -> dict[str, Any]:
    """All that the report and the plots show, as plain values."""
    metric = metric or metric_of(runs)
    usable = [run for run in runs if has_utility(run, metric)]
    return {
        "name": name,
        "metric": metric,
        "more_is_better": metric in _MORE_IS_BETTER,
        "reference": reference,
        "seeds": list(seeds),
        "losses": list(losses),
        "margin": margin,
        "without_utility": [run.id for run in runs if run not in usable],
        "points": [
            _at_point(usable, dict(point), variants, controls, reference, losses, margin, metric) for point in points
        ],
    }


def _at_point(
    runs: Sequence[Run],
    point: dict[str, Any],
    variants: Sequence[str],
    controls: Sequence[str],
    reference: str,
    losses: Sequence[float],
    margin: float,
    metric: str,
) -> dict[str, Any]:
    against = best(settings_at(runs, reference, point, metric))
    summary: dict[str, Any] = {"point": point, "reference": None if against is None else against.to_dict(against)}
    chosen = {name: best(settings_at(runs, name, point, metric)) for name in controls}
    summary["controls"] = {name: None if s is None else s.to_dict(against) for name, s in chosen.items()}
    summary["control_settings"] = {
        name: [setting.to_dict(against) for setting in settings_at(runs, name, point, metric)] for name in controls
    }
    summary["control_below"] = _above_control(chosen.get("non_private"), [
        best(settings_at(runs, name, point, metric)) for name in variants
    ])  # fmt: skip
    frozen = chosen.get("frozen")
    gain = None if frozen is None or against is None else frozen.loss(against, TEST)
    summary["gain_of_tables"] = None if gain is None else gain.to_dict()
    summary["tables_matter"] = None if gain is None else gain.mean >= margin
    planted = [run.result["planted_auc"] for run in runs if "planted_auc" in run.result and _lies_at(run, point)]
    summary["planted_auc"] = statistics.fmean(planted) if planted and metric == "auc" else None
    summary["variants"] = {}
    for name in variants:
        settings = settings_at(runs, name, point, metric)
        top = best(settings)
        reductions: list[Setting | None] = [
            None if against is None else best_reduction(settings, against, loss) for loss in losses
        ]
        summary["variants"][name] = {
            "best": None if top is None else top.to_dict(against),
            "best_reduction": [
                {"loss": loss, "choice": None if s is None else s.to_dict(against)}
                for loss, s in zip(losses, reductions)
            ],
            "front": [setting.to_dict(against) for setting in front(settings)],
            "settings": [setting.to_dict(against) for setting in settings],
        }
    return summary


def _above_control(control: Setting | None, tops: Sequence[Setting | None]) -> list[str]:
    """The variants whose private best is above the best without privacy, on the test half: the control is not what it is for."""
    if control is None:
        return []
    private = [
        top
        for top in tops
        if top is not None and all(_number(r.result["epsilon"]) < math.inf for r in top.runs.values())
    ]
    return [top.group for top in private if top.utility(TEST) > control.utility(TEST)]


def _lies_at(run: Run, point: Mapping[str, Any]) -> bool:
    return all(point[key] == value for key, value in run.point.items())
