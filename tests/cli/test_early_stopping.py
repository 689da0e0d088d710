"""`training.early_stopping`: looks that are planned, paid for and written down; a run that stops is finished, and can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data, make_model, prepare
from sparsedp.cli.run import run_training
from sparsedp.cli.validation import part_of
from sparsedp.errors import ConfigError

CONFIG: dict[str, Any] = {
    "data": {"kind": "generated", "rows": 600, "scale": 0.001, "held_out": 0.5},
    "model": {"kind": "pctr", "hidden": 4, "dim": 2},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "training": {
        "epochs": 6, "batch_size": 60, "check": False, "threads": 1, "seed": 1, "log_every": 1,
        "early_stopping": {"validation": "private", "every_epochs": 1, "patience": 1, "min_improvement": 0.5, "std": 0.3},
    },
    "privacy": {"target_epsilon": 3.0, "max_grad_norm": 1.0},
}  # fmt: skip
STEPS = 5  # of an epoch


def written(folder: Path, **early: Any) -> Path:
    content = yaml.safe_load(yaml.safe_dump(CONFIG))
    content["training"]["early_stopping"] |= early
    content["training"]["early_stopping"] = {
        k: v for k, v in content["training"]["early_stopping"].items() if v is not None
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    return folder / "mine.yaml"


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "private" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


PUBLIC = {"validation": "public", "std": None}


@pytest.mark.parametrize("early", [{}, PUBLIC], ids=["private", "public"])
def test_a_run_stops_early_and_is_finished(tmp_path: Path, early: dict[str, Any], capsys: Any) -> None:
    run = tmp_path / "run"
    assert main(["train", str(written(tmp_path, **early)), "--run-dir", str(run)]) == 0
    result = json.loads((run / "private" / "result.json").read_text())
    looks = rows(run, "validation")
    # No improvement of 0.5 on the first look is to be had: the second stops it.
    assert result["finished"] and result["stopped_early"] and result["evaluation"] == "done"
    assert [row["step"] for row in looks] == [STEPS, 2 * STEPS] and result["steps"] == 2 * STEPS
    assert 2.9 < result["epsilon"] <= 3.0  # of all 30 steps and all looks
    assert (run / "release" / "model.pt").is_file()
    printed = capsys.readouterr().out
    assert "stopped early" in printed and "it is not getting better: training stops" in printed
    statement = (run / "release" / "statement.txt").read_text()
    said = "nobody in it is protected" if early else "(at most 5, made 2)"
    assert said in statement and "The epsilon is that of the whole plan" in statement
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "mine.yaml")]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert ("taken as public" if early else "at most 5 looks at 150 private examples") in planned
    assert "after 7 steps" not in planned and "after 30 steps" in planned
    # Going on with it does nothing further.
    assert main(["train", "--resume", str(run)]) == 0
    assert len(rows(run, "validation")) == 2


def test_a_report_says_that_a_run_stopped_early(tmp_path: Path) -> None:
    config = load_config(str(written(tmp_path, min_improvement=9.0)), ["training.seed=null"])
    run_training(config, tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "stopped early, after 10 of 30 steps" in (tmp_path / "run" / "private" / "report.html").read_text()


def test_a_run_that_is_resumed_is_the_same(tmp_path: Path) -> None:
    config = load_config(str(written(tmp_path, patience=5, every=4, every_epochs=None)))
    whole = run_training(config, tmp_path / "whole")
    # Right after a look, before the next step; and in the middle between two.
    for at in (4, 6):
        folder = tmp_path / f"stopped-{at}"
        run_training(config, folder, should_stop=lambda step, at=at: step >= at)
        run_training(config, folder, resume=True)
        assert rows(folder, "validation") == rows(tmp_path / "whole", "validation")
        weights = [torch.load(path / "release" / "model.pt") for path in (folder, tmp_path / "whole")]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert len(rows(tmp_path / "whole", "validation")) == 7 and whole.finished and not whole.stopped_early


def test_a_look_is_in_the_checkpoint_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed when a look was read must not have it to spend again."""
    config = load_config(str(written(tmp_path)))

    def killed(self: Any, row: dict[str, Any]) -> None:
        if row["kind"] == "validation":
            raise KeyboardInterrupt  # as if the power failed here

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("sparsedp.cli.runfolder.RunFolder.log", killed)
        with pytest.raises(KeyboardInterrupt):
            run_training(config, folder)
    ledger = torch.load(folder / "private" / "checkpoint.pt", weights_only=True)["ledger"]
    assert [entry["count"] for entry in ledger["entries"] if entry["setup"]] == [1]


