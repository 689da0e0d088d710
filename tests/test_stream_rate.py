"""Streams with a sampling rate: spans of any size, of which no number of units leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import AdaFEST, ConfigError, Stream, UnsupportedError
from sparsedp.accounting import Ledger, epsilon_of
from sparsedp.mechanisms import PublicCounts
from sparsedp.noise import RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import PrivateLoader, poisson_indices
from support import Clicks, clicks, loader_of, make_private, train

RATE, STEPS, BATCH = 0.15, 7, 8
KEY = RandomKey.from_seed(2)
SIZES = (70, 3, 1, 40)


def periods(sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def start(sizes: tuple[int, ...] = SIZES, composition: Any = "sequential", **options: Any) -> tuple:
    torch.manual_seed(0)
    stream = Stream(periods(sizes), composition, sample_rate=RATE)
    data = loader_of(*clicks(sum(sizes)), batch_size=options.pop("batch_size", BATCH))
    return make_private(Clicks(), data, stream=stream, **options)


def test_each_unit_of_a_span_is_drawn_at_the_rate() -> None:
    stream = Stream(periods(), "parallel", sample_rate=RATE)
    loader = DataLoader(TensorDataset(torch.arange(sum(SIZES))), batch_size=BATCH, shuffle=True)
    private = PrivateLoader(loader, key=KEY, stream=stream)
    assert private.span_steps == (STEPS,) * 4 and private.sample_rate == RATE
    assert private.expected_units == pytest.approx(RATE * sum(SIZES) / 4)
    empty = 0
    for (places,) in private:
        info = private.current
        where = np.flatnonzero(stream.periods == info.span)
        drawn = where[poisson_indices(KEY.generator(info.step), len(where), RATE)]
        empty += info.stand_in
        assert ([] if info.stand_in else places.tolist()) == drawn.tolist()
        assert info.units == len(drawn)
    assert empty > 5  # of spans with three units and with one


@pytest.mark.parametrize(
    ("rate", "steps", "dropped"), [(1.0, 1, 1), (0.7, 2, 1), (0.5, 2, 2), (0.1, 10, 10), (1 / 3, 3, 3), (1 / 49, 49, 49), (0.3, 4, 3)]
)  # fmt: skip
def test_steps_follow_from_the_rate_alone(rate: float, steps: int, dropped: int) -> None:
    stream = Stream([0, 0, 1], "parallel", sample_rate=rate)
    assert (stream.steps(False), stream.steps(True)) == (steps, dropped)


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
def test_every_span_costs_the_same(composition: Any) -> None:
    engine, module, optimizer, loader = start(composition=composition)
    train(module, optimizer, loader)
    assert engine.ledger.steps == 4 * STEPS
    event, ledger = PoissonSampledDpEvent(RATE, GaussianDpEvent(1.0)), Ledger()
    assert {entry.event for entry in engine.ledger.entries} == {event}
    ledger.record(event, STEPS * (1 if composition == "parallel" else 4))
    assert engine.get_epsilon(1e-4) == pytest.approx(epsilon_of(ledger, 1e-4, "pld"), rel=1e-6)
    assert engine.plan.epsilon(4 * STEPS, 1e-4) == engine.get_epsilon(1e-4)


def test_no_size_of_a_span_is_in_plan_statement_or_checkpoint(tmp_path: Path) -> None:
    """Of two data sets of as many units, in spans of other sizes, nothing but the weights differs."""
    runs = [start(sizes, composition="parallel") for sizes in (SIZES, (1, 41, 60, 12))]
    said = []
    for number, (engine, module, optimizer, loader) in enumerate(runs):
        train(module, optimizer, loader)
        engine.save_checkpoint(tmp_path / f"{number}.pt")
        saved = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        said.append(
            (engine.plan.to_dict(), engine.statement().to_dict(), saved["plan"], saved["ledger"], saved["loader"])
        )
    assert said[0] == said[1] and runs[0][0].plan.hash == runs[1][0].plan.hash
    assert said[0][0]["stream"] == {
        "composition": "parallel", "span": 1, "sizes": [], "steps": [STEPS] * 4, "sample_rate": RATE,
    }  # fmt: skip
    assert PrivacyPlan.from_dict(said[0][0]) == runs[0][0].plan


def test_statement_says_what_is_public() -> None:
    engine, module, optimizer, loader = start()
    statement = engine.statement(1e-4)
    assert "rate 0.15 within each of the 4 spans of periods, whatever their sizes" in statement.sampling
    assert any(
        text == "Which periods form the 4 spans is public. How many examples a span has need not be: in all of them the rate "
        "and the number of steps are the same, and sums are divided by 8."
        for text in statement.assumptions
    )  # fmt: skip
    assert not any("70" in text for text in statement.assumptions)
    plain = start(loss_reduction="sum")[0].statement(1e-4)
    assert any("sums are not divided" in text for text in plain.assumptions)
    users = start(unit="user", users=np.arange(sum(SIZES)))[0].statement(1e-4)
    assert any("How many users a span has need not be" in text for text in users.assumptions)


def test_sums_are_divided_by_the_batch_size_whatever_the_span() -> None:
    """A unit moves the weights by at most lr C / batch size, in a span of one as in one of seventy."""
    for batch_size in (BATCH, 1000):  # also one that is larger than the data
        torch.manual_seed(0)
        module = Clicks()
        ids, x, y = clicks(sum(SIZES))
        stream = Stream(periods(), "parallel", sample_rate=1.0)
        _, _, optimizer, loader = make_private(
            module, loader_of(ids, 100 * x, y, batch_size=batch_size), stream=stream, noise_multiplier=0.0,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0), max_grad_norm=1e-3, clipping="automatic",
        )  # fmt: skip
        norms: list[tuple[int, float]] = []

        def keep(*_: Any, module: Any = module, norms: Any = norms, loader: Any = loader) -> None:
            total = math.sqrt(sum(float(p.grad.to_dense().double().square().sum()) for p in module.parameters()))
            norms.append((loader.current.span, total))

        optimizer.inner.register_step_pre_hook(keep)
        train(module, optimizer, loader)
        assert [span for span, _ in norms] == [0, 1, 2, 3]
        assert norms[2][1] == pytest.approx(1e-3 / batch_size, rel=0.01)  # of a single unit
        assert all(norm <= size * 1e-3 / batch_size * 1.0001 for (_, norm), size in zip(norms, SIZES))


def test_calibration_does_not_look_at_sizes() -> None:
    noise = []
    for sizes in (SIZES, (1, 41, 60, 12)):
        engine, module = sparsedp.PrivacyEngine(seed=1), Clicks()
        engine.make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(sum(sizes)), batch_size=BATCH), target_epsilon=2.0, target_delta=1e-4, epochs=2,
            max_grad_norm=1.0, stream=Stream(periods(sizes), "sequential", sample_rate=RATE),
        )  # fmt: skip
        assert engine.plan.steps == 8 * STEPS
        noise.append(engine.plan.noise_multiplier)
    assert noise[0] == noise[1]


def test_resumed_within_a_span(tmp_path: Path) -> None:
    whole, first, again = (start() for _ in range(3))
    train(*whole[1:])
    _, module, optimizer, loader = first
    for ids, x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
        optimizer.step()
        if first[0].ledger.steps == STEPS + 3:
            break
    first[0].save_checkpoint(tmp_path / "c.pt")
    again[0].load_checkpoint(tmp_path / "c.pt")
    train(*again[1:])
    for name, value in whole[1].state_dict().items():
        torch.testing.assert_close(value, again[1].state_dict()[name], rtol=0, atol=0)
    with pytest.raises(sparsedp.CheckpointError, match="stream"):
        other = Stream(periods(), "sequential", sample_rate=0.2)
        make_private(Clicks(), loader_of(*clicks(sum(SIZES)), batch_size=BATCH), stream=other)[0].load_checkpoint(
            tmp_path / "c.pt"
        )


def test_predictions_are_of_batches_at_the_rate() -> None:
    """Expected touches are those of rate times the span's units, however many of them were counted."""
    engine, *_ = start((90, 30), mechanism=AdaFEST(threshold=0.0))
    prediction = sparsedp.prediction.predict(engine.plan, engine.touch_statistics())
    assert prediction.tables["table.weight"].touches == pytest.approx(RATE * 120 / 2)
    counts = PublicCounts(counts={"table.weight": np.full(50, 2.4)}, units=120.0)
    given = sparsedp.prediction.predict(engine.plan, engine.touch_statistics(counts.counts, counts.units))
    assert given.tables["table.weight"].touches == pytest.approx(RATE * 120 / 2)


@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.1, True, "0.1", float("nan")])
def test_what_a_rate_must_be(rate: Any) -> None:
    with pytest.raises(ConfigError, match="sample_rate must be a probability above 0"):
        Stream([1, 2], "parallel", sample_rate=rate)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"sample_rate=\.\.\.\) is for Poisson sampling"):
        start(poisson_sampling=False)
    with pytest.raises(UnsupportedError, match=r"or give Stream\(sample_rate=\.\.\.\) \(stream\.sample_rate\)"):
        make_private(Clicks(), loader_of(*clicks(sum(SIZES)), batch_size=BATCH), stream=Stream(periods(), "parallel"))
