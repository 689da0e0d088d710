"""`python -m benchmarks secret-sharer`: a sweep whose runs have the same canaries, as a table and as plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.command import main
from benchmarks.secret_sharer.options import SWEEP

from sparsedp.cli.config.sweepfile import expand, load_sweep

BASE = """
data: {kind: generated_timelines, users: 200, items: 50, groups: 5, context: 5}
model: {kind: dual, dim: 8, hidden: [8]}
loss: softmax
optimizer: {name: SGD, lr: 1.0}
training: {epochs: 1, batch_size: 50, threads: 1, check: false}
privacy: {noise_multiplier: 0.64, max_grad_norm: 1.0, unit: user}
"""
TINY = """
base: base.yaml
reference: dpsgd
control_rates: [1.0]
variants: {dpsgd: {}, eana: {set: {privacy.mechanism: eana}}}
controls: {frozen: null}
"""


def test_the_sweep_has_every_mechanism_at_both_noises_and_epsilons() -> None:
    privacy = [(run.group, run.config.privacy) for run in expand(*load_sweep(SWEEP))]
    for group in ("dpsgd", "lazydp", "eana", "adafest"):
        assert [p.noise_on_mean for name, p in privacy if name == group] == [0.001, 0.01]
    for group in ("dpsgd_for", "lazydp_for", "adafest_for"):
        assert [p.target_epsilon for name, p in privacy if name == group] == [1.0, 8.0]


def test_a_sweep_with_canaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("tiny.yaml").write_text(TINY)
    command = [
        "secret-sharer",
        "tiny.yaml",
        "--canaries",
        "2",
        "--references",
        "150",
        "--json",
        "r.json",
        "--plots",
        "plots",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "| run | epsilon | p@1 |" in out and "| EANA, noise 0.64 | infinity |" in out and "| SGD | infinity |" in out
    rows = json.loads(Path("r.json").read_text())
    assert [row["mechanism"] for row in rows] == ["SGD", "DP-SGD", "EANA"]
    assert len(rows[0]["result"]["exposures"]) == 9 and len(rows[0]["precision"]) == 4
    assert len(list(Path("plots").glob("*.png"))) == 3
    keys = {path.read_text() for path in Path("runs/secret-sharer").glob("*/private/canaries.json")}
    assert len(keys) == 1, "the same canaries in all runs"
    assert main(command) == 0 and "Run folder" not in capsys.readouterr().out, "nothing is run again"
    Path("base.yaml").write_text(BASE.replace("lr: 1.0", "lr: 0.5"))
    assert main(command) == 2
    assert "was run with another optimizer.lr" in capsys.readouterr().err


def test_two_runs_of_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("tiny.yaml").write_text(TINY.replace("[1.0]", "[1.0, 0.5]"))
    assert main(["secret-sharer", "tiny.yaml", "--canaries", "2", "--references", "150"]) == 2
    assert "two runs are called SGD in tables and plots" in capsys.readouterr().err
