"""Bit patterns do not tell rows with a gradient from others; where noise is not rounded to a grid, the same attack does.

Every run is seeded, so the outcomes are the same on every machine but for the order of additions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.command import main
from benchmarks.floating.attack import attack
from benchmarks.floating.measure import above_chance, settings_of
from benchmarks.floating.options import table, verdict
from benchmarks.floating.runs import PAIRS, Setting, train, without_grid

from sparsedp.noise import move_rows_by_noise

ROWS = 2000


@pytest.mark.parametrize(("mechanism", "optimizer"), PAIRS)
def test_nothing_is_above_chance(mechanism: str, optimizer: str) -> None:
    """Weights, momenta and Adagrad's sums, after one step and, in float32, after ten."""
    outcomes = []
    for setting in settings_of((1, 10), ("float32",), ROWS) + settings_of((1,), ("float64",), ROWS):
        if (setting.mechanism, setting.optimizer) == (mechanism, optimizer):
            outcomes += attack(train(setting))
    assert {outcome.state for outcome in outcomes} == {
        "sgd": {"weight"}, "momentum": {"weight", "momentum_buffer"}, "adagrad": {"weight", "sum"},
    }[optimizer]  # fmt: skip
    assert all(outcome.tested == ROWS // 2 for outcome in outcomes)
    assert not above_chance(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "optimizer"), PAIRS)
def test_nothing_is_above_chance_after_many_steps(mechanism: str, optimizer: str) -> None:
    outcomes = []
    for setting in settings_of((100,), ("float32", "float64"), ROWS) + settings_of((10,), ("float64",), ROWS):
        if (setting.mechanism, setting.optimizer) == (mechanism, optimizer):
            outcomes += attack(train(setting))
    assert outcomes and not above_chance(outcomes)


@pytest.mark.parametrize(
    ("mechanism", "optimizer", "state"),
    [
        ("dpsgd", "sgd", "weight"),
        ("dpsgd", "momentum", "momentum_buffer"),
        ("dpsgd", "adagrad", "sum"),
        ("lazydp", "sgd", "weight"),
        ("lazydp by step", "sgd", "weight"),
        ("lazydp by step", "momentum", "momentum_buffer"),
        ("adafest", "sgd", "weight"),
        ("adafest", "adagrad", "sum"),
        ("eana", "adagrad", "sum"),
    ],
)
def test_the_attack_succeeds_where_there_is_no_grid(mechanism: str, optimizer: str, state: str) -> None:
    """In float64, where fewer numbers are reached by chance: so the tests above can fail."""
    with without_grid():
        outcomes = attack(train(Setting(mechanism, optimizer, dtype="float64", rows=ROWS)))
    (outcome,) = [outcome for outcome in outcomes if outcome.state == state]
    assert outcome in above_chance(outcomes) and outcome.share > 0.55


def test_the_attack_finds_rows_that_are_rounded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the grid and then to float32, where the numbers of float32 are twice as far apart as the grid's: ties show it."""

    def rounded_twice(key, table, rows, factor, std, values, step, grid, numbers=None):  # type: ignore[no-untyped-def]
        move_rows_by_noise(key, wide := table.double(), rows, factor, std, values.double(), step, grid, numbers)
        table[rows] = wide[rows].float()

    setting = Setting("lazydp", "sgd", rate=0.03, zeros=False)
    assert not above_chance(attack(train(setting)))
    monkeypatch.setattr("sparsedp.tables.lazy.move_rows_by_noise", rounded_twice)
    outcomes = attack(train(setting))
    assert above_chance(outcomes) == outcomes and outcomes[0].share > 0.6


def test_the_attack_is_at_chance_without_anything_to_find() -> None:
    """Labels that coins decide after the run: over many of them, no more are above chance than there should be."""
    released = train(Setting("dpsgd", "momentum", rows=1000))
    right = []
    for seed in range(20):
        labels = np.random.default_rng(seed).permutation(1000) % 2 == 0
        right += [outcome.share for outcome in attack(type(released)(**{**vars(released), "has_gradient": labels}))]
    assert abs(np.mean(right) - 0.5) < 4 * 0.5 / np.sqrt(500 * len(right)) * 2  # the same numbers come again and again


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["floating", "--steps=1", "--rows=400", "--mechanism=dpsgd", f"--json={tmp_path / 'out.json'}"]) == 0
    printed = capsys.readouterr().out
    assert "| DPSGD, SGD, momentum 0.9 | momenta |" in printed and "Nothing is above chance" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["state"] for row in result["outcomes"]} == {"weight", "momentum_buffer", "sum"}
    assert not result["leaks"]
    leaking = {**result, "leaks": result["outcomes"][:1]}
    assert "ABOVE CHANCE: dpsgd sgd weight" in verdict(leaking) and table(leaking) == table(result)
    with pytest.raises(SystemExit):
        main(["floating", "--rows=none"])
