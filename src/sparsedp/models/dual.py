"""The dual encoder of the EANA paper (Ning et al. 2022, section 4.1.2, figure 3): a context and its next item, compared."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.nn.candidates import candidate_scores
from sparsedp.nn.scores import score_all_rows
from sparsedp.nn.softmax import table_softmax_loss


class TwoTowers(nn.Module, ABC):
    """Scores items as the next one of a history: encode(history) . label_table[item], without a bias.

    Item ids are 1 to `items`; 0 is padding, anywhere in a history. The label tower is a lookup in `label_table`. A context
    tower ends with `network`, ReLU layers of the widths in `hidden` and a linear layer to `dim`.
    """

    def __init__(self, items: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        if min(items, dim, *hidden) < 1:
            raise ValueError(f"{items=}, {dim=} and {hidden=} must be at least 1")
        self.items, self.dim = items, dim

    def _add_label_tower(self, hidden: Sequence[int], shared: Tensor | None, sparse: bool) -> None:
        """After the context's tables: `label_table`, with the `shared` weight if there is one, and `network`."""
        self.label_table = make_table(self.items, self.dim, sparse)
        if shared is not None:
            self.label_table.weight = shared
        layers = [part for a, b in pairwise([self.dim, *hidden]) for part in (nn.Linear(a, b), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear([self.dim, *hidden][-1], self.dim))

    @abstractmethod
    def encode(self, history: Tensor) -> Tensor:
        """The context tower: histories [B, L], padded with 0 -> [B, dim]."""

    def forward(
        self,
        history: Tensor,
        candidates: Tensor | None = None,
        log_expected: Tensor | None = None,
        target: Tensor | None = None,
    ) -> Tensor:
        """Scores of all items, [B, items + 1], column 0 being padding (for `sparsedp.nn.sequence_loss`).

        With `candidates` [B, 1 + n], target first: their scores, [B, 1 + n], through a lookup, less `log_expected` if it is
        given (see `sparsedp.nn.candidate_scores`). With `target` [B]: each unit's softmax cross-entropy over all items, [B],
        without keeping the scores. The other units of a batch are no negatives: a unit's loss would depend on them.
        """
        if candidates is not None and target is not None:
            raise ValueError("Give candidates or target, not both: candidates have their target in front.")
        if candidates is None and log_expected is not None:
            raise ValueError("log_expected belongs to candidates, and there are none.")
        hidden = self.encode(history)
        if candidates is not None:
            return candidate_scores(hidden, self.label_table, candidates, log_expected)
        if target is not None:
            return table_softmax_loss(hidden[:, None], self.label_table.weight, target[:, None], ignore=0)
        return F.linear(hidden, self.label_table.weight)

    @torch.no_grad()
    def score_next(self, history: Tensor) -> Tensor:
        """The scores [B, items + 1] of what follows each history; padding's is -infinity."""
        scores = score_all_rows(self.encode(history), self.label_table)
        scores[:, 0] = -math.inf
        return scores


def make_table(rows: int, dim: int, sparse: bool) -> nn.Embedding:
    """Rows N(0, 1/dim) behind row 0, padding's."""
    table = nn.Embedding(rows + 1, dim, padding_idx=0, sparse=sparse)
    nn.init.normal_(table.weight[1:], std=dim**-0.5)
    return table


class DualEncoder(TwoTowers):
    """The encoder of section 4.1.2 and figure 3: the context tower is a bag of words.

    That is the mean of the history's rows of `context_table`, times sqrt(dim), behind which comes `network`. The paper has one
    hidden layer and a table for each tower; with `tied` they share one. It does not say what similarity, activation and
    initialisation it takes; the latter is that of `SequenceModel`: rows N(0, 1/dim), and a context's times sqrt(dim).
    A history of padding alone is a bag of nothing: zeros.
    """

    def __init__(
        self, items: int, dim: int = 128, hidden: Sequence[int] = (128,), tied: bool = False, sparse: bool = False
    ) -> None:
        super().__init__(items, dim, hidden)
        self.tied = tied
        self.context_table = nn.EmbeddingBag(items + 1, dim, mode="mean", padding_idx=0, sparse=sparse)
        nn.init.normal_(self.context_table.weight[1:], std=dim**-0.5)
        self._add_label_tower(hidden, self.context_table.weight if tied else None, sparse)

    def encode(self, history: Tensor) -> Tensor:
        if history.ndim != 2:
            raise ValueError(f"histories must be [B, L], not {tuple(history.shape)}")
        return self.network(self.context_table(history) * math.sqrt(self.dim))
