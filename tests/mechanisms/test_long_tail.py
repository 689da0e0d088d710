"""On long-tailed logs the default threshold learns next to nothing, a run says so, and the one that is found learns."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tuning.longtail import FILES, Clicks, generated, interactions, two_tables
from torch.utils.data import DataLoader

import sparsedp
from sparsedp.data import auc

pytestmark = pytest.mark.slow


def trained(mechanism: sparsedp.Mechanism, logs: tuple[Clicks, Clicks], batch: int) -> tuple[float, list[str]]:
    """AUC on what was held out, and what was warned of."""
    training, held_out = logs
    torch.manual_seed(0)
    model = two_tables(training)
    loader = DataLoader(training, batch_size=batch, shuffle=True, collate_fn=training.collate)
    engine = sparsedp.PrivacyEngine(seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", sparsedp.UtilityWarning)
        _, optimizer, private = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1), data_loader=loader,
            target_epsilon=3.0, target_delta=1e-6, epochs=2, max_grad_norm=1.0, mechanism=mechanism,
        )  # fmt: skip
        for _ in range(2):
            for *inputs, target in private:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(model(*inputs), target).backward()
                optimizer.step()
    assert engine.get_epsilon() <= 3.0
    first, items, clicked = held_out.tensors
    with torch.no_grad():
        scores = model(first, items)
    return auc(clicked.numpy(), scores.numpy()), [str(warning.message) for warning in caught]


def found(ratio: float) -> sparsedp.Mechanism:
    return sparsedp.AdaFEST(threshold="auto", look_at="data", noise_ratio=ratio)


def test_a_generated_log() -> None:
    logs = generated()
    default, said = trained(sparsedp.AdaFEST(), logs, 1024)
    assert default < 0.57 and any("the selection kept" in text for text in said)
    for ratio in (5.0, 2.0):
        assert trained(found(ratio), logs, 1024)[0] > 0.63
    assert trained(sparsedp.DPSGD(), logs, 1024)[0] > 0.64  # there is something to learn at this epsilon


def test_real_interactions() -> None:
    """Amazon Instant Video: 390,000 users, 21,000 items, an interaction or an item drawn evenly."""
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not (Path(folder) / FILES["amazon"]).is_file():
        pytest.skip("SPARSEDP_DATA names no folder with the interactions")
    logs = interactions("amazon")
    default, said = trained(sparsedp.AdaFEST(), logs, 2048)
    assert any("the selection kept" in text for text in said)
    assert trained(found(2.0), logs, 2048)[0] > default + 0.08
