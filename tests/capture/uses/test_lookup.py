"""Lookups of the same rows at the same positions, which are one: a bias by relative position that every layer adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsedp.capture.uses import Lookup, Use, add_use
from support import Apply, assert_exact, capture_uses

IDS, UNITS = torch.tensor([0, 2, -1, 2]), torch.tensor([0, 0, 1, 1])


def uses_of(*lookups: Lookup) -> list[Use]:
    uses: list[Use] = []
    for lookup in lookups:
        add_use(uses, lookup)
    return uses


def test_equal_lookups_are_added_up_in_memory_of_their_own() -> None:
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    kept = first.clone()
    (both,) = uses_of(Lookup(IDS, UNITS, first), Lookup(IDS.clone(), UNITS.clone(), second))
    assert isinstance(both, Lookup) and torch.equal(both.grad, first + second)
    assert torch.equal(first, kept)  # others may have the same gradient


OTHERS = {
    "other rows": lambda grad: Lookup(IDS.flip(0), UNITS, grad),
    "other units": lambda grad: Lookup(IDS, UNITS.flip(0), grad),
    "fewer positions": lambda grad: Lookup(IDS[:3], UNITS[:3], grad[:3]),
    "weights": lambda grad: Lookup(IDS, UNITS, grad, weight=torch.ones(4)),
    "bags": lambda grad: Lookup(IDS, UNITS, grad[:2], source=UNITS),
    "other numbers": lambda grad: Lookup(IDS, UNITS, grad.double()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_lookups_stay_apart(other: str) -> None:
    grad = torch.randn(4, 3)
    assert len(uses_of(Lookup(IDS, UNITS, grad), OTHERS[other](grad))) == 2
    assert len(uses_of(OTHERS[other](grad), Lookup(IDS, UNITS, grad))) == 2


class Layers(nn.Module):
    """Attention scores of several layers, with one bias by relative position, as in MPNet and T5."""

    def __init__(self, signs: tuple[float, ...]) -> None:
        super().__init__()
        self.bias, self.map, self.signs = nn.Embedding(7, 2), nn.Linear(3, 3), signs

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.bias(places[None] - places[:, None] + 3).permute(2, 0, 1)
        h = self.map(x)
        for sign in self.signs:
            scores = (h @ h.mT)[:, None] + sign * bias.expand(len(x), -1, -1, -1).contiguous()
            h = h + (scores.softmax(-1) @ h[:, None]).mean(1)
        return h


@pytest.mark.parametrize("signs", [(1.0,) * 6, (1e4, -1e4, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("batch", [3, 1])
def test_a_bias_that_every_layer_adds(signs: tuple[float, ...], batch: int) -> None:
    torch.manual_seed(0)
    assert_exact(Layers(signs).double(), torch.randn(batch, 4, 3, dtype=torch.float64))


def test_as_many_positions_as_one_layer_has() -> None:
    torch.manual_seed(0)
    found = capture_uses(Layers((1.0,) * 6), [torch.randn(3, 4, 3)])
    (lookup,) = found.uses["bias.weight"].lookups
    assert len(lookup.ids) == 3 * 4 * 4


def test_one_id_each_that_is_looked_up_twice() -> None:
    def forward(module: Any, ids: Tensor) -> Tensor:
        return module.table(ids) * module.table(ids).sin()

    torch.manual_seed(0)
    module = Apply(forward, table=nn.Embedding(5, 3, padding_idx=0))
    ids = torch.tensor([1, 4, 0, 1])
    assert_exact(module, ids)
    (lookup,) = capture_uses(module, [ids]).uses["table.weight"].lookups
    assert lookup.one_each and len(lookup.ids) == 4
