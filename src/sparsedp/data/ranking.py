"""How high a model ranks the item that came next, among all items: NDCG, HIT, MRR, precision and recall.

Of one held-out item at rank r (from 1), HIT@k is 1 if r <= k, and NDCG@k is 1 / log2(1 + r) if r <= k; else both are 0.
MRR is 1 / r, wherever the item stands. One item is relevant, so that recall@k is HIT@k, and precision@k is HIT@k / k.
Ties count against the item, so that a constant score puts it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from sparsedp.data.sequences import HeldOutItems
from sparsedp.errors import DivergedError, SparseDPError

# Scores [n, items + 1] of the item that comes next after each history [n, length]; column 0 (padding) is not looked at.
Scorer = Callable[[Tensor], Tensor]

_BLOCK = (
    1 << 20
)  # scores that are compared at once: what they are compared to fits into the cache, which is 4 times faster

_LARGEST = 1 << 27  # scores that are held at once


@dataclass(frozen=True)
class Ranking:
    """Means over users. `hits` has HIT@k for the k of `HeldOutItems.cutoffs`."""

    ndcg: float
    hit: float
    mrr: float
    k: int
    users: int
    hits: dict[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float]:
        precision = {f"precision@{k}": hit / k for k, hit in self.hits.items()}
        recall = {f"recall@{k}": hit for k, hit in self.hits.items()}
        return {f"ndcg@{self.k}": self.ndcg, f"hit@{self.k}": self.hit, "mrr": self.mrr} | precision | recall


def ranks(scores: Tensor, item: Tensor, exclude: Tensor | None = None) -> Tensor:
    """1 + the number of other items that score at least as much as `item`; int64 [n].

    scores [n, items + 1], item int64 [n]. The ids in `exclude`, int64 [n, any], are not ranked, but the item itself is;
    0 excludes nothing.
    """
    target_scores = scores.gather(1, item[:, None])
    if torch.isnan(target_scores).any():
        raise DivergedError(
            "A score is not a number, so that nothing can be ranked: training has diverged. Lower the learning rate."
        )
    # What is below is counted, not what is above: then another item's score that is not a number counts against this one.
    rows = max(1, _BLOCK // scores.shape[1])
    below = [
        torch.count_nonzero(part[:, 1:] < mine, 1) for part, mine in zip(scores.split(rows), target_scores.split(rows))
    ]
    above = scores.shape[1] - 2 - torch.cat(below)
    if exclude is not None:
        ids = exclude.masked_fill(exclude == item[:, None], 0).sort(1).values
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]  # an id may stand there twice
        above -= ((ids > 0) & first & ~(scores.gather(1, ids) < target_scores)).sum(1)
    return 1 + above


def rank_held_out(
    score: Scorer, held_out: Any, *, k: int = 10, chunk: int = 128, exclude_seen: bool = False
) -> Ranking:
    """NDCG@k, HIT@k and MRR of `score` on `HeldOutItems`, or on a torch Subset of them, at most `chunk` users at a time.

    With `exclude_seen`, items that the user had before are not ranked, unless the held-out item is one of them.
    """
    if k < 1:
        raise ValueError(f"{k=} must be at least 1")
    target_ranks = held_out_ranks(score, held_out, chunk=chunk, exclude_seen=exclude_seen)
    ndcg = torch.where(target_ranks <= k, 1 / torch.log2(1 + target_ranks), 0.0).mean().item()

    def hit(k: int) -> float:
        return (target_ranks <= k).double().mean().item()

    mrr = (1 / target_ranks).mean().item()
    cutoffs = _whole(held_out)[0].cutoffs
    return Ranking(ndcg, hit(k), mrr, k, len(target_ranks), {cutoff: hit(cutoff) for cutoff in cutoffs})


def held_out_ranks(score: Scorer, held_out: Any, *, chunk: int = 128, exclude_seen: bool = False) -> Tensor:
    """The rank of each item that is held out, float64 [n], as in `rank_held_out`."""
    if chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    data, where = _whole(held_out)
    if not isinstance(data, HeldOutItems):
        raise SparseDPError(
            f"To rank items, what is held out must be sparsedp.data.HeldOutItems; got {type(data).__name__}."
        )
    if not where:
        raise SparseDPError("Nothing is held out, so that there is nothing to rank.")
    chunk = min(chunk, max(1, _LARGEST // (data.items + 1)))
    parts = []
    with torch.no_grad():
        for begin in range(0, len(where), chunk):
            users = where[begin : begin + chunk]
            history, item = data.collate(data.__getitems__(users))
            parts.append(ranks(score(history).cpu(), item, data.seen(users) if exclude_seen else None))
    return torch.cat(parts).double()


def popularity_scorer(training: Any) -> Scorer:
    """Scores every item with its number of occurrences in a `SequenceDataset`, whatever the history is."""
    counts = training.item_counts.float()
    return lambda history: counts.expand(len(history), -1)


def _whole(held_out: Any) -> tuple[Any, Sequence[int]]:
    """The set that a chain of subsets is taken of, and the indices in it."""
    where: Sequence[int] = range(len(held_out))
    while isinstance(held_out, Subset):
        where = [held_out.indices[i] for i in where]
        held_out = held_out.dataset
    return held_out, where
