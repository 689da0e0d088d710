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
        header=yaml.safe_dump(_header(record, of), sort_keys=False, allow_unicode=True, width=math.inf).rstrip(),
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


def _header(record: RunRecord, of: Section) -> dict[str, Any]:
    """What the Hub reads. Metrics only of a card that is private."""
    header: dict[str, Any] = {"library_name": "pytorch", "tags": ["differential-privacy", "sparsedp"]}
    if record.finished and math.isfinite(epsilon_of(record.statement or {})):
        header["tags"].append("dp-sgd")
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
            "task": {"type": "tabular-classification" if "auc" in shown else "other"},
            "dataset": {"name": "held-out private data", "type": "private"},
            "metrics": [{"type": name, "value": value} for name, value in shown.items()],
        }],
    }]  # fmt: skip
    return header
