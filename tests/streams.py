"""Streams of several tests: periods out of order, runs over them and the events that they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from torch import nn

import sparsedp
from sparsedp import Stream
from sparsedp.mechanisms import Mechanism
from sparsedp.noise import RandomKey
from support import Clicks, clicks, loader_of, make_private

KEY = RandomKey.from_seed(3)
SIZES, BATCH = (40, 61, 48), 8
STEPS = (5, 8, 6)
# Not in order of time, not from 0, and with a gap: the spans must be found, not assumed.
PERIODS = np.random.default_rng(0).permutation(np.repeat([3, 4, 9], SIZES))
SELECTION = sparsedp.FEST(k=20, epsilon=0.7)
CHOICE = SELECTION.setup_event()


def stream(composition: Any = "parallel", span: int = 1, periods: Any = PERIODS) -> Stream:
    return Stream(periods, composition, span)


def start(
    mechanism: Mechanism | None = None, composition: Any = "parallel", seed: int | None = 7, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    chosen = options.pop("stream", stream(composition))
    data = loader_of(*clicks(sum(SIZES)), batch_size=BATCH, num_workers=options.pop("workers", 0))
    return make_private(Clicks(), data, seed=seed, mechanism=mechanism, stream=chosen, **options)


def steps(run: tuple, count: int, epochs: int = 2) -> None:
    """Takes up to `count` of the steps that are left of `epochs` epochs, then stops as a killed run would."""
    engine, module, optimizer, loader = run
    while engine.ledger.steps < epochs * len(loader):
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y).backward()
            optimizer.step()
            if loader.current.last:
                count -= 1
                if count == 0:
                    return


def step_event(span: int, sigma: float = 1.0) -> DpEvent:
    return PoissonSampledDpEvent(BATCH / SIZES[span], GaussianDpEvent(sigma))


def composed(*parts: tuple[DpEvent, int]) -> DpEvent:
    return ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in parts])


def calibrated(
    mechanism: Mechanism | None, composition: Any, epochs: int = 1, target: float = 2.0, **options: Any
) -> tuple:
    module = Clicks()
    engine = sparsedp.PrivacyEngine(seed=options.pop("seed", 7))
    module, optimizer, private = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader_of(*clicks(149), batch_size=BATCH), target_epsilon=target, target_delta=1e-5, epochs=epochs,
        max_grad_norm=1.0, mechanism=mechanism, stream=stream(composition), **options,
    )  # fmt: skip
    return engine, module, optimizer, private
