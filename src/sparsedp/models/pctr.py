"""The click-through-rate model of the DP-AdaFEST paper (appendix D.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class PCTR(nn.Module):
    """One table per categorical feature, log-transformed integers beside them, and a ReLU network.

    dim of a table of V rows = int(2 V^0.25), unless `dims` gives one for all or one per table. An integer x
    enters as log(1 + max(x, 0)), or as it is with `log` false; a missing one (NaN, or 0 as `ClickLog` reads it) enters as 0.
    Each of `bags` is a feature with many ids, (rows, padding id): its rows' mean, without padding, enters like a table's row.
    forward: integers float [B, 13], categories int64 [B, 26], an int64 [B, length] for each bag -> logits [B]; B may be 0.
    """

    def __init__(
        self,
        vocabulary_sizes: Sequence[int],
        integers: int = 13,
        hidden: int = 598,
        hidden_layers: int = 4,
        dims: Sequence[int] | int | None = None,
        sparse: bool = False,
        bags: Sequence[tuple[int, int]] = (),
        log: bool = True,
    ) -> None:
        super().__init__()
        sizes = [*vocabulary_sizes, *(rows for rows, _ in bags)]
        if dims is None:
            dims = [int(2 * size**0.25) for size in sizes]
        elif isinstance(dims, int):
            dims = [dims] * len(sizes)
        if len(dims) != len(sizes):
            raise ValueError(f"{len(dims)} dims for {len(sizes)} tables")
        self.integers, self.log = integers, log
        tables = [nn.Embedding(size, dim, sparse=sparse) for size, dim in zip(vocabulary_sizes, dims)]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="mean", padding_idx=padding, sparse=sparse)
            for (rows, padding), dim in zip(bags, dims[len(tables) :])
        )
        for table in (*tables, *self.bags):
            # The paper does not say; this is the default of Keras. N(0, 1) would drown the integers.
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.tables = nn.ModuleList(tables)
        widths = [sum(dims) + integers] + [hidden] * hidden_layers
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, integers: Tensor, categories: Tensor, *bags: Tensor) -> Tensor:
        require_features(integers, categories, bags, self.integers, (len(self.tables),), len(self.bags))
        embedded = [table(ids) for table, ids in zip(self.tables, categories.unbind(1))]
        embedded += [table(ids) for table, ids in zip(self.bags, bags)]
        return self.network(torch.cat([*embedded, numbers_of(integers, self.log)], dim=1)).squeeze(1)


def numbers_of(integers: Tensor, log: bool) -> Tensor:
    """Numbers as they enter a model: log(1 + max(x, 0)) if `log`, and 0 where they are missing (NaN)."""
    known = torch.nan_to_num(integers, nan=0.0)
    return torch.log1p(known.clamp(min=0)) if log else known


def require_features(
    integers: Tensor, categories: Tensor, bags: Sequence[Tensor], numbers: int, shape: tuple[int, ...], bag_count: int
) -> None:
    """Refuses a batch without so many numbers and bags, or whose categories have another shape."""
    if integers.shape[1] != numbers or categories.shape[1:] != shape or len(bags) != bag_count:
        more = f" and {bag_count} bags" if bag_count or bags else ""
        raise ValueError(
            f"expected {numbers} integers and {' x '.join(map(str, shape))} categories{more} per example, "
            f"got {integers.shape[1]} and {' x '.join(map(str, categories.shape[1:]))}"
            + (f" and {len(bags)}" if more else "")
        )
