"""The folder that a run leaves behind.

config.yaml      the configuration, with every default written out
plan.json        the privacy plan: sampling, clipping, mechanism, noise
metrics.jsonl    one JSON object per logged step and per evaluation
checkpoint.pt    what a run is resumed from; `torch.load` finds the weights under "model"
model.pt         the weights alone, under the module's own names
statement.json   what may be promised about the checkpoint's weights; the same as text in statement.txt
result.json      written when the run is complete
"""

from __future__ import annotations

import json
import math
import os
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch

from sparsedp.cli.config import Config
from sparsedp.cli.load import dump_config, load_config
from sparsedp.errors import ConfigError, SparseDPError
from sparsedp.plan import PrivacyPlan
from sparsedp.statement import PrivacyStatement


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self._metrics = path / "metrics.jsonl"

    @staticmethod
    def create(path: Path | None, config: Config, plan: PrivacyPlan) -> RunFolder:
        """A new folder, runs/<name>-<time> unless `path` is given; never one that holds something."""
        path = _default_path(config.name) if path is None else path
        refuse_used_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        folder.write_config(config)
        folder._write("plan.json", _json(plan.to_dict(), indent=2))
        folder._metrics.touch()
        return folder

    @staticmethod
    def open(path: Path) -> tuple[RunFolder, Config]:
        """The folder of an earlier run, and its configuration."""
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is not the folder of a run: it has no config.yaml")
        folder = RunFolder(path)
        if not folder.checkpoint.is_file():
            raise SparseDPError(f"{path} has no checkpoint: that run ended before its first one. Start it again.")
        return folder, load_config(path / "config.yaml")

    def write_config(self, config: Config) -> None:
        self._write("config.yaml", dump_config(config))

    def log(self, row: dict[str, Any]) -> None:
        with self._metrics.open("a") as file:
            file.write(_json(row) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps that a resumed run takes again, and a line that a kill cut short."""
        kept = []
        for line in self._metrics.read_text().splitlines() if self._metrics.is_file() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] <= step:
                kept.append(line + "\n")
        self._write("metrics.jsonl", "".join(kept))

    def write_statement(self, statement: PrivacyStatement) -> None:
        self._write("statement.json", statement.to_json() + "\n")
        self._write("statement.txt", f"{statement}\n")

    def write_weights(self, weights: dict[str, Any]) -> None:
        """What a user takes along: `model.load_state_dict(torch.load("model.pt"))`."""
        temporary = self.path / ".model.pt.part"
        torch.save(weights, temporary)
        os.replace(temporary, self.path / "model.pt")

    def write_result(self, result: dict[str, Any]) -> None:
        self._write("result.json", _json(result, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Beside the file first, so that a kill leaves the old one or the new one."""
        temporary = self.path / f".{name}.part"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)


def refuse_used_folder(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty. Name another folder, or continue its run with --resume.")


def _default_path(name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stem if i == 1 else f"{stem}-{i}" for i in count(1))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


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
