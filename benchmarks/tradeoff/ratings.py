"""Liked or not, from the ids of a user and a film: MovieLens 1M, read from $SPARSEDP_DATA/ml-1m/ratings.csv.gz."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sparsedp.errors import DataError

LIKED = 4  # ratings from here on


class Ratings(TensorDataset):
    """Examples (user, item, liked); ids are 0-based."""

    def __init__(self, users: Tensor, items: Tensor, liked: Tensor, sizes: tuple[int, int]) -> None:
        super().__init__(users, items, liked)
        self.sizes = sizes

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        where = torch.tensor(indices)
        return [tensor[where] for tensor in self.tensors]

    @staticmethod
    def collate(batch: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(batch)


def movielens(held_out: float = 0.1, seed: int = 0) -> tuple[Ratings, Ratings]:
    """(training set, held-out set), split at random."""
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not (path := Path(folder) / "ml-1m" / "ratings.csv.gz").is_file():
        raise DataError("MovieLens 1M is looked for in $SPARSEDP_DATA/ml-1m/ratings.csv.gz, which is not there.")
    user, item, rating = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1, 2), dtype=np.int64, unpack=True)
    liked = torch.from_numpy((rating >= LIKED).astype(np.float32))
    users, items = torch.from_numpy(user - 1), torch.from_numpy(item - 1)
    order = torch.randperm(len(liked), generator=torch.Generator().manual_seed(seed))
    border = round(len(liked) * (1 - held_out))
    sizes = int(users.max()) + 1, int(items.max()) + 1

    def part(rows: Tensor) -> Ratings:
        return Ratings(users[rows], items[rows], liked[rows], sizes)

    return part(order[:border]), part(order[border:])


class TwoTables(nn.Module):
    """A table of users and one of items, and a ReLU network on a row of each and on their product."""

    def __init__(self, users: int, items: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        for table in (self.users, self.items):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.network = nn.Sequential(nn.Linear(3 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        one, other = self.users(user), self.items(item)
        return self.network(torch.cat([one, other, one * other], dim=1)).squeeze(1)


def two_tables(training: Ratings, dim: int = 16, hidden: int = 32) -> nn.Module:
    return TwoTables(*training.sizes, dim=dim, hidden=hidden)
