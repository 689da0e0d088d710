"""The report on one or several runs: what is in their records as sections, and those as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.resources import files
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from sparsedp import concerns
from sparsedp.errors import one_line
from sparsedp.plan import PrivacyPlan
from sparsedp.report import plain_words, who_may_read
from sparsedp.report.chart import Chart, Series, chart, number
from sparsedp.report.curves import Point, finite
from sparsedp.report.metric_names import BASELINES, ONE_CLASS, is_metric, metric_name
from sparsedp.report.run_record import RunRecord
from sparsedp.version import __version__

_EPSILON_POINTS = 24
_TABLES_WITH_CURVES = 40  # the widest ones; the table has all
_PARTS = {
    "data": "reading the data", "check": "sparsedp.check", "plan": "planning and calibrating", "batches": "waiting for batches",
    "forward": "forward", "backward": "backward", "optimizer": "rest of the optimizer's step", "collect": "collecting gradients",
    "norms": "norms of units", "sums": "clipped sums", "selection": "selecting rows", "noise": "drawing noise",
    "update": "updating weights", "settling": "settling noise that waited", "ranks": "other processes",
    "evaluation": "evaluations", "checkpoints": "checkpoints",
}  # fmt: skip
_LOSS, _SHARE = "Mean over a batch's examples, without noise. Lower is better.", "0 is none, 1 is all."

Row = tuple[str, ...]


@dataclass
class Section:
    """Of one run: everything that the page shows about it."""

    record: RunRecord
    id: str
    status: tuple[str, str]  # good, bad or neutral; words
    words: list[str]
    recognised: list[tuple[str, str]]
    figures: list[tuple[str, str]]
    assumptions: list[str]
    not_covered: list[str]
    warnings: list[str]
    files: list[dict[str, str]]
    planned: list[Row]
    command_for_predictions: str | None  # None where there are some
    charts: dict[str, list[Chart]]
    metrics: list[Row]
    metric_columns: list[str]
    periods: list[Row]
    period_columns: list[str]
    tables: list[Row]
    table_charts: list[Chart]
    times: list[tuple[str, float, str]]
    provenance: list[tuple[str, str]]
    audits: list[tuple[str, bool, str]]
    configuration: str


@dataclass
class Comparison:
    """Of several runs: one column for each."""

    names: list[str]
    figures: list[list[str]] = field(default_factory=list)
    configuration: list[list[str]] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


def render(records: Sequence[RunRecord], predictions: Mapping[str, Any] | None = None) -> str:
    """The page. `predictions` is what `sparsedp plan --json` said, of a single run."""
    sections = [section(record, f"run{i}", predictions) for i, record in enumerate(records)]
    names = distinct_names(records)
    template = files("sparsedp.report").joinpath("templates")
    script = template.joinpath("hover.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.joinpath("report.html.jinja").read_text(encoding="utf-8")).render(
        sections=sections,
        names=names,
        comparison=compared(records, names) if len(records) > 1 else None,
        private=any(record.private for record in records),
        title=names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}",
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        version=__version__,
        style=template.joinpath("style.css").read_text(encoding="utf-8"),
        script=script,
        script_digest=digest,
    )


def distinct_names(records: Sequence[RunRecord]) -> list[str]:
    """The folders' names; their paths where two have the same."""
    names = [record.name for record in records]
    return [str(record.path) if names.count(record.name) > 1 else record.name for record in records]


def section(record: RunRecord, id: str = "run", predictions: Mapping[str, Any] | None = None) -> Section:
    statement = record.statement
    promise = statement or {}
    predictions = predictions or record.predictions
    columns, metrics = _metrics(record)
    period_columns, periods = _periods(record)
    charts, audits = _charts(record), _audits(record)  # may find problems, which are warned of
    return Section(
        record=record,
        id=id,
        status=_status(record),
        words=_words(record),
        recognised=plain_words.recognised(promise)
        if statement and math.isfinite(plain_words.epsilon_of(promise))
        else [],
        figures=_figures(record),
        assumptions=[str(text) for text in promise.get("assumptions") or []],
        not_covered=[str(text) for text in promise.get("not_covered") or []],
        warnings=_warnings(record),
        files=[_file(name, entry) for name, entry in record.files.items()],
        planned=_planned(record, predictions),
        command_for_predictions=None if predictions or not record.private else _command_for_predictions(record),
        charts=charts,
        metrics=metrics,
        metric_columns=columns,
        periods=periods,
        period_columns=period_columns,
        tables=_tables(record),
        table_charts=_table_charts(record),
        times=_times(record),
        provenance=_provenance(record),
        audits=audits,
        configuration=yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True) if record.config else "",
    )


