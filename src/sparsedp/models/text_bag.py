"""A classifier of texts in which the table is nearly all there is: the mean of a text's rows, and a small network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class TextBag(nn.Module):
    """Logits [n, classes] of texts, each int64 [n, length] with `padding` behind its end.

    A text is the mean of its rows. Of two texts, both are one bag, or with `towers` each is a bag u and v of the same table, and
    the network sees (u, v, |u - v|, u v). A text without any token is zero. `weights` are the rows to start from.
    """

    def __init__(
        self,
        rows: int,
        classes: int,
        *,
        padding: int,
        dim: int = 64,
        hidden: Sequence[int] = (),
        towers: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.padding, self.towers = padding, towers
        self.table = nn.EmbeddingBag(rows, dim, mode="mean", padding_idx=padding)
        with torch.no_grad():
            if weights is not None:
                self.table.weight.copy_(weights)
            self.table.weight[padding] = 0
        sizes = [dim * (4 if towers else 1), *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def forward(self, *texts: Tensor) -> Tensor:
        if not self.towers:
            return self.head(self.table(torch.cat(texts, 1)))
        u, v = (self.table(text) for text in texts)
        return self.head(torch.cat([u, v, (u - v).abs(), u * v], 1))
