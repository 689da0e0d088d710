"""What has no room in memory is refused in one line, before it starts, and not killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from sparsedp.check import memory_of_check
from sparsedp.cli import memory, run
from sparsedp.cli.main import main
from sparsedp.cli.memory import memory_left, naming_what_has_no_room
from sparsedp.errors import SparseDPError

TINY = """
data: {kind: generated, rows: 300, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: SGD, lr: 0.05}
training: {epochs: 1, batch_size: 100}
privacy: {target_epsilon: 5, max_grad_norm: 2, mechanism: eana}
"""


def test_a_check_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY.replace("target_epsilon: 5", "noise_multiplier: 1"))
    monkeypatch.setattr(run, "memory_left", lambda: 1000)
    assert main(["train", "tiny.yaml", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "training.check" in line and "1 kB are free" in line and "--set training.check=false" in line
    assert not Path("runs").exists(), "before anything is written"
    assert main(["train", "tiny.yaml", "--quiet", "--set", "training.check=false"]) == 0
    monkeypatch.setattr(run, "memory_left", lambda: None)  # where the system does not say it
    assert main(["train", "tiny.yaml", "--quiet"]) == 0


def test_what_a_check_takes() -> None:
    model = nn.Sequential(nn.Embedding(100, 10), nn.Linear(10, 10, bias=False))
    assert memory_of_check(model) == 8 * (1100 + 2 * 1100 + 1000)
    model[0].requires_grad_(False)
    assert memory_of_check(model) == 8 * (1100 + 2 * 100 + 100)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own count of memory")
def test_the_check_takes_no_more_than_that() -> None:
    program = """
import torch, sparsedp
from torch import nn
from sparsedp.check import memory_of_check

def most():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])  # ru_maxrss has what the process that started this one took

def check(rows):
    model = nn.Sequential(nn.Embedding(rows, 64), nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))
    sparsedp.check(model, nn.functional.mse_loss, (torch.tensor([[1], [5], [5]]), torch.rand(3)), units=2)
    return memory_of_check(model)

check(10)
before = most()
expected = check(300_000)
print((most() - before) / expected)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert 0.7 < float(done.stdout) < 1.25, done.stdout + done.stderr  # the model itself is an eighth


def test_memory_of_a_machine_and_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, most, used = tmp_path / "meminfo", tmp_path / "memory.max", tmp_path / "memory.current"
    meminfo.write_text("MemTotal:       24000 kB\nMemAvailable:    1000 kB\nSwapFree:          24 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_GROUPS", ((str(most), str(used), "inactive_file"),))
    assert memory_left() == 1024 * 1024, "no group"
    (tmp_path / "memory.stat").write_text("file 5\ninactive_file 300\n")
    used.write_text("500\n")
    most.write_text("max\n")
    assert memory_left() == 1024 * 1024
    most.write_text("900\n")
    assert memory_left() == 900 - 500 + 300, "pages of files are taken back"
    meminfo.unlink()
    most.write_text("max\n")
    assert memory_left() is None


def test_errors_of_memory() -> None:
    said = r"too little memory for it \(it was to allocate 800 bytes\)\. Take less"
    with pytest.raises(SparseDPError, match=said), naming_what_has_no_room("it", "Take less."):
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 800 bytes. Error code 12")
    with pytest.raises(SparseDPError, match=r"allocate 8\.00 GiB"), naming_what_has_no_room("it", "Take less."):
        raise MemoryError("Unable to allocate 8.00 GiB for an array")
    with pytest.raises(RuntimeError, match="another"), naming_what_has_no_room("it", "Take less."):
        raise RuntimeError("another")
