"""An optimizer of the tables beside that of the dense parameters, in configurations and sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from sparsedp import RowWiseAdagrad, table_parameters
from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.sweepfile import SweepRun, expand, load_sweep
from sparsedp.cli.main import main
from sparsedp.cli.prepare import load_data, make_model
from sparsedp.cli.run import run_training
from sparsedp.errors import ConfigError, UnsupportedError

BASE = """
data: {kind: generated, rows: 400, scale: 0.01, held_out: 0.25}
model: {kind: pctr, hidden: 4, hidden_layers: 1}
optimizer: {name: Adam, lr: 0.01, tables: {name: Adagrad, lr: 0.1, options: {eps: 1.0e-9}}, scheduler: {kind: linear}}
training: {epochs: 2, batch_size: 100, log_every: 1, check: false, seed: 3, checkpoint_every: 1}
privacy: {noise_multiplier: 1, max_grad_norm: 2, mechanism: {name: adafest, threshold: 2.0}}
"""
SWEEP = """
base: base.yaml
reference: dpsgd
control_rates: [0.5, 2.0]
variants: {dpsgd: {set: {privacy.mechanism: {name: dpsgd}}}}
controls: {frozen: null}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def test_it_trains_resumes_and_says_both_rates() -> None:
    config = load_config("base.yaml")
    whole = run_training(config, Path("whole"))
    rows = [json.loads(line) for line in Path("whole/private/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["lr"] for row in steps] == pytest.approx([0.01 * (1 - i / 6) for i in range(6)])
    assert [row["table_lr"] for row in steps] == pytest.approx([0.1 * (1 - i / 6) for i in range(6)])
    run_training(config, Path("parts"), should_stop=lambda step: step == 4)
    resumed = run_training(config, Path("parts"), resume=True)
    assert resumed.metrics == whole.metrics
    start, end = torch.load("whole/release/model.pt"), torch.load("parts/release/model.pt")
    assert all(torch.equal(value, end[name]) for name, value in start.items())
    other = run_training(load_config("base.yaml", ["optimizer.tables.lr=0.01"]), Path("other"))
    slow = torch.load("other/release/model.pt")
    assert other.finished and not torch.equal(start["tables.2.weight"], slow["tables.2.weight"])


def runs_of(path: str) -> list[SweepRun]:
    sweep, found = load_sweep(path)
    return expand(sweep, found)


def test_what_is_made() -> None:
    config = load_config("base.yaml")
    model = make_model(config, load_data(config).training)
    dense, tables = config.optimizer.make(model)  # type: ignore[misc]
    assert (type(dense), type(tables)) == (torch.optim.Adam, torch.optim.Adagrad)
    assert [id(p) for p in tables.param_groups[0]["params"]] == [id(p) for p in table_parameters(model)]
    assert tables.param_groups[0]["eps"] == 1e-9 and tables.param_groups[0]["lr"] == 0.1
    assert config.optimizer.state_share() == 2.0 and config.optimizer.table_state_share() == 1.0
    sparse = load_config("base.yaml", ["optimizer.tables={name: SparseAdam, lr: 0.1}"])
    assert sparse.optimizer.table_state_share() == 2.0
    model.requires_grad_(False)
    for parameter in table_parameters(model):
        parameter.requires_grad_(True)
    assert type(config.optimizer.make(model)) is torch.optim.Adagrad
    row_wise = load_config("base.yaml", ["optimizer.tables={name: RowWiseAdagrad, lr: 0.1, options: {lr_decay: 0.5}}"])
    assert type(row_wise.optimizer.tables.make([{"params": list(model.parameters())}])) is RowWiseAdagrad
    assert row_wise.optimizer.table_state_share() == 1 / 32, "one number for a row of the probe's 32"
    frozen = load_config("base.yaml", ["model.freeze_tables=true"])
    model = make_model(frozen, load_data(frozen).training)
    assert type(frozen.optimizer.make(model)) is torch.optim.Adam


@pytest.mark.parametrize(
    "mechanism",
    [
        "{name: lazydp}",
        "{name: dpsgd}",
        "{name: fest, k: 60, split: tables}",
        "{name: eana}",
        "{name: exponential, k: 5}",
    ],
)
def test_every_mechanism_trains_with_sgd_for_the_tables(mechanism: str) -> None:
    changes = ["optimizer.tables={name: SGD, lr: 0.1}", f"privacy.mechanism={mechanism}"]
    assert run_training(load_config("base.yaml", changes), Path("run")).finished


def test_plan_says_what_both_keep(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for name, change in {"both": "training.epochs=2", "adagrad": "optimizer={name: Adagrad, lr: 0.1}"}.items():
        assert main(["plan", "base.yaml", "--no-measure", "--json", f"--set={change}"]) == 0
        sizes[name] = json.loads(capsys.readouterr().out)["memory_bytes"]
    config = load_config("base.yaml")
    model = make_model(config, load_data(config).training)
    dense = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in table_parameters(model))
    assert sizes["both"]["optimizer_state"] - sizes["adagrad"]["optimizer_state"] == dense


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.tables: Adagrad refuses its settings"):
        run_training(load_config("base.yaml", ["optimizer.tables.options={mass: 1}"]), Path("run"))
    with pytest.raises(UnsupportedError, match="which Adam does not take"):
        run_training(load_config("base.yaml", ["optimizer.tables={name: Adam, lr: 0.1}"]), Path("run2"))


def test_sweeps_reach_it_and_controls_scale_it() -> None:
    Path("sweep.yaml").write_text(SWEEP)
    runs = runs_of("sweep.yaml")
    rates = [(r.config.optimizer.lr, r.config.optimizer.tables.lr) for r in runs if r.group == "non_private"]  # type: ignore[union-attr]
    assert rates == [(0.005, 0.05), (0.02, 0.2)]
    control = next(run for run in runs if run.group == "non_private")
    assert control.config.privacy.mechanism == {"name": "eana"}  # Adagrad for the tables: row-sparse
    values = yaml.safe_load(SWEEP)
    values["variants"]["dpsgd"] = {"grid": {"optimizer.tables.lr": [0.3, 0.4]}}
    values["controls"] = {"frozen": None, "non_private": {"set": {"optimizer.tables": {"name": "Adam", "lr": 0.7}}}}
    Path("sweep.yaml").write_text(yaml.safe_dump(values))
    runs = runs_of("sweep.yaml")
    assert [r.config.optimizer.tables.lr for r in runs if r.group == "dpsgd"] == [0.3, 0.4]  # type: ignore[union-attr]
    (control,) = [run for run in runs if run.group == "non_private"]
    assert control.config.optimizer.tables.name == "Adam"  # type: ignore[union-attr]
    values["set"] = {"optimizer.tables.options": {"mass": 1}}
    Path("sweep.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"optimizer.tables: Adagrad refuses its settings"):
        runs_of("sweep.yaml")


def test_the_schema_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert '"tables"' in json.dumps(schema) and "An optimizer of torch.optim and its settings" in json.dumps(schema)
