"""`sparsedp audit bound`: both attacks on a configuration, runs that were resumed, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsedp.audit import CanaryPlan
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.cli.runfolder import RunFolder
from sparsedp.noise import GaussianNoise

SMALL = [
    "--set", "data.rows=440", "--set", "data.scale=0.001", "--set", "training.batch_size=100", "--set", "training.epochs=1",
    "--set", "training.check=false", "--set", "training.evaluate_every=null", "--set", "privacy.target_delta=1e-5",
]  # fmt: skip


def _audit(folder: Path, *options: str, source: str = "demo") -> int:
    changes = SMALL if source == "demo" else []
    return main(["audit", "bound", source, *changes, "--quiet", "--seed", "1", "--out", str(folder), *options])


def _results(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "bound.json").read_text())


def test_both_attacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _audit(tmp_path / "out", "--canaries", "60", "--json") == 0
    results = _results(tmp_path / "out")
    assert json.loads(capsys.readouterr().out) == results
    assert [result["attack"].split(",")[0] for result in results] == ["white box", "white box", "black box"]
    for result in results:
        assert (
            0 <= result["bound"] <= result["claimed"] < 3.1 and result["canaries"] == 60 and not result["contradicts"]
        )
        assert result["statement"]["epsilon"] == result["claimed"] and "% confidence" in result["sentence"]
    assert [result["statement"]["steps"] for result in results] == [
        4,
        4,
        5,
    ]  # with canaries there are more than 400 examples
    assert (tmp_path / "out" / "bound.png").stat().st_size > 1000
    run = RunFolder(tmp_path / "out" / "run")
    plan = run.read_canaries()
    assert plan is not None and plan.audit == "bound" and plan.insertions == results[2]["canaries_in"]
    assert "for the audit alone" in (run.release / "statement.txt").read_text()


def test_the_leak_of_eana(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--set", "privacy.mechanism={name: eana}", "--set", "privacy.target_epsilon=null")
    noise = ("--set", "privacy.noise_multiplier=5.0", "--set", "training.epochs=8")
    assert _audit(tmp_path, "--attack", "white", "--on", "rows", "--canaries", "300", *options, *noise) == 0
    assert _results(tmp_path)[0]["bound"] > 1 and _results(tmp_path)[0]["claimed"] == "infinity"
    assert "no epsilon is claimed" in capsys.readouterr().out


def test_losses_tell_of_a_training_without_noise(tmp_path: Path) -> None:
    large = ("--set", "data.scale=0.1", "--set", "training.epochs=10", "--set", "privacy.mechanism={name: eana}")
    noise = ("--set", "privacy.target_epsilon=null", "--set", "privacy.noise_multiplier=0")
    assert _audit(tmp_path, "--attack", "black", "--canaries", "200", *large, *noise) == 0
    assert _results(tmp_path)[0]["bound"] > 1 and _results(tmp_path)[0]["claimed"] == "infinity"


def test_a_claim_that_is_wrong_has_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = GaussianNoise.add
    monkeypatch.setattr(GaussianNoise, "add", lambda self, tensors, std, step: add(self, tensors, std / 4, step))
    whole = ("--set", "training.batch_size=396", "--set", "privacy.mechanism={name: dpsgd}")
    assert (
        _audit(tmp_path, "--attack", "white", "--on", "dense", "--canaries", "1000", "--method", "one_run_fdp", *whole)
        == 1
    )
    assert _results(tmp_path)[0]["contradicts"] and "THE CLAIM IS WRONG" in _results(tmp_path)[0]["sentence"]


def test_a_run_that_was_resumed_halfway(tmp_path: Path) -> None:
    """Its canaries are those that it was started with."""
    config = load_config("demo", [value for value in SMALL if value != "--set"])
    coins = [i % 2 for i in range(40)]
    stopped = run_training(
        config, tmp_path / "run", canaries=CanaryPlan.make("bound", coins, None, 1), should_stop=lambda step: step >= 2
    )
    assert not stopped.finished
    assert _audit(tmp_path / "out", source=str(tmp_path / "run")) == 2  # not finished
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert _audit(tmp_path / "out", source=str(tmp_path / "run")) == 0
    (result,) = _results(tmp_path / "out")
    assert (result["canaries"], result["canaries_in"]) == (40, 20) and result["statement"]["steps"] == 5
    assert result["claimed"] == RunFolder(tmp_path / "run").read_statement().epsilon


def test_users(tmp_path: Path) -> None:
    """Each canary is a user of its own."""
    users = ("--set", "privacy.unit=user", "--set", "data.users=300", "--set", "training.batch_size=50")
    assert _audit(tmp_path, "--attack", "black", "--canaries", "30", *users) == 0
    plan = RunFolder(tmp_path / "run").read_canaries()
    assert plan is not None and plan.owner == "each" and _results(tmp_path)[0]["statement"]["unit"] == "user"


def test_more_confidence_than_the_canaries_can_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--canaries", "10", "--significance", "0.001")
    assert _audit(tmp_path, "--attack", "white", "--on", "dense", *options) == 0
    assert _results(tmp_path)[0]["bound"] == 0
    assert "10 canaries cannot give confidence 0.999" in capsys.readouterr().out


@pytest.mark.parametrize("options, match", [
    (["--canaries", "1"], "--canaries must be at least 2"),
    (["--canaries", "1000000000"], "at most 100,000; got 1,000,000,000"),
    (["--significance", "0"], "significance must lie between 0 and 1"),
    (["--attack", "white", "--set", "stream={composition: parallel}", "--set", "data.days=2"], "Use --attack black"),
    (["--rows-per-canary", "0"], "rows must be a whole number"),
])  # fmt: skip
def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str) -> None:
    assert _audit(tmp_path, *options) == 2
    assert match in capsys.readouterr().err


def test_a_folder_that_is_taken_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    assert _audit(tmp_path) == 2
    out, err = capsys.readouterr()
    assert f"sparsedp train --resume {tmp_path / 'run'}" in err and "White box" not in out + err


def test_runs_that_cannot_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("demo", [value for value in SMALL if value != "--set"])
    run_training(config, tmp_path / "plain")
    run_training(config, tmp_path / "other", canaries=CanaryPlan.make("secret-sharer", [5, 0], None, 1))
    assert _audit(tmp_path / "out", source=str(tmp_path / "plain")) == 2
    assert "is a run without canaries" in capsys.readouterr().err
    assert _audit(tmp_path / "out", source=str(tmp_path / "other")) == 2
    assert "those of another audit (secret-sharer)" in capsys.readouterr().err
    assert _audit(tmp_path / "out", "--delta", "1e-6", source=str(tmp_path / "plain")) == 2
    assert "leave out --attack and --delta" in capsys.readouterr().err
