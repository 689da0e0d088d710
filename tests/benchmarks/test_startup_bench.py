"""`python -m benchmarks startup` asks the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.command import main


def test_both_questions_are_asked_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "--repeats", "1", "--json", str(tmp_path / "startup.json")]) == 0
    result = json.loads((tmp_path / "startup.json").read_text())
    assert [row["question"] for row in result["rows"]] == ["--version", "--help"]
    assert all(0 < row["best"] == row["median"] for row in result["rows"])  # of one repeat
    out = capsys.readouterr().out
    assert all(f"sparsedp {row['question']}: median {row['median']:.3f} s" in out for row in result["rows"])
