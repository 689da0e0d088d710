"""Faults at every stage of a run: whatever happens, the folder can be resumed, and the run ends as if nothing had happened."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsedp.cli.config.load
import sparsedp.cli.loop
import sparsedp.cli.run
import sparsedp.cli.scheduled_evaluation
import sparsedp.cli.training
from sparsedp.accounting.ledger import Ledger
from sparsedp.cli.main import main
from sparsedp.cli.result import RunResult
from sparsedp.cli.runfolder import RunFolder
from sparsedp.engine import PrivacyEngine
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.preparation import Preparation

CONFIG = """
data: {kind: 'faults_mine:data'}
model: {kind: 'faults_mine:Model'}
loss: faults_mine:loss
optimizer: {name: SGD, lr: 0.5, options: {momentum: 0.9}, scheduler: {kind: cosine, warmup: 2}}
training: {epochs: 2, batch_size: 20, max_physical_batch: 15, log_every: 1, evaluate_every: 3, checkpoint_every: 2,
           seed: 5, init_seed: 1, check: false, threads: 1}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0, mechanism: {name: MECHANISM}}
"""
STEPS = 6
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    ids = torch.arange(80) % 20
    return TensorDataset(ids[:60], (ids[:60] % 2).float()), TensorDataset(ids[60:], (ids[60:] % 2).float())

class Model(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(nn.functional.dropout(self.table(ids), 0.3, self.training)).squeeze(1)

def loss(output, target):
    return (output - target).square().mean()
"""


class Injected(Exception):
    pass


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def raise_error() -> None:
    raise Injected("injected")


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS: list[Callable[[], None]] = [raise_error, interrupt, full_disk]

