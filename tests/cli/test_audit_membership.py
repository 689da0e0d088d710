"""`sparsedp audit membership`: its runs, going on after an interruption, what it shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsedp.cli import membership
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.membership import MembershipAudit, Units
from sparsedp.cli.runfolder import RunFolder

CONFIG = """
data: {kind: generated, rows: 600, scale: 0.01, users: 60, held_out: 0.0}
model: {kind: pctr, hidden: 4, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.1}
training: {epochs: 1, batch_size: 60, check: false}
privacy: {noise_multiplier: 2, max_grad_norm: 1}
"""


def written(tmp_path: Path, text: str = CONFIG) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return str(path)


def audited(config: str, folder: Path, *more: str) -> list[str]:
    return ["audit", "membership", config, "--shadows=4", f"--audit-dir={folder}", "--quiet", *more]


def test_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a claimed epsilon: nothing is above it, the picture is there, and the same command again trains nothing."""
    config, folder = written(tmp_path), tmp_path / "audit"
    assert main(audited(config, folder, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] > 0 and result["epsilon_at_least"] <= result["epsilon"] and not result["above_the_claim"]
    assert [attack["name"] for attack in result["attacks"]] == ["loss threshold", "LiRA, online, 4 shadow models"]
    for attack in result["attacks"]:
        assert attack["members"] + attack["non_members"] == 600 and attack["rates"][0]["tpr"] is None
    assert any("needs 10,000 non-members" in note for note in result["notes"])
    assert (folder / "roc.png").stat().st_size > 10_000
    assert json.loads((folder / "result.json").read_text()) == result
    weights = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/release/model.pt")}
    assert len(weights) == 5
    assert main(audited(config, folder, "--variant=offline")) == 0
    assert "LiRA, offline" in capsys.readouterr().out
    assert weights == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/release/model.pt")}


def test_members_are_trained_on_and_others_are_not(tmp_path: Path) -> None:
    """Fair coins for each run; a shadow model has what its twin has not; the plan counts those that were drawn."""
    config = load_config(written(tmp_path))
    audit = MembershipAudit.open(tmp_path / "audit", config, 4, 1000)
    coins = np.array([audit.coins(number, 10_000) for number in range(5)])
    assert (coins[1] != coins[2]).all() and (coins[3] != coins[4]).all()
    for one, other in ((0, 1), (0, 3), (1, 3)):
        assert abs((coins[one] == coins[other]).mean() - 0.5) < 0.025
    assert (MembershipAudit.open(tmp_path / "audit", config, 4, 1000).coins(0, 10_000) == coins[0]).all()
    assert main(audited(written(tmp_path), tmp_path / "other")) == 0
    again = MembershipAudit.open(tmp_path / "other", load_config(written(tmp_path)), 4, 24_000)
    for number in range(5):
        plan = json.loads((RunFolder(again.run_dir(number)).release / "plan.json").read_text())
        assert plan["dataset_size"] == again.coins(number, 600).sum()


def test_users_are_in_or_out_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(
        tmp_path, CONFIG.replace("max_grad_norm: 1", "max_grad_norm: 1, unit: user").replace("60, check", "20, check")
    )

    class Training:
        users = np.array([5, 3, 5, 9])

    units = Units.of(load_config(config), Training())
    assert [sorted(examples.tolist()) for examples in units.examples] == [[1], [0, 2], [3]]
    assert units.indices(np.array([1, 2])).tolist() == [0, 2, 3]
    assert main(audited(config, tmp_path / "audit", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unit"] == "user" and result["attacks"][0]["members"] + result["attacks"][0]["non_members"] <= 60


def test_an_audit_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = written(tmp_path), tmp_path / "audit"
    trained: list[tuple[str, bool]] = []
    run_training = membership.run_training

    def stopping(config: Any, run_dir: Path, **options: Any) -> Any:
        trained.append((run_dir.name, options["resume"]))
        stop = run_dir.name == "shadow-02" and not options["resume"]
        return run_training(config, run_dir, **options, should_stop=lambda step: stop and step >= 2)

    monkeypatch.setattr(membership, "run_training", stopping)
    assert main(audited(config, folder)) == 130
    assert trained == [("target", False), ("shadow-01", False), ("shadow-02", False)]
    trained.clear()
    assert main(audited(config, folder)) == 0
    assert trained == [("shadow-02", True), ("shadow-03", False), ("shadow-04", False)]


@pytest.mark.slow
def test_a_model_without_noise_gives_its_members_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CONFIG.replace("noise_multiplier: 2, max_grad_norm: 1", "noise_multiplier: 0, max_grad_norm: 10")
    text = text.replace("epochs: 1", "epochs: 60").replace("lr: 0.1", "lr: 0.3").replace("hidden: 4,", "hidden: 32,")
    text = text.replace("rows: 600,", "rows: 2400,")
    assert text.count("2400") == 1
    assert main(audited(written(tmp_path, text), tmp_path / "audit", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] in ("infinity", "inf", None) or result["epsilon"] == float("inf")
    assert max(attack["area"] for attack in result["attacks"]) > 0.7 and result["epsilon_at_least"] > 0.3


def test_a_claim_that_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that tell everything, and a statement that promises a small epsilon: said, and an exit code of its own."""
    config, folder = written(tmp_path), tmp_path / "audit"
    assert main(audited(config, folder)) == 0
    audit = MembershipAudit.open(folder, load_config(config), 4, 24_000)
    scored = audit.scored(600)
    rng = np.random.default_rng(0)
    for number, name in enumerate(audit.names):
        losses = 1 + 0.1 * rng.random(600) - 0.8 * audit.coins(number, 600)[scored]
        np.save(folder / "losses" / f"{name}.npy", losses)
    statement = RunFolder(audit.run_dir(0)).release / "statement.json"
    statement.write_text(json.dumps({**json.loads(statement.read_text()), "epsilon": 0.5}))
    capsys.readouterr()
    assert main(audited(config, folder)) == 1
    assert "ABOVE THE CLAIM" in capsys.readouterr().out


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = written(tmp_path), tmp_path / "audit"
    MembershipAudit.open(folder, load_config(config), 4, 24_000)
    for more, message in (
        (["--examples=10"], "another examples"),
        (["--set", "training.epochs=2"], "another config"),
        (["--shadows=6"], "another shadows"),
    ):
        assert main([*audited(config, folder), *more]) == 2
        assert message in capsys.readouterr().err
    (folder / "membership.json").write_text("{")
    assert main(audited(config, folder)) == 2 and "cannot be read" in capsys.readouterr().err
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("")
    assert main(audited(config, used)) == 2 and "not empty" in capsys.readouterr().err
    few = written(tmp_path, CONFIG.replace("rows: 600", "rows: 5").replace(", users: 60", ""))
    assert main(audited(few, tmp_path / "few")) == 2 and "too few" in capsys.readouterr().err
    assert main(audited("stream", tmp_path / "stream")) == 2 and "stream" in capsys.readouterr().err
    for wrong in ("--shadows=5", "--shadows=2", "--examples=0", "--variant=other"):
        with pytest.raises(SystemExit):
            main(["audit", "membership", config, wrong])


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "membership", "--help"])
    assert "examples:" in capsys.readouterr().out
