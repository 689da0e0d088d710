"""Looks at a private validation set have the right noise and sensitivity, and are paid for; when to stop follows from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import EarlyStopping, PrivateValidation
from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.grid import grid_of
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan

UNITS, LOOKS = 40, 3
VALIDATION = PrivateValidation(units=30, looks=LOOKS, std=0.5, clip=2.0)
LOSSES = torch.linspace(0, 3, 30)
Run = tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]


def private(validation: Any = VALIDATION, *, seed: int | None = 1, epochs: int = 2, **options: Any) -> Run:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(4, 1))
    engine = sparsedp.PrivacyEngine(seed=seed)
    loader: Any = DataLoader(TensorDataset(torch.arange(UNITS)[:, None] % 12, torch.zeros(UNITS)), batch_size=8)
    made = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader, target_epsilon=3.0,
        target_delta=1e-4, epochs=epochs, max_grad_norm=1.0, validation=validation, **options,
    )  # fmt: skip
    return engine, *made


def epoch(run: Run, steps: int | None = None) -> None:
    _, module, optimizer, loader = run
    for step, (ids, target) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(ids).squeeze(1), target).backward()
        optimizer.step()
        if step + 1 == steps:
            return


# ------------------------------------------------------------------ what is released


def sums(validation: PrivateValidation, values: Any) -> int:
    return int(validation._steps(np.asarray(values, float)).sum())


@pytest.mark.parametrize("clip", [0.3, 1.0, 2.0, 7.7])
@pytest.mark.parametrize("value", [0.0, 0.7, 1e30, -5.0, math.nan, math.inf, -math.inf])
def test_a_unit_moves_the_exact_sum_by_half_the_clip_at_most(clip: float, value: float) -> None:
    validation = PrivateValidation(units=5, looks=1, std=1.0, clip=clip)
    others = [0.1, 0.2, math.nan, 1.5]
    moved = abs(sums(validation, [*others, value]) - sums(validation, others)) * clip / (1 << 20)
    assert moved <= clip / 2
    assert validation.noise_multiplier == pytest.approx(
        5 * 1.0 / (clip / 2)
    )  # deviation of the sum, over its sensitivity


def test_one_unit_can_move_the_sum_by_all_of_it() -> None:
    assert sums(VALIDATION, [0.0]) == -(1 << 19) and sums(VALIDATION, [2.0]) == 1 << 19


def test_what_is_no_number_counts_as_the_clip() -> None:
    for wrong in (math.nan, math.inf, 1e300):
        assert sums(VALIDATION, [wrong]) == sums(VALIDATION, [2.0])


def test_users_count_once_however_many_examples_they_have() -> None:
    validation = PrivateValidation(units=2, looks=1, std=1.0, clip=2.0)
    few = validation.of_units([0.0, 1.0, 1.0], np.array([7, 3, 3]))
    many = validation.of_units(torch.tensor([0.0] + 500 * [math.inf]), torch.tensor([7] + 500 * [3]))
    assert few.tolist() == [1.0, 0.0] and many.tolist() == [2.0, 0.0]
    assert abs(sums(validation, few) - sums(validation, many)) <= 1 << 19


def test_the_noise_has_the_deviation_that_is_planned_and_lies_on_the_grid() -> None:
    key = RandomKey.from_seed(3)
    released = np.array([VALIDATION.draw(LOSSES.double().numpy(), key, look) for look in range(4000)])
    exact = LOSSES.clamp(0, 2).double().mean().item()
    assert released.mean() == pytest.approx(exact, abs=4 * 0.5 / 4000**0.5)
    assert released.std() == pytest.approx(0.5, rel=0.06)
    steps = (released - 1) * 30 / grid_of(30 * 0.5)
    assert np.allclose(steps, steps.round(), atol=1e-6)
    assert len(set(released)) > 1000  # of each look its own


def test_looks_do_not_follow_torchs_seed_and_are_fresh() -> None:
    def first(seed: int | None) -> float:
        torch.manual_seed(0)
        return private(seed=seed)[0].validate(LOSSES)

    assert first(None) != first(None) and first(1) == first(1) != first(2)


# ------------------------------------------------------------------ what it costs


def test_the_target_covers_training_and_all_looks() -> None:
    run, without = private(), private(validation=None)
    plan = run[0].plan
    assert plan.noise_multiplier > without[0].plan.noise_multiplier
    assert 2.9 < plan.epsilon(10, 1e-4) <= 3.0
    events = [entry.event for entry in plan.ledger(10).entries]
    assert events[0] == dp_accounting.GaussianDpEvent(VALIDATION.noise_multiplier) == VALIDATION.event
    assert plan.ledger(10).entries[0].count == LOOKS


def test_looks_are_recorded_and_no_more_than_planned() -> None:
    run = private()
    engine = run[0]
    epoch(run)
    for _ in range(LOOKS):
        engine.validate(LOSSES)
    with pytest.raises(sparsedp.SparseDPError, match="3 looks at the validation set that are planned were made"):
        engine.validate(LOSSES)
    assert engine.ledger.setups(None, VALIDATION.event) == LOOKS and engine.ledger.steps == 5
    epoch(run)
    assert epsilon_of(engine.ledger, 1e-4) == pytest.approx(engine.plan.epsilon(10, 1e-4))  # nothing is left


@pytest.mark.parametrize("validation", [VALIDATION, "public"])
def test_a_run_that_stops_early_has_the_epsilon_of_its_whole_plan(validation: Any) -> None:
    run = private(validation)
    epoch(run, steps=1)
    engine = run[0]
    assert epsilon_of(engine.ledger, 1e-4) < 2
    assert 2.9 < engine.get_epsilon() == engine.statement().epsilon <= 3.0
    assert "The epsilon is that of the whole plan" in str(engine.statement())
    assert "1 steps by the PLD accountant; charged for all 10 that were planned" in str(engine.statement())
    assert sparsedp.PrivacyStatement.from_dict(engine.statement().to_dict()) == engine.statement()


def test_a_failed_look_costs_nothing() -> None:
    engine = private()[0]
    for wrong, error in (
        (torch.zeros(0), "of 0 units"),
        (torch.zeros(29), "of 29 units"),
        (torch.zeros(30, 1), "one axis"),
    ):
        with pytest.raises((sparsedp.SparseDPError, ValueError), match=error):
            engine.validate(wrong)
    with pytest.raises(ValueError, match="users is for unit='user'"):
        engine.validate(LOSSES, users=range(30))
    assert not engine.ledger.entries
    engine.validate(LOSSES.requires_grad_())
    assert engine.ledger.setups(None) == 1


def test_values_come_in_batches_too() -> None:
    a, b = private(), private()
    assert (
        a[0].validate(LOSSES)
        == b[0].validate(part for part in LOSSES.split(7))
        == private()[0].validate(LOSSES.tolist())
    )


def test_users_are_protected_with_unit_user() -> None:
    run = private(PrivateValidation(units=10, looks=1, std=0.5), unit="user", users=np.arange(UNITS) // 2)
    with pytest.raises(ValueError, match="give users="):
        run[0].validate(LOSSES)
    run[0].validate(LOSSES, users=np.arange(30) // 3)
    assert "each user's value depends on the weights and that user alone" in str(run[0].statement())


def test_the_statement_says_what_was_looked_at() -> None:
    engine = private()[0]
    engine.validate(LOSSES)
    text = str(engine.statement())
    assert "the looks at the validation set (at most 3, made 1)" in text
    assert "it holds for one example with data in one of them or in both" in text and "30, is public" in text
    assert "nobody in it is protected" in str(private("public")[0].statement())
    assert "validation" not in str(private(None)[0].statement())


def test_a_selection_ahead_of_the_steps_is_not_taken_for_a_look() -> None:
    run = private(mechanism=sparsedp.FEST(k=3, epsilon=0.5))
    run[0].validate(LOSSES)
    epoch(run)  # chooses its rows now, and charges that once
    assert run[0].ledger.setups(None) == 2 and run[0].ledger.setups(None, VALIDATION.event) == 1
    assert run[0].get_epsilon() <= 3.0


# ------------------------------------------------------------------ resuming


def test_a_checkpoint_remembers_the_looks(tmp_path: Path) -> None:
    run = private()
    epoch(run)
    run[0].validate(LOSSES)
    run[0].save_checkpoint(tmp_path / "run.pt")
    second = run[0].validate(LOSSES)
    again = private()
    again[0].load_checkpoint(tmp_path / "run.pt")
    assert again[0].ledger.setups(None) == 1 and again[0].validate(LOSSES) == second
    # Going back in one engine does not give looks back: what they released was read.
    run[0].load_checkpoint(tmp_path / "run.pt")
    assert run[0].ledger.setups(None) == 2
    assert run[0].validate(LOSSES) != second
    with pytest.raises(sparsedp.SparseDPError, match="looks at the validation set"):
        run[0].validate(LOSSES)


def test_an_unseeded_run_draws_other_noise_after_it_went_back(tmp_path: Path) -> None:
    run = private(seed=None)
    run[0].save_checkpoint(tmp_path / "run.pt")
    other = private(seed=None)
    other[0].load_checkpoint(tmp_path / "run.pt")
    assert run[0].validate(LOSSES) != other[0].validate(LOSSES)


def test_another_validation_is_another_plan(tmp_path: Path) -> None:
    run = private()
    run[0].save_checkpoint(tmp_path / "run.pt")
    with pytest.raises(sparsedp.CheckpointError, match="validation"):
        private("public")[0].load_checkpoint(tmp_path / "run.pt")
    plan = run[0].plan
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    public = private("public")[0].plan
    assert PrivacyPlan.from_dict(public.to_dict()) == public


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "wrong",
    [{"units": 0}, {"units": 3.0}, {"looks": 0}, {"std": 0.0}, {"std": math.inf}, {"clip": -1.0}, {"clip": math.nan}],
)
def test_settings_that_say_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrivateValidation(**{"units": 10, "looks": 2, "std": 0.1, **wrong})


def test_it_is_refused_where_it_cannot_be_accounted_for() -> None:
    module = nn.Linear(1, 1)
    given = {
        "module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "max_grad_norm": 1.0,
        "data_loader": DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4),
    }  # fmt: skip
    with pytest.raises(sparsedp.UnsupportedError, match="make_private_with_epsilon"):
        sparsedp.PrivacyEngine().make_private(noise_multiplier=1.0, validation=VALIDATION, **given)
    with pytest.raises(sparsedp.UnsupportedError, match="together with a stream"):
        private(stream=sparsedp.Stream(np.arange(UNITS) // 20, composition="parallel"))
    with pytest.raises(TypeError, match="validation must be"):
        private("held out")
    with pytest.raises(sparsedp.SparseDPError, match="No private validation is planned"):
        private("public")[0].validate(LOSSES)
    with pytest.raises(sparsedp.SparseDPError, match=r"cannot be reached.*looks at a private validation set"):
        private(PrivateValidation(units=30, looks=100, std=1e-3))


# ------------------------------------------------------------------ when to stop


def test_it_stops_after_looks_without_an_improvement() -> None:
    stopping = EarlyStopping(patience=2, min_improvement=0.1)
    assert [stopping(value) for value in (1.0, 0.95, 0.8, 0.75, math.nan)] == [False, False, False, False, True]
    assert stopping.best == 0.8
    again = EarlyStopping(patience=2, min_improvement=0.1)
    again.load_state_dict(stopping.state_dict())
    assert again.stopped
    assert EarlyStopping(patience=1)(math.inf)


@pytest.mark.parametrize(
    "wrong", [{"patience": 0}, {"patience": True}, {"min_improvement": -1}, {"min_improvement": math.nan}]
)
def test_a_rule_that_says_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EarlyStopping(**wrong)
