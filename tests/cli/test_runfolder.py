"""A run's folder: locks, room on the disk, evaluation that fails and is made up for, and what may leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import sparsedp.cli.training as training
from sparsedp.cli.config.load import load_config
from sparsedp.cli.files import in_units, locked, write_file
from sparsedp.cli.main import main
from sparsedp.cli.run import run_training
from sparsedp.cli.signals import StopRequests, stop_on_signals
from sparsedp.errors import SparseDPError

CONFIG = """
data: {kind: 'folder_mine:data', options: {}}
model: {kind: 'folder_mine:Model'}
loss: binary_cross_entropy
optimizer: {name: SGD, lr: 0.5}
training: {epochs: 2, batch_size: 20, log_every: 1, check: false, threads: 1, init_seed: 1}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0}
"""
STEPS = 6
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(wrong=None, row=7):
    ids = torch.arange(90) % 20
    label = (ids % 2).float()
    held_ids, held = ids[60:].clone(), label[60:].clone()
    weight = torch.ones(30)
    if wrong == "label":
        held[[row, row + 3]] = float("nan")
    if wrong == "id":
        held_ids[row] = 99
    if wrong == "input":
        weight[row] = float("inf")
    if wrong == "empty":
        held_ids, held, weight = held_ids[:0], held[:0], weight[:0]
    return TensorDataset(ids[:60], torch.ones(60), label[:60]), TensorDataset(held_ids, weight, held)

class Model(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids, weight):
        return self.out(self.table(ids)).squeeze(1) * weight
"""
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "folder_mine", raising=False)
    Path("tiny.yaml").write_text(CONFIG)
    Path("folder_mine.py").write_text(CODE)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]


def result() -> dict[str, Any]:
    return json.loads(Path("run/private/result.json").read_text())


def train(*changes: str) -> int:
    return main(["train", "tiny.yaml", "--run-dir", "run", "--quiet", *(f"--set={change}" for change in changes)])


def stopped_run(step: int = 3) -> None:
    run_training(load_config("tiny.yaml"), Path("run"), should_stop=lambda at: at == step)


