"""The command line: runs, their folders, resuming, interruption, plans, accounting, and errors in one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsedp.accounting import get_epsilon
from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import load_config
from sparsedp.cli.config.sections import SchedulerConfig
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.data import generated_click_log, write_click_log
from sparsedp.plan import default_delta
from sparsedp_command import COMMANDS

TINY = """
data: {kind: generated, rows: 1000, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 100, log_every: 1, evaluate_every: 6}
privacy: {target_epsilon: 5, max_grad_norm: 2}
"""
STEPS = 18  # 900 examples to train on, in batches of 100, twice

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

class Pairs(Dataset):
    def __init__(self, count):
        random = torch.Generator().manual_seed(0)
        self.ids = torch.randint(20, (count,), generator=random)
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, i):
        return {"ids": self.ids[i], "wanted": (self.ids[i] % 2).float()}

def one_set(count=200):
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (count,), generator=random)
    return TensorDataset(ids, (ids % 2).float())

def shares(count=200):
    ids = one_set(count).tensors[0]
    return TensorDataset(ids, ids / 20), TensorDataset(ids, ids / 20)

def two_sets(count=200):
    return one_set(count), one_set(50)

def dicts(count=200):
    return Pairs(count), Pairs(50)

class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 1)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.dropout = dropout
    def forward(self, ids, wanted=None):
        hidden = nn.functional.dropout(self.frozen(self.table(ids)), self.dropout, self.training)
        return self.out(hidden).squeeze(1)

def model(training, dropout=0.0):
    return Model(dropout)

def squared(output, target):
    wanted = target["wanted"] if isinstance(target, dict) else target
    return (output - wanted).square().mean()

def summed(output, target):
    return (output - target).square().sum()

def mixing(output, target):
    return (output - output.mean() - target).square().mean()

def no_module(training):
    return 3

setting = 3
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write to runs/ of the current directory, and import a user's own modules from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "mine.py").write_text(OWN)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads only get in each other's way in models this small
    yield
    torch.set_num_threads(threads)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "private/metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "private/checkpoint.pt", weights_only=True)["model"]


def own_model(**options: Any) -> list[str]:
    """--set arguments for the model in mine.py."""
    values = {
        "data": "{kind: 'mine:two_sets'}",
        "model": "{kind: 'mine:model'}",
        "loss": "mine:squared",
        "training.batch_size": "40",
        "training.evaluate_every": "null",
        **options,
    }
    return [f"--set={key}={value}" for key, value in values.items()]


# ------------------------------------------------------------------ train


def test_a_run_and_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "runs/mine"]) == 0
    out = capsys.readouterr().out
    run = Path("runs/mine")
    names = {
        "release": {"config.yaml", "plan.json", "environment.json", "model.pt", "statement.json", "statement.txt"},
        "private": {"README.txt", ".lock", "config.yaml", "code.json", "provenance.json", "metrics.jsonl", "checkpoint.pt",
                    "totals.json", "result.json"},
    }  # fmt: skip
    assert {part.name: {path.name for path in part.iterdir()} for part in run.iterdir()} == names
    assert "sparsedp report runs/mine writes one" in out
    result = json.loads((run / "private/result.json").read_text())
    assert result["finished"] and result["steps"] == result["planned_steps"] == STEPS
    assert 0 < result["auc"] < 1 and result["log_loss"] > 0 and 0.7 < result["planted_auc"] < 0.9
    assert 4.9 < result["epsilon"] <= 5 and result["delta"] == 1e-4
    assert result["gradient_size"] == result["dense_gradient_size"] > 0 and result["rows_touched_per_step"] > 100
    assert json.loads((run / "release/statement.json").read_text())["epsilon"] == result["epsilon"]
    assert "Privacy statement: epsilon = " in (run / "release/statement.txt").read_text()
    assert json.loads((run / "release/plan.json").read_text())["steps"] == STEPS
    logged = rows(run)
    assert [row["step"] for row in logged if row["kind"] == "step"] == list(range(1, STEPS + 1))
    assert [row["step"] for row in logged if row["kind"] == "evaluation"] == [6, 12, 18]
    assert logged[-1]["auc"] == result["auc"] and logged[-1]["epsilon"] == result["epsilon"]
    for shown in ("Checked 30 parameters", "noise multiplier", f"step {STEPS}/{STEPS}", "AUC, held out", "examples/s",
                  "coordinates a step (dense)", "runs/mine"):  # fmt: skip
        assert shown in out


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "Run folder" in err
    assert result["run"].startswith("runs/tiny-") and Path(result["run"], "private/result.json").is_file()
    assert json.loads(Path(result["run"], "private/result.json").read_text()) == result


def test_quiet_shows_the_table_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--quiet", "--set", "training.epochs=1"]) == 0
    out, err = capsys.readouterr()
    assert "AUC, held out" in out and "Run folder:" not in out and "step" not in out.split("AUC")[0] and not err


def test_folders_are_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["train", "tiny.yaml", "--run-dir", "full"]) == 2
    assert "full exists and is not empty" in capsys.readouterr().err
    config = load_config("tiny.yaml", ["training.epochs=1"])
    runs = [run_training(config).run_dir for _ in range(2)]
    assert runs[0] != runs[1]


def test_no_noise_is_no_privacy_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set=privacy.target_epsilon=null", "--set=privacy.noise_multiplier=0", "--set=data.held_out=0"]
    assert main(["train", "tiny.yaml", "--run-dir", "run", *changes]) == 0
    assert "NONE (epsilon is infinite)" in capsys.readouterr().out
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["epsilon"] == "infinity" and "auc" not in result
    assert all(row["kind"] == "step" for row in rows(Path("run")))


def test_a_counted_vocabulary_is_in_the_statement(capsys: pytest.CaptureFixture[str]) -> None:
    write_click_log(generated_click_log(1000, scale=0.01), "log.tsv")
    data = "--set=data={kind: clicklog, paths: log.tsv, cache_dir: cache, vocabulary: {kind: count, min_count: 5}}"
    assert main(["train", "tiny.yaml", data, "--run-dir", "run", "--quiet"]) == 0
    assert "counted on the private data" in Path("run/release/statement.txt").read_text()
    hashed = data.replace("count, min_count: 5", "hash, buckets: 50")
    assert main(["train", "tiny.yaml", hashed, "--run-dir", "other", "--quiet"]) == 0
    assert "counted on the private data" not in Path("other/release/statement.txt").read_text()


def test_the_statement_says_whether_the_loss_was_checked() -> None:
    for check, words in (("true", "sparsedp.check found it so, on 2 of them"), ("false", "no check is on record")):
        config = load_config("tiny.yaml", ["training.epochs=1", f"training.check={check}"])
        run = run_training(config, Path(f"checked-{check}"))
        assert sum(words in line for line in run.statement.assumptions) == 1
        assert words in Path(f"checked-{check}/release/statement.txt").read_text()


def test_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    """All keys, with explanations, and nothing else happens."""
    for command in ("train", "plan"):
        assert main([command, "tiny.yaml", "--set", "privacy.mechanism=adafest", "--show-config"]) == 0
        out = capsys.readouterr().out
        Path("shown.yaml").write_text(out)
        assert load_config("shown.yaml") == load_config("tiny.yaml", ["privacy.mechanism=adafest"])
        assert "  check: true  # run sparsedp.check on a few examples first" in out
    assert not Path("runs").exists()
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert "--show-config" in out and "src/" not in out


def test_a_target_for_a_mechanism_without_a_guarantee(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--quiet", "--set", "privacy.mechanism=eana"]) == 2
    err = capsys.readouterr().err
    assert "'eana' has no (epsilon, delta) guarantee" in err and "noise_multiplier=" in err


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "active"])
def test_the_console_script_lets_waiting_threads_sleep(policy: str | None) -> None:
    """Set before torch is loaded, when OpenMP reads it; what the environment says already stays."""
    code = """
