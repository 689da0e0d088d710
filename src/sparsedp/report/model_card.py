"""A model card in Markdown, with the fields of the Hugging Face Hub in its header."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from sparsedp.report.curves import finite
from sparsedp.report.metric_names import is_metric
from sparsedp.report.page import Section, section
from sparsedp.report.plain_words import epsilon_of
from sparsedp.report.run_record import RunRecord
from sparsedp.version import __version__

# Fields of the Hub that a configuration does not tell, or not always: comments, until somebody fills them in.
_PLACEHOLDERS = {
    "license": "apache-2.0  # yours to choose",
    "pipeline_tag": "other  # the Hub's name of the task",
    "datasets": "[owner/name]  # public ones on the Hub, such as those that a pretrained part was trained on",
    "language": "en  # of the texts, if there are any",
    "metrics": "[accuracy]",
}
_TASKS = {
    ("text", "cross_entropy"): "text-classification",
    ("text", "binary_cross_entropy"): "text-classification",
    **{(kind, "binary_cross_entropy"): "tabular-classification" for kind in ("generated", "clicklog", "table")},
}  # by data.kind and loss; the Hub has none for recommenders
_RANKS_ITEMS = ("softmax", "sampled_softmax", "binary_candidates")
_METRICS = {
    "binary_cross_entropy": ["auc", "log_loss"],
    "cross_entropy": ["accuracy"],
    **{loss: ["ndcg@10", "hit@10", "mrr"] for loss in _RANKS_ITEMS},
}  # what a loss is evaluated by
_NAME = r"[\w@.-]+"  # of a metric that may stand in the header


def model_card(record: RunRecord) -> str:
    """With exact metrics, and a sentence that says so, if the record has any of its private part."""
    of = section(record)
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters |= {"text": as_text, "cell": as_cell}
    template = (
        files("sparsedp.report").joinpath("templates").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    )
    return environment.from_string(template).render(
        header=_as_yaml(_header(record, of)),
        run=of,
        private=record.private,
        finished=record.finished,
        version=__version__,
        configuration=of.configuration.rstrip(),
        fence=_fence(of.configuration),
    )


def as_text(value: Any) -> str:
    """In a line of Markdown: as it is, whatever is in it."""
    return re.sub(r"([\\`*_\[\]<>#|~$&])", r"\\\1", " ".join(str(value).split()))


def as_cell(value: Any) -> str:
    return as_text(value) or "–"


def _fence(text: str) -> str:
    """Of a block of code that holds this text: longer than what it has of the kind."""
    return "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])


def _as_yaml(header: dict[str, Any]) -> str:
    """The fields, and as comments those that are left to fill in."""
    known = yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=math.inf).rstrip()
    return "\n".join([known, *(f"# {name}: {text}" for name, text in _PLACEHOLDERS.items() if name not in header)])


def _header(record: RunRecord, of: Section) -> dict[str, Any]:
    """What the Hub reads. Metrics only of a card that is private."""
    header: dict[str, Any] = {"library_name": "pytorch", "tags": ["differential-privacy", "sparsedp"]}
    if record.finished and math.isfinite(epsilon_of(record.statement or {})):
        header["tags"].append("dp-sgd")
    data, model, loss = (record.config.get(key) for key in ("data", "model", "loss"))
    kind = data.get("kind") if isinstance(data, dict) else None
    architecture = model.get("kind") if isinstance(model, dict) else None
    if isinstance(architecture, str) and re.fullmatch(r"[a-z_]+", architecture):  # no address of the user's own code
        header["tags"].append(architecture)
    if loss in _RANKS_ITEMS:
        header["tags"].append("recommendation")
    if isinstance(kind, str) and isinstance(loss, str) and (kind, loss) in _TASKS:
        header["pipeline_tag"] = _TASKS[kind, loss]
    if isinstance(loss, str) and loss in _METRICS:
        header["metrics"] = _METRICS[loss]  # their names; their values are private
    if not record.private or not of.metrics:
        return header
    last = next(entry for entry in reversed(record.evaluations) if entry.period is None)
    values = {
        name: finite(value) for name, value in last.metrics.items() if is_metric(name) and re.fullmatch(_NAME, name)
    }
    shown = {name: value for name, value in values.items() if value is not None}
    header["metrics"] = list(shown)
    header["model-index"] = [{
        "name": " ".join(record.name.split()),
        "results": [{
            "task": {"type": header.get("pipeline_tag") or ("tabular-classification" if "auc" in shown else "other")},
            "dataset": {"name": "held-out private data", "type": "private"},
            "metrics": [{"type": name, "value": value} for name, value in shown.items()],
        }],
    }]  # fmt: skip
    return header
