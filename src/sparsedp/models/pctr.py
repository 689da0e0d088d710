"""The click-through-rate model of the DP-AdaFEST paper (appendix D.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class PCTR(nn.Module):
    """One table per categorical feature, log-transformed integers beside them, and a ReLU network.

    dim of a table of V rows = int(2 V^0.25), unless `dims` gives one for all or one per table. An integer x
    enters as log(1 + max(x, 0)); a missing one (NaN, or 0 as `ClickLog` reads it) enters as 0.
    forward: integers float [B, 13], categories int64 [B, 26] -> logits [B]; B may be 0.
    """

    def __init__(
        self,
        vocabulary_sizes: Sequence[int],
        integers: int = 13,
        hidden: int = 598,
        hidden_layers: int = 4,
        dims: Sequence[int] | int | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if dims is None:
            dims = [int(2 * size**0.25) for size in vocabulary_sizes]
        elif isinstance(dims, int):
            dims = [dims] * len(vocabulary_sizes)
        if len(dims) != len(vocabulary_sizes):
            raise ValueError(f"{len(dims)} dims for {len(vocabulary_sizes)} tables")
        self.integers = integers
        tables = [nn.Embedding(size, dim, sparse=sparse) for size, dim in zip(vocabulary_sizes, dims)]
        for table in tables:
            # The paper does not say; this is the default of Keras. N(0, 1) would drown the integers.
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.tables = nn.ModuleList(tables)
        widths = [sum(dims) + integers] + [hidden] * hidden_layers
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, integers: Tensor, categories: Tensor) -> Tensor:
        if integers.shape[1] != self.integers or categories.shape[1] != len(self.tables):
            raise ValueError(
                f"expected {self.integers} integers and {len(self.tables)} categories per example, "
                f"got {integers.shape[1]} and {categories.shape[1]}"
            )
        logs = torch.log1p(torch.nan_to_num(integers, nan=0.0).clamp(min=0))
        embedded = [table(ids) for table, ids in zip(self.tables, categories.unbind(1))]
        return self.network(torch.cat([*embedded, logs], dim=1)).squeeze(1)
