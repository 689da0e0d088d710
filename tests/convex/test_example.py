"""The example runs, and shows what it is there to show."""

from __future__ import annotations

import re

import pytest
from examples import private_mean


def test_projection_has_the_smaller_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(private_mean, "PEOPLE", 5_000)
    monkeypatch.setattr(private_mean, "ITEMS", 20_000)
    private_mean.main()
    shown = capsys.readouterr().out
    errors = {name: float(error) for name, error in re.findall(r"(\w+): an error of ([\d.]+)", shown)}
    assert errors["projection"] < errors["gaussian"] / 2
    assert "Privacy statement: epsilon = 1 at delta = 1e-06" in shown


def test_more_budget_is_more_accurate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from examples import private_classifier

    monkeypatch.setattr(private_classifier, "TEXTS", 8_000)
    monkeypatch.setattr(private_classifier, "WORDS", 2_000)
    private_classifier.main()
    shown = capsys.readouterr().out
    right = [float(share) for share in re.findall(r": ([\d.]+) are right", shown)]
    assert len(right) == 3 and right[2] > 0.6 and right[2] > right[0]
    assert "Privacy statement: epsilon = 4 at delta = 1e-06" in shown
