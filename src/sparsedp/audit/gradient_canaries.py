"""Canaries whose gradient is known exactly, and the model that has such gradients: what a white-box audit trains.

The loss is linear, so that a canary's gradient does not depend on the weights: it has one direction of its own, that of one
weight of a matrix, or of rows of a table that no other example touches. It is so long that it is clipped, so that each
canary moves the sum by exactly the clipping norm, which is the most that a unit may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsedp.errors import SparseDPError, suggestion

Place = Literal["dense", "rows"]
# The norm of a canary's gradient on each of its rows, in clipping norms: on any of them it is clipped.
_LENGTH = 10.0


@dataclass(frozen=True)
class GradientCanaries:
    """`count` canaries on a dense parameter, or on `rows` rows of a table each."""

    count: int
    on: Place = "rows"
    rows: int = 1

    def __post_init__(self) -> None:
        if self.on not in get_args(Place):
            raise SparseDPError(f"on must be 'dense' or 'rows', not {self.on!r}{suggestion(self.on, get_args(Place))}")
        for name in ("count", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SparseDPError(f"{name} must be a whole number of at least 1, not {getattr(self, name)!r}.")

    @property
    def width(self) -> int:
        """The matrix has so many rows and columns that no smaller one holds as many weights as the table has rows."""
        return math.ceil(math.sqrt(self.count * self.rows))

    @property
    def table_rows(self) -> dict[str, int]:
        """The rows of the model's table, by its name; the last is for examples that touch none."""
        return {"rows.weight": self.count * self.rows + 1}

    def module(self) -> CanaryModel:
        return CanaryModel(self.width, self.count * self.rows)

    def loader(self, is_in: np.ndarray, units: int, batch_size: int, max_grad_norm: float) -> DataLoader:
        """Batches of (left, right, ids, length, places), for a data set of `units` units.

        Unit i is canary i if is_in[i]; all others have no gradient and touch no row, as if they were not there. So the number
        of units, which is public, does not tell who is in.
        """
        places = torch.arange(units)
        present = torch.zeros(units, dtype=torch.bool)
        present[: self.count] = torch.from_numpy(is_in)
        left, right = torch.zeros(units, self.width), torch.zeros(units, self.width)
        ids = torch.full((units, self.rows), self.count * self.rows)
        length = torch.full((units,), _LENGTH * max_grad_norm)
        if self.on == "dense":
            left[places[present], places[present] % self.width] = 1.0
            right[places[present], places[present] // self.width] = 1.0
        else:
            ids[present] = places[present, None] * self.rows + torch.arange(self.rows)

        def collate(chosen: list[int]) -> tuple[Tensor, ...]:
            at = torch.tensor(chosen)
            return left[at], right[at], ids[at], length[at], at

        return DataLoader(_Places(units), batch_size=batch_size, shuffle=True, collate_fn=collate)

    def coordinates(self, weights: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Of all weights, those that each canary moves, (count, rows) float64; and others that no canary moves, as many.

        The others have the same places in the other parameter: if both parameters had the same noise, theirs would be it.
        """
        matrix, table = (weights[name].reshape(-1).double().numpy() for name in ("dense.weight", "rows.weight"))
        per_canary = self.rows if self.on == "rows" else 1
        shape, used = (self.count, per_canary), self.count * per_canary
        moved, others = (table, matrix) if self.on == "rows" else (matrix, table)
        return moved[:used].reshape(shape).copy(), others[:used].reshape(shape).copy()


class CanaryModel(nn.Module):
    """loss = length * (right . W left + the sum of the example's rows), with W `width` x `width` and rows of one weight."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width, bias=False)
        self.rows = nn.EmbeddingBag(rows + 1, 1, mode="sum", padding_idx=rows)  # the last: an example without rows
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, left: Tensor, right: Tensor, ids: Tensor, length: Tensor) -> Tensor:
        """The loss of each example, (batch,)."""
        return length * ((self.dense(left) * right).sum(1) + self.rows(ids)[:, 0])


class _Places(Dataset[int]):
    """The numbers from 0 on: what is at a place is looked up for a whole batch at once."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        return place
