"""Long-tailed click logs: most of what users touch is in rows that a batch touches once. Generated, and of real interactions."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sparsedp.errors import DataError

FILES = {"movielens": "ml-latest-sample/interactions.csv.gz", "amazon": "amazon-instant-video/interactions.csv.gz"}


class Clicks(TensorDataset):
    """Examples (user or context, item, clicked); ids are 0-based. `users` are whose the examples are."""

    def __init__(self, first: np.ndarray, items: np.ndarray, clicked: np.ndarray, sizes: tuple[int, int]) -> None:
        super().__init__(torch.from_numpy(first), torch.from_numpy(items), torch.from_numpy(clicked.astype(np.float32)))
        self.sizes, self.users = sizes, first

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        where = torch.tensor(indices)
        return [tensor[where] for tensor in self.tensors]

    @staticmethod
    def collate(batch: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(batch)


def generated(
    rows: int = 200_000, items: int = 20_000, skew: float = 0.6, held_out: float = 0.1
) -> tuple[Clicks, Clicks]:
    """(training set, held-out set). Popularity is rank^-skew; clicks follow an effect of the item and one of the context."""
    random = np.random.default_rng(0)
    popularity = np.arange(1, items + 1) ** -skew
    item = random.permutation(items)[random.choice(items, rows, p=popularity / popularity.sum())]
    context = random.integers(0, 50, rows)
    logit = 1.5 * random.standard_normal(items)[item] + 0.1 * random.standard_normal(50)[context]
    clicked = random.random(rows) < 1 / (1 + np.exp(-logit))
    return _split(context, item, clicked, (50, items), held_out, random)


def interactions(name: str, held_out: float = 0.1) -> tuple[Clicks, Clicks]:
    """The same of a file in $SPARSEDP_DATA: each interaction is a click, and beside it is one item drawn evenly that is none."""
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not (path := Path(folder) / FILES[name]).is_file():
        raise DataError(f"{FILES[name]} is looked for in $SPARSEDP_DATA, and is not there.")
    users, items = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1), dtype=np.int64, unpack=True)
    random = np.random.default_rng(0)
    users, items = (np.unique(ids, return_inverse=True)[1] for ids in (users, items))
    sizes = int(users.max()) + 1, int(items.max()) + 1
    first = np.concatenate([users, users])
    item = np.concatenate([items, random.integers(0, sizes[1], len(items))])
    clicked = np.arange(len(first)) < len(users)
    return _split(first, item, clicked, sizes, held_out, random)


def _split(
    first: np.ndarray,
    items: np.ndarray,
    clicked: np.ndarray,
    sizes: tuple[int, int],
    held_out: float,
    random: np.random.Generator,
) -> tuple[Clicks, Clicks]:
    order = random.permutation(len(items))
    border = round(len(order) * (1 - held_out))
    train, rest = (Clicks(first[part], items[part], clicked[part], sizes) for part in (order[:border], order[border:]))
    return train, rest


class TwoTables(nn.Module):
    """A table of items and one of users or contexts; the logit is linear in a row of each, and in their product."""

    def __init__(self, sizes: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.first, self.items = nn.Embedding(sizes[0], dim), nn.Embedding(sizes[1], dim)
        for table in (self.first, self.items):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.out = nn.Linear(3 * dim, 1)

    def forward(self, first: Tensor, items: Tensor) -> Tensor:
        a, b = self.first(first), self.items(items)
        return self.out(torch.cat([a, b, a * b], 1)).squeeze(1)


def two_tables(training: Clicks, dim: int = 8) -> TwoTables:
    return TwoTables(training.sizes, dim)
