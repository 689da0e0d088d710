"""Sweeps: what they expand to, what they refuse, resuming, failures, interruption, fronts, tables and plots."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.sweepfile import Sweep, SweepRun, expand, load_sweep
from sparsedp.cli.evaluation import evaluate
from sparsedp.cli.files import locked
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.cli.sweepjobs import DataCache, Job, carry_out, perform
from sparsedp.errors import ConfigError
from sparsedp.report import front, markdown

BASE = """
data: {kind: generated, rows: 400, scale: 0.01, held_out: 0.25}
model: {kind: pctr, hidden: 4, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 100, log_every: 1, check: false}
privacy: {noise_multiplier: 1, max_grad_norm: 2}
"""
SWEEP = """
base: base.yaml
control_rates: [1.0]
seeds: [0, 1]
reference: dpsgd
over: {privacy.noise_multiplier: [0.5, 2.0]}
variants:
  dpsgd: {}
  adafest:
    set: {privacy.mechanism: {name: adafest}}
    grid: {privacy.mechanism.threshold: [0.0, 2.0], privacy.mechanism.noise_ratio: [1.0, 5.0]}
"""
SMALL = """
base: base.yaml
reference: dpsgd
variants:
  dpsgd: {}
  adafest: {set: {privacy.mechanism: {name: adafest, threshold: 2.0}}}
controls: {non_private: null, frozen: null}
"""
MINE = """
import os, signal
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(count=100, held_out=40):
    ids = torch.arange(count) % 10
    rest = torch.arange(held_out) % 10
    return TensorDataset(ids, (ids % 2).float()), TensorDataset(rest, (rest % 2).float())

def all_of_it():
    return data()[0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 2), nn.Linear(2, 1)
    def forward(self, ids):
        return self.out(self.table(ids)).squeeze(1)

def model(training, how="good"):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wrong":
        raise ValueError("no such model")
    return nn.Linear(2, 1) if how == "without tables" else Model()

def squared(output, target):
    return (output - target).square().mean()
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name, text in {"base.yaml": BASE, "full.yaml": SWEEP, "small.yaml": SMALL, "mine.py": MINE}.items():
        (tmp_path / name).write_text(text)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written(text: str, **changes: Any) -> Path:
    """A sweep file with other values for some of its keys."""
    values = {**yaml.safe_load(text), **changes}
    path = Path("changed.yaml")
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def runs_of(path: str | Path, *overrides: str) -> list[SweepRun]:
    sweep, found = load_sweep(path)
    return expand(sweep, found, overrides)


def swept(*argv: str) -> int:
    return main(["sweep", *argv, "--jobs", "1", "--quiet"])


# ------------------------------------------------------------------ what a sweep stands for


def test_every_combination_is_a_run() -> None:
    runs = {run.id: run for run in runs_of("full.yaml")}
    # Two seeds; the non-private control once, frozen and DP-SGD at two points, AdaFEST at two with a grid of four.
    assert len(runs) == 2 * (1 + 2 + 2 + 8)
    run = runs["adafest,noise_multiplier=0.5,threshold=2,noise_ratio=5,seed=1"]
    assert run.config.privacy.mechanism == {"name": "adafest", "threshold": 2.0, "noise_ratio": 5.0}
    assert run.config.privacy.noise_multiplier == 0.5 and run.config.name == run.id
    assert run.config.training.init_seed == 1 and run.config.training.seed is None
    assert run.point == {"privacy.noise_multiplier": 0.5}
    assert run.settings == {"privacy.mechanism.threshold": 2.0, "privacy.mechanism.noise_ratio": 5.0}
    plain = runs["non_private,seed=0"].config.privacy
    assert (plain.noise_multiplier, plain.mechanism, plain.max_grad_norm) == (0, {"name": "eana"}, 1e9)
    frozen = runs["frozen,noise_multiplier=2,seed=0"].config
    assert frozen.model.freeze_tables and frozen.privacy.noise_multiplier == 2
    assert [run.seed for run in runs.values()] == [0] * 13 + [1] * 13


def test_the_parts_of_a_sweep_lie_on_top_of_each_other() -> None:
    variants = {
        "dpsgd": {"set": {"optimizer.lr": 0.3}},
        "other": {"grid": {"optimizer.table_lr": [0.1, 0.2], "training.batch_size": [50]}, "over": False},
    }
    path = written(
        SMALL, variants=variants, set={"training.epochs": 3}, seeded=True, seeds=[7], over={"model.hidden": [2, 3]}
    )
    runs = {run.id: run.config for run in runs_of(path, "privacy.max_grad_norm=9")}
    assert list(runs) == [
        "dpsgd,hidden=2,seed=7",
        "dpsgd,hidden=3,seed=7",
        "other,table_lr=0.1,batch_size=50,seed=7",
        "other,table_lr=0.2,batch_size=50,seed=7",
    ]
    first, last = runs["dpsgd,hidden=2,seed=7"], runs["other,table_lr=0.2,batch_size=50,seed=7"]
    assert (first.optimizer.lr, last.optimizer.lr, last.optimizer.table_lr) == (0.3, 0.05, 0.2)
    assert all(config.training.epochs == 3 and config.training.seed == 7 for config in runs.values())
    assert all(config.privacy.max_grad_norm == 9 for config in runs.values())