import os, sys
import sparsedp_command
assert "torch" not in sys.modules
sys.argv = ["sparsedp", "--version"]
try:
    sparsedp_command.main()
finally:
    print(os.environ["OMP_WAIT_POLICY"])
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_DISPLAY_ENV": "VERBOSE"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (policy or "passive")
    if "GOMP_SPINCOUNT" in done.stderr:  # GNU's OpenMP says what it has read
        assert ("GOMP_SPINCOUNT = '0'" in done.stderr) == (policy is None)


@pytest.mark.slow
def test_the_bundled_criteo_configuration_on_a_sample_of_the_real_data() -> None:
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not Path(folder, "criteo/kaggle_sample_137k.csv.gz").is_file():
        pytest.skip("set SPARSEDP_DATA to a folder that holds criteo/kaggle_sample_137k.csv.gz")
    changes = [f"data.paths={folder}/criteo/kaggle_sample_137k.csv.gz", "model.hidden=64", "model.hidden_layers=1"]
    result = run_training(load_config("criteo", [*changes, "data.vocabulary.buckets=1000", "optimizer.lr=0.05"]))
    assert result.metrics["auc"] > 0.6


def test_days_are_held_out() -> None:
    changes = ["data.days=4", "data.drift=0.2", "data.held_out=[3]", "training.batch_size=250", "training.epochs=1"]
    result = run_training(load_config("tiny.yaml", changes))
    assert result.planned_steps == 3  # 750 examples


