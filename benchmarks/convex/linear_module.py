"""A linear model as a PyTorch module whose weights are a table, and sparse rows as it takes them."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from sparsedp.errors import UnsupportedError


class LinearModel(nn.Module):
    """<x, w> for k models: rows come as column numbers (n, width) and values (n, width), with zeros where a row has fewer."""

    def __init__(self, columns: int, models: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(columns, models, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        return self.weights(columns, per_sample_weights=values)


def padded(rows: csr_array) -> tuple[Tensor, Tensor]:
    """Column numbers (n, width) int64 and values (n, width) float32: width is the most non-zeros of a row."""
    sizes = np.diff(rows.indptr)
    width = max(1, int(sizes.max(initial=0)))
    if rows.shape[0] * width > max(1 << 24, 50 * rows.nnz):
        raise UnsupportedError(
            f"One row has {width} non-zeros, and on average they have {rows.nnz / rows.shape[0]:.3g}: they are kept "
            "as wide as the widest. Leave columns out."
        )
    columns, values = np.zeros((rows.shape[0], width), np.int64), np.zeros((rows.shape[0], width), np.float32)
    of_row = np.repeat(np.arange(rows.shape[0]), sizes)
    within = np.arange(rows.nnz) - np.repeat(rows.indptr[:-1], sizes)
    columns[of_row, within], values[of_row, within] = rows.indices, rows.data
    return torch.from_numpy(columns), torch.from_numpy(values)