# Where a fault comes: the owner of a function, its name, and which of its calls; "after" lets the call happen first.
STAGES: dict[str, tuple[Any, str, int, str]] = {
    "configuration": (sparsedp.cli.config.load, "read_values", 1, "before"),
    "data": (sparsedp.cli.run, "load_data", 1, "before"),
    "model": (sparsedp.cli.run, "make_model", 1, "before"),
    "make_private": (sparsedp.cli.run, "prepare", 1, "after"),
    "preparation": (sparsedp.cli.training, "release_frequencies", 1, "before"),
    "forward of the first step": (sparsedp.cli.loop, "forward", 1, "before"),
    "forward of a later step": (sparsedp.cli.loop, "forward", 7, "after"),
    "step": (PrivateOptimizer, "step", 8, "before"),
    "preparation within a step": (Preparation, "prepare", 3, "after"),
    "ledger": (Ledger, "record", 4, "after"),
    "update": (torch.optim.SGD, "step", 4, "before"),
    "after the update": (torch.optim.SGD, "step", 5, "after"),
    "after a step": (PrivateOptimizer, "step", 10, "after"),
    "log": (RunFolder, "log", 3, "before"),
    "first evaluation": (sparsedp.cli.scheduled_evaluation, "evaluate", 1, "before"),
    "last evaluation": (sparsedp.cli.scheduled_evaluation, "evaluate", 2, "before"),
    "checkpoint": (PrivacyEngine, "save_checkpoint", 2, "before"),
    "final checkpoint": (PrivacyEngine, "save_checkpoint", 3, "after"),
    "release": (RunFolder, "write_release", 1, "before"),
    "statement": (PrivacyEngine, "statement", 1, "before"),
    "result": (RunFolder, "write_result", 1, "before"),
    "last result": (RunFolder, "write_result", 2, "before"),
    "report": (RunResult, "table", 1, "before"),
}
# Every one of these calls is a place where a disk can fill up or a process can die.
FILE_OPERATIONS: dict[str, tuple[Any, str, str]] = {
    "write": (os, "fsync", "before"),
    "rename": (os, "replace", "before"),
    "renamed": (os, "replace", "after"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "faults_mine", raising=False)
    write_inputs("dpsgd")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run that nothing happened to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        patch.setattr(sys, "path", list(sys.path))
        write_inputs("dpsgd")
        assert train("whole") == 0
        folder = str(Path("whole").absolute())
    sys.modules.pop("faults_mine", None)
    yield folder


def write_inputs(mechanism: str) -> None:
    Path("faults_mine.py").write_text(CODE)
    Path("tiny.yaml").write_text(CONFIG.replace("MECHANISM", mechanism))


def train(folder: str) -> int:
    return main(["train", "tiny.yaml", "--run-dir", folder, "--quiet"])


def inject(
    patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, when: str, act: Callable[[], None]
) -> list[int]:
    """Lets `act` run at one call of a function; the list it returns has the number of calls so far."""
    original, calls = getattr(owner, name), [0]

    def faulty(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and when == "before":
            act()
        value = original(*args, **options)
        if calls[0] == call and when == "after":
            act()
        return value

    patch.setattr(owner, name, faulty)
    return calls


def state_of(folder: str) -> dict[str, Any]:
    return torch.load(Path(folder, "private/checkpoint.pt"), weights_only=True)


def require_sound(folder: str, killed: bool) -> None:
    """What must be true of a folder at any moment."""
    run = Path(folder)
    if not killed:
        assert {path.name for path in run.rglob(".*")} <= {".lock"}, "half-written files"
    if (run / "release/statement.json").exists() or (run / "release/statement.txt").exists():
        weights = torch.load(run / "release/model.pt", weights_only=True)
        assert all(torch.equal(value, state_of(folder)["model"][name]) for name, value in weights.items())
    if (run / "private/checkpoint.pt").exists():
        totals = json.loads((run / "private/totals.json").read_text())["after_step"]
        assert str(state_of(folder)["loader"]["step"]) in totals


def finish(folder: str) -> None:
    """Goes on with a run, or begins anew in the same folder if it had not got to be one."""
    if Path(folder, "private/config.yaml").exists():
        assert main(["train", "--resume", folder, "--code", "tiny.yaml", "--quiet"]) == 0
    else:
        assert train(folder) == 0


def require_same_end(folder: str, whole: str, log_failed: bool = False) -> None:
    """The run ended as the uninterrupted one did, and its ledger has every step once."""
    state, wanted = state_of(folder), state_of(whole)
    for name, value in wanted["model"].items():
        assert torch.equal(value, state["model"][name]), name
        assert torch.equal(value, torch.load(Path(folder, "release/model.pt"), weights_only=True)[name])
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    assert ledger.steps == STEPS
    assert json.loads(Path(folder, "release/statement.json").read_text())["steps"] == STEPS
    result = json.loads(Path(folder, "private/result.json").read_text())
    assert result["evaluation"] == "done" and result["steps"] == STEPS
    rows = [json.loads(line) for line in Path(folder, "private/metrics.jsonl").read_text().splitlines()]
    logged = [row["step"] for row in rows if row["kind"] == "step"]
    if not log_failed:
        assert logged == list(range(1, STEPS + 1))
        assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [3, 6]
    assert {path.name for path in Path(folder).rglob(".*")} == {".lock"}


def slow_unless(often: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(
    ("stage", "action"),
    [
        slow_unless((i + j) % 3 == 0, stage, action)
        for i, stage in enumerate(STAGES)
        for j, action in enumerate(ACTIONS)
    ],
)
def test_a_fault_at_a_stage(stage: str, action: Callable[[], None], whole: str) -> None:
    owner, name, call, when = STAGES[stage]
    with pytest.MonkeyPatch.context() as patch:
        calls = inject(patch, owner, name, call, when, action)
        code: int | None = None
        with suppress(Injected):
            code = train("run")
        assert calls[0] >= call, "the stage was not reached"
    if stage == "first evaluation" and action is not interrupt:
        assert code == 0, "a failed evaluation does not stop the training"
    elif stage == "last evaluation":
        assert code == (130 if action is interrupt else 3)
        assert Path("run/release/statement.json").exists()
    else:
        assert code == {raise_error: None, interrupt: 130, full_disk: 2}[action]
    require_sound("run", killed=False)
    if stage == "forward of a later step":
        assert state_of("run")["loader"]["step"] == 3, "what was trained since the last checkpoint is lost"
    finish("run")
    require_same_end("run", whole, log_failed=stage == "log" or (stage == "first evaluation" and code == 0))


@pytest.mark.parametrize(
    ("operation", "shift"),
    [slow_unless(name == "rename" and shift == 2, name, shift) for name in FILE_OPERATIONS for shift in range(3)],
)
def test_a_fault_at_every_file_operation(operation: str, shift: int, whole: str) -> None:
    """Generated: each write and rename of a run fails once, in turns with an error, an interrupt and a full disk."""
    owner, name, when = FILE_OPERATIONS[operation]
    for call in itertools.count(1):
        action, run = ACTIONS[(call + shift) % len(ACTIONS)], f"run-{call}"
        with pytest.MonkeyPatch.context() as patch:
            calls = inject(patch, owner, name, call, when, action)
            with suppress(Injected):
                train(run)
        if calls[0] < call:
            break
        require_sound(run, killed=False)
        finish(run)
        require_same_end(run, whole)
    assert call > 15


KILLED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import test_faults as faults
import pytest

assert faults.train("whole") == 0
for number, (owner, name, call, when) in enumerate(faults.kills()):
    child = os.fork()
    if child == 0:
        faults.inject(pytest.MonkeyPatch(), owner, name, call, when, faults.kill)
        try:
            faults.train(f"run-{number}")
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    print(number, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)
"""


def kills() -> list[tuple[Any, str, int, str]]:
    operations = [(owner, name, call, when) for owner, name, when in FILE_OPERATIONS.values() for call in range(1, 19)]
    return [*STAGES.values(), *operations]


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["dpsgd", "fest", "adafest"])
def test_kill_9_at_every_stage_and_file_operation(mechanism: str) -> None:
    require_kills(mechanism, slice(None))


@pytest.mark.slow
def test_kill_9() -> None:
    require_kills("dpsgd", slice(None, None, 8))


def require_kills(mechanism: str, chosen: slice) -> None:
    write_inputs(mechanism)
    tests = str(Path(__file__).parent)
    source = KILLED.replace("faults.kills()", f"faults.kills()[{chosen.start}:{chosen.stop}:{chosen.step}]")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tests).parents[1] / "src"), tests])}
    environment |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source, tests], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(killed) == len(kills()[chosen]) and sum(how == "9" for _, how in killed) > 0.8 * len(killed)
    for number, how in killed:
        run = f"run-{number}"
        require_sound(run, killed=True)
        if how == "9":
            finish(run)
        require_same_end(run, "whole", log_failed=True)
