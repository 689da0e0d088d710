"""Callbacks in a loop of one's own."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsedp
from sparsedp import AdaFEST, ConfigError
from sparsedp.callbacks import SpentEpsilon
from sparsedp.integrations.tensorboard import TensorBoard
from support import Clicks, clicks, loader_of, make_private, train


class Told:
    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.epochs: list[int] = []
        self.ends: list[dict[str, float]] = []

    def on_step(self, step: int, values: dict[str, float]) -> None:
        self.steps.append((step, values))

    def on_epoch(self, epoch: int, values: dict[str, float]) -> None:
        self.epochs.append(epoch)

    def on_end(self, values: dict[str, float]) -> None:
        self.ends.append(values)


def private_run(**options: Any) -> tuple[sparsedp.PrivacyEngine, Clicks, Any, Any]:
    model = Clicks()
    loader = loader_of(*clicks(64), batch_size=16)
    return make_private(model, loader, mechanism=AdaFEST(threshold=2.0), **options)


@pytest.mark.parametrize("most", [None, 5])
def test_steps_epochs_and_the_end(most: int | None) -> None:
    """Also where a logical batch is several physical ones: one call for each logical step."""
    engine, model, optimizer, loader = private_run(max_physical_batch=most)
    every, third = Told(), Told()
    engine.add_callback(every)
    engine.add_callback(third, every=3)
    train(model, optimizer, loader, epochs=2)
    assert [step for step, _ in every.steps] == list(range(1, 9)) and [step for step, _ in third.steps] == [3, 6]
    assert every.epochs == third.epochs == [1, 2]
    report, values = optimizer.last_step, every.steps[-1][1]
    assert values["private/units"] == report.units and values["private/clipped_share"] == report.clipped_share
    assert values["private/tables/table.weight/selected"] == report.tables["table.weight"].rows_selected
    assert values["public/lr/0"] == 0.1 and 0 < values["public/epsilon"] <= engine.get_epsilon()
    assert every.ends == []
    engine.close()
    engine.close()
    assert len(every.ends) == 1 and every.ends[0]["public/epsilon"] == engine.get_epsilon()


def test_callbacks_change_nothing_of_the_training() -> None:
    weights = []
    for listened in (False, True):
        torch.manual_seed(0)
        engine, model, optimizer, loader = private_run()
        if listened:
            engine.add_callback(Told())
        train(model, optimizer, loader, epochs=2)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_an_empty_batch_has_no_values_that_are_no_numbers() -> None:
    engine, model, optimizer, loader = make_private(Clicks(), loader_of(*clicks(8), batch_size=1))
    told = Told()
    engine.add_callback(told)
    train(model, optimizer, loader, epochs=4)
    assert any(values["private/units"] == 0 for _, values in told.steps)
    assert all(
        isinstance(value, float) and math.isfinite(value) for _, values in told.steps for value in values.values()
    )


def test_what_is_no_callback_is_refused() -> None:
    engine, *_ = private_run()
    with pytest.raises(TypeError, match="has none of the methods on_step, on_epoch, on_end"):
        engine.add_callback(print)
    with pytest.raises(ValueError, match="every must be at least 1"):
        engine.add_callback(Told(), every=0)


def test_epsilon_is_computed_rarely_and_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, computed = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def compute() -> float:
        now[0] += 0.1  # that it takes
        computed.append(now[0])
        return float(len(computed))

    spent = SpentEpsilon(compute)
    assert [spent(), spent()] == [1.0, 1.0]
    now[0] += 1.0
    assert spent() == 1.0 and spent(now=True) == 2.0
    now[0] += 2.5  # more than twenty times as long
    assert spent() == 3.0


def test_tensorboard_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    engine, model, optimizer, loader = private_run()
    engine.add_callback(TensorBoard(tmp_path))
    train(model, optimizer, loader)
    engine.close()
    reader = events.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [event.step for event in reader.Scalars("private/units")] == [
        1,
        2,
        3,
        4,
        4,
    ]  # the last one again, at the end


def test_tensorboard_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'sparsedp\[tensorboard\]'"):
        TensorBoard(tmp_path)
