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
