"""What is in the folder of a run, as far as it can be read: of a finished run, an interrupted, a damaged or an old one.

Nothing here fails because something is missing: what cannot be read is named in `problems`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparsedp.errors import ConfigError, one_line
from sparsedp.report.curves import Curve, Point, finite

_CURVES = ("loss", "lr", "table_lr", "units", "examples", "clipped_share", "mean_norm", "kept_mass", "rows_touched",
           "gradient_size", "reduction", "seconds")  # fmt: skip
_OF_TABLE = ("touched", "selected", "false")
_TABLE_POINTS = 100
_MOST_WARNINGS = 100
AUDITS = ("bound.json", "secret_sharer.json")


@dataclass
class Evaluation:
    step: int
    metrics: dict[str, Any]
    epsilon: float | None = None
    period: Any = None  # of a stream, evaluated before it is trained on


@dataclass
class RunRecord:
    """`private` tells whether anything of the run's private part was read: if not, nothing here may not leave."""

    path: Path
    name: str
    private: bool
    statement: dict[str, Any] | None = None  # None: the run is not finished
    plan: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, Any] = field(
        default_factory=dict
    )  # what `sparsedp plan --json` said, if it lies in the folder
    curves: dict[str, Curve] = field(default_factory=dict)
    tables: dict[str, dict[str, Curve]] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    failed_evaluations: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    audits: dict[str, Any] = field(default_factory=dict)
    last_step: int = 0
    files: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by "release/model.pt": bytes, sha256 if it may leave
    problems: list[str] = field(default_factory=list)
    epsilons: list[Point] | None = None  # over steps; None before they are computed

    @property
    def finished(self) -> bool:
        return self.statement is not None

    @property
    def steps(self) -> int:
        """That were taken, as far as the folder tells."""
        counted = (self.statement or {}).get("steps"), self.totals.get("steps"), self.last_step
        return max(int(finite(value) or 0) for value in counted)

    @property
    def planned_steps(self) -> int | None:
        planned = finite(self.result.get("planned_steps")) or finite(self.plan.get("steps"))
        return None if planned is None else int(planned)


def read_run(path: Path, public: bool = False, progress: Callable[[int], None] = lambda rows: None) -> RunRecord:
    """The record of a run's folder, or of what `sparsedp export` made of one.

    `public` reads the part that may leave, and nothing else. `progress` is called with the rows of metrics read so far.
    """
    exported = _is_exported(path)
    release = path if exported else path / "release"
    if not is_folder_of_run(path):
        hint = ""
        if path.is_dir() and any((folder / "private").is_dir() for folder in path.iterdir() if folder.is_dir()):
            hint = f" It holds folders of runs: name those, as in {path}/*"
        raise ConfigError(f"{path} is not the folder of a run: it has neither release/ nor private/.{hint}")
    private = path / "private"
    record = RunRecord(path, _name(path), private=not public and private.is_dir())
    reader = _Reader(record)
    record.statement = reader.mapping(release / "statement.json") or None
    record.plan = reader.mapping(release / "plan.json")
    record.environment = reader.mapping(release / "environment.json")
    record.config = reader.configuration(release / "config.yaml")
    _add_files(record, release, "release", digests=True)
    if record.private:
        record.config = reader.configuration(private / "config.yaml") or record.config
        record.provenance = reader.mapping(private / "provenance.json")
        record.code = reader.mapping(private / "code.json")
        record.result = reader.mapping(private / "result.json")
        record.predictions = reader.mapping(private / "predictions.json")
        record.totals = _last_totals(reader.mapping(private / "totals.json"))
        record.audits = {file.name: value for file in _audit_files(path) if (value := reader.json(file)) is not None}
        reader.metrics(private / "metrics.jsonl", progress)
        _add_files(record, private, "private", digests=False)
    return record


def is_folder_of_run(path: Path) -> bool:
    """Whether it is what a run left, or what `sparsedp export` made of it."""
    return _is_exported(path) or (path / "release").is_dir() or (path / "private").is_dir()


def _is_exported(path: Path) -> bool:
    return (path / "statement.json").is_file() and not (path / "release").is_dir()


