"""`sparsedp mean`: what it prints may be released."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from sparsedp.cli.main import main

ASK = ("--epsilon", "1", "--delta", "1e-6", "--bound", "1", "--sparsity", "2")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    X = np.tile(np.eye(30)[:2] * [[1.0], [5.0]], (50, 1))
    sp.save_npz(tmp_path / "rows.npz", sp.csr_array(X))
    np.save(tmp_path / "rows.npy", X)
    return tmp_path / "rows.npz"


def test_text(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mean", str(rows), *ASK, "--to", str(tmp_path / "mean.npy")]) == 0
    shown = capsys.readouterr()
    assert "projection" in shown.out and "epsilon = 1 at delta = 1e-06" in shown.out
    assert "50 rows were clipped" in shown.err and "clipped at" not in shown.out and "50 rows" not in shown.out
    assert np.load(tmp_path / "mean.npy").shape == (30,)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_json(rows: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASK, "--neighbours", "replace_one", "--method", "gaussian", "--json"]
    assert main(["mean", str(rows.with_suffix(suffix)), *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"] == 100 and answer["method"] == "gaussian" and len(answer["mean"]) == 30
    assert answer["statement"]["epsilon"] <= 1 and answer["statement"]["neighbouring"].startswith("replacing")
    assert not any("clipped" in key for key in answer)


def test_json_of_a_recovery(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASK, "--method", "l1_recovery", "--measurements", "5", "--rows", "100", "--json"]
    assert main(["mean", str(rows), *asked, "--to", str(tmp_path / "mean.npy")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recovery"]["measurements"] == 5 and "clipped_measurements" not in answer["recovery"]
    assert "mean" not in answer and answer["error_bound"] == 3.0 and answer["file"].endswith("mean.npy")
    assert main(["mean", str(rows), *asked[:-1]]) == 0
    assert "5 measurements; highs finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (["--delta", "0", "--method", "gaussian"], "delta above 0"),
        (["--epsilon", "-1"], "epsilon"),
        (["--to", "mean.txt"], ".npy"),
        (["--to", "nowhere/mean.npy"], "the folder nowhere does not exist"),
        (["--neighbours", "replace_one", "--rows", "7"], "100 rows"),
        (["--calibration", "paper"], "public number of rows"),
    ],
)
def test_refusals(rows: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mean", str(rows), *ASK, *change]) == 2
    assert message in capsys.readouterr().err


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, arrays, pickled = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npy"
    text.write_text("no matrix")
    np.savez(arrays, X=np.eye(3))
    np.save(pickled, np.array([{}]), allow_pickle=True)
    for path in (text, arrays, pickled, tmp_path / "missing.npz"):
        assert main(["mean", str(path), *ASK]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
