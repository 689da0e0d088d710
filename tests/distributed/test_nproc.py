"""`sparsedp train` in several processes: the run of one process, whoever starts them, and whatever ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
import commands
import torch
from launch import launch

pytestmark = pytest.mark.distributed

CONFIG = """
data: {kind: generated, rows: 3000, scale: 0.001, skew: 0.5}
model: {kind: pctr, hidden: 8, hidden_layers: 1, dim: 8}
optimizer: {name: SGD, lr: 0.05}
training: {epochs: 2, batch_size: 256, threads: 1, seed: 1, log_every: 5, evaluate_every: 7, check: false}
privacy: {noise_multiplier: 1.0, target_delta: 1.0e-5, max_grad_norm: 1.0, mechanism: {name: adafest, threshold: 2.0, noise_ratio: 2.0}}
"""
SEQUENCES = """
data: {kind: generated_sequences, users: 300, items: 60, length: 10, structure: 0.9}
model: {kind: gru, dim: 8, dropout: 0.0}
loss: sampled_softmax
optimizer: {name: SGD, lr: 0.05}
training: {epochs: 1, batch_size: 60, threads: 1, seed: 1, negatives: 5, check: false}
privacy: {noise_multiplier: 1.0, target_delta: 1.0e-4, max_grad_norm: 1.0, mechanism: lazydp}
"""
TIMELINES = """
data: {kind: generated_timelines, users: 300, items: 60, context: 10}
model: {kind: dual, dim: 8, hidden: [8], tied: true}
loss: sampled_softmax
optimizer: {name: SGD, lr: 0.05}
training: {epochs: 1, batch_size: 60, threads: 1, seed: 1, negatives: 5, check: false}
privacy: {noise_multiplier: 1.0, target_delta: 1.0e-4, max_grad_norm: 1.0, mechanism: dpsgd, unit: user}
"""
# A click model with bags of ids, a learning rate that can be awaited, and rows that can be spoilt.
OWN = """
import os, time
import numpy as np, torch
from torch import nn
from torch.utils.data import Dataset

class Clicks(Dataset):
    def __init__(self, spoilt=None, slow=False, killed=None, number=9):
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 40, (600, 3), generator=draw)
        self.labels = (torch.rand(600, generator=draw) < 0.4).float()
        if spoilt is not None:
            self.labels[spoilt] = float("nan")
        self.slow, self.killed, self.number, self.read = slow, killed, number, 0
    def __len__(self):
        return 600
    def __getitem__(self, i):
        self.read += 1
        if self.slow:
            time.sleep(0.002)
        if self.killed is not None and self.read == 400 and os.environ.get("RANK") == str(self.killed):
            os.kill(os.getpid(), self.number)
        return self.ids[i], self.labels[i]

def clicks(**options):
    return Clicks(**options), Clicks()

class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 8, mode="mean", padding_idx=0)
        self.again = nn.Embedding(40, 8)
        self.again.weight = self.bag.weight
        self.other = nn.Embedding(40, 4)
        self.over = nn.Linear(20, 1)
    def forward(self, ids):
        parts = [self.bag(ids), self.again(ids[:, 0]), self.other(ids[:, 1])]
        return self.over(torch.cat(parts, 1)).squeeze(1)

def bags(training):
    return Bags()
