"""AdaFEST(threshold="auto"): found before training, from what may be looked at and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.prediction import find_threshold_keeping, predict, with_threshold

pytestmark = pytest.mark.filterwarnings("ignore::sparsedp.UtilityWarning")  # small data
AdaFEST = sparsedp.AdaFEST
RELEASE = sparsedp.FrequencyRelease(epsilon=0.5, delta=1e-6)
ROWS, EXAMPLES, BATCH, EPOCHS = 400, 1200, 120, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(20, 2), nn.Embedding(ROWS, 2)
        self.forwards = 0

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        self.forwards += 1
        return (self.first(first) * self.second(second)).sum(1)


def examples(count: int = EXAMPLES, seed: int = 0) -> TensorDataset:
    random = np.random.default_rng(seed)
    popularity = np.arange(1, ROWS + 1) ** -1.0
    second = torch.from_numpy(random.choice(ROWS, count, p=popularity / popularity.sum()))
    first = torch.from_numpy(random.integers(0, 20, count))
    return TensorDataset(first, second, torch.from_numpy(random.integers(0, 2, count)).float())


def public(data: TensorDataset) -> sparsedp.PublicCounts:
    counts = {
        name: torch.bincount(ids, minlength=rows)
        for name, ids, rows in zip(("first.weight", "second.weight"), data.tensors, (20, ROWS))
    }
    return sparsedp.PublicCounts(counts, len(data))


def start(
    mechanism: sparsedp.Mechanism,
    data: TensorDataset | None = None,
    seed: int = 1,
    epsilon: float | None = None,
    **settings: Any,
) -> Any:
    """A run for a target `epsilon`; without one, with a noise that it would have at about 3."""
    torch.manual_seed(0)
    model = Model()
    engine = sparsedp.PrivacyEngine(seed=seed)
    data = examples() if data is None else data
    settings["mechanism"] = mechanism
    parts = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "max_grad_norm": 1.0}
    parts["data_loader"] = DataLoader(data, batch_size=BATCH, shuffle=True)
    if epsilon is None:
        _, optimizer, loader = engine.make_private(noise_multiplier=1.0, **parts, **settings)
    else:
        _, optimizer, loader = engine.make_private_with_epsilon(
            target_epsilon=epsilon, target_delta=1e-4, epochs=EPOCHS, **parts, **settings
        )
    return engine, model, optimizer, loader


def train(run: Any, steps: int | None = None) -> None:
    engine, model, optimizer, loader = run
    for _ in range(loader.next_epoch, EPOCHS):
        for first, second, target in loader:
            optimizer.zero_grad()
            if len(target):
                F.binary_cross_entropy_with_logits(model(first, second), target).backward()
            optimizer.step()
            if steps is not None and engine.ledger.steps == steps:
                return


def auto(**settings: Any) -> AdaFEST:
    return AdaFEST(threshold="auto", noise_ratio=1.0, **settings)


def test_it_keeps_the_wanted_share_and_no_larger_threshold_does() -> None:
    for keep in (0.3, 0.6):
        engine = start(auto(keep=keep, look_at="data"))[0]
        statistics, found = engine.touch_statistics(), engine.plan.mechanism.found
        assert predict(engine.plan, statistics).kept_touches >= keep > 0
        assert predict(with_threshold(engine.plan, found * 1.01), statistics).kept_touches < keep


def test_it_gives_the_wanted_gradient_size() -> None:
    engine = start(auto(gradient_size=60.0, look_at="data"))[0]
    statistics, found = engine.touch_statistics(), engine.plan.mechanism.found
    assert predict(engine.plan, statistics).gradient_size <= 60
    assert predict(with_threshold(engine.plan, found * 0.99), statistics).gradient_size > 60


def test_what_no_threshold_keeps_gives_zero() -> None:
    engine = start(AdaFEST(threshold="auto", keep=0.999, noise_ratio=20.0, look_at="data"))[0]
    assert engine.plan.mechanism.tau == 0.0


def test_it_trains_as_with_the_number_that_was_found() -> None:
    run = start(auto(look_at="data"))
    found = run[0].plan.mechanism.found
    other = start(AdaFEST(threshold=found, noise_ratio=1.0))
    for each in (run, other):
        train(each)
    assert all(torch.equal(a, b) for a, b in zip(run[1].parameters(), other[1].parameters()))
    assert run[0].ledger == other[0].ledger


def test_plan_statement_and_hash_have_what_was_found() -> None:
    engine = start(auto(look_at="data"))[0]
    plan = engine.plan
    assert plan.to_dict()["mechanism"]["found"] == plan.mechanism.found > 0
    assert plan.hash != with_threshold(plan, plan.mechanism.found + 1).hash
    assert sparsedp.PrivacyPlan.from_dict(plan.to_dict()) == plan
    assert f"found={plan.mechanism.found}" in str(engine.statement())
    assert any("found by looking at the training data" in text for text in engine.statement().not_covered)


def test_public_counts_are_all_that_is_looked_at() -> None:
    data = examples()
    engine, model, _, _ = start(auto(look_at=public(data)), data)
    assert model.forwards == 0
    assert engine.plan.mechanism.found == start(auto(look_at="data"), data)[0].plan.mechanism.found
    others = start(auto(look_at=public(data)), examples(seed=5))[0]
    assert others.plan.hash == engine.plan.hash  # other data, same counts
    statement = engine.statement()
    assert any("counts of rows that the threshold was found from are public" in text for text in statement.assumptions)
    assert not any("threshold" in text for text in statement.not_covered)


def test_a_release_is_paid_for_once_and_within_the_target() -> None:
    run = start(auto(look_at="release"), epsilon=3.0, frequencies=RELEASE)
    engine = run[0]
    assert engine.plan.mechanism.found is None and engine.get_epsilon() == 0
    with pytest.raises(sparsedp.SparseDPError, match="not found yet"):
        _ = engine.plan.mechanism.tau
    engine.prepare()
    assert engine.plan.mechanism.found is not None and engine.ledger.setups(None) == 1
    assert 0 < engine.get_epsilon(1e-4) <= 0.5
    train(run)
    assert engine.ledger.setups(None) == 1 and 2.9 < engine.get_epsilon() <= 3.0
    assert not any("threshold" in text for text in engine.statement().not_covered)
    without = start(auto(look_at="data"), epsilon=3.0)[0]
    assert engine.plan.noise_multiplier > without.plan.noise_multiplier  # the release took its part of the budget


def test_the_first_step_finds_it_too() -> None:
    prepared, unprepared = (start(auto(look_at="release"), frequencies=RELEASE) for _ in range(2))
    prepared[0].prepare()
    for run in (prepared, unprepared):
        train(run, 3)
    assert prepared[0].plan.hash == unprepared[0].plan.hash
    assert all(torch.equal(a, b) for a, b in zip(prepared[1].parameters(), unprepared[1].parameters()))


def test_a_released_threshold_is_a_function_of_the_release_alone() -> None:
    first = start(auto(look_at="release"), frequencies=RELEASE)[0]
    drawn = dataclasses.replace(RELEASE, drawn=first.release_frequencies())
    first.prepare()
    neighbour = start(auto(look_at="release"), examples(seed=7), seed=3, frequencies=drawn)[0]
    neighbour.prepare()  # on other data, with the same release
    assert neighbour.plan.mechanism.found == first.plan.mechanism.found
    assert neighbour.ledger.setups(None) == 1  # and it is paid there


def test_a_release_that_was_drawn_before_is_paid_whoever_looks_at_it() -> None:
    drawn = dataclasses.replace(RELEASE, drawn=start(sparsedp.DPSGD(), frequencies=RELEASE)[0].release_frequencies())
    run = start(sparsedp.LazyDP(), frequencies=drawn)
    train(run, 1)
    assert run[0].ledger.setups(None) == 1
    wrong = dataclasses.replace(RELEASE, drawn={"first.weight": torch.zeros(3)})
    run = start(sparsedp.LazyDP(), frequencies=wrong)
    with pytest.raises(ValueError, match="of other tables"):
        train(run, 1)


@pytest.mark.parametrize("look", ["data", "release"])
def test_resumed_runs_have_the_threshold_of_the_run_and_pay_no_second_release(look: Any, tmp_path: Path) -> None:
    settings = {"frequencies": RELEASE} if look == "release" else {}
    whole, begun, resumed = (start(auto(look_at=look), **settings) for _ in range(3))
    train(whole)
    train(begun, 7)
    begun[0].save_checkpoint(tmp_path / "run.pt")
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    assert resumed[0].plan == resumed[2].plan == begun[0].plan and resumed[0].plan.mechanism.found is not None
    train(resumed)
    assert all(torch.equal(a, b) for a, b in zip(whole[1].parameters(), resumed[1].parameters()))
    assert resumed[0].ledger == whole[0].ledger


def test_a_run_that_has_released_takes_no_other_runs_checkpoint(tmp_path: Path) -> None:
    other = start(auto(look_at="release"), seed=1, frequencies=RELEASE)
    train(other, 2)
    other[0].save_checkpoint(tmp_path / "other.pt")
    run = start(auto(look_at="release"), seed=1, frequencies=RELEASE)
    train(run, 1)
    with pytest.raises(sparsedp.CheckpointError):
        run[0].load_checkpoint(tmp_path / "other.pt")
    assert run[0].ledger.setups(None) == 1


def test_released_counts_are_near_the_true_ones() -> None:
    data = examples(60_000)
    release = sparsedp.FrequencyRelease(epsilon=1.0, delta=1e-6)
    released, looked = (
        start(auto(look_at=look), data, **settings)[0]
        for look, settings in (("release", {"frequencies": release}), ("data", {}))
    )
    released.prepare()
    statistics = looked.touch_statistics()
    kept = predict(with_threshold(looked.plan, released.plan.mechanism.found), statistics).kept_touches
    assert kept == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": "auto"}, "what may be looked at"),
        ({"threshold": "auto", "look_at": "everything"}, "what may be looked at"),
        ({"threshold": "automatic"}, 'a number or "auto"'),
        ({"threshold": 3.0, "keep": 0.5}, 'keep is for threshold="auto"'),
        ({"threshold": 3.0, "look_at": "data"}, 'look_at is for threshold="auto"'),
        ({"threshold": "auto", "look_at": "data", "keep": 1.5}, "keep is a share"),
        ({"threshold": "auto", "look_at": "data", "keep": 0.5, "gradient_size": 10.0}, "not both"),
        ({"threshold": "auto", "look_at": "data", "gradient_size": -1.0}, "positive"),
        ({"threshold": "auto", "look_at": "release", "preselect": sparsedp.FEST(k=9)}, "counts the data itself"),
    ],
    ids=str,
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaFEST(**settings)


def test_a_release_has_to_be_planned() -> None:
    with pytest.raises(sparsedp.UnsupportedError, match="needs a release"):
        start(auto(look_at="release"))
    with pytest.raises(sparsedp.UnsupportedError, match="needs a release"):
        start(auto(look_at="release", found=1.5))  # found on a release that this run would not pay for


def test_plans_with_a_number_have_the_hash_they_had() -> None:
    values = {"name": "adafest", "threshold": 10.0, "noise_ratio": 5.0, "map_clip": 1.0, "preselect": None}
    assert AdaFEST().to_dict() == values


def test_no_mechanism_without_a_threshold_is_searched() -> None:
    engine = start(sparsedp.DPSGD())[0]
    with pytest.raises(sparsedp.UnsupportedError, match="has no threshold"):
        find_threshold_keeping(engine.plan, engine.touch_statistics(), 0.5)