# ------------------------------------------------------------------ the promise


def _status(record: RunRecord) -> tuple[str, str]:
    if record.statement is None:
        of = "" if record.planned_steps is None else f" of {record.planned_steps:,}"
        taken = f" after step {record.steps:,}{of}" if record.private else ""
        return "bad", f"not finished{taken}"
    if record.result.get("diverged"):
        return "bad", "diverged: the model is of no use"
    if math.isinf(plain_words.epsilon_of(record.statement)):
        return "bad", "no guarantee"
    if plain_words.is_seeded(record.statement, record.plan):
        return "bad", "seeded: not for release"
    if record.plan.get("poisson_sampling") is False:
        return "bad", "epsilon not proven"
    if record.result.get("stopped_early"):
        return "good", f"stopped early, after {record.steps:,} of {record.planned_steps:,} steps"
    return "good", "finished"


def _words(record: RunRecord) -> list[str]:
    if record.statement is not None:
        return plain_words.in_words(record.statement, record.plan)
    words = [
        "This run is not finished, or its statement cannot be read: there is no model for release, and nothing is promised "
        f"about its checkpoint. `sparsedp train --resume {record.path}` goes on with it."
    ]
    spent = _epsilons(record)
    if record.private and spent and spent[-1].y is not None:
        words.append(f"Its steps so far have spent an epsilon of {number(spent[-1].y)}, by its plan.")
    return words


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    statement, plan = record.statement or {}, record.plan
    epsilon = plain_words.epsilon_of(statement)
    settings = statement.get("settings")
    mechanism = str(statement.get("mechanism") or _mapping(plan.get("mechanism")).get("name") or "")
    if isinstance(settings, dict) and any(value is not None for value in settings.values()):
        mechanism += (
            f" ({', '.join(f'{key} = {number(value)}' for key, value in settings.items() if value is not None)})"
        )
    values = {
        "epsilon": "" if record.statement is None else "infinite" if math.isinf(epsilon) else number(epsilon),
        "target epsilon": plan.get("target_epsilon"),
        "delta": statement.get("delta", plan.get("target_delta")),
        "delta times units": statement.get("delta_times_units"),
        "protects": f"one {statement.get('unit') or plan.get('unit') or 'unit'}",
        "neighbouring data sets differ by": statement.get("neighbouring"),
        "mechanism": mechanism,
        "holds for": statement.get("guarantee"),
        "noise multiplier": statement.get("noise_multiplier", plan.get("noise_multiplier")),
        "clipping": _clipping(statement, plan),
        "sampling": statement.get("sampling"),
        "periods": statement.get("composition"),
        "accountant": statement.get("accountant") or plan.get("accountant"),
        "epsilon by dp_accounting's PLD": statement.get("dp_accounting_epsilon"),
        "steps": statement.get("steps") or (record.steps or None),
        "steps that are not part of the model": statement.get("abandoned_steps") or None,
        "batches without a step": statement.get("batches_without_step") or None,
        "rounding": statement.get("rounding"),
    }
    return [(name, number(value)) for name, value in values.items() if value not in (None, "")]


def _clipping(statement: Mapping[str, Any], plan: Mapping[str, Any]) -> str | None:
    of_plan = _mapping(plan.get("clipping"))
    norm = finite(statement.get("max_grad_norm", of_plan.get("max_norm")))
    style = statement.get("clipping") or of_plan.get("style")
    return None if norm is None else f"{style}, norm at most {number(norm)}"


# ------------------------------------------------------------------ plan and what happened


