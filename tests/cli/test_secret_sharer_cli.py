"""`sparsedp audit secret-sharer`: canaries in every kind of data, resumed runs, several runs in one picture, and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsedp.audit.canaries import CanaryPlan
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data
from sparsedp.cli.run import run_training
from sparsedp.cli.secret_sharer import RESULT
from sparsedp.errors import ConfigError

CLICKS = """
data: {kind: generated, rows: 1500, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 3, batch_size: 150, threads: 1, check: false}
privacy: {noise_multiplier: 0.0, max_grad_norm: 5}
"""
SEQUENCES = """
data: {kind: generated_sequences, users: 300, items: 60, length: 8, groups: 6, mean_length: 8}
model: {kind: transformer, dim: 8, blocks: 1, dropout: 0.1}
loss: softmax
optimizer: {name: Adam, lr: 0.02}
training: {epochs: 4, batch_size: 50, threads: 1, check: false}
privacy: {noise_multiplier: 0.0, max_grad_norm: 1, unit: user}
"""
TIMELINES = """
data: {kind: generated_timelines, users: 300, items: 60, groups: 6, context: 5}
model: {kind: dual, dim: 8, hidden: [8]}
loss: softmax
optimizer: {name: Adam, lr: 0.02}
training: {epochs: 4, batch_size: 50, threads: 1, check: false}
privacy: {noise_multiplier: 0.0, max_grad_norm: 1, unit: user}
"""
OWN = """
data: {kind: "mine:data"}
model: {kind: "mine:model"}
loss: "mine:squared"
optimizer: {name: SGD, lr: 0.5}
training: {epochs: 3, batch_size: 20, threads: 1, check: false}
privacy: {noise_multiplier: 0.0, max_grad_norm: 100}
"""
OWN_CODE = """
import torch
from torch import nn

class Numbers:
    def __len__(self):
        return 200
    def __getitem__(self, i):
        return torch.tensor(i % 50), torch.tensor(0.0)
    def make_canary(self, generator):
        return torch.tensor(50 + int(generator.integers(950, 1)[0])), torch.tensor(1.0)

class WithLoss(Numbers):
    def canary_loss(self, model, canaries):
        ids = torch.stack([i for i, _ in canaries])
        return (1 - model(ids)).abs()

class NotFinite(Numbers):
    def canary_loss(self, model, canaries):
        return [float("nan")] * len(canaries)

class AllEqual(Numbers):
    def canary_loss(self, model, canaries):
        return [2.0] * len(canaries)

class OneForAll(Numbers):
    def canary_loss(self, model, canaries):
        return torch.tensor(2.0)

class OtherShape(Numbers):
    def make_canary(self, generator):
        return torch.from_numpy(generator.integers(1000, 3)), torch.tensor(1.0)

class Without:
    __len__, __getitem__ = Numbers.__len__, Numbers.__getitem__

def data(kind="Numbers"):
    return globals()[kind]()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 1)
    def forward(self, ids):
        return self.table(ids).squeeze(-1)

def model(training):
    return Model()

def squared(output, target):
    return (output - target).square().mean()
