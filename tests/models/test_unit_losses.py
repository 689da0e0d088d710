"""The losses of units, from logits: those that transformers' own models return for units alone, over the families of the matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_matrix import hf

from sparsedp.integrations.unit_losses import LABELS, losses_of_units

transformers = pytest.importorskip("transformers")

loss_kind = pytest.importorskip("sparsedp.integrations.transformers").loss_kind

pytestmark = pytest.mark.models

# Its labels are not shifted, for whatever reason: PrivateTrainer refuses it.
OTHERS = {("Bart", hf.CAUSAL)}
CASES = [
    (family, config, head)
    for family, config, heads in hf.FAMILIES
    for head in heads
    if head in (*LABELS, "LMHeadModel")
]


@pytest.mark.parametrize(("family", "config", "head"), CASES, ids=[f"{family}-{head}" for family, _, head in CASES])
def test_the_losses_of_units_are_the_models_own_of_units_alone(family: str, config: Any, head: str) -> None:
    torch.manual_seed(0)
    model = hf._build(family, head, config)().eval()
    kind = loss_kind(model)
    batch = {"causal": hf.padded_language}.get(hf.HEADS[head], hf.BATCHES[head])(3)
    if head == hf.CLASSIFIER:
        batch = hf.CLASSES.get(family, hf.classes)(3)
    assert kind in LABELS
    for unit in range(3):
        alone = {name: value[unit : unit + 1] for name, value in batch.items()}
        with torch.no_grad():
            outputs = model(**alone)
        (loss,) = losses_of_units(kind, outputs, {name: alone[name] for name in LABELS[kind]})
        alike = torch.allclose(loss, outputs.loss.to(loss.dtype), rtol=1e-4, atol=1e-5)
        assert alike == ((family, head) not in OTHERS)
