"""Tables in which all ids outside of a selection share one trained row, the fallback.

FEST trains the rows that it selected; an id outside of them would be represented by the random numbers that its row
started with. Here it is represented by the last row, which every selection contains. That is a public choice and costs
nothing, and the selection itself is released with differential privacy, so the mapping may be in a `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.fallback import FallbackTable


class _Fallback(FallbackTable):
    """What both forms share: `kept`, (rows + 1,) bool, says which ids have their own row. At first all have."""

    num_embeddings: int  # rows of the table, with the fallback
    padding_idx: int | None
    weight: Tensor
    kept: Tensor
    _maps: bool = True

    @property
    def fallback(self) -> int:
        """The row that stands for all ids that are not kept. Also an id, for what has no id of its own."""
        return self.num_embeddings - 1

    def keep(self, rows: Tensor | Sequence[int]) -> None:
        """From now on, only `rows` (and padding) are looked up as they are; all other ids become the fallback.

        The engine calls this with what a mechanism selected before training, in place of any earlier call. With
        mechanisms that select nothing beforehand, call it yourself, with rows that are public.
        """
        chosen = torch.as_tensor(rows, dtype=torch.long, device=self.kept.device)
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) <= self.fallback:
            raise ValueError(f"rows must lie between 0 and {self.fallback}")
        self.kept.fill_(False)
        self.kept[chosen] = True
        self.kept[self.fallback] = True
        if self.padding_idx is not None:
            self.kept[self.padding_idx] = True

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        kept = self.kept.clone()
        try:
            yield
        finally:
            self.kept.copy_(kept)

    @contextmanager
    def real_ids(self) -> Iterator[None]:
        self._maps = False
        try:
            yield
        finally:
            self._maps = True

    def _rows(self, ids: Tensor) -> Tensor:
        return torch.where(self.kept[ids], ids, self.fallback) if self._maps else ids

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of which the last is the fallback"


class FallbackEmbedding(_Fallback, nn.Embedding):
    """nn.Embedding for ids 0 to `num_embeddings` - 1, with one more row for those that are not selected."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        padding_idx = _padding(padding_idx, num_embeddings)
        super().__init__(num_embeddings + 1, embedding_dim, padding_idx, sparse=sparse, device=device, dtype=dtype)
        self.register_buffer("kept", torch.ones(num_embeddings + 1, dtype=torch.bool, device=device))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self._rows(input))


class FallbackEmbeddingBag(_Fallback, nn.EmbeddingBag):
    """nn.EmbeddingBag, likewise. Several ids of a bag may fall on the fallback: each counts."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        padding_idx: int | None = None,
        sparse: bool = False,
        include_last_offset: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_embeddings + 1, embedding_dim, mode=mode, padding_idx=_padding(padding_idx, num_embeddings),
            sparse=sparse, include_last_offset=include_last_offset, device=device, dtype=dtype,
        )  # fmt: skip
        self.register_buffer("kept", torch.ones(num_embeddings + 1, dtype=torch.bool, device=device))

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return super().forward(self._rows(input), offsets, per_sample_weights)


def _padding(index: int | None, rows: int) -> int | None:
    """The id of padding, from 0 on: a negative one counts from the end of the ids, which is not the end of the table."""
    if index is None:
        return None
    if not -rows <= index < rows:
        raise ValueError(f"padding_idx must lie between {-rows} and {rows - 1}, not {index}")
    return index % rows