"""
OF_OWN = """
data: {kind: "own:clicks"}
model: {kind: "own:bags"}
optimizer: {name: SGD, lr: 0.05}
training: {epochs: 3, batch_size: 60, threads: 1, seed: 1, log_every: 1, check: false}
privacy: {noise_multiplier: 1.0, target_delta: 1.0e-4, max_grad_norm: 1.0, mechanism: {name: lazydp, aggregate: false}}
"""
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
COMMAND = (sys.executable, "-m", "sparsedp")
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sparsedp",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    return tmp_path


def write_configs(folder: Path) -> None:
    for name, text in {"clicks": CONFIG, "sequences": SEQUENCES, "timelines": TIMELINES, "mine": OF_OWN}.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "own.py").write_text(OWN)


def sparsedp(
    *arguments: str, command: tuple[str, ...] = (), code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How the command ended: without a `command` to start it, in processes that are forked from a warm one."""
    if command or variables:
        done = subprocess.run(
            [*(command or COMMAND), *arguments],
            env=ENVIRONMENT | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
    else:
        done = commands.run(ENVIRONMENT, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def weights(run: Path | str) -> dict[str, torch.Tensor]:
    return torch.load(Path(run) / "release" / "model.pt", weights_only=True)


def lines(run: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "private" / "metrics.jsonl").read_text().splitlines()]


def statement(run: Path | str) -> str:
    """Without the sentences on what travels between processes, and on the checkpoints that a run went on from."""
    text = (Path(run) / "release" / "statement.txt").read_text()
    said = ("between the processes", "this run went on from")
    return "\n".join(line for line in text.splitlines() if not any(words in line for words in said))


def nearly(one: Any, other: Any) -> bool:
    """Whether two metrics, or those of several periods, are the same but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nearly(one[key], other[key]) for key in one)
    return bool(other == (pytest.approx(one, rel=1e-4, abs=1e-5) if isinstance(one, float) else one))


def require_alike(one: Path | str, several: Path | str) -> None:
    """The same keys and weights, the same statement and plan, the same metrics, and counts to the last row."""
    expected, reached = weights(one), weights(several)
    assert list(expected) == list(reached)
    for name, tensor in expected.items():
        assert tensor.dtype == reached[name].dtype and tensor.shape == reached[name].shape
        assert (tensor - reached[name]).abs().max() <= 1e-6, name
    assert statement(one) == statement(several)
    assert (Path(one) / "release" / "plan.json").read_bytes() == (Path(several) / "release" / "plan.json").read_bytes()
    for mine, other in zip(lines(one), lines(several), strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"seconds"}:
            assert nearly(mine[name], other[name]), (mine["step"], name)


@cache
def one_process(folder: Path, name: str, *arguments: str) -> Path:
    """The run of one process, in a folder of its own."""
    write_configs(folder)
    run = folder / f"{name}-{abs(hash(arguments))}"
    sparsedp("train", str(folder / f"{name}.yaml"), "--run-dir", str(run), "--quiet", *arguments)
    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_the_run_of_one_process(here: Path, shared: Path, sharding: str) -> None:
    one = one_process(shared, "clicks")
    sparsedp("train", "clicks.yaml", "--nproc", "2", "--run-dir", "two", "--set", f"distributed.sharding={sharding}")
    require_alike(one, "two")
    metrics = lines("two")
    assert [row["step"] for row in metrics if row["kind"] == "evaluation"] == [7, 14, 21, 22]
    assert {"checkpoint", "metrics.jsonl"} <= {path.name for path in Path("two/private").iterdir()}
    assert not any(path.name.startswith(".") for path in Path("two/release").iterdir())


def test_the_kinds_of_a_plan_table_by_table(here: Path, shared: Path) -> None:
    kinds = ["row_wise", "table_wise 1", "column_wise 1 0", "data_parallel", "table_wise 0"]
    tables = {f"tables.{at}.weight": kinds[at % len(kinds)] for at in range(26)}
    one = one_process(shared, "clicks")
    planned = ("--set", "distributed.sharding=planned", "--set", f"distributed.tables={json.dumps(tables)}")
    sparsedp("train", "clicks.yaml", "--nproc", "2", "--run-dir", "two", *planned)
    require_alike(one, "two")
    refused = sparsedp(
        "train", "--resume", "two", "--nproc", "2", "--set", "distributed.tables={bags.weight: row_wise}", code=2
    )
    assert "'bags.weight' is no table of the model" in refused.stderr


@pytest.mark.parametrize(
    "changes",
    [
        ("training.max_physical_batch=100", "privacy.mechanism={name: fest, k: 30, epsilon: 1.0, delta: 1e-6}"),
        ("data.days=3", "stream.composition=parallel", "stream.evaluate_next=true", "data.held_out=[2]"),
        ("data.users=500", "privacy.unit=user", "training.batch_size=64", "privacy.mechanism=eana"),
    ],
    ids=["physical batches, FEST", "stream", "users"],
)
def test_batches_streams_and_users(here: Path, shared: Path, changes: tuple[str, ...]) -> None:
    arguments = [f"--set={change}" for change in changes]
    one = one_process(shared, "clicks", *arguments)
    sparsedp("train", "clicks.yaml", "--nproc", "2", "--run-dir", "two", *arguments)
    require_alike(one, "two")


def test_without_torchrec(here: Path) -> None:
    """It is needed where tables are divided, and what is said then is what to install."""
    (here / "torchrec.py").write_text("raise ImportError('not here')")
    (here / "fbgemm_gpu.py").write_text("raise ModuleNotFoundError('not here')")
    arguments = ["train", "clicks.yaml", "--nproc", "2", "--run-dir", "run", "--set", "training.epochs=1", "--quiet"]
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    done = sparsedp(*arguments, code=2, PYTHONPATH=path)
    (line,) = done.stderr.splitlines()
    assert "pip install --no-deps" in line
    sparsedp(*arguments, "--set", "distributed.sharding=data_parallel", PYTHONPATH=path)


def test_torchrun_does_the_same_and_one_process_speaks(here: Path, shared: Path) -> None:
    one = one_process(shared, "mine")
    done = sparsedp("train", "mine.yaml", "--run-dir", "two", command=TORCHRUN)
    require_alike(one, "two")
    assert done.stdout.count("Run folder: two") == done.stdout.count("Privacy statement") == 1
    done = sparsedp("train", "mine.yaml", "--nproc", "3", "--run-dir", "three", "--json")
    require_alike(one, "three")
    assert json.loads(done.stdout)["finished"]
    weights_of_bag = weights("three")
    assert torch.equal(weights_of_bag["bag.weight"], weights_of_bag["again.weight"])


@pytest.mark.parametrize("name", ["sequences", "timelines"])
def test_sequences_and_dual_encoders(here: Path, shared: Path, name: str) -> None:
    """Negatives and labels are drawn on each rank by itself, so that the model is another one, of the same law."""
    one = one_process(shared, name)
    sparsedp("train", f"{name}.yaml", "--nproc", "2", "--run-dir", "two")
    expected, reached = weights(one), weights("two")
    assert list(expected) == list(reached) and statement(one) == statement("two")
    found, again = (json.loads(Path(run, "private/result.json").read_text()) for run in (one, "two"))
    assert found["evaluation"] == again["evaluation"] == "done" and found["steps"] == again["steps"]
    assert again["popularity_ndcg@10"] == found["popularity_ndcg@10"]
    evaluated = json.loads(sparsedp("evaluate", "two", "--json").stdout)  # in one process
    assert evaluated["ndcg@10"] == pytest.approx(again["ndcg@10"], abs=1e-9)


def stop_when(
    run: str, happens: Callable[[], bool], number: int, *arguments: str, started: list[int] | None = None
) -> tuple[int, str]:
    """Starts a run, sends it a signal when something has happened, and waits for its end: (code, what it said)."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--run-dir", run], env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if started is not None:
        started.append(process.pid)
    try:
        for _ in range(3000):
            with contextlib.suppress(OSError, ValueError):
                if happens():
                    break
            time.sleep(0.05)
        process.send_signal(number)
        said, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, said


