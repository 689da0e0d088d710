"""What a run writes down and tells about itself: where it came from, its time, warnings, callbacks, the log, a report."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from documentation import DOCS
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main
from sparsedp.cli.provenance import file_digest, provenance
from sparsedp.cli.run import run_training
from sparsedp.cli.stopwatch import Stopwatch
from sparsedp.cli.warnings_of_run import WarningsOfRun
from sparsedp.errors import SparseDPWarning

CONFIG = """
data: {kind: 'telling_mine:data', options: {}}
model: {kind: 'telling_mine:Model'}
loss: binary_cross_entropy
optimizer: {name: SGD, lr: 0.5}
training: {epochs: 2, batch_size: 20, log_every: 1, check: false, threads: 1, init_seed: 1, evaluate_every: 2}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0, mechanism: {name: fest, k: 5, epsilon: 1.0}}
"""
STEPS, EPOCHS = 6, 2
CODE = """
import json
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(file=None):
    ids = torch.arange(90) % 20
    label = (ids % 2).float()
    return TensorDataset(ids[:60], label[:60]), TensorDataset(ids[60:], label[60:])

class Model(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.table(ids)).squeeze(1)

class Tracker:
    def __init__(self, config, run_dir):
        self.file = open(run_dir.parent / "told.jsonl", "a")
        self.tell("begin", config["training"]["epochs"], {"run": run_dir.name})

    def tell(self, what, number, values):
        self.file.write(json.dumps([what, number, values], allow_nan=False) + chr(10))
        self.file.flush()

    def on_step(self, step, values): self.tell("step", step, values)
    def on_epoch(self, epoch, values): self.tell("epoch", epoch, values)
    def on_end(self, values): self.tell("end", 0, values)

class Failing(Tracker):
    def on_step(self, step, values): raise OSError("no network")

class Unbuilt:
    def __init__(self, config, run_dir): raise RuntimeError("no server")

class Nothing:
    def __init__(self, config, run_dir): pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "telling_mine", raising=False)
    Path("tiny.yaml").write_text(CONFIG)
    Path("telling_mine.py").write_text(CODE)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train(*sets: str, to: str = "run") -> int:
    return main(["train", "tiny.yaml", "--run-dir", to, "--quiet", *(f"--set={one}" for one in sets)])


def told() -> list[Any]:
    return [json.loads(line) for line in Path("told.jsonl").read_text().splitlines()]


def test_a_callback_is_told_of_steps_epochs_evaluations_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("callbacks=['telling_mine:Tracker']") == 0
    steps = [(number, values) for what, number, values in told() if what == "step"]
    assert [n for n, values in steps if "private/units" in values] == list(range(1, STEPS + 1))
    assert [n for n, values in steps if "private/held_out/auc" in values] == [2, 4, 6]
    assert [n for what, n, _ in told() if what == "epoch"] == [1, 2]
    (what, _, end) = told()[-1]
    result = json.loads(Path("run/private/result.json").read_text())
    assert what == "end" and end["public/finished"] == 1 and end["public/steps"] == STEPS
    assert end["public/epsilon"] == pytest.approx(result["epsilon"])
    assert end["private/held_out/auc"] == pytest.approx(result["auc"])
    assert all(name.startswith(("public/", "private/")) for _, values in steps for name in values)
    assert {name for _, values in steps for name in values if name.startswith("public/")} == {
        "public/epsilon",
        "public/lr",
    }


def test_public_values_are_the_same_on_other_data() -> None:
    """One half of the data more or less, and their labels turned round: what is called public does not move."""
    config = load_config("tiny.yaml", ["callbacks=['telling_mine:Tracker']", "training.seed=1"])
    seen = []
    for name in ("a", "b"):
        if name == "b":
            Path("telling_mine.py").write_text(
                CODE.replace("ids = torch.arange(90) % 20", "ids = torch.arange(90) % 3 + 7")
            )
            sys.modules.pop("telling_mine")
            config = load_config("tiny.yaml", ["callbacks=['telling_mine:Tracker']", "training.seed=1"])
        Path("told.jsonl").unlink(missing_ok=True)
        run_training(config, Path(name))
        rows = [
            (what, n, {k: v for k, v in values.items() if k.startswith("public/")}) for what, n, values in told()[1:]
        ]
        others = [values for _, _, values in told() if values.get("private/loss") is not None]
        seen.append((rows, others))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


def test_a_callback_that_fails_takes_nothing_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("callbacks=['telling_mine:Failing', 'telling_mine:Tracker']") == 0
    error = capsys.readouterr().err
    assert error.count("telling_mine:Failing failed in on_step, and is not called again: no network") == 1
    assert sum(what == "end" for what, _, _ in told()) == 1
    assert json.loads(Path("run/private/result.json").read_text())["finished"]