def _audit_files(path: Path) -> list[Path]:
    """In the run's folder; of a run that an audit made, also in that audit's folder."""
    files = [path / "private" / name for name in AUDITS]
    above = path.absolute().parent
    if path.name == "run":
        files.append(above / "bound.json")
    if path.name == "target" and (above.parent / "membership.json").is_file():
        files.append(above.parent / "result.json")
    return files


def _name(path: Path) -> str:
    return path.absolute().name


class _Reader:
    """Reads files into a record; what is damaged goes to its problems."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def json(self, path: Path) -> Any:
        """None if the file is not there or cannot be read."""
        return self._read(path, json.loads)

    def mapping(self, path: Path) -> dict[str, Any]:
        return self._mapping(path, self.json(path))

    def configuration(self, path: Path) -> dict[str, Any]:
        return self._mapping(path, self._read(path, yaml.safe_load))

    def _mapping(self, path: Path, value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, dict):
            self.record.problems.append(f"{path.name} holds something else than names and values.")
        return value if isinstance(value, dict) else {}

    def _read(self, path: Path, parse: Callable[[str], Any]) -> Any:
        if not path.is_file():
            return None
        try:
            return parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            self.record.problems.append(f"{path.parent.name}/{path.name} cannot be read: {one_line(error)}")
            return None

    def metrics(self, path: Path, progress: Callable[[int], None]) -> None:
        """Line by line: a run of a million steps need not fit into memory."""
        if not path.is_file():
            return
        damaged = 0
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                damaged += not self._row(line)
                if number % 10_000 == 0:
                    progress(number)
        if damaged:
            self.record.problems.append(f"{damaged:,} lines of private/metrics.jsonl cannot be read, and are left out.")

    def _row(self, line: str) -> bool:
        """Whether the line could be read."""
        try:
            row = json.loads(line)
            kind, step = row["kind"], int(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return False
        record = self.record
        if kind == "step":
            record.last_step = max(record.last_step, step)
            for name in _CURVES:
                if name in row:
                    record.curves.setdefault(name, Curve()).add(step, row[name])
            tables = row.get("tables")
            for table, counts in tables.items() if isinstance(tables, dict) else ():
                if isinstance(counts, dict):
                    curves = record.tables.setdefault(table, {name: Curve(_TABLE_POINTS) for name in _OF_TABLE})
                    for name, curve in curves.items():
                        curve.add(step, counts.get(name))
            _add_selected(record, step, tables)
        elif kind in ("evaluation", "evaluate") and "data" not in row:  # data: evaluated on others than the run's own
            metrics = {key: value for key, value in row.items() if key not in ("kind", "step", "epsilon", "period")}
            record.evaluations.append(Evaluation(step, metrics, finite(row.get("epsilon")), row.get("period")))
        elif kind == "failed_evaluation":
            record.failed_evaluations.append((step, str(row.get("error"))))
        elif kind == "warning" and str(row.get("message")) not in record.warnings[:_MOST_WARNINGS]:
            record.warnings.append(str(row.get("message")))
        return True


def _add_selected(record: RunRecord, step: int, tables: Any) -> None:
    """Rows selected and falsely selected, over all tables."""
    counts = [value for value in tables.values() if isinstance(value, dict)] if isinstance(tables, dict) else []
    for name, total in (("selected", "rows_selected"), ("false", "rows_false")):
        numbers = [number for value in counts if (number := finite(value.get(name))) is not None]
        if numbers:
            record.curves.setdefault(total, Curve()).add(step, sum(numbers))


def _last_totals(values: dict[str, Any]) -> dict[str, Any]:
    """The sums after the latest step that the file has, and its evaluation."""
    after = values.get("after_step")
    steps = [key for key in after if str(key).isdecimal()] if isinstance(after, dict) else []
    if not steps or not isinstance(after, dict):
        return {}
    last = after[max(steps, key=int)]
    totals = last.get("totals") if isinstance(last, dict) else None
    return totals if isinstance(totals, dict) else {}


def _add_files(record: RunRecord, folder: Path, part: str, digests: bool) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            entry: dict[str, Any] = {"bytes": path.stat().st_size}
            if digests and path.name not in ("report.html", "README.md"):
                entry["sha256"] = _sha256(path)
            record.files[f"{part}/{path.name}"] = entry


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