# ------------------------------------------------------------------ evaluation that fails


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("label", "The label is NaN or infinite in held-out rows 7, 10."),
        (
            "id",
            "Held-out row 7: Table 'table.weight' has rows 0 to 19, and was asked for row 99 (at place 0 of the batch's ids). "
            "Make the table as large as the largest id, plus one, or map ids that it does not have to a row that is kept for "
            "them.",
        ),
        ("input", "The input 2 is NaN or infinite in held-out row 7."),
    ],
)
@pytest.mark.parametrize("every", ["null", "2"])
def test_trained_not_evaluated(wrong: str, message: str, every: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The data of one held-out row are wrong: the model is there, the row is named, and the evaluation is made up for."""
    assert train(f"data.options.wrong={wrong}", f"training.evaluate_every={every}") == 3
    out, err = capsys.readouterr()
    told = f"Trained, not evaluated: {message.rstrip('.')}. The model and its statement are in run/release."
    assert f"sparsedp: error: {told}" in err.splitlines()
    assert "sparsedp evaluate run --code tiny.yaml" in out and "diverged" not in out
    assert json.loads(Path("run/release/statement.json").read_text())["steps"] == STEPS
    assert result()["evaluation"] == f"failed: {message}" and "auc" not in result()
    failed = [row["step"] for row in rows() if row["kind"] == "failed_evaluation"]
    assert failed == ([STEPS] if every == "null" else [2, 4, STEPS])
    assert main(["evaluate", "run", "--code", "tiny.yaml"]) == 2
    assert message in capsys.readouterr().err
    # With mended data: --set, or in a file of the same name.
    assert main(["evaluate", "run", "--code", "tiny.yaml", "--set", "data.options.wrong=null", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert result()["evaluation"] == f"failed: {message}", "other data are not the run's own"
    Path("folder_mine.py").write_text(
        CODE.replace('float("nan")', "0").replace("= 99", "= 0").replace('float("inf")', "1")
    )
    sys.modules.pop("folder_mine")
    arguments = ["--code", "tiny.yaml", "--trust", "folder_mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **options: None)
        assert main(["evaluate", "run", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "AUC, held out" in out and "privacy epsilon = " in out and "after step 6" in out
    assert result()["evaluation"] == "done" and 0 < result()["auc"] <= 1 and result()["steps"] == STEPS
    assert other["step"] == STEPS and [row["kind"] for row in rows()][-2:] == ["evaluate", "evaluate"]


def test_an_empty_held_out_part_is_refused_before_anything_is_spent(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("data.options.wrong=empty") == 2
    assert "returned an empty held-out set" in capsys.readouterr().err
    assert not Path("run").exists()


def test_diverged_weights_are_still_called_so() -> None:
    from sparsedp.cli.evaluation import DivergedError, evaluate
    from sparsedp.cli.prepare import load_data, make_model

    config = load_config("tiny.yaml")
    data = load_data(config)
    model = make_model(config, data.training)
    with torch.no_grad():
        model.get_parameter("out.bias").fill_(float("nan"))
    with pytest.raises(DivergedError, match="the weights have diverged"):
        evaluate(config, model, config.make_loss(), data)
    with torch.no_grad():
        model.get_parameter("out.bias").fill_(3e38)
        model.get_parameter("out.weight").fill_(3e38)
    with pytest.raises(DivergedError, match="the model's outputs are too large"):
        evaluate(config, model, config.make_loss(), data)


def test_rows_are_named_within_periods_and_subsets() -> None:
    """The row is that of the whole held-out set, whatever part is evaluated."""
    import numpy as np
    from torch.utils.data import Subset

    from sparsedp.cli.evaluation import EvaluationError, evaluate_on
    from sparsedp.cli.prepare import load_data, make_model

    config = load_config("tiny.yaml", ["data.options.wrong=label", "data.options.row=20"])
    data = load_data(config)
    model = make_model(config, data.training)
    with pytest.raises(EvaluationError, match="held-out rows 20, 23"):
        evaluate_on(config, model, config.make_loss(), data.held_out, data.collate, np.arange(30) // 15)
    with pytest.raises(EvaluationError, match="held-out row 23"):
        part = Subset(data.held_out, range(21, 30))
        evaluate_on(config, model, config.make_loss(), part, data.collate)


def test_evaluate_takes_the_checkpoint_of_an_unfinished_run(capsys: pytest.CaptureFixture[str]) -> None:
    stopped_run()
    assert main(["evaluate", "run", "--code", "tiny.yaml"]) == 0
    assert "the run is not finished" in " ".join(capsys.readouterr().out.split())
    assert rows()[-1]["kind"] == "evaluate" and rows()[-1]["step"] == 3
    for change, words in (
        ("optimizer.lr=1", "another optimizer.lr"),
        ("privacy.noise_multiplier=2", "another privacy"),
    ):
        assert main(["evaluate", "run", "--code", "tiny.yaml", "--set", change]) == 2
        assert words in capsys.readouterr().err
    Path("run/private/checkpoint.pt").unlink()
    assert main(["evaluate", "run", "--code", "tiny.yaml"]) == 2
    assert "has no model yet" in capsys.readouterr().err


def test_evaluate_agrees_with_the_run() -> None:
    assert train() == 0
    before = result()
    assert main(["evaluate", "run", "--code", "tiny.yaml", "--quiet"]) == 0
    assert result() == before


def test_nothing_held_out(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["data={kind: generated, rows: 500, scale: 0.01, held_out: 0}", "model={kind: pctr, hidden: 4}"]
    assert train(*config) == 0
    assert result()["evaluation"] == "nothing is held out"
    assert main(["evaluate", "run"]) == 2
    assert "nothing to evaluate on" in capsys.readouterr().err


# ------------------------------------------------------------------ signals


def test_signals_one_two_three() -> None:
    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with stop_on_signals() as asked:
        assert not asked()
        send()
        assert asked()
        ended = False
        with pytest.raises(KeyboardInterrupt), asked.held():
            send()  # waits for the end of the block
            ended = True
        assert ended
        with pytest.raises(KeyboardInterrupt), asked.held():
            send()  # the third does not
            raise AssertionError
    with stop_on_signals() as asked, asked.at_once(), pytest.raises(KeyboardInterrupt):
        send()
        raise AssertionError
    with stop_on_signals() as asked, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError


@pytest.mark.parametrize("at", ["evaluate", "forward", "save_checkpoint"])
def test_ctrl_c_twice(at: str, capsys: pytest.CaptureFixture[str]) -> None:
    """During the last evaluation, in the middle of a step, while the checkpoint is written: nothing is lost."""
    import sparsedp.cli.loop as loop
    import sparsedp.cli.scheduled_evaluation as scheduled_evaluation
    from sparsedp.engine import PrivacyEngine

    owner = {"evaluate": scheduled_evaluation, "forward": loop, "save_checkpoint": PrivacyEngine}[at]
    original, calls = getattr(owner, at), 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (3 if at == "forward" else 1):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, at, interrupted)
        assert train("training.checkpoint_every=4", "training.seed=3") == 130
    out, err = capsys.readouterr()
    told = " ".join((out + err).split())
    if at == "evaluate":
        assert "Trained, not evaluated: interrupted" in told and "sparsedp evaluate run --code tiny.yaml" in told
        assert Path("run/release/statement.json").is_file()
    else:
        step = {"forward": 2, "save_checkpoint": 4}[at]
        assert f"The checkpoint after step {step} of 6 is written. Go on with: sparsedp train --resume run" in told
        state = torch.load("run/private/checkpoint.pt", weights_only=True)
        assert state["loader"]["step"] == step
    assert main(["train", "--resume", "run", "--code", "tiny.yaml", "--quiet"]) == 0
    assert result()["evaluation"] == "done"
    shutil.move("run", "interrupted")
    assert train("training.checkpoint_every=4", "training.seed=3") == 0
    models = [torch.load(f"{name}/release/model.pt", weights_only=True) for name in ("run", "interrupted")]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_checkpoints_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            clock[0] += 1  # a second from one look to the next
            return clock[0]

    def saves(*changes: str) -> list[int]:
        shutil.rmtree("run", ignore_errors=True)
        found: list[int] = []
        original = training.Training.save
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "time", Clock)
            patch.setattr(training.Training, "save", lambda self: found.append(self.step) or original(self))
            assert train(*changes) == 0
        return found

    assert saves("training.checkpoint_minutes=1") == [STEPS]
    early = saves("training.checkpoint_minutes=0.001")
    assert early == list(range(1, STEPS + 1))
    assert saves("training.checkpoint_minutes=null", "training.checkpoint_every=null") == [STEPS]
    assert saves("training.checkpoint_minutes=null", "training.checkpoint_every=4") == [4, STEPS]


# ------------------------------------------------------------------ locks

HOLD = """
import sys, time
from pathlib import Path
from sparsedp.cli.files import locked
with locked(Path("run/private")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_commands_do_not_work_in_one_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl")
    stopped_run()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    for argv in (
        ["train", "--resume", "run", "--code", "tiny.yaml"],
        ["evaluate", "run", "--code", "tiny.yaml"],
        ["export", "run"],
    ):
        assert main(argv) == 2
        assert "Another sparsedp command is at work in run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    other.kill()  # what a dead process held does not block
    other.wait()
    assert main(["train", "--resume", "run", "--code", "tiny.yaml", "--quiet"]) == 0


def test_two_new_runs_do_not_share_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl")
    with locked(Path("run/private")):  # of a run that is just being made
        assert train() == 2
    assert "Another sparsedp command is at work in run" in capsys.readouterr().err
    assert train() == 0, "a folder that a run only began to make is as good as new"
    assert train() == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_worker_does_not_hold_the_lock_of_a_killed_run() -> None:
    pytest.importorskip("fcntl")
    ready, tell = os.pipe()
    wait, release = os.pipe()
    run = os.fork()
    if run == 0:
        with locked(Path("here")):
            if os.fork() == 0:
                os.close(release)
                os.write(tell, b"x")
                os.read(wait, 1)  # until the test has ended
                os._exit(0)
            time.sleep(60)
            os._exit(0)
    os.read(ready, 1)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    with locked(Path("here")):  # its worker is still there
        os.close(release)


# ------------------------------------------------------------------ a full disk


Usage = namedtuple("Usage", "total used free")


def with_free(patch: pytest.MonkeyPatch, *sizes: int) -> None:
    """The disk has so many bytes left, at one look after another."""
    left = list(sizes)
    patch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, left.pop(0) if len(left) > 1 else left[0]))