def test_ctrl_c_and_going_on_with_other_processes(here: Path, shared: Path) -> None:
    """Two ranks by rows, stopped by Ctrl-C; three by tables; one process: as if one had taken all steps."""
    one = one_process(shared, "mine")
    slow = ["train", "mine.yaml", "--nproc", "2", "--set", "data.options={slow: true}"]
    code, said = stop_when("parts", lambda: len(lines("parts")) >= 4, signal.SIGINT, *slow)
    assert code == 130 and said.count("stopping after this step") == 1, said
    assert "Go on with:\n  sparsedp train --resume parts" in said and "Traceback" not in said
    evaluated = json.loads(sparsedp("evaluate", "parts", "--code", "mine.yaml", "--json").stdout)
    assert evaluated["step"] == len([row for row in lines("parts") if row["kind"] == "step"]) and "auc" in evaluated
    refused = sparsedp("export", "parts", code=2)
    assert "is not finished" in refused.stderr
    sparsedp(
        "train", "--resume", "parts", "--code", "mine.yaml", "--nproc", "3",
        "--set", "distributed.sharding=table_wise", "--set", "training.evaluate_every=1000",
    )  # fmt: skip
    expected, reached = weights(one), weights("parts")
    assert all((expected[name] - reached[name]).abs().max() <= 1e-6 for name in expected)
    assert [row["step"] for row in lines("parts") if row["kind"] == "step"] == list(range(1, 31))


