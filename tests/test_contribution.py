"""What a unit adds to rows, and the bound that it states."""

from __future__ import annotations

import math

import pytest
import torch

from sparsedp import FEST, AdaFEST, FrequencyRelease
from sparsedp.contribution import Contribution


@pytest.mark.parametrize("clip", [0.1, 0.9, 1.0, 3.7, 100.0, None])
def test_no_unit_adds_more_than_the_sensitivity(clip: float | None) -> None:
    contribution = Contribution(clip)
    touched = torch.tensor([0, 1, 2, 3, 13, 14, 1000, 10**6, 10**9])
    shares = contribution.shares(touched)
    assert shares.dtype == torch.float64 and float(shares.max()) <= 1
    norms = shares * touched.double().sqrt()
    if clip is None:
        assert contribution.sensitivity == math.inf and (shares == 1).all()
        return
    assert float(norms.max()) <= contribution.sensitivity * (1 + 1e-15)
    assert float(norms.max()) == pytest.approx(contribution.sensitivity)  # and it is reached
    assert (shares[(touched > 0) & (touched.double().sqrt() <= clip)] == 1).all()


@pytest.mark.parametrize("clip", [0.5, 2.0])
def test_one_unit_more_moves_sums_by_at_most_the_sensitivity(clip: float) -> None:
    units, at = torch.rand(30, 40, generator=torch.Generator().manual_seed(0)).gt(0.6).nonzero().T.contiguous()
    everyone = Contribution(clip).sums(units, at, 30, 40)
    for unit in range(30):
        others = units != unit
        moved = everyone - Contribution(clip).sums(units[others], at[others], 30, 40)
        assert 0 < float(moved.norm()) <= Contribution(clip).sensitivity * (1 + 1e-12)


def test_who_asks_for_it() -> None:
    assert AdaFEST(map_clip=2.5).contribution_clip == 2.5 and FEST(k=1).contribution_clip is None
    assert FrequencyRelease(clip=3.0).clip == Contribution(3.0).sensitivity