def test_a_disk_that_is_too_full_is_noticed_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_free(patch, 500_000)
        assert train() == 2
    err = capsys.readouterr().err
    assert "is too full for the checkpoints of this run and its weights: 1.0 MB are needed, 500 kB are free" in err
    assert "--run-dir" in err and err.count("\n") == 1 and not Path("run").exists()


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for full_at, step in ((3, 2), (5, 6)):  # at the second checkpoint, and at the weights
        with pytest.MonkeyPatch.context() as patch:
            with_free(patch, *[10**9] * (full_at - 1), 1000)
            assert train("training.checkpoint_every=2") == 2
        err = capsys.readouterr().err
        assert (
            "are needed, 1 kB are free. Make room." in err
            and f"The checkpoint after step {step} of 6 is written" in err
        )
        assert not Path("run/release/statement.json").exists() and not Path("run/release/model.pt").exists()
        assert {path.name for path in Path("run").rglob(".*")} == {".lock"}
        assert main(["train", "--resume", "run", "--code", "tiny.yaml", "--quiet"]) == 0
        shutil.rmtree("run")


def test_a_real_full_disk(tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk: a write ends in the middle."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(path, lambda file: file.write(b"x" * 200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.glob("*file*")] == ["file"]
    assert (in_units(500), in_units(2_500_000), in_units(3 * 10**9)) == ("0 kB", "2.5 MB", "3.0 GB")


# ------------------------------------------------------------------ what may leave


def test_export_copies_what_may_leave_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    Path("run/release/notes.txt").write_text("clipped 17 of 60")
    capsys.readouterr()
    assert main(["export", "run", "--to", "out/there"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Privacy statement: epsilon = ") and "Not copied, because no run writes it: notes.txt" in out
    names = {"config.yaml", "plan.json", "environment.json", "model.pt", "statement.json", "statement.txt"}
    assert {path.name for path in Path("out/there").iterdir()} == names and len(list(Path("out").iterdir())) == 1
    assert torch.load("out/there/model.pt", weights_only=True).keys() == {"table.weight", "out.weight", "out.bias"}
    assert main(["export", "run", "--to", "out/there"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["export", "run"]) == 0 and Path("run-release/model.pt").is_file()


def test_export_refuses_what_is_not_finished_or_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(words: str, *more: str) -> None:
        assert main(["export", "run", "--to", "out", *more]) == 2
        assert words in capsys.readouterr().err and not Path("out").exists()

    refused("not the folder of a run")
    stopped_run()
    refused("is not finished")
    for change, words in (
        ("training.seed=1", "its noise was seeded"),
        ("privacy.noise_multiplier=0", "epsilon is infinite"),
    ):
        shutil.rmtree("run")
        assert train(change) == 0
        refused(words)
        assert main(["export", "run", "--to", "out", "--without-guarantee"]) == 0
        shutil.rmtree("out")
    secret = Path("run/private/metrics.jsonl").absolute()
    Path("run/release/plan.json").unlink()
    Path("run/release/plan.json").symlink_to(secret)
    refused("is a link", "--without-guarantee")


def test_the_two_parts_of_the_folder() -> None:
    """No exact count, metric, path or seed is in what may leave, or in the checkpoint's plain values."""
    Path("log.tsv").write_text("x")
    config = {**yaml.safe_load(CONFIG), "training": {**yaml.safe_load(CONFIG)["training"], "seed": 918273}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    assert train("data.options={row: 11, wrong: null}", "training.evaluate_every=2") == 0
    assert "PRIVATE: not for release." in Path("run/private/README.txt").read_text()
    assert "not for release" in Path("run/private/totals.json").read_text()
    released = {path.name: path.read_text() for path in Path("run/release").iterdir() if path.suffix != ".pt"}
    kept = yaml.safe_load(released["config.yaml"])
    assert "options" not in kept["data"] and not {"seed", "init_seed"} & set(kept["training"])
    assert released["config.yaml"].startswith(
        "# Left out, as it is about the data, the machine or the randomness: data.options, training.seed"
    )
    known = [row for row in rows() if row["kind"] == "step"]
    secrets = {"918273", str(Path.cwd()), *(repr(row[key]) for row in known for key in ("loss", "mean_norm"))}
    secrets |= {str(result()[key]) for key in ("auc", "log_loss", "clipped_share", "rows_touched_per_step")}
    for name, text in released.items():
        assert not [secret for secret in secrets if secret in text], name
    checkpoint = torch.load("run/private/checkpoint.pt", weights_only=True)
    assert set(checkpoint["extra"]) == {"scheduler", "negatives"}


def test_paths_of_data_stay_private(tmp_path: Path) -> None:
    from sparsedp.data import generated_click_log, write_click_log

    write_click_log(generated_click_log(300, scale=0.01), "secret_log.tsv")
    data = "data={kind: clicklog, paths: secret_log.tsv, cache_dir: cache, vocabulary: {kind: hash, buckets: 20}}"
    assert train(data, "model={kind: pctr, hidden: 4}") == 0
    assert "secret_log" in Path("run/private/config.yaml").read_text()
    text = Path("run/release/config.yaml").read_text()
    assert "secret_log" not in text and str(tmp_path) not in text and "buckets: 20" in text
    assert "PRIVATE" in Path("cache/README.txt").read_text()


def test_a_folder_without_the_configuration_of_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "checkpoint.pt"):
        Path("run", name).touch()
    for argv in (["train", "--resume", "run"], ["evaluate", "run"], ["export", "run"]):
        assert main(argv) == 2
        assert "run is not the folder of a run: it has no private/config.yaml" in capsys.readouterr().err


def test_a_resumed_run_that_is_not_finished_takes_its_release_back() -> None:
    """As after an older checkpoint was put in place: the statement must not speak of other weights."""
    stopped_run()
    shutil.copytree("run/private", "older")
    assert main(["train", "--resume", "run", "--code", "tiny.yaml", "--quiet"]) == 0
    shutil.rmtree("run/private")
    shutil.move("older", "run/private")
    config = load_config("tiny.yaml")
    run_training(config, Path("run"), resume=True, should_stop=lambda step: step == 4)
    assert not (Path("run/release") / "statement.json").exists() and not Path("run/release/model.pt").exists()


def test_requests_count_from_nothing() -> None:
    assert not StopRequests()() and time.monotonic() > 0
    with pytest.raises(SparseDPError, match="has nothing about step 9"):
        from sparsedp.cli.runfolder import RunFolder

        RunFolder(Path("nowhere")).read_totals(9)