def _planned(record: RunRecord, predictions: Mapping[str, Any]) -> list[Row]:
    """(what, as planned, what happened)."""
    plan, statement, totals, result = record.plan, record.statement or {}, record.totals, record.result
    rows: list[tuple[str, Any, Any]] = []
    taken = record.steps if record.private or record.finished else None
    rows.append(("steps", record.planned_steps or predictions.get("steps"), taken))
    target = finite(plan.get("target_epsilon"))
    spent = plain_words.epsilon_of(statement) if record.finished else None
    rows.append(("epsilon", None if target is None else f"at most {number(target)}", spent))
    rows.append(("noise multiplier", plan.get("noise_multiplier"), statement.get("noise_multiplier")))
    if record.private:
        steps = finite(totals.get("steps"))
        batch, size = finite(plan.get("batch_size")), finite(plan.get("dataset_size"))
        stream = _mapping(plan.get("stream"))
        expected: Any = batch if stream.get("sample_rate") is None else predictions.get("expected_batch_size")
        if batch and size and plan.get("poisson_sampling", True) and not stream:
            expected = f"{number(batch)} ± {math.sqrt(batch * max(0.0, 1 - batch / size)):,.0f}"
        rows.append((f"{plan.get('unit', 'unit')}s in a batch, mean", expected, _share(totals.get("units"), steps)))
        if plan.get("unit") == "user":
            rows.append(
                (
                    "examples in a batch, mean",
                    predictions.get("expected_examples"),
                    _share(totals.get("examples"), steps),
                )
            )
        predicted = _mapping(predictions.get("predicted"))
        measured = _mapping(predictions.get("measured"))
        curves = {name: curve.mean for name, curve in record.curves.items()}
        for label, key, happened in (
            ("rows touched in a step", "rows_touched", _share(totals.get("rows_touched"), steps)),
            ("rows selected in a step", "rows_selected", curves.get("rows_selected")),
            ("selected rows that nobody touched", "rows_false", curves.get("rows_false")),
            ("gradient size (coordinates a step)", "gradient_size", _share(totals.get("gradient_size"), steps)),
        ):
            rows.append((label, _predicted(predicted, key), happened))
        milliseconds = finite(measured.get("seconds_per_step"))
        rows.append(("milliseconds of a step", milliseconds and 1000 * milliseconds, _milliseconds(totals)))
        memory = finite(_mapping(predictions.get("memory_bytes")).get("total"))
        peak = finite(totals.get("peak_memory")) or finite(result.get("peak_memory_bytes"))
        rows.append(
            (
                "memory, MB (plan: the training alone; happened: the process at its peak)",
                memory and memory / 1e6,
                peak and peak / 1e6,
            )
        )
    return [
        (name, number(plan_of), number(_finite_or_infinite(happened)))
        for name, plan_of, happened in rows
        if plan_of is not None or happened is not None
    ]


def _command_for_predictions(record: RunRecord) -> str:
    """What to type so that the folder holds them. Code of the user's own lies beside the configuration that was given."""
    private = record.path / "private"
    configuration = record.code.get("configuration") if record.code.get("files") else private / "config.yaml"
    trusted = "".join(f" --trust {quote(str(package))}" for package in record.code.get("trusted") or [])
    return f"sparsedp plan {quote(str(configuration))}{trusted} --json > {quote(str(private / 'predictions.json'))}"