def test_the_non_private_control_follows_the_axes_that_are_not_about_privacy() -> None:
    path = written(SWEEP, over={"privacy.noise_multiplier": [1, 2], "data.skew": [0.5, 1.5]}, seeds=[0])
    runs = runs_of(path)
    assert [run.point for run in runs if run.group == "non_private"] == [{"data.skew": 0.5}, {"data.skew": 1.5}]
    # Runs on the same data stand together, so that a process draws them once.
    skews = [run.config.data.skew for run in runs]  # type: ignore[union-attr]
    assert skews == sorted(skews)
    path = written(SWEEP, set={"optimizer.options": {"weight_decay": 0.1}}, seeds=[0])
    mechanisms = {run.config.privacy.mechanism["name"] for run in runs_of(path) if run.group == "non_private"}
    assert mechanisms == {"dpsgd"}  # decay changes every row


def test_names_of_runs_are_names_of_folders() -> None:
    grid = {
        "privacy.mechanism": [{"name": "dpsgd"}, {"name": "fest", "k": 3}],
        "optimizer.scheduler.kind": ["none", "linear"],
        "data.kind": ["generated"],
    }
    path = written(SMALL, variants={"dpsgd": {"grid": grid}, "a b/c": {}})
    ids = [run.id for run in runs_of(path)]
    assert "dpsgd,mechanism=_name=fest_k=3_,optimizer.scheduler.kind=linear,data.kind=generated,seed=0" in ids
    assert "a_b_c,seed=0" in ids and not any("/" in id for id in ids)
    long = written(SMALL, variants={"dpsgd": {"grid": {"data.seed": [1, 2]}}, "x" * 300: {}})
    assert all(len(run.id) <= 150 for run in runs_of(long))


