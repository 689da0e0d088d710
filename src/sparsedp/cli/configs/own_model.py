"""Data, a model and a loss of one's own, for `sparsedp train own_model`.

The configuration beside this file, own_model.yaml, names the three callables below.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset


class Ratings(TensorDataset):
    """Examples (user, item, rating - 3). A `collate` attribute would say how examples become a batch."""

    def __init__(self, users: Tensor, items: Tensor, ratings: Tensor, user_count: int, item_count: int) -> None:
        super().__init__(users, items, ratings)
        self.user_count, self.item_count = user_count, item_count


def make_data(ratings: int, users: int, items: int, seed: int = 0) -> tuple[Ratings, Ratings]:
    """(training set, held-out set) with ratings that follow what a user and an item have in common.

    The arguments are `data.options` of the configuration. One data set alone would do too.
    """
    random = torch.Generator().manual_seed(seed)
    user = torch.randint(users, (ratings,), generator=random)
    item = torch.randint(items, (ratings,), generator=random)
    tastes, traits = torch.randn(users, 3, generator=random), torch.randn(items, 3, generator=random)
    appeal = 0.5 * torch.randn(items, generator=random)
    noise = 0.5 * torch.randn(ratings, generator=random)
    rating = 0.5 * (tastes[user] * traits[item]).sum(1) + appeal[item] + noise
    held_out = ratings // 10

    def part(rows: slice) -> Ratings:
        return Ratings(user[rows], item[rows], rating[rows], users, items)

    return part(slice(held_out, None)), part(slice(None, held_out))


class Factors(nn.Module):
    """rating = appeal of the item + (taste of the user) . (traits of the item)."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.tastes = nn.Embedding(users, dim)
        self.traits = nn.Embedding(items, dim)
        self.appeal = nn.Embedding(items, 1)
        nn.init.normal_(self.tastes.weight, std=0.3)
        nn.init.normal_(self.traits.weight, std=0.3)
        nn.init.zeros_(self.appeal.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.tastes(user) * self.traits(item)).sum(1) + self.appeal(item).squeeze(1)


def make_model(training: Ratings, dim: int) -> nn.Module:
    """The training set comes first; the rest are `model.options`."""
    return Factors(training.user_count, training.item_count, dim)


def squared_error(predicted: Tensor, rating: Tensor) -> Tensor:
    """The mean over the examples of a batch, as privacy.loss_reduction says. Each example's own loss only."""
    return mse_loss(predicted, rating)
