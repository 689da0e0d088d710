"""`python -m benchmarks audit-bound`: a table of claims and bounds, and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.audit import bound
from benchmarks.command import main


@pytest.mark.slow
def test_a_table_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bound, "EPSILONS", (4.0,))
    monkeypatch.setattr(bound, "NOISES", (2.0,))
    monkeypatch.setattr(bound, "MANY_RUNS", {4.0: 30})
    assert main(["audit-bound", "--canaries", "100", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "bound.json").read_text())
    assert len(results) == 5 * 4 + 2 + 3 + 1 and not any(result["contradicts"] for result in results)
    table = (tmp_path / "bound.md").read_text()
    assert table in capsys.readouterr().out
    for name in bound.guaranteed(4.0, 100):
        assert f"| {name} | rows | one_run |" in table
    assert (tmp_path / "eana-bound.png").stat().st_size > 1000


def test_the_plot_shows_what_was_measured() -> None:
    lines = [
        bound.Line("the same noise", name, on, epsilon, SimpleNamespace(bound=2 * epsilon))  # type: ignore[arg-type]
        for name, on in (("EANA", "rows"), ("EANA", "dense"), ("DPSGD", "rows"))
        for epsilon in bound.NOISES
    ]
    claimed, *curves = bound.eana_plot(lines).axes[0].lines
    assert list(claimed.get_ydata()) == list(bound.NOISES) and len(curves) == 3
    assert all(list(curve.get_ydata()) == [2 * noise for noise in bound.NOISES] for curve in curves)