"""
FEW = ["--canaries", "8", "--repetitions", "1,25", "--references", "300"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    texts = {"clicks": CLICKS, "sequences_": SEQUENCES, "timelines": TIMELINES, "own": OWN}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "mine.py").write_text(OWN_CODE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def audit(*argv: str) -> int:
    return main(["audit", "secret-sharer", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert audit(*argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["clicks.yaml"],
        ["clicks.yaml", "--set", "model={kind: dlrm, dim: 4, bottom: [8], top: [8]}"],
        ["sequences_.yaml", "--owner", "each"],
        ["sequences_.yaml", "--owner", "each", "--set=loss=sampled_softmax", "--set=training.negatives=10"],
        ["timelines.yaml", "--owner", "each"],
        ["own.yaml"],
        ["own.yaml", "--set", "data.options={kind: WithLoss}"],
    ],
)
def test_what_is_often_there_is_remembered_better(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert audit(*argv, *FEW, "--run-dir", "run", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    once, often = result["exposures"]
    assert (once["repetitions"], often["repetitions"]) == (1, 25) and often["canaries"] == 8
    assert often["p_value"] < 1e-3 and often["rank"]["median"] > 3
    assert often["extrapolated"]["median"] > once["extrapolated"]["median"]
    assert all(np.isfinite(value) for value in often["extrapolated"].values())
    written = json.loads(Path("run/private", RESULT).read_text())
    assert written["fit"] == result["fit"] and len(written["losses"]) == 316
    assert Path("run/private/secret_sharer.png").stat().st_size > 10_000
    statement = json.loads(Path("run/release/statement.json").read_text())
    assert any(f"{8 * 26} canaries" in note and "for the audit alone" in note for note in statement["not_covered"])
    assert not any("canar" in path.name for path in Path("run/release").iterdir())


def test_noise_hides_canaries(capsys: pytest.CaptureFixture[str]) -> None:
    noise = ["--set=privacy.noise_multiplier=3", "--set=privacy.max_grad_norm=1"]
    assert audit("own.yaml", *FEW, *noise, "--run-dir", "run", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert all(entry["p_value"] > 1e-3 and entry["rank"]["median"] < 4 for entry in result["exposures"])


@pytest.mark.parametrize(("owner", "users"), [("one", 16), ("existing", 0)])
def test_users_own_canaries(capsys: pytest.CaptureFixture[str], owner: str, users: int) -> None:
    noise = "--set=privacy.noise_multiplier=1"
    assert audit("timelines.yaml", "--owner", owner, *FEW, noise, "--set=training.epochs=1", "--run-dir", "run") == 0
    assert "epsilon" in capsys.readouterr().out.rpartition("Run folder")[2]
    plan = json.loads(Path("run/release/plan.json").read_text())
    without = len(load_data(load_config("timelines.yaml")).training)
    assert plan["dataset_size"] == without + users, "canaries are users of their own, or nobody new"


def test_a_stopped_run_goes_on_with_the_same_canaries(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("own.yaml", ["training.seed=3"])
    plan = CanaryPlan.make("secret-sharer", [5] * 8 + [0] * 200, None)
    run_training(config, Path("whole"), canaries=plan)
    run_training(config, Path("halves"), canaries=plan, should_stop=lambda step: step == 9)
    assert "is not finished" in refused(capsys, "halves", "--code", "own.yaml")
    assert audit("--resume", "halves", "--code", "own.yaml") == 0
    out = capsys.readouterr().out
    assert "Resumed after step 9" in out and "Canaries: 40 examples" in out and "Exposure in bits" in out
    assert audit("whole", "--quiet", "--code", "own.yaml") == 0
    losses = [json.loads(Path(run, "private", RESULT).read_text())["losses"] for run in ("whole", "halves")]
    assert losses[0] == losses[1]
    # `sparsedp train --resume` keeps the canaries as well, and so does `sparsedp evaluate`.
    run_training(config, Path("third"), canaries=plan, should_stop=lambda step: step == 9)
    assert main(["train", "--resume", "third", "--code", "own.yaml", "--quiet"]) == 0
    whole, third = (torch.load(Path(run, "release/model.pt"), weights_only=True) for run in ("whole", "third"))
    assert torch.equal(whole["table.weight"], third["table.weight"])


def test_several_runs_in_one_picture(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.yaml").write_text(OWN)
    assert audit("own.yaml", "other.yaml", *FEW, "--run-dir", "both", "--plot", "pictures/both.png") == 0
    out = capsys.readouterr().out
    assert out.count("Exposure in bits") == 2 and Path("pictures/both.png").stat().st_size > 10_000
    Path("pictures/both.png").unlink()
    assert audit("both/own", "both/other", "--code", "own.yaml", "--json", "--plot", "pictures/both.png") == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["own", "other"]
    assert Path("pictures/both.png").is_file()
    Path("other.yaml").write_text(OWN + "name: own\n")
    assert "called own, own: give each" in refused(capsys, "own.yaml", "other.yaml", *FEW)


def test_whose_canaries_are_must_be_said_of_users_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "whose the canaries are: --owner one, each, existing" in refused(capsys, "timelines.yaml", *FEW)
    assert "leave --owner out" in refused(capsys, "clicks.yaml", "--owner", "one", *FEW)
    for owner, config in ((None, "timelines.yaml"), ("one", "clicks.yaml")):
        plan = CanaryPlan.make("secret-sharer", [1], owner)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"privacy\.unit"):
            run_training(load_config(config), Path("run"), canaries=plan)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("Without", r"No canary can be made for these data: Without has no method make_canary"),
        ("OtherShape", "do not go into one batch"),
        ("NotFinite", "are NaN or infinite"),
        ("AllEqual", "All 300 references have the loss 2"),
        ("OneForAll", "expected one loss each"),
    ],
)
def test_data_and_losses_that_say_nothing(capsys: pytest.CaptureFixture[str], kind: str, match: str) -> None:
    message = refused(
        capsys, "own.yaml", "--set", f"data.options={{kind: {kind}}}", *FEW, "--run-dir", "run", "--quiet"
    )
    assert match in message and not Path("run/private", RESULT).exists()


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert "CONFIG is missing" in refused(capsys)
    assert "at least 100 references to compare with, not 99" in refused(capsys, "own.yaml", "--references", "99")
    assert "at least one canary for each" in refused(capsys, "own.yaml", "--canaries", "0")
    assert "different whole numbers from 1 on" in refused(capsys, "own.yaml", "--repetitions", "1,1")
    wanted = "1,016 different canaries and references were asked for, and Numbers.make_canary makes 950 only"
    assert wanted in refused(capsys, "own.yaml", *FEW[:4], "--references", "1000")
    run_training(load_config("own.yaml"), Path("plain"))
    assert "is a run without canaries" in refused(capsys, "plain", "--code", "own.yaml")
    assert "is a run without canaries" in refused(capsys, "--resume", "plain", "--code", "own.yaml")
    run_training(load_config("own.yaml"), Path("bound"), canaries=CanaryPlan.make("bound", [1, 0], None))
    assert "canaries of another audit: sparsedp audit bound" in refused(capsys, "bound", "--code", "own.yaml")
    assert "--references: the canaries of a run are those that it was started with" in refused(
        capsys, "bound", "--references", "200"
    )
    with pytest.raises(SystemExit):
        audit("own.yaml", "--repetitions", "1,x")
    assert "expected whole numbers" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        audit("--help")
    out = capsys.readouterr().out
    assert "examples:" in out and "--owner" in out


def test_many_canaries_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("own.yaml", *FEW, "--quiet") == 0
    assert "208 canaries among 200 examples are 51% of what is trained on" in capsys.readouterr().err
