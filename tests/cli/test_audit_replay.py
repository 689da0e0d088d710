"""`sparsedp audit replay`: configurations, functions of one's own, JSON, exit codes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsedp.cli.main import main

CONFIG = """
data: {kind: generated, rows: 400, scale: 0.01, users: 40}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 50}
privacy: {noise_multiplier: 1, max_grad_norm: 0.5, mechanism: {name: adafest, threshold: 1, map_clip: 2.0}}
"""
OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
    def forward(self, x):
        return self.out(x.tanh()).squeeze(1)

def loss(output, target):
    return (output - target).square().mean()

def batch():
    torch.manual_seed(0)
    x = 0.1 * torch.randn(12, 4)
    x[7] += 50
    return x, torch.randn(12)

def apart():
    return Model(), loss, batch()

def centred():
    def loop(model, both):
        return loss(model(both[0] - both[0].mean(0)), both[1])
    return {"model": Model(), "batch": batch(), "loop": loop, "max_grad_norm": 0.5}

def nothing():
    return 3

def more():
    return {"model": Model(), "batch": batch(), "loss": loss, "colour": 3}

def no_model():
    return loss, loss, batch()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AdaFEST's map is replayed with its own bound; users are units if they are the run's."""
    path = tmp_path / "some.yaml"
    path.write_text(CONFIG)
    assert main(["audit", "replay", str(path), "--units=6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["holds"] and len(result["units"]) == 6 and result["max_grad_norm"] == 0.5
    assert result["map_clip"] == 2.0 and result["map_ratio"] <= 1.000001 and result["units_are"] == "example"
    assert main(["audit", "replay", str(path), "--units=9", "--set", "privacy.unit=user"]) == 0
    shown = capsys.readouterr().out
    assert "user" in shown and "moves the map by" in shown and "the bound holds" in shown


def test_functions_of_ones_own(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "replay", f"{own}:apart", "--max-grad-norm=0.25"]) == 0
    assert "the bound holds" in capsys.readouterr().out
    assert main(["audit", "replay", f"{own}:centred", "--json", "--quiet"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (
        not result["holds"] and result["unit"] == 7 and result["ratio"] > 2 and result["parameter"].startswith("out.")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{own}:nothing"], "must return (model, loss_fn, batch)"),
        (["{own}:more"], "'colour'"),
        (["{own}:no_model"], "must be a torch module"),
        (["{own}:missing"], "has no 'missing'"),
        (["no_such_module_at_all:f"], "no module"),
        (["a b:c"], "expected MODULE:FUNCTION"),
        (["{own}:apart", "--set", "training.epochs=1"], "--set changes a configuration"),
        (["{own}:apart", "--map-clip=1"], "no table"),
        (["no_such_config"], "no_such_config"),
    ],
)
def test_errors(own: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "replay", *(argument.format(own=own) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    for wrong in ("--units=0", "--max-grad-norm=-1", "--map-clip=none"):
        with pytest.raises(SystemExit):
            main(["audit", "replay", "demo", wrong])


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "replay", "--help"])
    assert "examples:" in capsys.readouterr().out
