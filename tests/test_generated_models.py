"""Capture is exact on models that nobody wrote by hand: random stacks of layers, ties, repeated layers and ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsedp
from support import assert_exact

DIM, ROWS = 4, 7
BLOCKS = (
    "linear", "linear again", "functional", "matmul", "norm", "rms", "scale", "position", "position slice", "attention",
    "conv", "residual", "second lookup", "bag", "lstm", "seq first", "flatten", "table as matrix", "bias",
)  # fmt: skip
HEADS = ("untied", "tied module", "tied matmul", "tied functional", "mean pool")


class Generated(nn.Module):
    """Ids (B, L) through an embedding, `blocks`, and a `head`; all lookups and ties share one table."""

    def __init__(self, blocks: list[str], head: str, length: int, padding: int | None) -> None:
        super().__init__()
        self.blocks, self.kind = blocks, head
        self.table = nn.Embedding(ROWS, DIM, padding_idx=padding)
        self.linear = nn.Linear(DIM, DIM)
        self.square = nn.Parameter(torch.randn(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(DIM))
        self.norm, self.rms = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.position = nn.Embedding(length + 2, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.lstm = sparsedp.nn.LSTM(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, ROWS)
        if head == "tied module":
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = self.apply_block(block, h, ids)
        if self.kind == "tied matmul":
            return h @ self.table.weight.T
        if self.kind == "tied functional":
            return F.linear(h, self.table.weight)
        return self.head(h if self.kind != "mean pool" else h.mean(1))

    def apply_block(self, block: str, h: Tensor, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if block in ("linear", "linear again"):
            return self.linear(h).tanh()
        if block == "functional":
            return F.linear(h, self.linear.weight)
        if block == "matmul":
            return (h @ self.square).sin()
        if block == "norm":
            return self.norm(h)
        if block == "rms":
            return self.rms(h)
        if block == "scale":
            return h * self.scale
        if block == "bias":
            return h + self.scale
        if block == "position":
            return h + self.position(torch.arange(length))
        if block == "position slice":
            return h * self.position.weight[1 : length + 1]
        if block == "attention":
            return self.attention(h, h, h, need_weights=False)[0]
        if block == "conv":
            return self.conv(h.transpose(1, 2)).transpose(1, 2)
        if block == "residual":
            return h + self.linear(self.norm(h))
        if block == "second lookup":
            return h * self.table((ids + 1) % ROWS)
        if block == "bag":
            return h + F.embedding_bag(ids, self.table.weight, mode="mean")[:, None]
        if block == "lstm":
            return self.lstm(h)[0]
        if block == "seq first":
            return self.linear(h.transpose(0, 1)).transpose(0, 1).sin()
        if block == "flatten":
            return self.linear(h.reshape(-1, DIM)).view_as(h).sin()
        if block == "table as matrix":
            return (h @ self.table.weight.T).tanh() @ self.table.weight
        raise AssertionError(block)


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