def test_one_process_goes_on_with_a_run_of_two_and_two_with_that_of_one(here: Path, shared: Path) -> None:
    one = one_process(shared, "mine")
    slow = ["train", "mine.yaml", "--set", "data.options={slow: true}"]
    assert stop_when("a", lambda: len(lines("a")) >= 4, signal.SIGTERM, *slow, "--nproc", "2")[0] == 130
    assert stop_when("b", lambda: len(lines("b")) >= 4, signal.SIGTERM, *slow)[0] == 130
    assert Path("a/private/checkpoint/state.pt").is_file() and Path("b/private/checkpoint.pt").is_file()
    sparsedp("train", "--resume", "a", "--code", "mine.yaml")
    sparsedp("train", "--resume", "b", "--code", "mine.yaml", "--nproc", "2")
    assert not Path("a/private/checkpoint").exists() and not Path("b/private/checkpoint.pt").exists()
    for run in ("a", "b"):
        assert all((tensor - weights(run)[name]).abs().max() <= 1e-6 for name, tensor in weights(one).items())
        assert statement(run) == statement(one)
    sparsedp("export", "a", "--without-guarantee", "--to", "c")
    assert list(torch.load("c/model.pt", weights_only=True)) == list(weights(one))


def test_one_rank_that_is_asked_to_stop_stops_all(here: Path, shared: Path) -> None:
    one = one_process(shared, "mine")
    done = sparsedp(
        "train",
        "mine.yaml",
        "--nproc",
        "2",
        "--run-dir",
        "run",
        "--set",
        "data.options={killed: 1, number: 15}",
        code=130,
    )
    assert "Go on with:" in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert len([row for row in lines("run") if row["kind"] == "step"]) < 30
    Path("own.py").write_text(OWN.replace("os.kill(os.getpid(), self.number)", "pass"))
    sparsedp("train", "--resume", "run", "--trust", "own", "--nproc", "2")
    assert all((tensor - weights("run")[name]).abs().max() <= 1e-6 for name, tensor in weights(one).items())


def started_by(launcher: int) -> list[str]:
    """The processes that `--nproc` started, by the variable that it gave them."""
    mark, found = f"SPARSEDP_STARTED={launcher}\0".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes():
                found.append(place.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ranks_whose_launcher_is_killed_save_and_end(here: Path, shared: Path) -> None:
    one = one_process(shared, "mine")
    slow = ["train", "mine.yaml", "--nproc", "2", "--set", "data.options={slow: true}"]
    launchers: list[int] = []
    code, _ = stop_when("run", lambda: len(lines("run")) >= 4, signal.SIGKILL, *slow, started=launchers)
    assert code == -9
    end = time.monotonic() + 200
    while started_by(launchers[0]):
        assert time.monotonic() < end, "ranks go on without the one that started them"
        time.sleep(0.1)
    steps = len([row for row in lines("run") if row["kind"] == "step"])
    assert 0 < steps < 30 and Path("run/private/checkpoint/state.pt").is_file()
    sparsedp("train", "--resume", "run", "--code", "mine.yaml")
    assert all((tensor - weights("run")[name]).abs().max() <= 1e-6 for name, tensor in weights(one).items())


def test_an_error_on_one_rank_stops_all_with_one_message(here: Path) -> None:
    done = sparsedp(
        "train", "mine.yaml", "--nproc", "2", "--run-dir", "run", "--set", "data.options={spoilt: 17}", code=2
    )
    assert done.stderr.count("error:") == 1 and "NaN" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("Go on with:") == 1


def test_a_killed_rank_is_named_and_the_run_goes_on(here: Path) -> None:
    killed = [
        "--set",
        "data.options={killed: 1}",
        "--set",
        "training.checkpoint_every=2",
        "--set",
        "training.seed=null",
    ]
    done = sparsedp("train", "mine.yaml", "--nproc", "2", "--run-dir", "run", *killed, code=2)
    assert done.stderr.count("error:") == 1 and "Rank(s) 1 of 2 did not answer" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    Path("own.py").write_text(OWN.replace("os.kill(os.getpid(), self.number)", "pass"))
    sparsedp("train", "--resume", "run", "--trust", "own", "--quiet")
    assert "steps" in json.loads(Path("run/release/statement.json").read_text())
    assert json.loads(Path("run/private/result.json").read_text())["steps"] == 30


@pytest.mark.parametrize("killed", [1, 0])
def test_a_rank_that_is_killed_under_torchrun(here: Path, killed: int) -> None:
    """The other one says which, in one line; torchrun says by what; the last checkpoint is whole."""
    changes = (f"data.options={{killed: {killed}}}", "training.checkpoint_every=2", "distributed.rank_timeout=5")
    given = [argument for change in changes for argument in ("--set", change)]
    done = sparsedp("train", "mine.yaml", "--run-dir", "run", *given, command=TORCHRUN, code=1)
    assert done.stderr.count("sparsedp: error:") == 1, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("sparsedp: error:")]
    assert f"Rank(s) {killed} of 2 did not answer" in said and "The last checkpoint is whole" in said
    assert "(SIGKILL)" in done.stderr and f"rank      : {killed} (" in done.stderr, "torchrun's own summary"
    assert "torch.distributed.elastic" in done.stderr and "sparsedp/distributed" not in done.stderr, (
        "no traceback of ours"
    )
    Path("own.py").write_text(OWN.replace("os.kill(os.getpid(), self.number)", "pass"))
    sparsedp("train", "--resume", "run", "--trust", "own", "--quiet")
    assert json.loads(Path("run/private/result.json").read_text())["steps"] == 30


