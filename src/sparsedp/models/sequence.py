"""What the models of item sequences share: the tables, and the ways to score.

Item ids are 1 to `items`; 0 is padding. Histories are padded on the right, so a causal model needs no padding mask: a real
position never sees a padded one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.nn.candidates import candidate_scores
from sparsedp.nn.scores import score_all_rows
from sparsedp.nn.softmax import table_softmax_loss


class SequenceModel(nn.Module, ABC):
    """Scores items as the next one after each position of a history: hidden . table[item], without a bias.

    `item_table` embeds histories. If `tied` it scores as well, otherwise `output_table` does. Its rows start as
    N(0, deviation^2), and `embed` multiplies what it looks up by sqrt(dim) (Vaswani et al. 2017, section 3.4).
    """

    def __init__(self, items: int, length: int, dim: int, tied: bool, dropout: float, deviation: float) -> None:
        super().__init__()
        if min(items, length, dim) < 1:
            raise ValueError(f"{items=}, {length=} and {dim=} must be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"{dropout=} must be in [0, 1)")
        self.items, self.length, self.dim, self.tied, self.dropout = items, length, dim, tied, dropout
        self.item_table = _table(items, dim, deviation)
        if not tied:
            self.output_table = _table(items, dim, deviation)

    @property
    def scoring_table(self) -> nn.Embedding:
        """The table whose rows are compared with hidden states."""
        return self.item_table if self.tied else self.output_table

    @abstractmethod
    def encode(self, history: Tensor) -> Tensor:
        """Hidden states [B, L, dim] of histories [B, L]: each depends on its position and those before it."""

    def forward(self, history: Tensor, candidates: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        """Logits of all items, [B, L, items + 1], column 0 being padding (for `sparsedp.nn.sequence_loss`).

        With `candidates` [B, L, 1 + n], target first: their scores, [B, L, 1 + n], through a lookup. With `target` [B, L],
        0 where there is none: each unit's mean softmax cross-entropy over its targets, [B], without keeping the logits.
        """
        if candidates is not None and target is not None:
            raise ValueError("Give candidates or target, not both: candidates have their target in front.")
        hidden = self.encode(history)
        if candidates is not None:
            return candidate_scores(hidden, self.scoring_table, candidates)
        if target is not None:
            return table_softmax_loss(hidden, self.scoring_table.weight, target, ignore=0)
        return F.linear(hidden, self.scoring_table.weight)

    @torch.no_grad()
    def score_next(self, history: Tensor) -> Tensor:
        """The scores [B, items + 1] of what follows each history's last item; padding's is -infinity.

        Call eval() first: in training mode dropout acts here as well.
        """
        last = ((history != 0).sum(1) - 1).clamp_min(0)
        hidden = self.encode(history)[torch.arange(history.shape[0], device=history.device), last]
        scores = score_all_rows(hidden, self.scoring_table)
        scores[:, 0] = -math.inf
        return scores

    def embed(self, history: Tensor) -> Tensor:
        """sqrt(dim) item_table[history], [B, L, dim]."""
        if history.ndim != 2 or not 1 <= history.shape[1] <= self.length:
            raise ValueError(f"histories must be [B, L] with L from 1 to {self.length}, not {tuple(history.shape)}")
        return self.item_table(history) * math.sqrt(self.dim)


def _table(items: int, dim: int, deviation: float) -> nn.Embedding:
    table = nn.Embedding(items + 1, dim, padding_idx=0)
    nn.init.normal_(table.weight[1:], std=deviation)
    return table