TRACKERS = {  # by the class in docs/command-line.md: how a run begins, is told of a step, and ends
    "Mlflow": ("mlflow", "start_run", "log_metrics", "end_run"),
    "WandB": ("wandb", "init", "log", "finish"),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_the_documented_trackers_run(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand in the documentation, with a module in place of the tracker's that takes what the real one takes."""
    page = (DOCS / "command-line.md").read_text()
    blocks = [text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if f"class {tracker}:" in text]
    assert len(blocks) == 1 and f'callbacks: ["trackers:{tracker}"]' in blocks[0]
    Path("trackers.py").write_text(blocks[0])
    monkeypatch.delitem(sys.modules, "trackers", raising=False)
    package, begin, step, end = TRACKERS[tracker]
    calls: list[tuple[str, dict[str, Any]]] = []
    stub = types.ModuleType(package)
    setattr(
        stub, begin, lambda *, run_name=None, name=None, config=None: calls.append((begin, {"run": run_name or name}))
    )
    setattr(stub, step, lambda values, *, step: calls.append(("step", {"step": step, **values})))
    setattr(stub, end, lambda: calls.append((end, {})))
    monkeypatch.setitem(sys.modules, package, stub)
    assert train(f"callbacks=['trackers:{tracker}']") == 0
    assert calls[0] == (begin, {"run": "run"}) and calls[-1] == (end, {})
    told_of = [values for what, values in calls if what == "step"]
    assert {values["step"] for values in told_of} == set(range(1, STEPS + 1))
    assert all(isinstance(number, (int, float)) for values in told_of for number in values.values())
    assert "private/loss" in told_of[0] and "public/epsilon" in told_of[0]


def test_callbacks_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no server"):
        train("callbacks=['telling_mine:Unbuilt']")
    assert "Go on with:" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "--resume", "run", "--quiet", "--set=callbacks=['telling_mine:Tracker']"]) == 0
    assert train("callbacks=['telling_mine:Nothing']", to="two") == 2
    assert "has none of the methods on_step, on_epoch, on_end" in capsys.readouterr().err
    for names, words in (
        ("['telling_mine:absent']", "has no 'absent'"),
        ("['json:dumps']", "--trust json"),
        ("[tensorbord]", "callbacks"),
        ("tensorboard", "callbacks"),
    ):
        assert train(f"callbacks={names}", to=f"x{len(names)}") == 2
        assert words in capsys.readouterr().err


def test_an_interrupted_run_ends_its_callbacks_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    config = load_config("tiny.yaml", ["callbacks=['telling_mine:Tracker']"])
    run_training(config, Path("run"), should_stop=lambda step: step == 3)
    assert told()[-1][0] == "end" and told()[-1][2]["public/finished"] == 0 and told()[-1][2]["public/steps"] == 3
    Path("told.jsonl").unlink()
    run_training(config, Path("run"), resume=True)
    assert [n for what, n, values in told() if what == "step" and "private/units" in values] == [4, 5, 6]
    sessions = json.loads(Path("run/private/provenance.json").read_text())["sessions"]
    assert [(one["after_step"], one["last_step"]) for one in sessions] == [(0, 3), (3, 6)]


def test_tensorboard_has_every_value() -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train("callbacks=[tensorboard]") == 0
    reader = events.EventAccumulator("run/private/tensorboard")
    reader.Reload()
    epsilons = [(event.step, event.value) for event in reader.Scalars("public/epsilon")]
    rows = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "step" and row["loss"] is not None}
    assert {event.step: event.value for event in reader.Scalars("private/loss")} == pytest.approx(losses)
    assert {step for step, _ in epsilons} == set(range(1, STEPS + 1))
    assert [event.step for event in reader.Scalars("epochs/public/epsilon")] == [1, 2]


# ------------------------------------------------------------------ provenance, time, warnings, the log


