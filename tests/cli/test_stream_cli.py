"""Streams on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.data import generated_click_log, write_click_log

TINY = """
data: {kind: generated, rows: 1200, scale: 0.01, days: 6, drift: 0.2, held_out: [4, 5]}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 100, log_every: 1, evaluate_every: 6, seed: 1, check: false, threads: 1}
privacy: {target_epsilon: 5, max_grad_norm: 2, mechanism: {name: fest, k: 300, epsilon: 1.0, split: tables, frequencies: running}}
stream: {composition: parallel, evaluate_next: true}
"""
OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Days(TensorDataset):
    def __init__(self, first, days, each=40):
        ids = torch.arange(days * each) % 20
        super().__init__(ids, (ids % 2).float())
        self.periods = [first + i // each for i in range(days * each)]

def data(first=3):
    return Days(0, 3), Days(first, 2)

def no_periods():
    ids = torch.arange(100) % 20
    return TensorDataset(ids, (ids % 2).float())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 1)
    def forward(self, ids):
        return self.table(ids).squeeze(1)

def model(training):
    return Model()

def squared(output, target):
    return (output - target).square().mean()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("tiny.yaml").write_text(TINY)
    Path("mine.py").write_text(OWN)
    return tmp_path


def logged(run: str, kind: str) -> list[dict[str, Any]]:
    lines = Path(run, "private/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_a_run_over_days(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    out = capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["steps"] == 16 and 4.8 < result["epsilon"] <= 5
    assert set(result["periods"]) == {"4", "5"}
    for values in result["periods"].values():
        assert values["examples"] == 200 and 0 < values["auc"] < 1 and values["log_loss"] > 0
    assert [row["span"] for row in logged("run", "step")] == 2 * [0, 0, 1, 1, 2, 2, 3, 3]
    evaluations = logged("run", "evaluation")
    before = [(row["step"], row["period"]) for row in evaluations if "period" in row]
    assert before == [(2, 1), (4, 2), (6, 3)]  # in the first pass only
    held_out = [row for row in evaluations if "period" not in row]
    assert [row["step"] for row in held_out] == [6, 12, 16] and held_out[-1]["periods"] == result["periods"]
    for shown in ("Stream: periods 0 to 3, 1 at a time; the 4 spans compose in parallel", "period 3  loss", "Period 2, before",
                  "composed in parallel", "period 5"):  # fmt: skip
        assert shown in out
    plan = json.loads(Path("run/release/plan.json").read_text())["stream"]
    assert plan["sizes"] == [200] * 4 and plan["steps"] == [2] * 4


def test_metrics_by_period_are_those_of_the_period(folder: Path) -> None:
    from sparsedp.cli.evaluation import evaluate, evaluate_on
    from sparsedp.cli.prepare import load_data, make_model

    config = load_config("tiny.yaml")
    data = load_data(config)
    model, loss = make_model(config, data.training), config.make_loss()
    found = evaluate(config, model, loss, data)
    whole = evaluate_on(config, model, loss, data.held_out, data.collate)
    assert found["auc"] == pytest.approx(whole["auc"]) and found["log_loss"] == pytest.approx(whole["log_loss"])
    for period in (4, 5):
        alone = data.held_out.subset(np.flatnonzero(data.held_out.periods == period))  # type: ignore[union-attr]
        wanted = evaluate_on(config, model, loss, alone, data.collate)
        assert {**wanted, "examples": 200} == found["periods"][str(period)]


@pytest.mark.parametrize("at", [3, 4])  # within a day, and between two
def test_a_resumed_run_equals_the_whole_one(folder: Path, at: int) -> None:
    config = load_config("tiny.yaml", ["training.epochs=1", "training.evaluate_every=3"])
    run_training(config, Path("whole"))
    assert not run_training(config, Path("run"), should_stop=lambda step: step == at).finished
    assert run_training(config, Path("run"), resume=True).finished
    weights = [torch.load(f"{run}/release/model.pt", weights_only=True) for run in ("whole", "run")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    for kind in ("step", "evaluation"):
        rows = [
            [{k: v for k, v in row.items() if k != "seconds"} for row in logged(run, kind)] for run in ("whole", "run")
        ]
        assert rows[0] == rows[1]
    said = [json.loads(Path(f"{run}/release/statement.json").read_text()) for run in ("whole", "run")]
    assert "went on from" in said[1]["assumptions"].pop() and said[0] == said[1]


def test_composition_changes_the_noise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = {}
    for composition in ("parallel", "sequential"):
        changes = [f"--set=stream.composition={composition}", "--set=privacy.mechanism={name: dpsgd}"]
        assert main(["plan", "tiny.yaml", "--no-measure", "--json", *changes]) == 0
        report = json.loads(capsys.readouterr().out)
        noise[composition] = report["noise_multiplier"]
        assert 4.9 < report["epsilon"] <= 5 and report["steps"] == 16 and report["sample_rate"] == 0.5
        assert report["stream"]["composition"] == composition and report["stream"]["sizes"] == [200] * 4
    assert noise["parallel"] < 0.8 * noise["sequential"]
    assert main(["plan", "tiny.yaml"]) == 0
    assert "4 spans of 1 period(s), composed in parallel" in " ".join(capsys.readouterr().out.split())


def test_several_days_at_a_time(folder: Path) -> None:
    result = run_training(load_config("tiny.yaml", ["stream.span=2"]), Path("run"))
    assert result.finished and [row["span"] for row in logged("run", "step")] == 2 * [0, 0, 0, 0, 1, 1, 1, 1]
    before = [(row["step"], row["period"]) for row in logged("run", "evaluation") if "period" in row]
    assert before == [(4, 2), (4, 3)]


def test_a_click_log_of_several_files_has_periods(folder: Path) -> None:
    write_click_log(generated_click_log(1000, scale=0.01, days=5), "day_{day}.tsv")
    data = "{kind: clicklog, paths: day_*.tsv, cache_dir: cache, vocabulary: {kind: hash, buckets: 50}, held_out: [4]}"
    changes = [f"data={data}", "stream.composition=sequential", "training.epochs=1", "privacy.mechanism={name: dpsgd}"]
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert result.finished and set(result.metrics["periods"]) == {"4"}
    assert [row["span"] for row in logged("run", "step")] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "composed in sequence" in Path("run/release/statement.txt").read_text()


def test_own_data_have_periods(folder: Path) -> None:
    changes = ["data={kind: 'mine:data'}", "model={kind: 'mine:model'}", "loss=mine:squared", "training.batch_size=20",
               "privacy.mechanism={name: dpsgd}"]  # fmt: skip
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert result.finished and set(result.metrics["periods"]) == {"3", "4"}
    each = [values["loss"] for values in result.metrics["periods"].values()]
    assert result.metrics["loss"] == pytest.approx(sum(each) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["stream={}"], "stream.composition: missing; say 'parallel' if each unit has data in one span"),
        (["stream={span: 2}"], "Nothing in the data tells which it is"),
        (["stream.composition=both"], "expected parallel or sequential"),
        (["stream.span=0"], "stream.span"),
        (["data.days=1", "data.held_out=0.1"], "stream: the data have no periods"),
        (["data={kind: 'mine:no_periods'}", "model={kind: 'mine:model'}"], "an attribute `periods`"),
        (["data={kind: 'mine:data', options: {first: 2}}", "model={kind: 'mine:model'}"], "period 2 is held out"),
        (["data.held_out=[2]"], "data.held_out: period 2 is held out, and the stream trains on periods up to 5"),
        (["data.held_out=0.1"], "data.held_out: period 5 is held out, and the stream trains on periods up to 5"),
        (["training.batch_size=300"], "exceeds the 200 examples of span 0 (period 0)"),
        (["stream=null"], "frequencies='running' needs data in periods"),
    ],
)
def test_refusals_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str], changes: list, message: str) -> None:
    assert main(["train", "tiny.yaml", "--quiet", *[f"--set={change}" for change in changes]]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("sparsedp: error: ") and err.count("\n") == 1 and message in err
    assert not Path("runs").exists()


def test_resuming_may_change_what_is_logged_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(load_config("tiny.yaml"), Path("run"), should_stop=lambda step: step == 1)
    assert main(["train", "--resume", "run", "--set", "stream.composition=sequential"]) == 2
    assert "another stream.composition" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--quiet", "--set", "stream.evaluate_next=false"]) == 0
    assert all("period" not in row for row in logged("run", "evaluation"))


def test_users_of_each_day(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A generated log of some days, whose users come back: in sequence, and not in parallel."""
    changes = [
        "data.users=150", "privacy.unit=user", "privacy.max_examples_per_user=2", "training.batch_size=40",
        "stream.composition=sequential", "training.epochs=1", "training.evaluate_every=2",
    ]  # fmt: skip
    config = load_config("tiny.yaml", changes)
    whole = run_training(config, Path("whole"))
    assert not run_training(config, Path("run"), should_stop=lambda step: step == 4).finished
    assert run_training(config, Path("run"), resume=True).metrics == whole.metrics
    said = Path("whole/release/statement.txt").read_text()
    assert "adding or removing one user, with all of their examples in all spans" in said
    plan = json.loads(Path("whole/release/plan.json").read_text())
    assert plan["unit"] == "user" and all(40 < size <= 150 for size in plan["stream"]["sizes"])
    assert main(["plan", "tiny.yaml", "--no-measure", *(f"--set={change}" for change in changes)]) == 0
    assert "users each, and the sampling rate" in " ".join(capsys.readouterr().out.split())
    changes[4] = "stream.composition=parallel"
    assert main(["train", "tiny.yaml", "--quiet", *(f"--set={change}" for change in changes)]) == 2
    assert "users have some in several: user" in capsys.readouterr().err


def test_days_of_any_size_by_a_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["stream.sample_rate=0.25", "training.batch_size=300", "training.epochs=1", "training.evaluate_every=4"]
    result = run_training(load_config("tiny.yaml", changes), Path("run"))
    assert result.finished and [row["span"] for row in logged("run", "step")] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    plan = json.loads(Path("run/release/plan.json").read_text())["stream"]
    assert plan["sizes"] == [] and plan["steps"] == [4] * 4 and plan["sample_rate"] == 0.25
    assert "rate 0.25 within each of the 4 spans" in Path("run/release/statement.txt").read_text()
    assert main(["report", "run"]) == 0
    capsys.readouterr()
    assert main(["plan", "tiny.yaml", "--no-measure", *(f"--set={change}" for change in changes)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "50 expected, sampling rate 0.25" in out and "each with this rate, in 4 steps, whatever its size" in out
    for change, message in (("1.5", "stream.sample_rate: expected a number"), ("0", "stream.sample_rate: expected")):
        assert main(["train", "tiny.yaml", f"--set=stream.sample_rate={change}"]) == 2
        assert message in capsys.readouterr().err
