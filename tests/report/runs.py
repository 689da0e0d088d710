"""Folders of runs that were never trained: made file by file, so that they can be of any size and in any state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

STATEMENT: dict[str, Any] = {
    "epsilon": 2.5, "delta": 1e-6, "delta_times_units": 0.05, "steps": 200, "abandoned_steps": 0, "unit": "example",
    "neighbouring": "adding or removing one example", "mechanism": "adafest", "settings": {"threshold": 10.0},
    "guarantee": "(epsilon, delta)-differential privacy", "noise_multiplier": 0.9, "max_grad_norm": 5.0, "clipping": "flat",
    "sampling": "Poisson, rate 512/54000", "composition": None, "accountant": "PLD", "dp_accounting_epsilon": None,
    "rounding": None, "batches_drawn": 200, "batches_without_step": 0,
    "assumptions": ["The size of the data set, 54000, is public."], "not_covered": ["Choices made by looking at private data."],
}  # fmt: skip
PLAN: dict[str, Any] = {
    "mechanism": {"name": "adafest", "threshold": 10.0, "noise_ratio": 5.0, "map_clip": 1.0, "preselect": None},
    "unit": "example", "loss_reduction": "mean", "poisson_sampling": True, "public_inputs": [], "dataset_size": 54000,
    "batch_size": 512, "shuffled": True, "noise_multiplier": 0.9, "clipping": {"max_norm": 5.0, "style": "flat", "gamma": 0.01},
    "parameters": [["items.weight", [1000, 8]], ["users.weight", [500, 8]], ["out.weight", [1, 8]]], "accountant": "pld",
    "steps": 200, "target_epsilon": 3.0, "target_delta": 1e-6, "seeded": False,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "data": {"kind": "generated", "rows": 60000},
    "training": {"epochs": 2, "batch_size": 512},
    "privacy": {"target_epsilon": 3.0, "mechanism": "adafest"},
    "name": "made",
}


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    tables = {
        "items.weight": {"touched": 40 + step % 5, "selected": 30, "false": 20},
        "users.weight": {"touched": 50, "selected": 10, "false": 5},
    }
    return {
        "kind": "step", "step": step, "loss": 0.7 - 0.001 * (step % 100), "lr": 0.05, "units": 510, "examples": 510,
        "clipped_share": 0.3, "mean_norm": 4.0, "rows_touched": 90, "gradient_size": 320, "reduction": 37.5, "kept_mass": 0.4,
        "tables": tables, "seconds": 0.02, **changes,
    }  # fmt: skip


def make_run(
    path: Path,
    rows: list[dict[str, Any]] | None = None,
    *,
    statement: dict[str, Any] | None = STATEMENT,
    plan: dict[str, Any] = PLAN,
    config: dict[str, Any] = CONFIG,
    **files: Any,
) -> Path:
    """A finished run, unless there is no statement. `files` are further ones of the private part, by their names without .json."""
    release, private = path / "release", path / "private"
    release.mkdir(parents=True)
    private.mkdir()
    rows = [step_row(step) for step in range(10, 201, 10)] if rows is None else rows
    (private / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write(release / "plan.json", plan)
    _write(release / "environment.json", {"day": "2026-11-18", "python": "3.11.7", "packages": {"torch": "2.13.0"}})
    for folder in (release, private):
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if statement is not None:
        (release / "model.pt").write_bytes(b"weights")
        _write(release / "statement.json", statement)
    for name, value in files.items():
        _write(private / f"{name}.json", value)
    return path


def totals(steps: int = 200, **changes: Any) -> dict[str, Any]:
    values = {
        "steps": steps, "units": 510 * steps, "examples": 510 * steps, "rows_touched": 90 * steps, "gradient_size": 320 * steps,
        "training_seconds": 4.0, "seconds": 8.0, "clipped_share": 60.0, "kept_mass": 80.0, "share_steps": steps,
        "parts": {"forward": 1.0, "backward": 2.0, "data": 3.0}, "peak_memory": 5 * 10**8, **changes,
    }  # fmt: skip
    return {"private": "...", "checkpoint": steps, "after_step": {str(steps): {"totals": values}}}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