def test_where_a_run_came_from_and_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("clicks.csv").write_bytes(b"1,2\n" * 100)
    assert train(f"data.options={{file: {tmp_path / 'clicks.csv'}}}") == 0
    made = json.loads(Path("run/private/provenance.json").read_text())
    (file,) = made["data"]["files"]
    assert (file["sha256"], file["bytes"]) == (hashlib.sha256(b"1,2\n" * 100).hexdigest(), 400)
    environment = json.loads(Path("run/release/environment.json").read_text())
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "clicks.csv" not in json.dumps(environment) and str(tmp_path) not in json.dumps(environment)
    result = json.loads(Path("run/private/result.json").read_text())
    parts = result["seconds_of_parts"]
    assert {
        "data",
        "plan",
        "batches",
        "forward",
        "backward",
        "optimizer",
        "noise",
        "update",
        "evaluation",
        "checkpoints",
    } <= set(parts)
    assert 0 < sum(parts.values()) <= result["seconds"] and result["peak_memory_bytes"] > 10**7
    capsys.readouterr()
    assert main(["report", "run"]) == 0
    page = Path("run/private/report.html").read_text()
    for words in (file["sha256"], "clicks.csv", "evaluations", "AUC, held out", "table.weight", "Epsilon spent"):
        assert words in page, words
    assert main(["report", "run", "--public"]) == 0
    assert "clicks.csv" not in Path("run/release/report.html").read_text()


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    config = load_config("tiny.yaml", [f"data.options={{file: {file}, more: [{tmp_path}/*.tsv, not/there.csv]}}"])
    seen = []
    for content in (b"1", b"2"):
        file.write_bytes(content)
        (tmp_path / "a.tsv").write_bytes(content * 3)
        seen.append([one["sha256"] for one in provenance(config)["data"]["files"]])
    assert len(seen[0]) == 2 and not set(seen[0]) & set(seen[1])


def test_files_of_folders_and_of_deep_patterns_have_digests(tmp_path: Path) -> None:
    for name in ("log/day=1/a.csv", "log/day=2/b.csv", "log/_SUCCESS", "cache/left.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def digested(*overrides: str) -> list[str]:
        config = load_config(
            "table", [f"data.cache_dir={tmp_path}/cache", "data.label=y", "data.categorical=[a]", *overrides]
        )
        return [Path(one["path"]).name for one in provenance(config)["data"]["files"]]

    assert digested(f"data.paths={tmp_path}/log") == ["a.csv", "b.csv"]
    assert digested(f"data.paths={tmp_path}/**/*.csv") == ["a.csv", "b.csv"]
    assert digested(f"data.paths=[{tmp_path}/log/day=2]", "data.separator=/") == ["b.csv"]  # which names the root, too


def test_the_digest_of_a_large_file_takes_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedp.cli.provenance._WHOLE", 100)
    monkeypatch.setattr("sparsedp.cli.provenance._PART", 16)
    file = tmp_path / "large"
    seen = set()
    for changed in (None, 0, 999, 500):
        content = bytearray(1000)
        if changed is not None:
            content[changed] = 1
        file.write_bytes(content)
        entry = file_digest(file)
        seen.add(entry["sha256"])
        assert "first and last" in entry["of"]
    assert len(seen) == 3  # the middle does not count, and the entry says so


def test_parts_within_parts_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch("outer"), watch("inner"):
        pass
    with pytest.raises(ValueError, match="x"), watch("outer"):
        raise ValueError("x")
    assert watch.seconds == {"outer": 1.0 + 4.0 + 1.0, "inner": 2.0}


def test_warnings_are_noted_once_and_shown_as_before() -> None:
    noted: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with WarningsOfRun() as of_run:
            warnings.warn("early", SparseDPWarning, stacklevel=1)
            of_run.write_to(noted.append)
            for _ in range(2):
                warnings.warn("late", SparseDPWarning, stacklevel=1)
            warnings.warn("of torch", UserWarning, stacklevel=1)
        warnings.warn("after", SparseDPWarning, stacklevel=1)
    assert noted == ["early", "late"]
    assert [str(one.message) for one in shown] == ["early", "late", "late", "of torch", "after"]


def test_what_a_run_is_warned_of_is_in_its_folder_and_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always", SparseDPWarning)
        assert train("privacy.target_delta=0.1", "privacy.allow_large_delta=true") == 0
    rows = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    (warned,) = [row["message"] for row in rows if row["kind"] == "warning" and "above 1 / N" in row["message"]]
    assert main(["report", "run"]) == 0 and "is above 1 / N = 0.0167" in Path("run/private/report.html").read_text()


def test_the_library_logs_and_the_command_line_shows_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="sparsedp"):
        assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    assert any(record.name == "sparsedp" and "choose rows" in record.message for record in caplog.records)
    assert "sparsedp: fest goes over the data to choose rows" in capsys.readouterr().err
    assert train(to="quiet") == 0 and "choose rows" not in capsys.readouterr().err
    assert main(["--debug", "train", "tiny.yaml", "--run-dir", "debug", "--quiet"]) == 0
    assert "sparsedp: Checkpoint after step 6: debug/private/checkpoint.pt" in capsys.readouterr().err
    assert logging.getLogger("sparsedp").handlers == []