def test_ranks_with_other_configurations_are_refused_at_the_start(here: Path) -> None:
    """With a given noise multiplier the plan does not depend on these, and ranks would wait for each other in vain."""
    keys = {
        "training.epochs": 5, "training.evaluate_every": 3, "training.checkpoint_every": 2, "training.seed": 7,
        "distributed.sharding": "table_wise", "privacy.mechanism.aggregate": "true",
    }  # fmt: skip
    changes = {key: [f"{key}={value}"] for key, value in keys.items()}
    (here / "other.py").write_text(f"{OWN}# another commit\n")
    for ended in launch(2, "other_configurations", str(here / "mine.yaml"), changes, str(here / "other.py")):
        for key in keys:
            assert ended.value[key].startswith(f"ConfigError: {key}: ") and "on rank 1" in ended.value[key], (
                ended.value[key]
            )
        assert "3 on rank 0" in ended.value["training.epochs"]
        assert "the version of torch: 2.99.0 on rank 1" in ended.value["another torch"]
        assert "the file of own:clicks" in ended.value["other code"]
    assert not (here / "run").exists()


def test_a_check_that_has_no_room_ends_all_before_they_start(here: Path) -> None:
    """It is for the first process alone to do; as the other one would wait for it, it ends, too."""
    Path("own.py").write_text(f"{OWN}\nimport sparsedp.cli.run\nsparsedp.cli.run.memory_left = lambda: 1000\n")
    arguments = ("train", "mine.yaml", "--nproc", "2", "--run-dir", "run", "--set")
    done = sparsedp(*arguments, "training.check=true", command=COMMAND, code=2)
    (said,) = done.stderr.splitlines()
    assert "training.check" in said and "are free" in said and "--set training.check=false" in said
    assert not Path("run").exists()


def test_what_is_refused_in_one_line(here: Path) -> None:
    def refused(*arguments: str) -> str:
        done = sparsedp("train", *arguments, code=2)
        (line,) = [line for line in done.stderr.splitlines() if line]
        return line

    assert "model.dim" in refused("clicks.yaml", "--nproc", "2", "--set", "model.dim=6")
    assert "sampled_softmax" in refused(
        "sequences.yaml", "--nproc", "2", "--set", "loss=softmax", "--set", "training.negatives=null"
    )
    assert "lazydp settles" in refused("sequences.yaml", "--nproc", "2", "--set", "distributed.sharding=data_parallel")
    assert "row_wise or table_wise" in refused("clicks.yaml", "--nproc", "2", "--set", "distributed.sharding=rows")
    assert not Path("runs").exists()
    done = subprocess.run([*TORCHRUN, "evaluate", "run"], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode and done.stderr.count("evaluate runs in one process") == 1


def test_the_example_ends_with_the_same_model_in_one_process_and_in_two() -> None:
    """`torchrun examples/sharded.py`, as its first line says; on the batches, and so in what it prints."""
    example = Path(__file__).parents[2] / "examples" / "sharded.py"
    said = []
    for processes in ("1", "2"):
        command = [*TORCHRUN[:4], "--nproc-per-node", processes, str(example)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    one, two = ([line for line in text.splitlines() if "epoch" in line] for text in said)
    assert len(one) == len(two) == 3 and one == two
    assert all("seed" in text and "epsilon" in text for text in said)
    assert "between the processes" in said[1] and "between the processes" not in said[0]
