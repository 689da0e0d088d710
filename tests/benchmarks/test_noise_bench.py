"""`python -m benchmarks noise`: all rows, the command, its plot and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.command import main
from benchmarks.speed.noise.measure import bench_noise
from benchmarks.speed.noise.page import page
from benchmarks.speed.noise.plots import write_plots


def test_benchmark_has_all_its_rows() -> None:
    result = bench_noise([1000], repeats=1)
    one = [row["variant"] for row in result["rows"] if row["threads"] == 1]
    assert one == ["torch", "chacha", "settling", "chacha rows"]
    assert all(row["best"] > 0 and row["nanoseconds_each"] > 0 for row in result["rows"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["noise", "--size=1000", "--repeats=1", f"--json={tmp_path / 'out.json'}", f"--plots={tmp_path / 'plots'}"]
    assert main(argv) == 0
    assert "chacha" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["size"] for row in found["rows"]} == {1000}
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["noise_sources.png"]
    text = page(found, ["noise_sources.png", "step_mlp.png"])
    assert text.startswith("# Noise\n") and "(noise_sources.png)" in text and "step_mlp" not in text
    for wrong in ("--size=0", "--repeats=none"):
        with pytest.raises(SystemExit):
            main(["noise", wrong])


def test_plots_of_nothing(tmp_path: Path) -> None:
    assert write_plots({"rows": []}, tmp_path) == []