@pytest.mark.parametrize("data", ["one_set", "two_sets", "dicts"])
def test_own_data_model_and_loss(data: str) -> None:
    changes = own_model(data=f"{{kind: 'mine:{data}', options: {{count: 120}}}}")
    assert main(["train", "tiny.yaml", "--run-dir", "run", "--quiet", *changes]) == 0
    result = json.loads(Path("run/private/result.json").read_text())
    assert result["steps"] == 6
    assert ("loss" in result) == (data != "one_set")
    assert ("mse" in result) == (data == "two_sets")
    if data == "two_sets":
        assert result["mse"] == pytest.approx(result["loss"])  # which is the mean of squares
    assert "frozen.weight" in weights(Path("run"))


def test_binary_cross_entropy_of_shares_has_no_auc() -> None:
    changes = own_model(data="{kind: 'mine:shares'}", loss="binary_cross_entropy")
    result = run_training(load_config("tiny.yaml", [text.removeprefix("--set=") for text in changes]))
    assert set(result.metrics) == {"loss"}


def test_the_bundled_example_of_own_code(tmp_path: Path) -> None:
    config = load_config("own_model", ["data.options.ratings=5000", "training.epochs=1"])
    result = run_training(config, tmp_path / "run")
    assert result.finished and result.metrics["loss"] > 0


