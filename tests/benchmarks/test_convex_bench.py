"""`python -m benchmarks convex` in its small form: its tables and plots, and fits that find known exponents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.command import main
from benchmarks.convex.measure import Problem, find_exponents, in_regime


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--part",
        "recovery",
        "--part",
        "rates",
        "--quick",
        "--json",
        str(tmp_path / "r.json"),
        "--plots",
        str(tmp_path),
    ]
    assert main(["convex", *asked]) == 0
    assert "Exponents of the error" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert {fit["quantity"] for fit in result["exponents"]} == {"rows", "columns", "sparsity", "epsilon"}
    along_rows = {fit["variant"]: fit["exponent"] for fit in result["exponents"] if fit["quantity"] == "rows"}
    assert along_rows["gaussian"] == pytest.approx(-1, abs=0.1) and -0.7 < along_rows["projection"] < -0.3
    assert (tmp_path / "convex_mean_rows.png").stat().st_size > 1000


def test_rows_have_norm_one_and_the_planted_mean() -> None:
    X = Problem(rows=100, columns=1000, sparsity=4).draw(0)
    assert np.allclose(np.sqrt((X.toarray()[::2] ** 2).sum(axis=1)), 1)
    assert np.sort(X.mean(axis=0))[-4:].min() > 0.2


def test_exponents_are_fitted_in_the_papers_regime_only() -> None:
    rows = [
        {"quantity": "rows", "value": n, "variant": "projection", "error": n**-0.5 if n < 1000 else 1 / n,
         "sparse_rate": n**-0.5, "dense_rate": 30 / n}
        for n in (1, 10, 100, 800, 10_000, 10**6)
    ]  # fmt: skip
    assert [in_regime(row) for row in rows] == [True, True, True, True, False, False]
    (fit,) = find_exponents(rows)
    assert fit["exponent"] == pytest.approx(-0.5) and fit["paper"] == -0.5 and fit["points"] == 4
