"""The command line with DLRM on click logs: training, plan, evaluation, export, resuming, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.models import DlrmModel
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.errors import ConfigError

TINY = """
data: {kind: generated, rows: 1200, scale: 0.001}
model: {kind: dlrm, dim: 4, bottom: [8], top: [16, 8]}
optimizer: {name: SGD, lr: 0.1}
training: {epochs: 2, batch_size: 200, log_every: 1, threads: 1}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1, mechanism: {name: adafest, threshold: 5.0}}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_training_evaluation_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    assert "Checked" in capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["finished"] and 0 < result["auc"] < 1 and result["reduction"] > 1
    assert main(["evaluate", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] == result["auc"]
    assert main(["export", "run", "--to", "out"]) == 0
    weights = torch.load("out/model.pt", weights_only=True)
    assert weights["bottom.0.weight"].shape == (8, 13) and weights["bottom.2.weight"].shape == (4, 8)
    assert weights["top.0.weight"].shape == (16, 4 + 27 * 26 // 2) and weights["top.2.weight"].shape == (8, 16)
    assert weights["tables.0.weight"].shape[1] == 4 and "tables.25.weight" in weights


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", "--json", "--no-measure"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["tables"]) == 26 and all(table["dim"] == 4 for table in report["tables"])
    assert report["predicted"]["rows_touched"] > 26


@pytest.mark.parametrize("mechanism", ["{name: adafest, threshold: 5.0}", "lazydp"])
def test_a_resumed_run_is_the_same_run(mechanism: str) -> None:
    # Checkpoints settle LazyDP's noise: both runs write one at step 5.
    changes = [
        "training.seed=3",
        "training.check=false",
        "training.checkpoint_every=5",
        f"privacy.mechanism={mechanism}",
    ]
    config = load_config("tiny.yaml", changes)
    run_training(config, Path("whole"))
    run_training(config, Path("parts"), should_stop=lambda step: step == 5)
    assert run_training(config, Path("parts"), resume=True).finished
    whole, parts = (torch.load(f"{name}/release/model.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_the_defaults_are_mlperfs() -> None:
    model = load_config("tiny.yaml", ["model={kind: dlrm}"]).model
    assert (model.dim, model.bottom, model.top) == (128, [512, 256], [1024, 1024, 512, 256])  # type: ignore[union-attr]


def test_the_bundled_configuration_explains_its_keys() -> None:
    path = Path(__file__).parents[2] / "src/sparsedp/cli/configs/dlrm.yaml"
    given = yaml.safe_load(path.read_text())["model"]
    assert set(given) == {field.name for field in dataclasses.fields(DlrmModel)}


def test_what_is_refused() -> None:
    for changes, message in (
        (["model.hidden=3"], r"model.hidden: unknown key"),
        (["model.top=[0]"], r"model.top\[0\]: expected a whole number of at least 1"),
        (["data={kind: generated_sequences, users: 9, items: 9}", "loss=softmax"], r"model.kind: dlrm is about clicks"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("tiny.yaml", changes)
    Path("own_rows.py").write_text(
        "import torch\ndef data():\n    return torch.utils.data.TensorDataset(torch.zeros(50, 3), torch.zeros(50))\n"
    )
    with pytest.raises(
        ConfigError, match=r"model.kind: dlrm needs a table or a click log; this data set has no vocabulary_sizes"
    ):
        run_training(load_config("tiny.yaml", ["data={kind: 'own_rows:data'}"]))