def _predicted(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return finite(values[key])
    parts = values.get("tables")
    each = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else []
    numbers = [finite(_mapping(part).get(key)) for part in each]
    return sum(filter(None, numbers)) if any(value is not None for value in numbers) else None


def _milliseconds(totals: Mapping[str, Any]) -> float | None:
    seconds = _share(totals.get("training_seconds"), finite(totals.get("steps")))
    return None if seconds is None else 1000 * seconds


def _share(total: Any, count: float | None) -> float | None:
    total = finite(total)
    return None if total is None or not count else total / count


def _finite_or_infinite(value: Any) -> Any:
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


def _epsilons(record: RunRecord) -> list[Point]:
    """Epsilon over steps, by the plan; of a mechanism that is not known here, what the run wrote down."""
    if record.epsilons is None:
        record.epsilons = _computed_epsilons(record)
    return record.epsilons


def _computed_epsilons(record: RunRecord) -> list[Point]:
    steps = record.steps if record.finished or record.private else 0
    delta = finite((record.statement or {}).get("delta")) or finite(record.plan.get("target_delta"))
    written = [
        Point(entry.step, entry.epsilon, entry.epsilon, entry.epsilon) for entry in record.evaluations if entry.epsilon
    ]
    if not steps or not delta or not record.plan:
        return written
    try:
        plan = PrivacyPlan.from_dict(record.plan)
        if math.isinf(plan.epsilon(1, delta)):
            return []
        at = sorted({max(1, round(steps * i / _EPSILON_POINTS)) for i in range(_EPSILON_POINTS + 1)})
        return [Point(step, value, value, value) for step in at for value in [plan.epsilon(step, delta)]]
    except Exception as error:  # the plan of another version, or with a mechanism of the user's own
        record.problems.append(f"Epsilon over steps cannot be computed from plan.json: {one_line(error)}")
        return written


# ------------------------------------------------------------------ curves


def _charts(record: RunRecord) -> dict[str, list[Chart]]:
    curves = record.curves

    def lines(title: str, names: Mapping[str, str], note: str = "", from_zero: bool = True) -> Chart | None:
        found = [(label, curves[name]) for name, label in names.items() if name in curves]
        return chart(title, [Series.of(label, curve, i) for i, (label, curve) in enumerate(found)], note, from_zero)

    groups: dict[str, list[Chart | None]] = {
        "epsilon": [chart("Epsilon spent", [Series("epsilon", _epsilons(record))], "Lower is better.", from_zero=True)],
        "loss": [
            lines("Training loss", {"loss": "loss"}, _LOSS, from_zero=False),
            *_metric_charts([record], [""]),
            lines("Learning rate", {"lr": "dense parameters" if "table_lr" in curves else "all", "table_lr": "tables"}),
        ],
        "rows": [
            lines("Rows in a step, all tables",
                  {"rows_touched": "touched", "rows_selected": "selected", "rows_false": "selected, not touched"}),
            lines("Share of the tables' gradient that the selection kept", {"kept_mass": "kept"}, _SHARE),
        ],
        "units": [
            lines("Share of units that were clipped", {"clipped_share": "clipped"}, _SHARE),
            lines("Mean norm of a unit's gradient, before clipping", {"mean_norm": "norm"}),
            lines("Units in a batch", {"units": "units"}),
        ],
        "time": [lines("Seconds of a step", {"seconds": "seconds"})],
    }  # fmt: skip
    return {name: [one for one in group if one is not None] for name, group in groups.items()}


def _metric_charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Chart | None]:
    """One for each held-out metric that was computed more than once."""
    points: dict[str, dict[int, list[Point]]] = {}
    for i, record in enumerate(records):
        for entry in record.evaluations:
            for name, value in entry.metrics.items():
                if entry.period is None and is_metric(name) and (y := finite(value)) is not None:
                    points.setdefault(name, {}).setdefault(i, []).append(Point(entry.step, y, y, y))
    charts = []
    for name, of_runs in points.items():
        if max(map(len, of_runs.values())) > 1:
            label, better = metric_name(name)
            series = [Series(names[i] or label, values, i) for i, values in of_runs.items()]
            charts.append(chart(f"{label}, held out", series, better))
    return charts


def _metrics(record: RunRecord) -> tuple[list[str], list[Row]]:
    """The last evaluation of all held-out data."""
    last = next((entry.metrics for entry in reversed(record.evaluations) if entry.period is None), {})
    names = [name for name in last if is_metric(name) and finite(last[name]) is not None]
    if "planted_auc" in record.result:
        last = {**last, "planted_auc": record.result["planted_auc"]}
    others = [prefix for prefix in BASELINES if any(f"{prefix}_{name}" in last for name in names)]
    rows = [
        (metric_name(name)[0], number(finite(last[name])),
         *(number(finite(last.get(f"{prefix}_{name}"))) for prefix in others), metric_name(name)[1])
        for name in names
    ]  # fmt: skip
    if "auc" in last and "auc" not in names:
        rows.insert(0, (metric_name("auc")[0], ONE_CLASS, *("–" for _ in others), metric_name("auc")[1]))
    return ["metric", "this model", *(BASELINES[prefix] for prefix in others), ""], rows


