"""DLRM, the deep learning recommendation model (Naumov et al. 2019), in the configuration of MLPerf's benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from sparsedp.models.pctr import numbers_of, require_features

# Rows of the tables in MLPerf's training benchmark: Criteo's terabyte click log, ids modulo 40 million.
# With dim 128 they are the LazyDP paper's default model: 187,767,399 rows, 96 GB.
MLPERF_TABLES = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10, 2_208, 11_938,
    155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
MLPERF_DIM = 128
_FEWEST_ROWS = 3


def dlrm_table_sizes(scale: float = 1.0) -> list[int]:
    """The rows of MLPerf's 26 tables times `scale`, at least 3 each."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, not {scale}")
    return [max(_FEWEST_ROWS, round(rows * scale)) for rows in MLPERF_TABLES]


class DLRM(nn.Module):
    """Integers through a ReLU network, one table per categorical feature, inner products of all pairs, another network.

    The network of the integers ends with `dim` outputs, like a table's rows. The products of these 27 vectors with each
    other, each pair once, and the integers' vector itself enter the second network; without integers, the products alone.
    An integer x enters as log(1 + max(x, 0)), or as it is with `log` false; a missing one (NaN, or 0 as `ClickLog` reads it)
    enters as 0. With `pooling` > 1 every feature has that many ids, and their rows are added up. Each of `bags` is a feature
    with any number of ids, (rows, padding id): the mean of its rows, without padding, is one more vector.
    forward: integers float [B, 13], categories int64 [B, 26], or [B, 26, pooling], an int64 [B, length] for each bag
    -> logits [B]; B may be 0.
    """

    pairs: Tensor

    def __init__(
        self,
        table_sizes: Sequence[int],
        integers: int = 13,
        dim: int = MLPERF_DIM,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
        pooling: int = 1,
        sparse: bool = False,
        bags: Sequence[tuple[int, int]] = (),
        log: bool = True,
    ) -> None:
        super().__init__()
        if pooling < 1:
            raise ValueError(f"pooling must be at least 1, not {pooling}")
        self.integers, self.pooling, self.log = integers, pooling, log
        self.tables = nn.ModuleList(
            nn.Embedding(rows, dim, sparse=sparse)
            if pooling == 1
            else nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse)
            for rows in table_sizes
        )
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="mean", padding_idx=padding, sparse=sparse) for rows, padding in bags
        )
        self.bottom = nn.Sequential(*(_layers([integers, *bottom, dim]) if integers else []))
        vectors = (integers > 0) + len(table_sizes) + len(bags)
        if vectors + (integers > 0) < 2:
            raise ValueError("a DLRM needs two features whose products it can take, or a number")
        one, other = torch.tril_indices(vectors, vectors, offset=-1)
        # index_select by these gives products[:, one, other], with a faster backward.
        self.register_buffer("pairs", one * vectors + other, persistent=False)
        self.top = nn.Sequential(*_layers([dim * (integers > 0) + self.pairs.numel(), *top, 1])[:-1])
        self._initialise()

    def _initialise(self) -> None:
        """As the model's authors do."""
        for table in (*self.tables, *self.bags):
            assert isinstance(table, (nn.Embedding, nn.EmbeddingBag))
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        for layer in (*self.bottom, *self.top):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0, math.sqrt(2 / (layer.in_features + layer.out_features)))
                nn.init.normal_(layer.bias, 0, math.sqrt(1 / layer.out_features))

    def forward(self, integers: Tensor, categories: Tensor, *bags: Tensor) -> Tensor:
        shape = (len(self.tables),) if self.pooling == 1 else (len(self.tables), self.pooling)
        require_features(integers, categories, bags, self.integers, shape, len(self.bags))
        dense = [self.bottom(numbers_of(integers, self.log))] if self.integers else []
        rows = [table(ids) for table, ids in zip(self.tables, categories.unbind(1))]
        rows += [table(ids) for table, ids in zip(self.bags, bags)]
        vectors = torch.stack([*dense, *rows], dim=1)
        products = torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([*dense, products], dim=1)).squeeze(1)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    return [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
