"""`python -m benchmarks convex` in its small form: its tables and plots, and fits that find known exponents."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.command import main
from benchmarks.convex.problem import KINDS, Problem
from benchmarks.convex.rates import crossing, find_exponents, in_regime

from sparsedp.convex.release import gaussian_multiplier


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--quick", "--repeats", "1", "--json", str(tmp_path / "r.json"), "--plots", str(tmp_path)]
    assert main(["convex", "--part", "recovery", "--part", "rates", "--part", "risk", *asked]) == 0
    printed = capsys.readouterr().out
    for title in ("l1 recovery", "Exponents of the error", "Exponents of the excess risk"):
        assert title in printed
    result = json.loads((tmp_path / "r.json").read_text())
    assert {fit["quantity"] for fit in result["exponents"]} == {"rows", "columns", "sparsity", "epsilon"}
    for kind in KINDS:
        along_rows = {
            fit["variant"]: fit["exponent"]
            for fit in result["exponents"]
            if fit["quantity"] == "rows" and fit["kind"] == kind
        }
        assert along_rows["gaussian"] == pytest.approx(-1, abs=0.1) and -0.7 < along_rows["projection"] < -0.3
    assert all(row["error"] <= 1.1 * row["upper"] for row in result["rates"])
    assert {row["method"] for row in result["optimisation"]} == {"DP-SGD", "bias-reduced SGD", "output perturbation"}
    for name in ("convex_mean_rows.png", "convex_risk.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
def test_quick_runs_of_the_other_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convex", "--part", "truncation", "--part", "speed", "--quick", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Excess losses" in printed and "peak memory" in printed and printed.count("best of 1") == 2


def test_where_the_sparse_regime_ends() -> None:
    """scale sqrt(d) = sqrt(2 sqrt(s) scale sqrt(2 ln 2d)) at scale = 2 sqrt(s) sqrt(2 ln 2d) / d, which is 2 sigma / n."""
    base = Problem(rows=1000, columns=5000, sparsity=4)
    scale = 2 * 2 * math.sqrt(2 * math.log(10_000)) / 5000
    assert crossing(base, "rows", False) == pytest.approx(2 * gaussian_multiplier(1.0, 1e-6) / scale, rel=0.01)
    assert crossing(base, "sparsity", True) is None  # both bounds grow alike
    columns = crossing(base, "columns", False)
    assert columns is not None and columns < 5000


def test_rows_have_norm_one_and_the_planted_mean() -> None:
    for kind in KINDS:
        X = Problem(rows=100, columns=1000, sparsity=4, kind=kind).draw(0)
        assert np.allclose(np.sqrt((X.toarray() ** 2).sum(axis=1)), 1) and np.diff(X.indptr).max() <= 4
    assert np.sort(Problem(rows=100, columns=1000, sparsity=4).draw(0).mean(axis=0))[-4:].min() > 0.2


def test_exponents_are_fitted_in_the_papers_regime_only() -> None:
    rows = [
        {"kind": "bags", "quantity": "rows", "value": n, "variant": "projection", "error": n**-0.5 if n < 1000 else 1 / n,
         "sparse_rate": n**-0.5, "dense_rate": 30 / n}
        for n in (1, 10, 100, 800, 10_000, 10**6)
    ]  # fmt: skip
    assert [in_regime(row) for row in rows] == [True, True, True, True, False, False]
    (fit,) = find_exponents(rows)
    assert fit["exponent"] == pytest.approx(-0.5) and fit["paper"] == -0.5 and fit["points"] == 4
