"""Capture is exact on models that nobody wrote by hand: random stacks of layers, ties, repeated layers and ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import BLOCKS, HEADS, ROWS, Generated
from support import assert_exact


def _check(blocks: list[str], head: str, units: int, length: int, padding: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    model = Generated(blocks, head, length, padding)
    ids = torch.randint(ROWS, (units, length))
    assert_exact(model, ids, loss=lambda out: out.sin().sum() / 3, tolerance=1e-8)


MODELS = given(
    blocks=st.lists(st.sampled_from(BLOCKS), max_size=5),
    head=st.sampled_from(HEADS),
    units=st.integers(1, 5),
    length=st.integers(1, 5),
    padding=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 2**20),
)


@settings(max_examples=80, deadline=None)
@MODELS
def test_generated_models(
    blocks: list[str], head: str, units: int, length: int, padding: int | None, seed: int
) -> None:
    _check(blocks, head, units, length, padding, seed)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@MODELS
def test_many_generated_models(
    blocks: list[str], head: str, units: int, length: int, padding: int | None, seed: int
) -> None:
    _check(blocks, head, units, length, padding, seed)
