"""Loops and libraries that leave batches or steps out: somebody is told."""

from __future__ import annotations

import gc
import warnings
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from sparsedp import SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.mechanisms.eana import eana_renyi_bound
from support import Clicks, clicks, loader_of, make_private, train

SIZE, BATCH = 96, 16


def run(**options: Any) -> tuple[Any, Any, Any, Any]:
    return make_private(Clicks(), loader_of(*clicks(SIZE), batch_size=BATCH), **options)


def step(module: Any, optimizer: Any, batch: Any) -> None:
    ids, x, y = batch
    optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(module(ids, x), y).backward()
    optimizer.step()


def rebuilt(loader: DataLoader, **options: Any) -> DataLoader:
    """What accelerate makes of a loader, and others that want samplers of their own."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, **options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("when", ["before the first pass", "during one", "after one"])
def test_a_loader_that_is_made_of_its_parts_is_refused(workers: int, when: str) -> None:
    """It gave no batch at all, and no error."""
    *_, loader = run()
    live = iter(loader) if when == "during one" else None
    if live is not None:
        next(live)
    if when == "after one":
        list(loader)
    with pytest.raises(UnsupportedError, match=r"accelerator\.prepare"):
        list(rebuilt(loader, num_workers=workers))
    if live is not None:
        assert len(list(live)) == len(loader) - 1  # the loader itself goes on


@pytest.mark.parametrize("workers", [0, 1])
def test_persistent_workers_still_serve_every_pass(workers: int) -> None:
    options = {"num_workers": 1, "persistent_workers": True} if workers else {}
    *_, loader = make_private(Clicks(), loader_of(*clicks(SIZE), batch_size=BATCH, **options))
    assert [len(list(loader)) for _ in range(3)] == [len(loader)] * 3


def test_a_loop_that_takes_len_for_the_number_of_physical_batches_is_told() -> None:
    """As transformers' Trainer does: it stopped after a third of the steps."""
    engine, module, optimizer, loader = run(max_physical_batch=5)
    with pytest.warns(SparseDPWarning, match="len\\(loader\\) counts logical batches") as said:
        for _ in range(3):
            batches = iter(loader)
            for batch in islice(batches, len(loader)):
                step(module, optimizer, batch)
            del batches, batch
            gc.collect()
    assert len(said) == 1
    drawn, taken = loader.drawn, engine.ledger.steps
    assert taken < drawn < 3 * len(loader)
    assert f"of {drawn} batches drawn, {drawn - taken} had no step" in str(engine.statement())
    assert engine.statement().to_dict()["batches_without_step"] == drawn - taken


def test_loops_that_end_early_on_purpose_are_left_in_peace() -> None:
    """A whole epoch, a break after a step, a look at one batch."""
    for limit in (None, 5):
        engine, module, optimizer, loader = run(max_physical_batch=limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(module, optimizer, loader)
            assert "had no step" not in str(engine.statement())
            for batch in loader:
                step(module, optimizer, batch)
                if loader.current.last:
                    break
            assert "had no step" not in str(engine.statement())
            next(iter(loader))
            gc.collect()
        assert f"of {loader.drawn} batches drawn, 1 had no step" in str(engine.statement())


def test_a_loop_without_steps_is_told() -> None:
    engine, module, optimizer, loader = run()
    with pytest.warns(SparseDPWarning, match="none of which had a step") as said:
        for ids, x, y in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(module(ids, x), y).backward()
    assert len(said) == 1 and engine.ledger.steps == 0
    assert f"of {len(loader)} batches drawn, {len(loader)} had no step" in str(engine.statement())


def test_steps_that_are_left_out_now_and_then_are_nobodys_business() -> None:
    _, module, optimizer, loader = run()
    for number, (ids, x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(module(ids, x), y).backward()
        if number % 3 == 2:
            optimizer.step()


def test_the_optimizer_that_was_wrapped_does_not_train() -> None:
    """Its step() finds no gradient: without an error nothing would be trained."""
    module = Clicks()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    _, module, _, loader = make_private(module, loader_of(*clicks(SIZE), batch_size=BATCH), optimizer=inner)
    with pytest.raises(SparseDPError, match="two batches met in one step"):
        for ids, x, y in loader:
            inner.zero_grad()
            F.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            inner.step()


def test_bounds_are_not_computed_from_nan() -> None:
    given = {"min_count": 9, "max_rows": 4, "gradient_bound": 1.0, "noise_std": 1.0}
    for name in ("max_rows", "gradient_bound", "noise_std"):
        with pytest.raises(ValueError, match="noise_std positive"):
            eana_renyi_bound(2, **{**given, name: float("nan")})