def _periods(record: RunRecord) -> tuple[list[str], list[Row]]:
    """Held-out metrics by period, and of periods before they are trained on."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for entry in record.evaluations:
        if entry.period is not None:
            found.append((f"{entry.period}, before training on it", entry.metrics))
    whole = next((entry.metrics for entry in reversed(record.evaluations) if entry.period is None), {})
    found += [(str(period), _mapping(values)) for period, values in _mapping(whole.get("periods")).items()]
    names = list(dict.fromkeys(name for _, values in found for name in values if finite(values[name]) is not None))
    rows = [(period, *(number(finite(values.get(name))) for name in names)) for period, values in found]
    return ["period", *(metric_name(name)[0] for name in names)], rows


def _tables(record: RunRecord) -> list[Row]:
    shapes = _shapes(record)
    rows: list[Row] = []
    for name in _in_order(record):
        curves = record.tables[name]
        touched, selected, false = (curves[key].mean for key in ("touched", "selected", "false"))
        shape = shapes.get(name)
        size = shape if isinstance(shape, list) and len(shape) == 2 else [None, None]
        share = None if not selected or false is None else false / selected
        rows.append((
            name, number(size[0]), number(size[1]), _count(touched), _count(selected), _count(false),
            "–" if share is None else f"{100 * share:.0f} %",
        ))  # fmt: skip
    return rows


def _shapes(record: RunRecord) -> dict[str, Any]:
    return {str(entry[0]): entry[1] for entry in record.plan.get("parameters") or [] if isinstance(entry, list)}


def _in_order(record: RunRecord) -> list[str]:
    """The tables' names as the model has them; then those that it does not have."""
    places = {name: place for place, name in enumerate(_shapes(record))}
    return sorted(record.tables, key=lambda name: (places.get(name, len(places)), name))


def _count(value: float | None) -> str:
    """A mean number of rows."""
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _table_charts(record: RunRecord) -> list[Chart]:
    largest = sorted(record.tables, key=lambda name: -(record.tables[name]["selected"].mean or 0))[:_TABLES_WITH_CURVES]
    labels = {"touched": "touched", "selected": "selected", "false": "selected, not touched"}
    charts = [
        chart(
            name,
            [Series.of(labels[key], curve, i) for i, (key, curve) in enumerate(record.tables[name].items())],
            from_zero=True,
        )
        for name in _in_order(record)
        if name in largest
    ]
    return [one for one in charts if one is not None]


# ------------------------------------------------------------------ time, provenance, audits, warnings


def _times(record: RunRecord) -> list[tuple[str, float, str]]:
    """(part, share of all in per cent, seconds)."""
    parts = {name: finite(value) for name, value in _mapping(record.totals.get("parts")).items()}
    seconds = finite(record.totals.get("seconds"))
    training = finite(record.totals.get("training_seconds"))
    if not parts and seconds and training is not None:  # a run from before its parts were timed
        parts = {"steps": training}
    if not seconds:
        return []
    parts["everything else"] = max(0.0, seconds - sum(filter(None, parts.values())))
    found = [(_PARTS.get(name, name), value) for name, value in parts.items() if value]
    return [
        (label, 100 * value / seconds, f"{value:,.1f}") for label, value in sorted(found, key=lambda part: -part[1])
    ]


