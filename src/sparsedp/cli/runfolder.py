"""The folder that a run leaves behind: what may be released, and what may not.

release/
  config.yaml      the configuration, without what describes the private data, the machine or the randomness
  plan.json        the privacy plan: sampling, clipping, mechanism, noise
  environment.json the day, and versions of what it was made with
  model.pt         the weights alone, under the module's own names
  frequencies.pt   rows' frequencies, if they were released
  statement.json   what may be promised about these; the same as text in statement.txt. Written last
  report.html      by `sparsedp report --public`, and README.md, a model card, by `--markdown`: made of the files above alone
private/
  README.txt       says that nothing here is for release
  config.yaml      the configuration, with every default written out
  code.json        which files the code came from that the configuration names
  provenance.json  the machine, the data's files and their digests, and when the run was at work
  canaries.json    of a run for an audit: which canaries were inserted, and the key that they were drawn from
  metrics.jsonl    one JSON object per logged step and per evaluation
  checkpoint.pt    what a run is resumed from; `torch.load` finds the weights under "model"
  checkpoint/      the same of several processes, each with its files
  totals.json      sums over the steps of the checkpoint, and its last evaluation
  result.json      what the closing table shows
  predictions.json if somebody asked `sparsedp plan --json` for them: rows, time and memory, for the report
  report.html      by `sparsedp report`

The command line's documentation says of each file why it is where it is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from sparsedp.audit.canaries import CanaryPlan
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import dump_config, find_config, load_config
from sparsedp.cli.config.trust import Code, digest
from sparsedp.cli.files import locked, remove_unfinished, write_file, write_text
from sparsedp.cli.provenance import ended, environment, provenance, session
from sparsedp.distributed.checkpoint import STATE
from sparsedp.errors import ConfigError, SparseDPError, one_line
from sparsedp.plan import PrivacyPlan
from sparsedp.statement import PrivacyStatement

RUNS = Path("runs")  # where runs lie that were given no folder
RELEASED = (
    "config.yaml", "plan.json", "environment.json", "model.pt", "frequencies.pt", "statement.txt", "statement.json",
    "report.html", "README.md",
)  # fmt: skip
_PRIVATE = (
    "README.txt", "config.yaml", "code.json", "canaries.json", "provenance.json", "metrics.jsonl", "checkpoint.pt",
    "totals.json", "result.json", "report.html", "model_card.md",
)  # fmt: skip
# What the released configuration leaves out: where the data are, what the user's own code was told about them, and seeds.
_LEFT_OUT = (
    "data.paths", "data.path", "data.cache_dir", "data.user_column", "data.vocabulary.path", "data.options",
    "model.frequencies", "training.seed", "training.init_seed", "privacy.counts", "privacy.frequencies.drawn",
)  # fmt: skip

_README = """\
PRIVATE: not for release.

What is in this folder was computed from private data without noise, or tells where they are: exact losses and metrics, exact
counts of units and of rows touched, checkpoints with the position in the data. The privacy statement does not cover it.

