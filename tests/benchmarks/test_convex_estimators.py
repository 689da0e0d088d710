"""The benchmarks of linear models run: their data, our estimators, and the noise of bias-reduced SGD."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from benchmarks.convex import bias_reduced, linear_data


def test_hashed_rows_have_norm_one_at_most() -> None:
    rows = linear_data._hashed([["a", "b", "b"], [], ["c"]], 1000)
    norms = np.sqrt((rows.toarray() ** 2).sum(axis=1))
    np.testing.assert_allclose(norms, [1.0, 0.0, 1.0], rtol=1e-12)
    assert (norms <= 1).all() and np.diff(rows.indptr).tolist() == [2, 0, 1]


def test_estimators_run_on_generated_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from benchmarks.convex import estimators

    small = linear_data._generated(5000, 200)
    monkeypatch.setattr(estimators, "load", lambda name: small)
    monkeypatch.setattr(
        sys, "argv", ["x", "--data", "generated", "--epsilon", "4", "--methods", "output", "--repeats", "1"]
    )
    monkeypatch.setattr(estimators, "DELTA", 1e-5)
    estimators.main()
    shown = capsys.readouterr().out
    assert "3,000 rows, 200 columns" in shown
    ours = next(line for line in shown.splitlines() if "sparsedp, output" in line)
    assert float(ours.split("AUC")[1].split()[0]) > 0.6


def test_noise_of_both_accountings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--rows", "1000", "--runs", "3", "--delta", "1e-5"])
    bias_reduced.main()
    assert "times less noise for the same steps" in capsys.readouterr().out