def _provenance(record: RunRecord) -> list[tuple[str, str]]:
    environment, machine = record.environment, _mapping(record.provenance.get("machine"))
    data = _mapping(record.provenance.get("data"))
    rows: list[tuple[str, Any]] = [("begun", environment.get("day"))]
    for entry in record.provenance.get("sessions") or []:
        entry = _mapping(entry)
        ended = entry.get("ended") or "killed"
        steps = f"steps {number(finite(entry.get('after_step')))} to {number(finite(entry.get('last_step')))}"
        rows.append(("at work", f"{entry.get('started')} to {ended}, {steps}"))
    packages = {"Python": environment.get("python"), **_mapping(environment.get("packages"))}
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in packages.items() if value)))
    rows.append(("code of sparsedp, SHA-256", environment.get("sparsedp_sha256")))
    rows += [(f"your code {name}, SHA-256", value) for name, value in _mapping(record.code.get("sha256")).items()]
    rows.append(("machine", ", ".join(f"{key}: {value}" for key, value in machine.items() if value is not None)))
    rows.append(("settings of the data, SHA-256", data.get("settings_sha256")))
    for entry in data.get("files") or []:
        entry = _mapping(entry)
        size = number(finite(entry.get("bytes")))
        of = "" if entry.get("of") == "all of it" else f" of {entry.get('of')}"
        rows.append(
            (f"data {entry.get('path')}", f"SHA-256{of} {entry.get('sha256')}, {size} bytes, of {entry.get('changed')}")
        )
    for name, file in record.files.items():
        if "sha256" in file:
            rows.append((f"{name}, SHA-256", file["sha256"]))
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _file(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    what, why = who_may_read.about(name)
    return {"name": name, "bytes": number(entry["bytes"]), "who": who_may_read.readers(name), "what": what, "why": why}


def _audits(record: RunRecord) -> list[tuple[str, bool, str]]:
    """(title, whether it speaks against the claim, sentence)."""
    found = []
    for name, value in record.audits.items():
        for entry in value if isinstance(value, list) else [value]:
            entry = _mapping(entry)
            contradicts = bool(entry.get("contradicts") or entry.get("above_the_claim"))
            if "sentence" in entry:
                title = (
                    "membership inference"
                    if "attacks" in entry
                    else f"lower bound on epsilon: {entry.get('attack', '')}"
                )
                found.append((title, contradicts, str(entry["sentence"])))
            for exposure in entry.get("exposures") or []:
                exposure = _mapping(exposure)
                rank = _mapping(exposure.get("rank"))
                found.append((
                    f"secret sharer, {number(finite(exposure.get('repetitions')))} times in the data", False,
                    f"median exposure by rank {number(finite(rank.get('median')))} bits (1 is that of what was never there), "
                    f"quartiles {number(finite(rank.get('low')))} to {number(finite(rank.get('high')))}",
                ))  # fmt: skip
            if not {"sentence", "exposures"} & entry.keys():
                record.problems.append(f"{name} holds no audit that is known here.")
    return found


def _warnings(record: RunRecord) -> list[str]:
    warnings = list(record.warnings)
    curves = {name: curve.mean for name, curve in record.curves.items()}
    if (loss := record.curves.get("loss")) is not None and loss.not_finite:
        warnings.append(
            f"{loss.not_finite:,} of {loss.count:,} logged losses are not finite numbers: of batches without units, or the "
            "training has diverged."
        )
    if loss is not None and (ends := loss.ends()) is not None and ends[1] > 10 * abs(ends[0]) > 0:
        warnings.append(
            "The mean loss of the last fifth of the logged steps is more than ten times that of the first fifth: the training "
            "has diverged."
        )
    clipped = curves.get("clipped_share")
    if clipped is not None and clipped > 0.99:
        warnings.append("Nearly every unit was clipped: max_grad_norm may be too small for the learning rate.")
    if clipped is not None and clipped < 0.001:
        warnings.append(
            "Hardly a unit was clipped: with a smaller max_grad_norm there would be less noise for the same epsilon."
        )
    selected, false = curves.get("rows_selected"), curves.get("rows_false")
    mechanism = _mapping(record.plan.get("mechanism"))
    told = any(concerns.WAYS_TO_LESS_NOISE in warning for warning in record.warnings)  # by the run, of its first steps
    if selected and false is not None and false > concerns.MOSTLY * selected and "threshold" in mechanism and not told:
        warnings.append(f"In all logged steps: {concerns.mostly_noise(false, selected, str(mechanism.get('name')))}")
    kept = curves.get("kept_mass")
    if kept is not None and kept < 0.1:
        warnings.append(f"The selection kept {100 * kept:.1f} % of the tables' gradient: the tables hardly learn.")
    if record.result.get("tables_frozen") is True:
        warnings.append("The tables were frozen at their start values.")
    if record.private and record.finished and not record.evaluations:
        warnings.append("The model was not evaluated: nothing was held out, or no evaluation succeeded.")
    warnings += [f"The evaluation after step {step:,} failed: {error}" for step, error in record.failed_evaluations]
    if (state := str(record.result.get("evaluation", ""))).startswith("failed: "):
        warnings.append(f"The last evaluation {state}")
    if any(contradicts for _, contradicts, _ in _audits(record)):
        warnings.insert(0, "AN AUDIT SHOWS MORE THAN THE STATEMENT PROMISES: the guarantee does not hold for this run.")
    if record.finished and "release/model.pt" not in record.files:
        warnings.append("The weights, release/model.pt, are not there.")
    return list(dict.fromkeys([*warnings, *record.problems]))


# ------------------------------------------------------------------ several runs


def compared(records: Sequence[RunRecord], names: Sequence[str]) -> Comparison:
    return Comparison(list(names), _compared_figures(records), differences(records), _compared_charts(records, names))


def _compared_figures(records: Sequence[RunRecord]) -> list[list[str]]:
    """(figure, then its value in each run); figures that no run has are left out."""
    columns = [
        {
            "status": _status(record)[1],
            **{
                name: value
                for name, value in _figures(record)
                if name in ("epsilon", "delta", "protects", "mechanism", "steps")
            },
            "noise multiplier": number(finite(record.plan.get("noise_multiplier"))),
            **{f"{row[0]}, held out": row[1] for row in _metrics(record)[1]},
            "share of units clipped": number(_mean(record, "clipped_share")),
            "rows touched in a step": number(_mean(record, "rows_touched")),
            "rows selected in a step": number(_mean(record, "rows_selected")),
            "selected rows that nobody touched": number(_mean(record, "rows_false")),
            "gradient size (coordinates a step)": number(_mean(record, "gradient_size")),
            "seconds in steps": number(finite(record.totals.get("training_seconds"))),
            "warnings": number(len(_warnings(record))),
        }
        for record in records
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return [row for row in rows if any(value not in ("–", "") for value in row[1:])]


def _mean(record: RunRecord, curve: str) -> float | None:
    """Over all steps, where the run has summed it up; else over those that were logged."""
    if curve in ("rows_touched", "gradient_size"):
        mean = _share(record.totals.get(curve), finite(record.totals.get("steps")))
        if mean is not None:
            return mean
    return record.curves[curve].mean if curve in record.curves else None


def differences(records: Sequence[RunRecord]) -> list[list[str]]:
    """(key, then its value in each run), for the keys of the configurations that are not the same everywhere."""
    flat = [_flat(_with_whole_mechanism(record)) for record in records]
    keys = dict.fromkeys(key for values in flat for key in values)
    missing = object()
    return [
        [
            key,
            *("–" if key not in values else "null" if values[key] is None else number(values[key]) for values in flat),
        ]
        for key in keys
        if any(values.get(key, missing) != flat[0].get(key, missing) for values in flat)
    ]


def _with_whole_mechanism(record: RunRecord) -> dict[str, Any]:
    """The configuration with the mechanism as the plan has it: with its defaults, and never by its name alone."""
    mechanism, privacy = record.plan.get("mechanism"), record.config.get("privacy")
    if not isinstance(mechanism, dict) or not isinstance(privacy, dict):
        return record.config
    return {**record.config, "privacy": {**privacy, "mechanism": mechanism}}


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {path: values} if path else {}
    return {
        key: value
        for name, item in values.items()
        for key, value in _flat(item, f"{path}.{name}" if path else str(name)).items()
    }


def _compared_charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    def together(title: str, curve: str, note: str = "", from_zero: bool = True) -> Chart | None:
        found = [(i, record.curves[curve]) for i, record in enumerate(records) if curve in record.curves]
        return chart(title, [Series.of(names[i], values, i) for i, values in found], note, from_zero)

    epsilons = [Series(name, _epsilons(record), i) for i, (record, name) in enumerate(zip(records, names))]
    charts = [
        chart("Epsilon spent", epsilons, "Lower is better.", from_zero=True),
        together("Training loss", "loss", _LOSS, from_zero=False),
        *_metric_charts(records, names),
        together("Rows selected in a step, all tables", "rows_selected"),
        together("Share of units that were clipped", "clipped_share", _SHARE),
    ]
    return [one for one in charts if one is not None]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
