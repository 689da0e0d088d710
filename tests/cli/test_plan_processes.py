"""`sparsedp plan` says what it is doing, and what several processes would hold and send."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsedp.cli import plan_report, sharding_report
from sparsedp.cli.config.load import load_config
from sparsedp.cli.main import main

TINY = """
data: {kind: generated, rows: 1000, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 2, batch_size: 100}
privacy: {target_epsilon: 5, max_grad_norm: 2, mechanism: {name: adafest, threshold: 4.0, noise_ratio: 2.0}}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)


def plan(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[dict[str, Any], str]:
    assert main(["plan", "tiny.yaml", "--no-measure", "--json", *argv]) == code
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the error stream, and nothing with --quiet. The plan alone is on stdout."""
    monkeypatch.setattr(plan_report, "_SECONDS", 0.0)
    assert main(["plan", "tiny.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["measured"]["steps"] == 1, "of long steps, one that warms up and one that is measured"
    wanted = [
        "Reading the data",
        "Making the model",
        "Calibrating the noise",
        "Counting rows",
        "Predicting rows",
        "Taking steps",
    ]
    assert [next(line for line in wanted if said.startswith(line)) for said in err.splitlines()] == wanted
    assert plan(capsys, "--quiet")[1] == ""


def test_several_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    alone, _ = plan(capsys, "--quiet")
    report, _ = plan(capsys, "--quiet", "--nproc", "4", "--hosts", "2", "--memory", "64GB")
    several = report.pop("several_processes")
    assert report == alone, "what one process is told does not change"
    assert several["fits"] and several["advice"] is None and several["host_memory_bytes"] == 64_000_000_000
    assert {entry["name"] for entry in several["tables"]} == {entry["name"] for entry in alone["tables"]}
    sent = several["sent_bytes_per_step"]
    assert sent["mean"] == pytest.approx(sum(sent["by_purpose"].values())) and sent["most"] >= sent["mean"] > 0
    assert {"rows", "counts", "mask", "clipped_rows", "dense"} <= sent["by_purpose"].keys()
    memory = several["memory_bytes_per_rank"]
    assert memory["most"] == pytest.approx(sum(memory["of_the_fullest"].values())) and memory["most"] < memory["limit"]
    assert main(["plan", "tiny.yaml", "--no-measure", "--quiet", "--nproc", "4"]) == 0
    assert "4 processes on 1 host(s)" in capsys.readouterr().out


def test_what_does_not_fit_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    report, err = plan(capsys, "--nproc", "2", "--memory", "500MB", code=2)
    assert "does not fit" in report["several_processes"]["advice"] and "the run does not fit" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hosts", "2"], "--nproc"),
        (["--nproc", "3", "--hosts", "2"], "cannot be divided evenly"),
        (["--nproc", "2", "--set", "model.freeze_tables=true"], "--nproc are about tables"),
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", "--quiet", *argv]) == 2
    assert message in capsys.readouterr().err


def test_amounts_without_a_unit_that_is_clear(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "tiny.yaml", "--nproc", "2", "--memory", "256G"])
    assert "such as 256GB or 256GiB" in capsys.readouterr().err


def test_the_configuration_that_trains_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables that are copied, one line; of several kinds, a line for each table, which a configuration takes."""
    copied, _ = plan(capsys, "--quiet", "--nproc", "2")
    assert copied["several_processes"]["config"] == {"sharding": "data_parallel"}, "their columns cannot be divided"
    assert copied["several_processes"]["disk_bytes_per_host"] == 0
    weights = sum(table["bytes"] for table in copied["tables"])
    assert copied["several_processes"]["check_bytes_of_the_first_rank"] > 3 * weights
    dims = ("--set", "model.dim=64", "--set", "data.scale=1.0", "--set", "privacy.mechanism=lazydp", "--set",
            "optimizer={name: SGD, lr: 0.1}")  # fmt: skip
    monkeypatch.setattr(sharding_report, "LARGE", 1 << 20)
    several = plan(capsys, "--quiet", *dims, "--nproc", "2")[0]["several_processes"]
    assert several["config"]["sharding"] == "planned" and several["disk_bytes_per_host"] > 0
    (Path("tiny.yaml")).write_text(TINY + f"distributed: {json.dumps(several['config'])}\n")
    config = load_config("tiny.yaml", [])
    assert config.distributed.of_tables == several["config"]["tables"]
    assert config.distributed.of_tables.keys() == {entry["name"] for entry in several["tables"]}


@pytest.mark.parametrize(
    "section",
    ["{sharding: planned}", "{tables: {a: row_wise}}", "{sharding: planned, tables: {a: table_row_wise}}",
     "{sharding: planned, tables: {a: 3}}"],
)  # fmt: skip
def test_places_that_are_none(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.yaml").write_text(TINY + f"distributed: {section}\n")
    assert main(["plan", "tiny.yaml", "--quiet"]) == 2
    assert "distributed.tables" in capsys.readouterr().err


OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_data():
    torch.manual_seed(0)
    return TensorDataset(torch.randint(0, 1000, (400, 2)), torch.randint(0, 1000, (400, 3)), torch.rand(400))


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.bag = nn.Embedding(4_000_000, 64), nn.EmbeddingBag(1000, 64)  # 1 GB of the first
        nn.init.trunc_normal_(self.one.weight, std=0.1)
        with torch.no_grad():
            self.one.weight[0].fill_(0.0)
            self.one.weight.mul_(0.5)

    def forward(self, one, several):
        return (self.one(one).sum(1) * self.bag(several)).sum(1)


def make_model(training):
    return Large()


def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""
LARGE_TABLES = """
data: {kind: "large:make_data"}
model: {kind: "large:make_model"}
loss: "large:loss"
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 40}
privacy: {noise_multiplier: 1.0, max_grad_norm: 1.0, mechanism: {name: adafest, threshold: 4.0, noise_ratio: 2.0}}
"""
LIMITED = """
import resource, sys
from sparsedp.cli.main import main
import sparsedp.cli.commands.plan, sparsedp.cli.commands.train
used = 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + (600 << 20),) * 2)  # shared pages of files do not count
sys.exit(main(sys.argv[1:]))
"""


def limited(*argv: str) -> subprocess.CompletedProcess[str]:
    Path("large.py").write_text(OWN)
    Path("large.yaml").write_text(LARGE_TABLES)
    return subprocess.run([sys.executable, "-c", LIMITED, *argv], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a process's own memory")
def test_tables_that_have_no_room_here(tmp_path: Path) -> None:
    """They are planned without values, and no steps are taken; what takes steps says that there is too little memory."""
    asked = ["plan", "large.yaml", "--quiet", "--nproc", "4", "--hosts", "2", "--memory", "4GB"]
    done = limited(*asked, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "measured" not in report and report["several_processes"]["fits"]
    assert {table["name"]: table["bytes"] for table in report["tables"]}["one.weight"] == 4_000_000 * 64 * 4
    assert report["memory_bytes"]["activations"] > 0 and report["several_processes"]["sent_bytes_per_step"]["mean"] > 0
    done = limited(*asked, "--measure")
    assert done.returncode == 2 and not done.stdout
    assert "There is too little memory" in done.stderr and "--no-measure" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_steps_are_measured_if_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_report, "_SECONDS", 0.0)
    assert main(["plan", "tiny.yaml", "--quiet", "--nproc", "2"]) == 0
    assert "not measured: that takes steps in this one process" in capsys.readouterr().out
    assert main(["plan", "tiny.yaml", "--quiet", "--json", "--nproc", "2", "--measure"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["steps"] == 1