What may leave is in the folder release, beside this one; `sparsedp export` copies that part alone.
"""


class RunFolder:
    """While it is open, no other command works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.release, self.private = path / "release", path / "private"
        self._checkpoints = {False: self.private / "checkpoint.pt", True: self.private / "checkpoint"}
        self.weights = self.release / "model.pt"
        self._metrics = self.private / "metrics.jsonl"
        self.listen: Callable[[dict[str, Any]], None] = lambda row: None  # called with each row of the metrics

    @staticmethod
    @contextmanager
    def create(
        path: Path | None, config: Config, plan: PrivacyPlan, canaries: CanaryPlan | None = None
    ) -> Iterator[RunFolder]:
        """A new folder, runs/<name>-<time> unless `path` is given; never one that holds something."""
        path = default_path(config.name) if path is None else path
        refuse_used_folder(path)
        folder = RunFolder(path)
        with locked(folder.private):
            refuse_used_folder(path)  # another run may have begun there meanwhile
            remove_unfinished(folder.private, _PRIVATE)
            folder.release.mkdir(exist_ok=True)
            remove_unfinished(folder.release, RELEASED)
            write_text(folder.private / "README.txt", _README)
            write_text(folder.private / "code.json", _json(_code_of(config), indent=2) + "\n")
            write_text(folder.private / "provenance.json", _json(provenance(config), indent=2) + "\n")
            write_text(folder.release / "environment.json", _json(environment(), indent=2) + "\n")
            folder.write_plan(plan)
            if canaries is not None:
                write_text(folder.private / "canaries.json", _json(canaries.to_dict()) + "\n")
            folder.write_config(config)
            yield folder

    @staticmethod
    @contextmanager
    def open(path: Path) -> Iterator[RunFolder]:
        """The folder of an earlier run."""
        require_run_folder(path)
        folder = RunFolder(path)
        with locked(folder.private):
            remove_unfinished(folder.private, _PRIVATE)
            remove_unfinished(folder.release, RELEASED)
            yield folder

    # ------------------------------------------------------------------ configuration

    def load_config(
        self,
        source: str | None = None,
        overrides: Sequence[str] = (),
        trust: Sequence[str] = (),
        code: str | None = None,
    ) -> tuple[Config, Config]:
        """The run's configuration as it was, and as it is wanted now: its own or that of `source`, with `overrides`.

        The folder may come from anybody. So the code that it names must lie beside the configuration `code`, or else
        beside `source`, or be of a package in `trust`.
        """
        path = self.private / "config.yaml"
        digests = {
            name: str(value) for name, value in _mapping(_mapping(self._read("code.json", {})).get("sha256")).items()
        }
        named = source if code is None else code
        allowed = Code(None if named is None else find_config(named), tuple(trust), digests=digests, run=self.path)
        wanted = load_config(path if source is None else source, overrides, code=allowed)
        return load_config(path, code=allowed), wanted

    def write_plan(self, plan: PrivacyPlan) -> None:
        write_text(self.release / "plan.json", _json(plan.to_dict(), indent=2))

    def write_config(self, config: Config) -> None:
        """First the one that may leave: with the other, the folder is one of a run."""
        values, removed = config.to_dict(), []
        for key in _LEFT_OUT:
            *sections, last = key.split(".")
            mapping: Any = values
            for section in sections:
                mapping = mapping.get(section) if isinstance(mapping, dict) else None
            if isinstance(mapping, dict) and mapping.get(last) is not None:
                del mapping[last]
                removed.append(key)
        about = "Left out, as it is about the data, the machine or the randomness"
        comment = f"# {about}: {', '.join(removed)}\n" if removed else ""
        write_text(self.release / "config.yaml", comment + dump_config(values))
        write_text(self.private / "config.yaml", dump_config(config.to_dict()))

    # ------------------------------------------------------------------ private

    def log(self, row: dict[str, Any]) -> None:
        with self._metrics.open("a") as file:
            file.write(_json(row) + "\n")
        self.listen(row)

    def changed_files(self, config: Config) -> list[str]:
        """The files of the data that are no longer what they were when the run was started."""
        begun = _mapping(_mapping(self._read("provenance.json", {})).get("data")).get("files")
        digests = {
            file.get("path"): file.get("sha256") for file in map(_mapping, begun if isinstance(begun, list) else [])
        }
        files = provenance(config)["data"]["files"]
        return [file["path"] for file in files if digests.get(file["path"], file["sha256"]) != file["sha256"]]

    def begin_session(self, step: int) -> None:
        """Notes that the run is at work from now on, from this step."""
        self._write_sessions([*self._sessions(), session(step)])

    def end_session(self, step: int) -> None:
        *earlier, last = self._sessions()
        self._write_sessions([*earlier, ended(last, step)])

    def _sessions(self) -> list[dict[str, Any]]:
        sessions = _mapping(self._read("provenance.json", {})).get("sessions")
        return sessions if isinstance(sessions, list) else []

    def _write_sessions(self, sessions: list[dict[str, Any]]) -> None:
        """The folder of a run from before there was this file gets none of the rest."""
        values = {**_mapping(self._read("provenance.json", {})), "sessions": sessions}
        write_text(self.private / "provenance.json", _json(values, indent=2) + "\n")

    def forget_after(self, step: int, evaluated: bool = True) -> None:
        """Drops the metrics of steps that a resumed run takes again, and a line that a kill cut short.

        If the run is still to be evaluated after this step, what is there of that evaluation goes as well.
        """
        kept = []
        for line in self._metrics.read_text().splitlines() if self._metrics.is_file() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            again = not evaluated and row["step"] == step and row["kind"] in ("evaluation", "failed_evaluation")
            if row["step"] <= step and not again:
                kept.append(line + "\n")
        write_text(self._metrics, "".join(kept))

    def write_totals(self, totals: Mapping[int, dict[str, Any]], checkpoint: int | None) -> None:
        """Sums after some steps, and the step of the checkpoint that is there."""
        content = {
            "private": "Counted on private data without noise: not for release.",
            "checkpoint": checkpoint,
            "after_step": {str(step): values for step, values in totals.items()},
        }
        write_text(self.private / "totals.json", json.dumps(content, indent=2) + "\n")

    def read_totals(self, step: int) -> dict[str, Any]:
        """The sums after the step of the checkpoint."""
        values = _mapping(_mapping(self._read("totals.json", {})).get("after_step")).get(str(step))
        if values is None:
            raise SparseDPError(
                f"{self.private / 'totals.json'} has nothing about step {step}, which the checkpoint is of. Restore both "
                "files from the same copy of the folder, or start the run again."
            )
        return values

    def require_no_checkpoint_lost(self) -> None:
        """A run without a checkpoint starts from its beginning, if it has never had one."""
        step = _mapping(self._read("totals.json", {})).get("checkpoint")
        if step is not None or self.is_released:
            raise SparseDPError(f"{self.path} has lost its checkpoint: {self.checkpoint} is missing. Start a new run.")

    def read_canaries(self) -> CanaryPlan | None:
        """Which canaries are in the run's data; None if there are none."""
        values = self._read("canaries.json", None)
        return None if values is None else CanaryPlan.from_dict(_mapping(values))

    def read_statement(self) -> PrivacyStatement:
        """Of a finished run."""
        path = self.release / "statement.json"
        try:
            return PrivacyStatement.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SparseDPError(f"{path} cannot be read as a statement: {one_line(error)}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        write_text(self.private / "result.json", _json(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        return self._read("result.json", None)

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint(self) -> Path:
        """What the run is resumed from, of one process or of several: where both are there, the later one."""
        return max(self._checkpoints.values(), key=_written)

    @property
    def has_checkpoint(self) -> bool:
        return _written(self.checkpoint) > 0

    def place_of_checkpoint(self, of_several: bool) -> Path:
        return self._checkpoints[of_several]

    def keep_checkpoint(self, of_several: bool) -> None:
        """Removes the one that another number of processes wrote before."""
        other = self._checkpoints[not of_several]
        if other.is_dir():
            shutil.rmtree(other)
        else:
            other.unlink(missing_ok=True)

    # ------------------------------------------------------------------ release

    @property
    def is_released(self) -> bool:
        """Whether everything of the release is there: the statement comes last."""
        return (self.release / "statement.json").is_file()

    def write_release(
        self,
        write_weights: Callable[[IO[bytes]], object],
        frequencies: dict[str, Any] | None,
        statement: PrivacyStatement,
    ) -> None:
        """`model.load_state_dict(torch.load("model.pt"))` is how a user takes the weights."""
        self.withdraw_release()
        write_file(self.weights, write_weights)
        if frequencies is not None:
            write_file(self.release / "frequencies.pt", lambda file: torch.save(frequencies, file))
        self.write_statement(statement)

    def write_statement(self, statement: PrivacyStatement) -> None:
        write_text(self.release / "statement.txt", f"{statement}\n")
        write_text(self.release / "statement.json", statement.to_json() + "\n")

    def withdraw_release(self) -> None:
        """Takes back what the end of a run wrote, the statement first: it must not stand without its model."""
        for name in ("statement.json", "statement.txt", "report.html", "README.md", "frequencies.pt", "model.pt"):
            (self.release / name).unlink(missing_ok=True)

    def _read(self, name: str, otherwise: Any) -> Any:
        path = self.private / name
        if not path.is_file():
            return otherwise
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise SparseDPError(f"{path} is damaged: {error}") from error


class FolderOfFirst(RunFolder):
    """The folder as the other processes see it that work for one run: the first of them writes, and they do not."""

    def log(self, row: dict[str, Any]) -> None:
        return

    def begin_session(self, step: int) -> None:
        return

    def end_session(self, step: int) -> None:
        return

    def forget_after(self, step: int, evaluated: bool = True) -> None:
        return

    def write_config(self, config: Config) -> None:
        return

    def write_totals(self, totals: Mapping[int, dict[str, Any]], checkpoint: int | None) -> None:
        return

    def write_result(self, result: dict[str, Any]) -> None:
        return

    def keep_checkpoint(self, of_several: bool) -> None:
        return

    def withdraw_release(self) -> None:
        return

    def write_release(
        self,
        write_weights: Callable[[IO[bytes]], object],
        frequencies: dict[str, Any] | None,
        statement: PrivacyStatement,
    ) -> None:
        write_weights(BytesIO())  # which sends the first process what is here


def _written(checkpoint: Path) -> float:
    """When a checkpoint was written; 0 if there is none."""
    last = checkpoint / STATE if checkpoint.is_dir() else checkpoint
    return last.stat().st_mtime if last.is_file() else 0.0


def require_run_folder(path: Path) -> None:
    if not (path / "private" / "config.yaml").is_file():
        raise ConfigError(f"{path} is not the folder of a run: it has no private/config.yaml")


def refuse_used_folder(path: Path) -> None:
    """A folder that a run began to make, and did not get to its own configuration, counts as new."""
    begun = {
        "private": {"README.txt", "code.json", "canaries.json", "provenance.json"},
        "release": {"config.yaml", "plan.json", "environment.json"},
    }
    if path.is_dir():
        entries = {entry.relative_to(path) for entry in path.rglob("*")}
        new = {Path(part) for part in begun} | {Path(part, name) for part, names in begun.items() for name in names}
        if all(entry in new or (entry.parent in new and entry.name.startswith(".")) for entry in entries):
            return
    if path.exists():
        raise ConfigError(f"{path} exists and is not empty. Name another folder, or continue its run with --resume.")


def _code_of(config: Config) -> dict[str, Any]:
    """Which files the user's own code came from, for those who go on with the run."""
    files = {address.partition(":")[0]: config.code.file_of(address) for address in config.addresses().values()}
    readable = {name: file for name, file in files.items() if file is not None and file.is_file()}
    configuration = config.code.configuration
    return {
        "configuration": None if configuration is None else str(configuration.absolute()),
        "trusted": list(config.code.trusted),
        "files": {name: str(file) for name, file in readable.items()},
        "sha256": {name: digest(file) for name, file in readable.items()},
    }


def copy_release(
    folder: RunFolder, target: Path, without: Sequence[str] = (), add: Callable[[Path], object] = lambda folder: None
) -> list[str]:
    """Copies what may leave into `target`, all of it or nothing; returns the names of the files.

    The files `without` stay, and `add` puts others beside the rest.
    """
    names = [name for name in RELEASED if name not in without and (folder.release / name).is_file()]
    temporary = target.with_name(f".{target.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name in RELEASED:
            if (folder.release / name).is_symlink():
                raise SparseDPError(f"{folder.release / name} is a link. A release holds files alone.")
        for name in names:
            shutil.copyfile(folder.release / name, temporary / name)
        add(temporary)
        if target.is_dir():
            target.rmdir()
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sorted(path.name for path in target.iterdir())


def default_path(name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stem if i == 1 else f"{stem}-{i}" for i in count(1))
    return next(path for path in (RUNS / name for name in names) if not path.exists())


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def plain(value: Any) -> Any:
    """The value with numbers that JSON lacks as text (infinity) or null (not a number)."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    return value


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, allow_nan=False)
