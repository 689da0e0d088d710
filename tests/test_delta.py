"""Delta is measured by the number of units: a default well below 1 / N, a warning above it, a refusal above 0.01."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsedp
from sparsedp import FEST, FrequencyRelease, SparseDPWarning, Stream, UnsupportedError
from sparsedp.accounting import epsilon_of
from sparsedp.cli.main import main
from sparsedp.plan import default_delta, require_delta
from support import Clicks, clicks, loader_of, make_private, train


@given(st.integers(1, 10**12))
def test_the_default_is_at_most_a_tenth_of_one_in_n(units: int) -> None:
    delta = default_delta(units)
    assert delta <= 0.01 and delta * units <= 0.1 * (1 + 1e-12)
    assert delta == 0.01 or delta * units > 0.05 - 1e-12  # rounded down, no more
    assert f"{delta:.0e}" == f"{delta:.0e}" and float(f"{delta:.0e}") == delta  # one digit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require_delta(delta, units, False) == delta


def _make(target_delta: float, size: int = 200, allow: bool = False, **options: Any) -> Any:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(seed=0, allow_large_delta=allow)
    engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(size), batch_size=8), target_epsilon=2.0, target_delta=target_delta, epochs=1,
        max_grad_norm=1.0, **options,
    )  # fmt: skip
    return engine


ENTRANCES = {
    "make_private_with_epsilon": lambda delta, allow: _make(delta, allow=allow),
    "get_epsilon": lambda delta, allow: _engine(allow).get_epsilon(delta),
    "statement": lambda delta, allow: _engine(allow).statement(delta),
}


def _engine(allow: bool) -> sparsedp.PrivacyEngine:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(seed=0, allow_large_delta=allow)
    engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(200), batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    return engine


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_everywhere_that_a_delta_enters(entrance: str) -> None:
    enter = ENTRANCES[entrance]
    for delta in (0.5, 0.011):
        with pytest.raises(UnsupportedError, match=r"above 0\.01.*allow_large_delta"):
            enter(delta, False)
        with pytest.warns(SparseDPWarning, match=r"above 1 / N"):
            enter(delta, True)
    with pytest.warns(SparseDPWarning, match=r"delta=0\.006 is above 1 / N = 0\.005: delta x N = 1\.2 units"):
        enter(0.006, False)
    enter(0.005, False)  # 1 / N itself, without a word (warnings are errors here)
    for nonsense in (0.0, 1.0, -1e-6, float("nan"), "1e-6", True):
        with pytest.raises(sparsedp.ConfigError, match="delta must be a number"):
            enter(nonsense, True)  # type: ignore[arg-type]


def test_units_are_users_and_all_spans_count() -> None:
    users = np.arange(200) // 10
    engine = make_private(Clicks(), loader_of(*clicks(200), batch_size=4), unit="user", users=users)[0]
    assert engine.statement().delta == default_delta(20) == 0.005
    assert engine.statement().delta_times_units == pytest.approx(0.1)
    engine.get_epsilon(0.01)  # though it is above 1 / examples
    with pytest.raises(UnsupportedError):
        engine.get_epsilon(0.02)
    stream = Stream(np.repeat([0, 1], [150, 50]), "parallel")
    engine = make_private(Clicks(), loader_of(*clicks(200), batch_size=4), stream=stream)[0]
    # All units together may be published, not those of one span alone: the data set's size is the safe one.
    assert engine.statement().delta == default_delta(200) <= default_delta(50)
    with pytest.warns(SparseDPWarning, match="1 / N"):
        engine.get_epsilon(0.008)


def test_the_statement_says_delta_times_n() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(200), batch_size=8))
    train(module, optimizer, loader)
    statement = engine.statement(1e-4)
    assert statement.delta_times_units == pytest.approx(0.02)
    assert "delta x N = 0.02" in str(statement)
    assert json.loads(statement.to_json())["delta_times_units"] == pytest.approx(0.02)


@pytest.mark.parametrize("own", [0.009, 0.3])
def test_a_release_ahead_of_the_steps_has_no_delta_of_its_own_in_the_total(own: float) -> None:
    """Its delta only says how much noise it gets; the ledger holds that noise, and the total is at one delta."""
    for options in ({"mechanism": FEST(k=5, epsilon=0.5, delta=own)}, {"frequencies": FrequencyRelease(0.5, own)}):
        engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(200), batch_size=8), **options)
        if "frequencies" in options:
            engine.release_frequencies()
        train(module, optimizer, loader)
        setup = next(entry.event for entry in engine.ledger.entries if entry.setup)
        assert epsilon_of(setup, 1e-6) > 0.5  # more than its own epsilon, because its own delta is larger
        assert engine.statement(1e-6).epsilon >= epsilon_of(setup, 1e-6)


CONFIG = """
data: {kind: generated, rows: 1000, scale: 0.01}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 100}
privacy: {noise_multiplier: 1.0, max_grad_norm: 2}
"""


@pytest.mark.filterwarnings("default::sparsedp.SparseDPWarning")
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    for command in (["plan", "c.yaml", "--no-measure"], ["train", "c.yaml", "--run-dir", "run"]):
        assert main([*command, "--set", "privacy.target_delta=0.5"]) != 0
        assert "privacy.target_delta" in (said := capsys.readouterr().err) and "allow_large_delta" in said
        assert not Path("run").exists()
    plan = ["plan", "c.yaml", "--no-measure", "--json"]
    assert main([*plan, "--set", "privacy.target_delta=0.5", "--set", "privacy.allow_large_delta=true"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["delta"] == 0.5 and "warning: delta=0.5 is above 1 / N" in shown.err
    assert main(plan) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == default_delta(900) == 1e-4
    account = ["account", "epsilon", "--noise-multiplier", "1", "--steps", "10"]
    assert main([*account, "--sample-rate", "0.01", "--delta", "0.5"]) != 0
    assert "--allow-large-delta" in capsys.readouterr().err
    assert main([*account, "--sample-rate", "0.01", "--delta", "0.5", "--allow-large-delta"]) == 0
    capsys.readouterr()
    assert main([*account, "--batch-size", "10", "--dataset-size", "1000", "--delta", "0.005"]) == 0
    assert "above 1 / N" in capsys.readouterr().err
    noise = ["account", "noise", "--target-epsilon", "1", "--sample-rate", "0.01", "--steps", "10"]
    assert main([*noise, "--target-delta", "0.5"]) != 0
