"""The recurrent baselines of the DPFormer paper (section 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparsedp.models.sequence import SequenceModel
from sparsedp.nn.recurrent import GRU, LSTM

_CELLS = {"gru": GRU, "lstm": LSTM}


class RecurrentRecommender(SequenceModel):
    """One GRU or LSTM layer over embedded items, with dropout before and after it. `dim` is also the size of its state.

    Rows start as N(0, 1/dim), so that what is looked up starts with variance 1.
    """

    def __init__(
        self, items: int, length: int, cell: str = "gru", dim: int = 64, tied: bool = True, dropout: float = 0.2
    ) -> None:
        if dim < 1 or cell not in _CELLS:
            raise ValueError(f"{dim=} must be at least 1 and {cell=} one of {', '.join(_CELLS)}")
        super().__init__(items, length, dim, tied, dropout, deviation=dim**-0.5)
        self.cell = cell
        self.layer = _CELLS[cell](dim, dim, batch_first=True)

    def encode(self, history: Tensor) -> Tensor:
        embedded = F.dropout(self.embed(history), self.dropout, self.training)
        return F.dropout(self.layer(embedded)[0], self.dropout, self.training)
