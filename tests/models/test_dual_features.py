"""The dual encoder with features of titles and a Transformer: by hand, exact capture, units that do not mix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsedp
from neighbours import largest_influence
from sparsedp.clipping import Clipping
from sparsedp.models import FeatureDualEncoder
from sparsedp.nn import candidate_loss
from support import Apply, assert_exact

ITEMS, LENGTH, DIM, UNITS, BUCKETS = 12, 4, 8, 6, 9

VARIANTS: dict[str, dict[str, Any]] = {
    "bag": {},
    "bag of titles": {"use_items": False},
    "tied bag": {"tied": True},
    "transformer": {"context": "transformer", "heads": 2, "blocks": 2},
    "transformer of titles": {"context": "transformer", "use_items": False},
}
all_variants = pytest.mark.parametrize("variant", VARIANTS)


def features() -> dict[str, Tensor]:
    """Titles of one to three words, one of none and one that repeats a word."""
    generator = torch.Generator().manual_seed(1)
    unigrams = torch.randint(1, BUCKETS + 1, (ITEMS + 1, 3), generator=generator)
    unigrams[torch.arange(3) >= torch.randint(1, 4, (ITEMS + 1, 1), generator=generator)] = 0
    unigrams[0] = unigrams[3] = 0
    unigrams[4] = 5
    bigrams = torch.randint(BUCKETS + 1, (ITEMS + 1, 2), generator=generator)
    bigrams[0] = 0
    return {"unigrams": unigrams, "bigrams": bigrams}


def build(variant: str) -> FeatureDualEncoder:
    torch.manual_seed(0)
    return FeatureDualEncoder(ITEMS, features(), BUCKETS, LENGTH, DIM, (5,), **VARIANTS[variant])


def batch(units: int = UNITS) -> tuple[Tensor, Tensor]:
    """Histories with padding behind, one of padding alone and one of a single repeated item; targets."""
    generator = torch.Generator().manual_seed(3)
    history = torch.randint(1, ITEMS + 1, (units, LENGTH), generator=generator)
    history[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (units, 1), generator=generator)] = 0
    history[:1], history[1:2] = 0, 4
    return history, 1 + torch.randint(ITEMS, (units,), generator=generator)


def candidates_of(target: Tensor) -> Tensor:
    drawn = torch.randint(1, ITEMS + 1, (len(target), 5), generator=torch.Generator().manual_seed(2))
    return torch.cat([target[:, None], drawn], 1)


@pytest.mark.parametrize("variant", ["bag", "bag of titles", "tied bag"])
def test_a_bag_by_hand(variant: str) -> None:
    model = build(variant)
    history, _ = batch()
    for unit in range(UNITS):
        vectors = []
        for item in history[unit][history[unit] > 0].tolist():
            vector = torch.zeros(DIM) if model.context_table is None else model.context_table.weight[item]
            for name, rows in features().items():
                real = rows[item][rows[item] > 0]
                if len(real):
                    vector = vector + model.tables[name].weight[real].mean(0)  # type: ignore[index, union-attr]
            vectors.append(vector)
        count = 2 if variant == "bag of titles" else 3
        mean = torch.stack(vectors).mean(0) if vectors else torch.zeros(DIM)
        hidden = model.network(math.sqrt(DIM / count) * mean)
        torch.testing.assert_close(model(history[unit : unit + 1])[0], model.label_table.weight @ hidden)


@pytest.mark.parametrize("variant", ["transformer", "transformer of titles"])
def test_a_transformer_does_not_see_padding(variant: str) -> None:
    model = build(variant)
    history = torch.tensor([[3, 7, 0, 0]])
    torch.testing.assert_close(model.encode(history), model.encode(history[:, :2]))
    assert not torch.allclose(model.encode(history), model.encode(torch.tensor([[7, 3, 0, 0]])))  # order counts
    assert torch.isfinite(model.encode(torch.zeros(1, LENGTH, dtype=torch.int64))).all()


@all_variants
def test_norms_and_sums_are_exact(variant: str) -> None:
    history, target = batch()
    losses = Apply(lambda m, h, c: len(h) * candidate_loss(m.model(h, c)), model=build(variant))
    assert_exact(losses, history, candidates_of(target), loss=lambda loss: loss)
    softmax = Apply(lambda m, h, t: m.model(h, target=t), model=build(variant))
    assert_exact(softmax, history, target, loss=lambda losses: losses.sum())


@all_variants
def test_units_do_not_mix(variant: str) -> None:
    history, target = batch()
    sparsedp.check(build(variant), lambda losses, _: losses.mean(), {"history": history, "target": target})
    inputs = [history, candidates_of(target)]
    loss = lambda scores: 1e3 * len(scores) * candidate_loss(scores)  # noqa: E731
    worst = largest_influence(build(variant), inputs, Clipping(0.5), loss)
    assert 0.45 < worst <= 0.5 * (1 + 1e-4)


def test_titles_stay_out_of_the_weights() -> None:
    names = build("transformer").state_dict().keys()
    assert {"tables.unigrams.weight", "tables.bigrams.weight", "context_table.weight", "label_table.weight"} < set(
        names
    )
    assert not any("rows_of" in name for name in names)
    assert "context_table.weight" not in build("bag of titles").state_dict()


@pytest.mark.parametrize("units", [0, 1])
@all_variants
def test_small_batches(variant: str, units: int) -> None:
    history, target = batch(units)
    assert build(variant)(history, candidates_of(target)).shape == (units, 6)


def test_what_is_refused() -> None:
    def make(**changes: Any) -> FeatureDualEncoder:
        return FeatureDualEncoder(
            **{"items": ITEMS, "features": features(), "buckets": BUCKETS, "length": 4, **changes}
        )

    for changes, message in (
        ({"context": "lstm"}, "bag or transformer"),
        ({"use_items": False, "tied": True}, "no tied table"),
        ({"use_items": False, "features": {}}, "must be other features"),
        ({"context": "transformer", "heads": 3}, "heads divide dim"),
        ({"buckets": 3}, r"features\['unigrams'\] must be \[13, n\]"),
        ({"items": 13}, r"features\['unigrams'\] must be \[14, n\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)
    with pytest.raises(ValueError, match="L up to 4"):
        make()(torch.zeros(1, 5, dtype=torch.int64))
