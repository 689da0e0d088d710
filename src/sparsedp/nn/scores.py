"""The scores of all rows of a table, also where its rows are in other processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PIECE = 1 << 16  # rows that are looked up at a time


@torch.no_grad()
def score_all_rows(hidden: Tensor, table: nn.Embedding) -> Tensor:
    """hidden . table[row] for each row, (..., rows), without gradients.

    Where the rows of the table are divided among processes they are looked up, some at a time; all processes have to ask.
    """
    whole = (table.num_embeddings, table.embedding_dim)
    if tuple(table.weight.shape) == whole and not table.weight.is_meta:
        return F.linear(hidden, table.weight)
    numbers = torch.arange(table.num_embeddings, device=hidden.device)
    return torch.cat([F.linear(hidden, table(rows)) for rows in numbers.split(_PIECE)], -1)