def test_summed_losses_report_the_mean() -> None:
    changes = {
        "loss": "mine:summed",
        "privacy.loss_reduction": "sum",
        "optimizer.lr": "1e-9",
        "training.log_every": "1",
    }
    summed = run_training(load_config("tiny.yaml", [c.removeprefix("--set=") for c in own_model(**changes)]), Path("a"))
    mean = {**changes, "loss": "mine:squared", "privacy.loss_reduction": "mean", "training.init_seed": "1"}
    run_training(load_config("tiny.yaml", [c.removeprefix("--set=") for c in own_model(**mean)]), Path("b"))
    assert 0.1 < summed.metrics["loss"] < 10  # not 50 times as much
    assert all(0.1 < row["loss"] < 10 for row in rows(Path("a")) if row["kind"] == "step")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mine:mixing"}, "Units mix"),
        ({"loss": "mine:nothing"}, "loss: mine:nothing: mine has no 'nothing'"),
        ({"loss": "mine:setting"}, "loss: mine:setting is not callable"),
        (
            {"model": "{kind: 'nowhere.mine:model'}"},
            "is neither in a file beside tiny.yaml nor in a package that you trust",
        ),
        ({"model": "{kind: 'mine:model', options: {depth: 3}}"}, "model.options: mine:model cannot be called"),
        ({"model": "{kind: 'mine:no_module'}"}, "model.kind: mine:no_module returned int"),
        ({"model": "{kind: pctr}"}, "pctr needs a table or a click log"),
        ({"data": "{kind: 'mine:no_module', options: {training: 1}}"}, "data.kind: mine:no_module returned int"),
        ({"data": "{kind: 'mine:two_sets', options: {size: 1}}"}, "data.options: mine:two_sets cannot be called"),
        ({"optimizer": "{name: SGD, lr: 1, options: {mass: 3}}"}, "optimizer: SGD refuses its settings"),
        ({"optimizer": "{name: LBFGS, lr: 1}"}, "LBFGS evaluates the loss several times"),
        ({"training.batch_size": "1000"}, "batch_size=1000 exceeds"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    assert main(["train", "tiny.yaml", "--quiet", *own_model(**changes)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("sparsedp: error: ") and err.count("\n") == 1 and message in err
    assert not Path("runs").exists()


def test_an_import_error_inside_a_users_module_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import surely_not_there")
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        main(["train", "tiny.yaml", *own_model()])


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--debug", "train", "nothing.yaml"], ["train", "nothing.yaml", "--debug"]):
        assert main(argv) == 2
        assert "Traceback" in capsys.readouterr().err
    assert main(["train", "nothing.yaml"]) == 2
    assert "Traceback" not in capsys.readouterr().err


# ------------------------------------------------------------------ resume


def seeded(**changes: Any) -> Config:
    """A run whose result hangs on everything that can be forgotten: dropout, momentum, schedule, physical batches."""
    settings = own_model(
        model="{kind: 'mine:model', options: {dropout: 0.5}}",
        optimizer="{name: SGD, lr: 0.5, options: {momentum: 0.9}, scheduler: {kind: cosine, warmup: 3, final: 0.1}}",
        **{"training.seed": 5, "training.max_physical_batch": 15, "training.evaluate_every": 4, "training.epochs": 3},
        **changes,
    )
    return load_config("tiny.yaml", [text.removeprefix("--set=") for text in settings])


def without_times(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(run)]


@pytest.mark.parametrize("poisson", ["true", "false"])
@pytest.mark.parametrize(
    "stop", [0, 3, 5, 7, 14]
)  # at the start, within an epoch, at the end of one, just before the end
def test_an_interrupted_run_ends_like_an_uninterrupted_one(stop: int, poisson: str) -> None:
    config = seeded(**{"privacy.poisson_sampling": poisson})
    whole = run_training(config, Path("whole"))
    first = run_training(config, Path("parts"), should_stop=lambda step: step == stop)
    assert not first.finished and first.totals.steps == stop
    assert not Path("parts/private/result.json").exists()
    torch.manual_seed(99)  # another process has another state
    last = run_training(config, Path("parts"), resume=True)
    assert last.finished and last.planned_steps == 15
    for name, value in weights(Path("whole")).items():
        assert torch.equal(value, weights(Path("parts"))[name]), name
    assert without_times(Path("whole")) == without_times(Path("parts"))
    *assumptions, resumed = last.statement.assumptions
    assert whole.metrics == last.metrics and whole.statement == replace(last.statement, assumptions=tuple(assumptions))
    assert resumed.startswith("The checkpoints that this run went on from")
    assert (whole.totals.units, whole.totals.rows_touched) == (last.totals.units, last.totals.rows_touched)
    assert "Seeded, do not release" in Path("parts/release/statement.txt").read_text()


def test_a_killed_run_ends_like_an_uninterrupted_one() -> None:
    config = seeded(**{"training.checkpoint_every": 4})
    run_training(config, Path("whole"))

    def kill(step: int) -> bool:
        if step == 6:
            shutil.copytree("parts", "killed")  # as a kill would leave it after step 6
        return step == 7

    run_training(config, Path("parts"), should_stop=kill)
    shutil.rmtree("parts")
    shutil.move("killed", "parts")
    with open("parts/private/metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a line that the kill cut short
    assert torch.load("parts/private/checkpoint.pt", weights_only=True)["loader"]["step"] == 4
    run_training(config, Path("parts"), resume=True)
    assert all(torch.equal(value, weights(Path("parts"))[name]) for name, value in weights(Path("whole")).items())
    assert without_times(Path("whole")) == without_times(Path("parts"))


def test_the_same_seed_gives_the_same_model_and_no_seed_another() -> None:
    def table(name: str, seed: str) -> torch.Tensor:
        changes = [f"training.seed={seed}", "training.init_seed=3", "training.epochs=1"]
        run_training(load_config("tiny.yaml", changes), Path(name))
        return weights(Path(name))["tables.0.weight"]

    assert torch.equal(table("a", "1"), table("b", "1"))
    assert not torch.equal(table("c", "null"), table("d", "null"))


def test_resume_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_training(load_config("tiny.yaml"), Path("run"), should_stop=lambda step: step == 8)
    capsys.readouterr()

    def refused(*argv: str) -> str:
        assert main(["train", "--resume", *argv]) == 2
        return capsys.readouterr().err

    assert "another privacy.target_epsilon" in refused("run", "--set", "privacy.target_epsilon=9")
    assert "another optimizer.lr, training.epochs" in refused("run", "--set=optimizer.lr=1", "--set=training.epochs=3")
    assert "another data, loss, model" in refused("run", "tiny.yaml", *own_model())
    assert "leave --run-dir out" in refused("run", "--run-dir", "other")
    assert "not the folder of a run" in refused("nowhere")
    assert main(["train", "tiny.yaml", "--resume", "run", "--set", "training.evaluate_every=5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"Resumed after step 8 of {STEPS}" in err and json.loads(out)["steps"] == STEPS
    assert [row["step"] for row in rows(Path("run")) if row["kind"] == "evaluation"] == [6, 10, 15, 18]
    # A complete run: nothing is left to do, and nothing is written twice.
    before = rows(Path("run"))
    assert main(["train", "--resume", "run", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["auc"] == json.loads(out)["auc"] and again["epsilon"] == json.loads(out)["epsilon"]
    assert rows(Path("run")) == before
    Path("run/private/checkpoint.pt").unlink()
    assert "has lost its checkpoint" in refused("run")


def test_a_changed_plan_is_refused_by_the_checkpoint() -> None:
    run_training(load_config("tiny.yaml"), Path("run"), should_stop=lambda step: step == 2)
    path = Path("run/private/config.yaml")
    path.write_text(path.read_text().replace("max_grad_norm: 2.0", "max_grad_norm: 3.0"))
    assert main(["train", "--resume", "run"]) == 2


# ------------------------------------------------------------------ signals


def interrupted(number: signal.Signals, *changes: str) -> None:
    # Without evaluations: a signal in one of them stops at once, and says nothing of a step.
    long = ["--set=training.epochs=2000", "--set=data.rows=5000", "--set=training.evaluate_every=null", *changes]
    command = [sys.executable, "-m", "sparsedp.cli.main", "train", "tiny.yaml", "--run-dir", "run", *long]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    metrics = Path("run/private/metrics.jsonl")
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, number)  # a terminal's Ctrl-C reaches the workers too
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.strip() == f"{number.name}: stopping after this step; once more stops at once."
    assert "sparsedp train --resume run" in out
    state = torch.load("run/private/checkpoint.pt", weights_only=True)
    step = state["loader"]["step"]
    assert 0 < step < 90_000
    totals = json.loads(Path("run/private/totals.json").read_text())["after_step"][str(step)]["totals"]
    assert totals["steps"] == step and not Path("run/release/statement.json").exists()
    assert max(row["step"] for row in rows(Path("run"))) == step
    resumed = run_training(
        load_config("run/private/config.yaml"), Path("run"), resume=True, should_stop=lambda s: s >= step + 2
    )
    assert resumed.totals.steps == step + 2
    logged = [row["step"] for row in rows(Path("run")) if row["kind"] == "step"]
    assert logged == list(range(1, step + 3))


def test_ctrl_c_finishes_the_step_and_writes_a_checkpoint() -> None:
    interrupted(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_with_workers_and_physical_batches(number: signal.Signals) -> None:
    changes = ["--set=training.workers=1", "--set=training.max_physical_batch=10"]
    if number == signal.SIGTERM:
        changes = changes[1:]  # workers end at once when the whole group is told to
    interrupted(number, *changes)


# ------------------------------------------------------------------ plan


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == STEPS and report["expected_batch_size"] == 100 and report["dataset_size"] == 900
    assert report["sample_rate"] == pytest.approx(1 / 9)
    assert list(report["epsilon_after"]) == ["4", "9", "13", "18"]
    values = list(report["epsilon_after"].values())
    assert values == sorted(values) and values[-1] == report["epsilon"] <= 5
    assert len(report["tables"]) == 26
    assert report["dense_gradient_size"] == sum(table["rows"] * table["dim"] for table in report["tables"])
    measured = report["measured"]
    assert measured["steps"] == 7  # of an epoch's 9, without those that warm up
    assert measured["training_seconds"] > STEPS * measured["seconds_per_step"] > 0
    assert measured["seconds_per_step"] >= measured["fastest_seconds_per_step"]
    memory = report["memory_bytes"]
    assert memory["tables"] == 4 * report["dense_gradient_size"]
    assert memory["gradients"] == memory["optimizer_state"] == 4 * report["parameters"]
    assert memory["activations"] > 100 * 4 * 13
    assert not Path("runs").exists()
    assert main(["plan", "tiny.yaml", "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert "after 9 steps" in out and "tables.2.weight" in out and "21 more" in out and "ms a step" not in out
    assert "time not predicted" in " ".join(out.split()) and "private data without noise" in " ".join(out.split())


ADAFEST = "privacy.mechanism={name: adafest, threshold: 4.0, noise_ratio: 2.0}"


@pytest.mark.parametrize("mechanism", [ADAFEST, "privacy.mechanism={name: fest, k: 200, epsilon: 1.0, split: tables}"])
def test_plan_predicts_what_the_run_does(mechanism: str) -> None:
    from sparsedp.cli.plan_report import plan_report

    config = load_config("tiny.yaml", [mechanism, "training.epochs=3", "training.seed=0"])
    report = plan_report(config)
    predicted, measured = report["predicted"], report["measured"]
    result = run_training(config)
    assert predicted["gradient_size"] == pytest.approx(result.gradient_size, rel=0.1)
    assert predicted["rows_touched"] == pytest.approx(result.rows_touched, rel=0.05)
    for name in ("rows_touched", "rows_selected", "rows_false", "gradient_size"):
        assert measured[name] == pytest.approx(predicted[name], rel=0.2)
    assert predicted["private"] and predicted["source"] == "all 900 training examples"
    assert report["memory_bytes"]["gradients"] < 4 * report["dense_gradient_size"] / 2


def test_plan_from_counts(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    def plan(*argv: str) -> dict[str, Any]:
        assert main(["plan", "tiny.yaml", "--set", ADAFEST, "--no-measure", "--json", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    tables = plan()["tables"]
    # Each of 500 units touches a row of every table, and all rows of a table are as popular.
    counts = {table["name"]: np.full(table["rows"], 500 / table["rows"]) for table in tables}
    np.savez("counts.npz", units=500, **counts)
    torch.save({"units": 500, **{name: torch.from_numpy(c) for name, c in counts.items()}}, "counts.pt")
    Path("counts.json").write_text(json.dumps({"units": 500, **{name: c.tolist() for name, c in counts.items()}}))
    found = [plan("--counts", f"counts.{kind}")["predicted"] for kind in ("npz", "pt", "json")]
    assert found[0] == found[1] == found[2] and not found[0]["private"] and found[0]["source"] == "given counts"
    touched = sum(table["rows"] * (1 - math.exp(-100 / table["rows"])) for table in tables)
    assert found[0]["rows_touched"] == pytest.approx(touched)
    assert main(["plan", "tiny.yaml", "--no-measure", "--counts", "counts.npz"]) == 0
    out = capsys.readouterr().out
    assert "predicted from given counts" in " ".join(out.split()) and "private data" not in out


def test_plan_finds_a_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tiny.yaml", "--set", ADAFEST, "--no-measure", "--reduction", "20"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    threshold = report["suggested"]["threshold"]
    assert report["suggested"]["predicted"]["reduction"] == pytest.approx(20, rel=0.02)
    assert report["predicted"]["reduction"] != pytest.approx(20, rel=0.02)
    wanted = report["dense_gradient_size"] / 20
    change = ["--set", f"privacy.mechanism.threshold={threshold}", "--gradient-size", str(wanted)]
    assert main([*arguments[:-2], *change, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["predicted"] == report["suggested"]["predicted"] == again["suggested"]["predicted"]
    assert main(arguments) == 0
    assert f"--set privacy.mechanism.threshold={threshold}" in capsys.readouterr().out


def test_plan_without_trained_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tiny.yaml", "--set", "model.freeze_tables=true", "--no-measure"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "predicted" not in report and report["memory_bytes"]["gradients"] > 0
    assert main([*arguments, "--set", ADAFEST, "--reduction", "2"]) == 2
    assert "this run trains none" in capsys.readouterr().err


def test_plan_with_a_mechanism_that_has_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    from sparsedp.mechanisms import Mechanism, base

    @dataclass(frozen=True)
    class Other(Mechanism):
        name, selects, guarantee = "other", True, "none"

    try:
        assert main(["plan", "tiny.yaml", "--no-measure", "--set", "privacy.mechanism=other"]) == 0
    finally:
        del base._REGISTRY["other"]
    assert "no rule yet to predict what mechanism 'other'" in " ".join(capsys.readouterr().out.split())


def test_plan_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    Path("counts.json").write_text('{"tables.0.weight": [1, 2]}')
    Path("short.json").write_text('{"units": 3, "tables.0.weight": [1, 2]}')
    Path("broken.json").write_text("{")
    Path("counts.csv").write_text("1, 2")
    for argv, words in [
        (["--reduction", "20"], "privacy.mechanism is 'dpsgd'"),
        (["--counts", "counts.json"], "the number of counted units as 'units'"),
        (["--counts", "short.json"], "counts['tables.0.weight'] has shape (2,)"),
        (["--counts", "broken.json"], "cannot be read"),
        (["--counts", "counts.csv"], "expected a .npz, .pt or .json file"),
        (["--counts", "nowhere.npz"], "nowhere.npz"),
    ]:
        assert main(["plan", "tiny.yaml", "--no-measure", *argv]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "tiny.yaml", "--gradient-size", "-1"])
    assert "expected a positive number" in capsys.readouterr().err


def test_plan_agrees_with_the_run() -> None:
    from sparsedp.cli.plan_report import plan_report

    report = plan_report(load_config("tiny.yaml"), measure=False)
    result = run_training(load_config("tiny.yaml"))
    assert result.statement.epsilon == report["epsilon"] and result.dense_size == report["dense_gradient_size"]
    assert result.statement.noise_multiplier == report["noise_multiplier"]


@pytest.mark.parametrize(("optimizer", "share"), [("SGD", 0), ("Adagrad", 1), ("Adam", 2)])
def test_plan_knows_the_optimizers_state(optimizer: str, share: int) -> None:
    from sparsedp.cli.plan_report import plan_report

    memory = plan_report(load_config("tiny.yaml", [f"optimizer.name={optimizer}"]), measure=False)["memory_bytes"]
    assert memory["optimizer_state"] == share * (memory["tables"] + memory["other_parameters"])


# ------------------------------------------------------------------ account


def account(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["account", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_account_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["epsilon", "--noise-multiplier=0.8", "--delta=1e-5"]
    answer = account(capsys, *common, "--sample-rate=0.01", "--steps=200")
    assert answer["epsilon"] == get_epsilon(noise_multiplier=0.8, sample_rate=0.01, steps=200, delta=1e-5)
    assert account(capsys, *common, "--batch-size=10", "--dataset-size=1000", "--epochs=2") == answer
    assert account(capsys, *common, "--sample-rate=0.01", "--epochs=2") == answer
    rdp = account(capsys, *common, "--sample-rate=0.01", "--steps=200", "--accountant=rdp")
    assert rdp["epsilon"] > answer["epsilon"]
    assert account(capsys, "epsilon", "--noise-multiplier=0", "--delta=1e-5", "--sample-rate=0.01", "--steps=1")[
        "epsilon"
    ] == "infinity"  # fmt: skip
    assert main(["account", *common, "--sample-rate=0.01", "--steps=200"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("epsilon") and f"{answer['epsilon']:.6g}" in out


def test_account_noise(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--batch-size=7", "--dataset-size=1000", "--epochs=3"]
    answer = account(capsys, "noise", "--target-epsilon=2", "--target-delta=1e-5", *run)
    assert answer["steps"] == 429 and 1.99 < answer["epsilon"] <= 2
    again = account(capsys, "epsilon", f"--noise-multiplier={answer['noise_multiplier']}", "--delta=1e-5", *run)
    assert again == answer
    assert main(["account", "noise", "--target-epsilon=2", "--target-delta=1e-5", *run]) == 0
    assert capsys.readouterr().out.startswith("noise multiplier")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps=3"], "either --sample-rate, or both --batch-size and --dataset-size"),
        (["--steps=3", "--batch-size=3"], "either --sample-rate, or both"),
        (["--steps=3", "--batch-size=3", "--sample-rate=0.1"], "either --sample-rate, or both"),
        (["--sample-rate=0.1"], "either --steps or --epochs"),
        (["--sample-rate=0.1", "--steps=3", "--epochs=1"], "either --steps or --epochs"),
        (["--sample-rate=2", "--epochs=1"], "--sample-rate must be above 0"),
        (["--sample-rate=0.1", "--steps=-1"], "steps must be an integer of at least 0"),
        (["--batch-size=9", "--dataset-size=3", "--steps=3"], "between 1 and --dataset-size"),
    ],
)
def test_account_refuses(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["account", "epsilon", "--noise-multiplier=1", "--delta=1e-5", *argv]) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------ help and small parts


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], *([name, "--help"] for name in COMMANDS), ["account", "noise", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "usage: sparsedp" in out and "examples:" in out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("sparsedp 0.")
    for argv in ([], ["trian"], ["account"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
    assert main(["train"]) == 2


@pytest.mark.parametrize(
    ("size", "delta"),
    [(1, 0.01), (10, 0.01), (900, 1e-4), (1001, 9e-5), (18_000, 5e-6), (10**6, 1e-7), (45_840_617, 2e-9)],
)
def test_default_delta_is_at_most_a_tenth_of_one_in_n(size: int, delta: float) -> None:
    assert default_delta(size) == delta <= 0.1 / size


def test_schedules() -> None:
    linear = SchedulerConfig("linear", warmup=4, final=0.2).shares(104)
    assert [linear(i) for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert linear(54) == pytest.approx(0.6) and linear(104) == pytest.approx(0.2)
    cosine = SchedulerConfig("cosine").shares(100)
    assert [cosine(i) for i in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    constant = SchedulerConfig("none", warmup=1).shares(10)
    assert [constant(i) for i in (0, 1, 9)] == [0.5, 1, 1]