def test_what_is_looked_at_is_not_what_is_reported(tmp_path: Path) -> None:
    config = load_config(str(written(tmp_path)))
    data = load_data(config)
    assert (len(data.training), len(data.validation), len(data.held_out)) == (300, 150, 150)
    places = [set(part._indices.tolist()) for part in (data.training, data.validation, data.held_out)]
    assert not places[0] & places[1] and not places[1] & places[2] and len(set().union(*places)) == 600
    parts = prepare(config, data, make_model(config, data.training))
    plan = parts.engine.plan
    assert plan.validation.units == 150 and plan.validation.looks == 5
    assert epsilon_of(plan.ledger(plan.steps), parts.delta) <= 3.0


def test_users_of_the_validation_set_stay_together(tmp_path: Path) -> None:
    path = written(tmp_path)
    sets = ["data.users=40", "privacy.unit=user", "training.batch_size=10"]
    config = load_config(str(path), sets)
    data = load_data(config)
    assert not set(data.validation.users) & set(data.held_out.users)
    result = run_training(config, tmp_path / "run", data=data)
    validation = result.statement.assumptions[-1]
    assert (
        f"The number of users in the private validation set, {len(set(data.validation.users))}, is public" in validation
    )


def test_values_that_are_no_numbers_do_not_stop_a_look(tmp_path: Path) -> None:
    config = load_config(str(written(tmp_path)))
    data = load_data(config)
    numbers = data.validation._numbers.astype(np.float32)  # all parts share the arrays
    numbers[data.validation._indices[:3]] = np.inf
    data.validation._numbers = numbers
    run_training(config, tmp_path / "run", data=data)
    assert [0 <= row["validation"] <= 4 for row in rows(tmp_path / "run", "validation")] == [True, True]


def test_sequences_are_looked_at_by_their_ranking(tmp_path: Path) -> None:
    config = load_config("sequences", [
        "data.users=60", "data.items=20", "training.epochs=3", "training.batch_size=20", "training.check=false",
        "training.early_stopping={validation: private, every_epochs: 1, patience: 1, std: 0.5}", "training.seed=1",
    ])  # fmt: skip
    run_training(config, tmp_path / "run")
    assert rows(tmp_path / "run", "validation")


@pytest.mark.parametrize(
    "early, error",
    [
        ({"validation": None}, "say private"),
        ({"std": None}, "std: missing"),
        ({"validation": "public"}, "std: is for validation: private"),
        ({"every": 5}, "give it or every"),
        ({"every_epochs": 6}, "before the first look"),
    ],
)
def test_what_it_refuses(tmp_path: Path, early: dict[str, Any], error: str, capsys: Any) -> None:
    assert main(["train", str(written(tmp_path, **early)), "--run-dir", str(tmp_path / "run")]) == 2
    assert error in capsys.readouterr().err


def test_noise_that_is_given_is_refused_and_none_is_not(tmp_path: Path) -> None:
    path = str(written(tmp_path, **PUBLIC))
    with pytest.raises(ConfigError, match=r"needs privacy\.target_epsilon"):
        load_config(path, ["privacy.target_epsilon=null", "privacy.noise_multiplier=1"])
    config = load_config(path, ["privacy.target_epsilon=null", "privacy.noise_multiplier=0"])
    assert run_training(config, tmp_path / "run").stopped_early


def test_nothing_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is held out"):
        load_data(load_config(str(written(tmp_path)), ["data.held_out=0.0"]))


def test_parts_keep_what_a_data_set_says(tmp_path: Path) -> None:
    assert part_of([4, 5, 6], np.array([2]))[0] == 6
