"""Units of a batch do not meet where their place is not known: in outputs, in what is kept, in sizes that are equal by chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import UnitsMixedError, UnsupportedError
from support import Apply

B, D = 8, 8
REFUSED = (UnsupportedError, UnitsMixedError)


def run(
    forward: Callable[..., Any], loss: Callable[[Any], Tensor], inputs: Any = lambda x, w: (x,), batch: int = B
) -> int:
    """How many steps were taken over one epoch."""
    module = Apply(forward, a=nn.Linear(D, D))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(B, D), torch.rand(B)), batch_size=batch),
    )  # fmt: skip
    steps = 0
    for x, w in loader:
        optimizer.zero_grad()
        loss(module(*inputs(x, w))).backward()
        optimizer.step()
        steps += 1
    return steps


def mean_of_squares(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("meet", [lambda h, kept: kept @ h.T, lambda h, kept: torch.einsum("bd,kd->bk", h, kept)])
def test_units_do_not_meet_those_of_an_earlier_batch(meet: Callable[[Tensor, Tensor], Tensor]) -> None:
    kept: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        out = meet(h, kept[-1]) if kept else h
        kept.append(h.detach())
        return out

    with pytest.raises(UnitsMixedError, match="earlier batch"):
        run(forward, mean_of_squares, batch=4)


def test_what_is_kept_for_looking_at_does_no_harm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.last = m.a(x)
        return m.last

    assert run(forward, mean_of_squares, batch=4) == 2


def permuted_mask(m: Any, x: Tensor) -> Tensor:
    mask = x > 0
    mask[torch.arange(B - 1, -1, -1)] = x > 0.5
    return m.a(x) * mask


def columns_of_units(m: Any, x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, x[:, 0] > 0] = 0
    return m.a(changed)


EQUAL_SIZES: dict[str, Callable[..., Tensor]] = {
    "quantiles": lambda m, x: m.a(torch.quantile(x, torch.linspace(0.1, 0.9, B), dim=1)),
    "unequal parts": lambda m, x: m.a(torch.cat([x, x]).split([4, B, 4])[1]) + m.a(x),
    "parts at places": lambda m, x: m.a(torch.cat([x, x]).tensor_split((3, 3 + B))[1]) + m.a(x),
    "an array as index": lambda m, x: m.a(x.T[np.arange(D)]),
    "a tuple as index": lambda m, x: m.a(x.T[(tuple(range(D)),)]),
    "indices of two dimensions": lambda m, x: m.a(x[torch.arange(B), torch.arange(D).repeat(B, 1)]),
    "a mask of all dimensions": lambda m, x: m.a(x[..., torch.ones(B, D, dtype=torch.bool)].view(B, D)),
    "a permuted mask": permuted_mask,
    "columns by units": columns_of_units,
    "new_full": lambda m, x: m.a(x) * x.new_full((D,), x.mean()),
}


@pytest.mark.parametrize("name", EQUAL_SIZES)
def test_sizes_that_are_equal_by_chance_do_not_mix_units(name: str) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):  # the loader may draw another number of units
            run(EQUAL_SIZES[name], mean_of_squares)


@dataclass(slots=True)
class Slots:
    weights: Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"), [(Slots, lambda s: s.weights), (lambda w: deque([w]), lambda d: d[0])], ids=["slots", "deque"]
)
def test_inputs_in_any_container_are_of_units(wrap: Callable, unwrap: Callable) -> None:
    with pytest.raises(UnitsMixedError, match="mean"):
        run(lambda m, x, o: m.a(x) * unwrap(o).mean(), mean_of_squares, inputs=lambda x, w: (x, wrap(w)))
    run(lambda m, x, o: m.a(x) * unwrap(o)[:, None], mean_of_squares, inputs=lambda x, w: (x, wrap(w)))
