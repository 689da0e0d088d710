"""Which rows a batch looks up: uniformly, or with the LazyDP paper's three degrees of skew (section 7.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Skew = Literal["uniform", "low", "medium", "high"]
SKEWS: tuple[Skew, ...] = get_args(Skew)
HOT_ACCESSES = 0.9  # the share of the lookups that goes to the hot rows
HOT_ROWS = {"low": 0.36, "medium": 0.10, "high": 0.006}  # the share of a table's rows that are hot


def draw_ids(
    table_sizes: Sequence[int], batch: int, *, pooling: int = 1, skew: Skew = "uniform",
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Ids for a batch, int64 [batch, tables], or [batch, tables, pooling] for a pooling factor above 1.

    With skew, the first rows of a table are hot: 90 % of its lookups go to HOT_ROWS of them (at least one row), evenly,
    and the rest evenly to the other rows. The paper does not say more of the distribution than this.
    """
    if pooling < 1:
        raise ValueError(f"pooling must be at least 1, not {pooling}")
    if skew not in SKEWS:
        raise ValueError(f"skew must be one of {', '.join(SKEWS)}, not {skew!r}")
    columns = []
    for rows in table_sizes:
        hot = rows if skew == "uniform" else max(1, round(HOT_ROWS[skew] * rows))
        ids = torch.randint(hot, (batch, pooling), generator=generator)
        if hot < rows:
            others = torch.randint(hot, rows, (batch, pooling), generator=generator)
            ids = torch.where(torch.rand(batch, pooling, generator=generator) < HOT_ACCESSES, ids, others)
        columns.append(ids)
    drawn = torch.stack(columns, dim=1)
    return drawn.squeeze(2) if pooling == 1 else drawn