def test_the_bundled_sweep_is_complete_and_explains_every_key() -> None:
    sweep, path = load_sweep("demo")
    values = yaml.safe_load(path.read_text())
    assert set(values) == set(Sweep.__dataclass_fields__)
    groups = {run.group for run in expand(sweep, path)}
    assert groups == {"non_private", "frozen", "dpsgd", "adafest", "fest"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [1]}, r"changed.yaml: seed: unknown key; .*Did you mean 'seeds'\?"),
        ({"seeds": []}, r"seeds: expected at least one seed"),
        ({"seeds": [1, 1]}, r"seeds: expected at least one seed, and none twice"),
        ({"losses": []}, r"losses: expected at least one"),
        ({"losses": [0]}, r"losses\[0\]: expected a number above 0"),
        (
            {"metric": "acu"},
            r"metric: expected auc or accuracy or log_loss or ndcg@10 or hit@10 or loss.*Did you mean 'auc'\?",
        ),
        ({"reference": "dpsdg"}, r"reference: expected one of the variants .*Did you mean 'dpsgd'\?"),
        ({"variants": {}}, r"variants: expected at least one"),
        ({"variants": {"dpsgd": {"gird": {}}}}, r"variants.dpsgd.gird: unknown key.*Did you mean 'grid'\?"),
        ({"variants": {"dpsgd": {}, "frozen": {}}}, r"variants.frozen: a control has this name"),
        ({"variants": {"dpsgd": {"grid": {"optimizer.lr": []}}}}, r"variants.dpsgd.grid.optimizer.lr: expected a list"),
        ({"variants": {"dpsgd": {"grid": {"optimizer.lr": 0.1}}}}, r"grid.optimizer.lr: expected a list"),
        ({"variants": {"dpsgd": {"grid": {"optimizer.lr": [1, 1.0]}}}}, r"a value stands here twice"),
        ({"variants": {"dpsgd": {"grid": {"training.seed": [1]}}}}, r"training.seed: the sweep's seeds"),
        ({"set": {"training": {"epochs": 1}}}, r"set.training: the sweep's seeds"),
        ({"set": {"training.epoch": 1}}, r"changed.yaml: set.training.epoch: training.epoch: unknown key.*'epochs'"),
        ({"set": {"epochs": 1}}, r"set.epochs: epochs: unknown key.* There is training.epochs"),
        ({"set": {"model.dim": "big"}}, r"changed.yaml: set.model.dim: model.dim: expected a whole number"),
        ({"set": {"name.x": 1}}, r"set.name.x: name is 'base', which has no keys"),
        ({"set": {"data.held_out": 0}}, r"data.held_out is 0.* compares utility"),
        ({"set": {"optimizer.options": {"mass": 1}}}, r"dpsgd,.*seed=0: optimizer: Adagrad refuses its settings"),
        ({"set": {"loss": "mine:nothing"}}, r"dpsgd,.*seed=0: loss: mine:nothing: mine has no 'nothing'"),
        ({"set": {"model": {"kind": "nowhere:model"}}}, r"is neither in a file beside"),
        (
            {
                "set": {"privacy.mechanism": {"name": "fest"}},
                "variants": {"dpsgd": {"grid": {"privacy.mechanism.n": [1]}}},
            },
            r"changed.yaml: variants.dpsgd.grid.privacy.mechanism.n: privacy.mechanism: Mechanism 'fest' has no setting 'n'",
        ),
        ({"over": {"optimizer.lr": [1]}, "variants": {"dpsgd": {"grid": {"optimizer.lr": [2]}}}}, r"would overwrite"),
        ({"over": {"optimizer.lr": [1]}, "variants": {"dpsgd": {"set": {"optimizer.lr": 2}}}}, r"over: false"),
        ({"over": {"optimizer.lr": [1]}, "variants": {"dpsgd": {"over": ["optimizer.lrs"]}}}, r"'optimizer.lr'\?"),
        ({"over": {"model.hidden": [0]}}, r"changed.yaml: over.model.hidden: model.hidden: expected a whole number"),
        ({"over": {"privacy.mechanism": [{"name": "dpsgd"}], "privacy.mechanism.k": [1]}}, r"overlaps with"),
        ({"controls": {"frosen": {}}}, r"controls.frosen: unknown key.*Did you mean 'frozen'\?"),
        ({"base": "bse.yaml"}, r"bse.yaml is neither a file nor a bundled configuration"),
        ({"name": "a/b"}, r"name: names the sweep's folder"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    base = {"controls": {"non_private": None, "frozen": None}, "seeds": [0]}
    with pytest.raises(ConfigError, match=message):
        runs_of(written(SWEEP, **{**base, **changes}))
    assert not Path("runs").exists()


def test_the_command_line_may_not_set_what_the_sweep_sets(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(change: str) -> str:
        assert main(["sweep", "full.yaml", "--list", "--set", change]) == 2
        return capsys.readouterr().err

    assert "over of the sweep sets privacy.noise_multiplier" in refused("privacy.noise_multiplier=3")
    assert "variants.adafest.set of the sweep sets privacy.mechanism" in refused("privacy.mechanism.threshold=3")
    assert "seeds and names decide it" in refused("training.init_seed=3")
    assert "training.epoch: unknown key" in refused("training.epoch=3")
    assert main(["sweep", "nowhere.yaml"]) == 2
    assert "neither a file nor a bundled sweep (demo" in capsys.readouterr().err


# ------------------------------------------------------------------ running it


def test_a_sweep_from_start_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "full.yaml", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    folder = Path("runs/full")
    assert "26 of 26 runs to do" in err and "[26/26] adafest," in err and "s left)" in err
    rows = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert len(rows) == 26
    for row in rows:
        frozen = row["group"] == "frozen"
        assert 0 < row["validation"]["auc"] < 1 and 0 < row["test"]["auc"] < 1 and 0 <= row["clipped_share"] <= 1
        assert row["tables_frozen"] == frozen and (row["reduction"] is None) == frozen == (row["gradient_size"] == 0)
        assert (row["epsilon"] == "infinity") == (row["group"] == "non_private")
        if row["group"] == "non_private":
            assert row["clipped_share"] == 0 and row["kept_mass"] == 1
        assert not list((folder / row["run"]).glob("*.pt")), "weights fill the disk"
        assert load_config(folder / row["run"] / "private/config.yaml").name == row["run"]
    summary = json.loads((folder / "front.json").read_text())
    assert summary["metric"] == "auc" and len(summary["points"]) == 2
    for at in summary["points"]:
        assert at["controls"]["non_private"]["seeds"] == at["controls"]["frozen"]["seeds"] == [0, 1]
        assert at["reference"]["reduction"] == 1 and at["reference"]["loss"]["test"]["mean"] == 0
        assert len(at["variants"]["adafest"]["settings"]) == 4
        # The same data and seeds on both sides of the comparison.
        mine = [r for r in rows if r["group"] == "dpsgd" and r["point"] == at["point"]]
        assert at["reference"]["metric"]["test"]["mean"] == pytest.approx(sum(r["test"]["auc"] for r in mine) / 2)
    report = (folder / "report.md").read_text()
    assert out == report and "Means over 2 seeds" in report and "validation" in report
    assert report.count("\n## privacy.noise_multiplier = ") == 2
    pytest.importorskip("matplotlib")
    for name in ("front.png", "best.png", "heat.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in report


def test_finished_runs_are_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("small.yaml") == 0
    results = {path: path.stat().st_mtime_ns for path in Path("runs/small").glob("*/private/result.json")}
    assert len(results) == 2
    unfinished = Path("runs/small/adafest,seed=0")
    (unfinished / "private/result.json").unlink()
    (unfinished / "rest").write_text("of a run that was killed")
    capsys.readouterr()
    assert main(["sweep", "small.yaml", "--list"]) == 0
    assert capsys.readouterr().out == "done      dpsgd,seed=0\nopen      adafest,seed=0\n2 runs; 1 are done\n"
    assert main(["sweep", "small.yaml", "--jobs=2"]) == 0
    assert "1 of 2 runs to do, 1 at a time" in capsys.readouterr().err
    again = {path: path.stat().st_mtime_ns for path in Path("runs/small").glob("*/private/result.json")}
    assert {path for path in results if results[path] == again[path]} == {
        Path("runs/small/dpsgd,seed=0/private/result.json")
    }
    assert not (unfinished / "rest").exists()


def test_a_changed_sweep_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("small.yaml") == 0
    before = Path("runs/small/dpsgd,seed=0/private/metrics.jsonl").read_text()
    changed = ["small.yaml", "--set=optimizer.lr=0.5"]
    capsys.readouterr()
    assert swept(*changed) == 2
    assert "2 finished runs in runs/small, such as dpsgd,seed=0, were made with another optimizer.lr" in (
        capsys.readouterr().err
    )
    assert Path("runs/small/dpsgd,seed=0/private/metrics.jsonl").read_text() == before
    assert main(["sweep", *changed, "--list", "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"changed"}
    assert swept("small.yaml", "--set=training.log_every=7") == 0  # changes nothing about the result
    assert swept(*changed, "--redo") == 0
    assert load_config("runs/small/dpsgd,seed=0/private/config.yaml").optimizer.lr == 0.5
    # A variant that is gone leaves its runs, which do not count.
    path = written(SMALL, variants={"dpsgd": {}}, name="small", set={"optimizer.lr": 0.5})
    capsys.readouterr()
    assert swept(str(path), "--report-only") == 0
    assert "1 finished runs in this folder are of settings that the sweep no longer has" in capsys.readouterr().out


def test_a_failed_run_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    variants = {
        "dpsgd": {},
        "tight": {"set": {"privacy.noise_multiplier": None, "privacy.target_epsilon": 0.01, "privacy.mechanism": {"name": "fest", "epsilon": 5.0}}},
        "adafest": {"set": {"privacy.mechanism": {"name": "adafest"}}},
    }  # fmt: skip
    path = written(SMALL, variants=variants)
    assert main(["sweep", str(path), "--jobs=1"]) == 1
    out, err = capsys.readouterr()
    assert "[2/3] tight,seed=0: FAILED: target_epsilon=0.01" in err and "[3/3] adafest,seed=0: AUC" in err
    assert "2 of 3 runs" in out and "**1 are missing**" in out and "- `tight,seed=0` failed: target_epsilon=0.01" in out
    error = Path("runs/changed/tight,seed=0/private/error.txt").read_text()
    assert error.startswith("target_epsilon=0.01") and "Traceback" in error
    assert main(["sweep", str(path), "--list"]) == 0
    assert "failed    tight,seed=0" in capsys.readouterr().out
    fixed = written(SMALL, variants={**variants, "tight": {}})
    assert swept(str(fixed)) == 0
    assert "2 are done" not in capsys.readouterr().out
    assert not Path("runs/changed/tight,seed=0/private/error.txt").exists()


def test_a_picture_that_cannot_be_drawn_does_not_take_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(summary: object, folder: object) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr(pytest.importorskip("sparsedp.report.plots"), "write_plots", fail)
    assert main(["sweep", "small.yaml", "--jobs=1", "--run-dir", "here"]) == 0
    assert "No plots: ValueError: no such colour" in capsys.readouterr().err
    assert "## Plots" not in Path("here/report.md").read_text()


def test_models_are_kept_on_demand_and_outputs_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("small.yaml", "--keep-models", "--json", "--run-dir", "here") == 0
    out, err = capsys.readouterr()
    assert not err and json.loads(out) == json.loads(Path("here/front.json").read_text())
    assert (
        Path("here/dpsgd,seed=0/release/model.pt").is_file()
        and Path("here/dpsgd,seed=0/private/checkpoint.pt").is_file()
    )


def test_without_matplotlib_there_are_tables_and_a_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sparsedp.report.plots", raising=False)
    import sparsedp.report

    monkeypatch.delattr(sparsedp.report, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["sweep", "small.yaml", "--jobs=1"]) == 0
    out, err = capsys.readouterr()
    assert "No plots: matplotlib is missing. pip install 'sparsedp[plot]'" in err
    assert ".png" not in out and not list(Path("runs/small").glob("*.png")) and "| adafest |" in out


def test_two_sweeps_do_not_share_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl")
    with locked(Path("runs/small")):
        assert swept("small.yaml") == 2
        assert swept("small.yaml", "--report-only") == 0  # reads what is finished
    assert "Another sparsedp command is at work in runs/small" in capsys.readouterr().err


# ------------------------------------------------------------------ jobs


def own(how: str = "good") -> Config:
    changes = [
        "data={kind: 'mine:data'}", f"model={{kind: 'mine:model', options: {{how: {how}}}}}", "loss=mine:squared",
        "training.batch_size=20",
    ]  # fmt: skip
    return load_config("base.yaml", changes)


def job(name: str, config: Config, key: str = "") -> Job:
    return Job(name, config, key, Path("out") / name, False)


@pytest.mark.slow
def test_processes_survive_the_death_of_a_run() -> None:
    jobs = [job(f"{i}-{how}", own(how)) for i, how in enumerate(["good", "killed", "wrong", "good", "good"])]
    outcomes = {outcome.id: outcome for outcome in carry_out(jobs, 2, lambda: False)}
    assert {id: outcome.status for id, outcome in outcomes.items()} == {
        "0-good": "done",
        "1-killed": "failed",
        "2-wrong": "failed",
        "3-good": "done",
        "4-good": "done",
    }
    assert "ended with signal SIGKILL; there may not be enough memory" in (outcomes["1-killed"].error or "")
    assert Path("out/1-killed/private/error.txt").read_text().startswith("the process of this run ended")
    assert outcomes["2-wrong"].error == "ValueError: no such model"
    assert json.loads(Path("out/4-good/private/result.json").read_text())["test"]["loss"] > 0


def test_data_are_loaded_once_for_runs_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    import sparsedp.cli.sweepjobs as jobs

    original = jobs.load_data
    monkeypatch.setattr(jobs, "load_data", lambda config: loaded.append(config.name) or original(config))
    runs = runs_of(written(SWEEP, over={"data.skew": [0.5, 1.5]}, seeds=[0, 1]))
    cache = DataCache()
    for run in runs:
        cache.get(job(run.id, run.config, run.data_key))
    assert len(runs) == 28 and len(loaded) == 2
    # A user's own data may hang on torch's seed.
    keys = {run.data_key for run in runs_of(written(SMALL, seeds=[0, 1], set={"data": {"kind": "mine:data"}}))}
    assert len(keys) == 2


def test_the_halves_are_halves_of_the_held_out_data() -> None:
    config = load_config("base.yaml", ["training.init_seed=0"])
    evaluated: dict[str, Any] = {}

    def look(parts: Any) -> dict[str, Any]:
        evaluated.update(evaluate(config, parts.model, parts.loss, parts.data))
        return {}

    found = run_training(config, Path("run"), by_halves=True, at_end=look).metrics
    assert (found["validation"]["log_loss"] + found["test"]["log_loss"]) / 2 == pytest.approx(
        found["log_loss"], rel=1e-5
    )
    assert found["validation"]["auc"] != found["test"]["auc"]
    assert evaluated and all(found[name] == pytest.approx(value) for name, value in evaluated.items())


def test_a_run_without_held_out_data_fails_by_name() -> None:
    config = load_config(
        "base.yaml", ["data={kind: 'mine:all_of_it'}", "model={kind: 'mine:model'}", "loss=mine:squared"]
    )
    outcome = perform(job("a", config), DataCache(), lambda: False)
    assert outcome.status == "failed" and "Nothing is held out" in (outcome.error or "")
    assert not Path("out/a/private/result.json").exists()


def test_what_a_mechanism_warns_of_is_in_the_result() -> None:
    config = load_config("base.yaml", ["privacy.mechanism={name: fest, k: 3}"])
    assert perform(job("a", config), DataCache(), lambda: False).status == "done"
    (warning,) = json.loads(Path("out/a/private/result.json").read_text())["warnings"]
    assert "FEST selected no row" in warning
    assert "- of 2 runs: FEST selected" in page(summary_of([]), warnings={warning: 2})


def test_stopping_keeps_what_is_done_and_no_more() -> None:
    done = 0

    def stop() -> bool:
        return done >= 1 and Path("out/b/private/metrics.jsonl").exists()

    outcomes = []
    for outcome in carry_out([job(name, load_config("base.yaml")) for name in "abc"], 1, stop):
        outcomes.append((outcome.id, outcome.status))
        done += 1
    assert outcomes == [("a", "done"), ("b", "stopped")]
    assert Path("out/a/private/result.json").exists() and not Path("out/b/private/result.json").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_runs_and_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"set": {"training.epochs": 100_000}}
    path = written(SMALL, variants={"dpsgd": {}, "first": {}, "long": long, "longer": long})
    command = [sys.executable, "-m", "sparsedp.cli.main", "sweep", str(path), "--jobs", "2"]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 120
    wanted = [Path(f"runs/changed/{name},seed=0/private/metrics.jsonl") for name in ("long", "longer")]
    while not all(file.is_file() and file.stat().st_size for file in wanted) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "SIGINT: stopping after this step" in err and "the same command goes on" in err and "Traceback" not in err
    assert "2 of 4 runs" in out
    done = sorted(file.parent.parent.name for file in Path("runs/changed").glob("*/private/result.json"))
    assert done == ["dpsgd,seed=0", "first,seed=0"]
    assert main(["sweep", str(path), "--list"]) == 0
    assert capsys.readouterr().out.count("open ") == 2


# ------------------------------------------------------------------ fronts, on numbers made by hand


def made(
    group: str, seed: int, validation: float, test: float, size: float, metric: str = "auc", **more: Any
) -> front.Run:
    settings = {key: value for key, value in more.items() if key != "point"}
    result = {
        "validation": {metric: validation}, "test": {metric: test}, "gradient_size": size, "dense_gradient_size": 1000,
        "reduction": 1000 / size if size else None, "clipped_share": 0.5, "kept_mass": 0.25, "epsilon": 1.0, "seconds": 2.0,
    }  # fmt: skip
    return front.Run(f"{group}-{seed}-{more}", group, more.get("point", {}), settings, seed, result)


def frozen_run(seed: int, validation: float, test: float, **more: Any) -> front.Run:
    run = made("frozen", seed, validation, test, 1, **more)
    run.result.update(gradient_size=0, dense_gradient_size=0, reduction=None, kept_mass=None)
    return run


def summary_of(runs: list[front.Run], **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "name": "made", "points": [{}], "variants": ["ref", "ada"], "controls": ["frozen"], "reference": "ref",
        "seeds": [0, 1], "losses": [0.001, 0.005, 0.01], "margin": 0.01,
    }  # fmt: skip
    return front.summarise(runs, **{**common, **changes})


def test_the_choice_is_made_on_validation_and_reported_on_test() -> None:
    runs = [
        made("ref", 0, 0.760, 0.755, 1000, lr=1),
        made("ref", 0, 0.750, 0.790, 1000, lr=2),  # better on test, which the choice must not see
        made("ada", 0, 0.7595, 0.700, 100, k=1),
        made("ada", 0, 0.755, 0.754, 10, k=2),
        made("ada", 0, 0.752, 0.756, 5, k=3),
        made("ada", 0, 0.740, 0.800, 1, k=4),
        frozen_run(0, 0.70, 0.70),
    ]
    at = summary_of(runs, seeds=[0])["points"][0]
    assert at["reference"]["settings"] == {"lr": 1}
    chosen = [entry["choice"] for entry in at["variants"]["ada"]["best_reduction"]]
    assert [choice["settings"]["k"] for choice in chosen] == [1, 2, 3]
    assert [choice["reduction"] for choice in chosen] == [10, 100, 200]
    assert [choice["loss"]["test"]["mean"] for choice in chosen] == pytest.approx([0.055, 0.001, -0.001])
    assert chosen[0]["loss"]["validation"]["mean"] == pytest.approx(0.0005)
    assert chosen[0]["loss"]["test"]["error"] is None
    assert [entry["settings"]["k"] for entry in at["variants"]["ada"]["front"]] == [1, 2, 3, 4]
    assert at["tables_matter"] and at["gain_of_tables"]["mean"] == pytest.approx(0.055)


def test_a_front_holds_what_nothing_beats_in_both() -> None:
    points = {"a": (0.75, 100), "b": (0.74, 100), "c": (0.73, 50), "d": (0.72, 60), "e": (0.73, 55), "f": (0.76, 900)}
    settings = [
        front.Setting("ada", {"name": name}, {0: made("ada", 0, value, 0.5, size)}, "auc")
        for name, (value, size) in points.items()
    ]
    assert [setting.settings["name"] for setting in front.front(settings)] == ["f", "a", "c"]
    assert front.front([]) == [] and front.best([]) is None


def test_means_and_spreads_over_seeds() -> None:
    runs = [
        *(made("ref", seed, 0.75, 0.75 + seed / 100, 1000) for seed in (0, 1)),
        made("ada", 0, 0.75, 0.74, 100),
        made("ada", 1, 0.75, 0.756, 300),
    ]
    at = summary_of(runs)["points"][0]
    choice = at["variants"]["ada"]["best_reduction"][0]["choice"]
    # Seed by seed: 0.75 - 0.74 and 0.76 - 0.756.
    loss = choice["loss"]["test"]
    assert loss["mean"] == pytest.approx(0.007) and loss["error"] == pytest.approx(0.003)
    assert (loss["min"], loss["max"], loss["seeds"]) == (pytest.approx(0.004), pytest.approx(0.01), 2)
    assert choice["reduction"] == 5 and choice["reduction_range"] == [1000 / 300, 10]  # of the mean size, 200
    assert at["tables_matter"] is None


def test_a_lucky_seed_does_not_win_against_a_mean() -> None:
    runs = [
        *(made("ref", seed, 0.75, 0.75, 1000) for seed in (0, 1)),
        *(made("ada", seed, 0.75, 0.75, 100, k=1) for seed in (0, 1)),
        made("ada", 0, 0.76, 0.76, 1, k=2),
    ]
    found = summary_of(runs)["points"][0]["variants"]["ada"]
    assert found["best"]["settings"] == {"k": 1} and len(found["settings"]) == 2
    assert [entry["choice"]["settings"]["k"] for entry in found["best_reduction"]] == [1, 1, 1]
    # Only what both have is compared.
    alone = summary_of([made("ref", 0, 0.75, 0.75, 1000), made("ada", 1, 0.75, 0.75, 10)])["points"][0]
    assert alone["variants"]["ada"]["best_reduction"][0]["choice"] is None


def test_losses_are_better_when_they_are_small() -> None:
    runs = [
        made("ref", 0, 0.500, 0.50, 1000, metric="loss"),
        made("ada", 0, 0.504, 0.51, 10, metric="loss", k=1),
        made("ada", 0, 0.490, 0.49, 100, metric="loss", k=2),
    ]
    summary = summary_of(runs)
    assert summary["metric"] == "loss" and not summary["more_is_better"]
    found = summary["points"][0]["variants"]["ada"]
    assert found["best"]["settings"] == {"k": 2}
    assert [entry["choice"]["settings"]["k"] for entry in found["best_reduction"]] == [2, 1, 1]
    assert found["best_reduction"][1]["choice"]["loss"]["test"]["mean"] == pytest.approx(0.01)


def test_points_have_their_own_reference_and_share_what_is_run_once() -> None:
    axis = "privacy.target_epsilon"
    runs = [
        made("ref", 0, 0.70, 0.70, 1000, point={axis: 1}),
        made("ref", 0, 0.75, 0.75, 1000, point={axis: 8}),
        made("ada", 0, 0.70, 0.70, 10, point={axis: 1}),
        made("ada", 0, 0.70, 0.70, 10, point={axis: 8}),
        frozen_run(0, 0.695, 0.695),
    ]
    one, eight = summary_of(runs, points=[{axis: 1}, {axis: 8}])["points"]
    assert one["variants"]["ada"]["best_reduction"][0]["choice"]["reduction"] == 100
    assert eight["variants"]["ada"]["best_reduction"][2]["choice"] is None
    assert (one["tables_matter"], eight["tables_matter"]) == (False, True)
    assert one["controls"]["frozen"]["runs"] == eight["controls"]["frozen"]["runs"]


def page(summary: dict[str, Any], **changes: Any) -> str:
    common: dict[str, Any] = {
        "base": "demo",
        "done": 3,
        "total": 3,
        "failed": {},
        "warnings": {},
        "left_over": 0,
        "plots": [],
    }
    return markdown.report(summary, **{**common, **changes})


def test_the_report_says_where_a_trade_off_means_nothing() -> None:
    weak = [made("ref", 0, 0.7, 0.70, 1000), made("ada", 0, 0.7, 0.70, 10), frozen_run(0, 0.7, 0.6951)]
    text = page(summary_of(weak, seeds=[0]))
    assert f"gains 0.0049 over leaving them frozen, less than 0.01: {markdown.TABLES_DO_NOT_MATTER}" in text
    assert "One seed: there is no spread" in text and "| ada | 100x | 100x | 100x |" in text
    strong = [*weak[:2], frozen_run(0, 0.6, 0.6)]
    assert markdown.TABLES_DO_NOT_MATTER not in page(summary_of(strong))
    assert "nothing shows that the tables matter" in page(summary_of(weak[:2], controls=[]))
    assert "| tables frozen | not run yet |" in page(summary_of(weak[:2]))
    weak[1].result["epsilon"] = "infinity"
    assert "Without any privacy guarantee (epsilon is infinite): ada." in page(summary_of(weak))


def test_a_report_of_nothing_and_of_runs_without_a_metric() -> None:
    text = page(summary_of([]), done=0)
    assert "**3 are missing**" in text and "No run of the reference `ref` is finished" in text
    run = made("ada", 0, 0.7, 0.7, 10)
    run.result["test"]["auc"] = None  # a half without clicks
    summary = summary_of([made("ref", 0, 0.7, 0.7, 1000), run])
    assert summary["without_utility"] == [run.id] and f"`{run.id}` has no AUC" in page(summary)
    assert "ada | none | none | none" in page(summary)


def test_plots_of_what_there_is(tmp_path: Path) -> None:
    plots = pytest.importorskip("sparsedp.report.plots")
    assert plots.write_plots(summary_of([]), tmp_path) == []
    flat = [made("ref", 0, 0.7, 0.70, 1000), made("ada", 0, 0.7, 0.70, 10), frozen_run(0, 0.5, 0.5)]
    (tmp_path / "heat.png").touch()  # of an earlier sweep
    assert plots.write_plots(summary_of(flat), tmp_path) == ["front.png", "best.png"]
    assert not (tmp_path / "heat.png").exists()


def test_a_heat_map_takes_the_best_of_the_other_settings() -> None:
    plots = pytest.importorskip("sparsedp.report.plots")
    grid = [(a, b, lr) for a in (1, 2) for b in (3, 4) for lr in (0.1, 0.2)]
    runs = [
        made("ada", 0, a + lr, 0.5, 10, **{"privacy.mechanism.a": a, "privacy.mechanism.b": b, "optimizer.lr": lr})
        for a, b, lr in grid
    ]
    settings = summary_of([*runs, made("ref", 0, 0.7, 0.7, 1000)])["points"][0]["variants"]["ada"]["settings"]
    axes = plots.heat_axes(settings)
    assert axes == ("privacy.mechanism.a", "privacy.mechanism.b")
    cells = plots.best_cells(settings, *axes, True)
    assert len(cells) == 4 and all(entry["settings"]["optimizer.lr"] == 0.2 for entry in cells.values())
    assert all(e["settings"]["optimizer.lr"] == 0.1 for e in plots.best_cells(settings, *axes, False).values())
    assert plots.heat_axes([{"settings": {"a": "x", "b": 1}}]) is None and plots.heat_axes([]) is None


# ------------------------------------------------------------------ the keys and metrics that a sweep needs


def test_tables_have_a_learning_rate_of_their_own() -> None:
    changes = ["optimizer={name: SGD, lr: 0.5, table_lr: 1e-6, scheduler: {kind: linear}}", "training.epochs=2"]
    config = load_config("base.yaml", [*changes, "training.seed=3", "training.checkpoint_every=1"])
    whole = run_training(config, Path("whole"))
    start = torch.load("whole/release/model.pt")
    rows = [json.loads(line) for line in Path("whole/private/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["lr"] for row in steps] == pytest.approx([0.5 * (1 - i / 6) for i in range(6)])
    assert [row["table_lr"] for row in steps] == pytest.approx([1e-6 * (1 - i / 6) for i in range(6)])
    other = run_training(
        load_config("base.yaml", [*changes, "training.seed=3", "optimizer.table_lr=0.5"]), Path("other")
    )
    fast = torch.load("other/release/model.pt")
    assert (start["tables.2.weight"] - fast["tables.2.weight"]).abs().max() > 0.01
    assert start["tables.2.weight"].abs().max() < 0.0501  # where they started
    one = run_training(load_config("base.yaml", ["training.epochs=1"]), Path("one"))
    assert "table_lr" not in Path("one/private/metrics.jsonl").read_text() and one.finished and other.finished
    run_training(config, Path("parts"), should_stop=lambda step: step == 4)
    resumed = run_training(config, Path("parts"), resume=True)
    assert resumed.metrics == whole.metrics
    assert all(torch.equal(value, torch.load("parts/release/model.pt")[name]) for name, value in start.items())


@pytest.mark.parametrize(
    "mechanism",
    [
        "{name: dpsgd}",
        "{name: eana}",
        "{name: fest, k: 5}",
        "{name: fest, k: 5, split: tables}",
        "{name: fest, k: 5, method: gumbel}",
        "{name: adafest, threshold: -5.0}",
        "{name: adafest, preselect: {name: fest, k: 5}}",
        "{name: exponential, k: 5}",
    ],
)
def test_every_mechanism_runs_with_frozen_tables(mechanism: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        "model.freeze_tables=true",
        "optimizer.table_lr=0.1",
        f"privacy.mechanism={mechanism}",
        "training.check=true",
    ]
    argv = ["train", "base.yaml", "--run-dir=run", "--quiet", *(f"--set={change}" for change in changes)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "frozen at their start values" in out and "times smaller" not in out and "rows touched" not in out
    result = json.loads(Path("run/private/result.json").read_text())
    assert (result["gradient_size"], result["reduction"], result["kept_mass"]) == (0, None, None)
    weights = torch.load("run/release/model.pt")
    assert weights["tables.0.weight"].abs().max() <= 0.05  # as PCTR starts them
    assert '"tables": {}' in Path("run/private/metrics.jsonl").read_text()


def test_frozen_tables_of_an_own_model_and_of_a_model_without(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("base.yaml", ["data={kind: 'mine:data'}", "loss=mine:squared", "training.batch_size=20",
                         "training.init_seed=4", "model={kind: 'mine:model', freeze_tables: true}"])  # fmt: skip
    assert run_training(config, Path("run")).reduction is None
    torch.manual_seed(4)
    assert torch.equal(torch.load("run/release/model.pt")["table.weight"], torch.nn.Embedding(10, 2).weight)
    for change in ("model.freeze_tables=true", "optimizer.table_lr=0.1"):
        model = "--set=model={kind: 'mine:model', options: {how: without tables}}"
        argv = [
            "train",
            "base.yaml",
            "--set=data={kind: 'mine:data'}",
            model,
            f"--set={change}",
            "--set=loss=mine:squared",
        ]
        assert main(argv) == 2
        assert f"{change.partition('=')[0]}: the model has no table" in capsys.readouterr().err


def test_metrics_say_what_a_mechanism_did_to_each_table() -> None:
    changes = ["privacy.mechanism={name: adafest, threshold: 3.0}", "training.epochs=2", "training.seed=1"]
    result = run_training(load_config("base.yaml", changes), Path("run")).to_dict()
    steps = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if row["kind"] == "step"]
    for row in steps:
        assert len(row["tables"]) == 26
        assert sum(table["touched"] for table in row["tables"].values()) == row["rows_touched"]
        assert all(0 <= table["false"] <= table["selected"] for table in row["tables"].values())
        assert row["reduction"] == pytest.approx(result["dense_gradient_size"] / max(1, row["gradient_size"]))
        assert 0 < row["kept_mass"] < 1
    assert result["kept_mass"] == pytest.approx(sum(row["kept_mass"] for row in steps) / len(steps))
    assert result["clipped_share"] == pytest.approx(sum(row["clipped_share"] for row in steps) / len(steps))
    assert result["reduction"] == pytest.approx(result["dense_gradient_size"] / result["gradient_size"])


def test_the_non_private_control_is_tried_at_rates_of_its_own() -> None:
    text = SMALL.replace("controls: {non_private: null, frozen: null}", "controls: {frozen: null}")
    tried = [run for run in runs_of(written(text)) if run.group == "non_private"]
    assert [run.config.optimizer.lr for run in tried] == [0.005, 0.015, 0.05, 0.15]
    both = runs_of(written(text, set={"optimizer.table_lr": 0.2}, control_rates=[0.5, 2.0]))
    rates = [(run.config.optimizer.lr, run.config.optimizer.table_lr) for run in both if run.group == "non_private"]
    assert rates == [(0.025, 0.1), (0.1, 0.4)]
    given = runs_of(written(text, controls={"non_private": {"set": {"optimizer.lr": 0.7}}, "frozen": None}))
    assert [run.config.optimizer.lr for run in given if run.group == "non_private"] == [0.7]
    with pytest.raises(ConfigError, match="control_rates"):
        runs_of(written(text, control_rates=[1.0, 1.0]))


def test_a_control_below_private_runs_is_flagged_and_every_setting_is_listed() -> None:
    def run(group: str, auc: float, epsilon: float | str, seed: int, **settings: float) -> front.Run:
        result = {
            "validation": {"auc": auc}, "test": {"auc": auc}, "epsilon": epsilon, "gradient_size": 10, "reduction": 10.0,
            "dense_gradient_size": 100, "seconds": 1.0, "clipped_share": 0.5, "kept_mass": 1.0,
        }  # fmt: skip
        return front.Run(f"{group}{settings}{seed}", group, {}, settings, seed, result)

    def summary(control: float) -> dict[str, Any]:
        runs = [run("dpsgd", 0.70 + seed / 100, 3.0, seed, lr=rate) for seed in (0, 1) for rate in (0.1, 0.2)]
        runs += [
            run("eana", 0.99, "infinity", seed) for seed in (0, 1)
        ]  # no privacy, so no reason to doubt the control
        runs += [
            run("non_private", control - rate, "infinity", seed, lr=rate) for seed in (0, 1) for rate in (0.0, 0.1)
        ]
        return front.summarise(
            runs, name="s", points=[{}], variants=["dpsgd", "eana"], controls=["non_private"], reference="dpsgd", seeds=[0, 1],
            losses=[0.005], margin=0.01,
        )  # fmt: skip

    def text(of: dict[str, Any]) -> str:
        return markdown.report(of, base="b", done=1, total=1, failed={}, warnings={}, left_over=0, plots=[])

    weak, good = summary(0.69), summary(0.8)
    assert weak["points"][0]["control_below"] == ["dpsgd"] and good["points"][0]["control_below"] == []
    assert "below `dpsgd`: it is no measure" in text(weak) and "it is no measure" not in text(good)
    lines = text(good).splitlines()
    start = lines.index("Every setting:")
    table = [line for line in lines[start + 4 : start + 10] if line.startswith("|")]
    assert len(table) == 5 and "(validation, chooses)" in lines[start + 2] and "(test, reports)" in lines[start + 2]
    assert any("lr = 0.2" in line and "0.7050 ± 0.0050" in line for line in table)
