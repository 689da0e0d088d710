"""NDCG and HIT over all items, against a loop that sorts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from sparsedp.data import (
    HeldOutItems,
    SequenceDataset,
    Sequences,
    generated_sequences,
    popularity_scorer,
    rank_held_out,
    ranks,
)
from sparsedp.errors import SparseDPError


def sequences(lists: list[list[int]], items: int) -> Sequences:
    starts = np.cumsum([0, *map(len, lists)])
    return Sequences(np.concatenate([np.asarray(own, np.int64) for own in lists]), starts, items)


def naive_rank(scores: list[float], item: int, excluded: set[int]) -> int:
    others = [s for j, s in enumerate(scores) if j > 0 and j != item and j not in excluded]
    return 1 + sum(s >= scores[item] for s in others)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of 30 items with many ties, an item each, and ids that repeat, pad and may be the item itself."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 3, (40, 31), generator=random).float()
    item = torch.randint(1, 31, (40,), generator=random)
    return scores, item, torch.randint(0, 31, (40, 12), generator=random)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("excluding", [False, True])
def test_ranks_are_those_of_a_loop(seed: int, excluding: bool) -> None:
    scores, item, exclude = random_case(seed)
    found = ranks(scores, item, exclude if excluding else None)
    for row in range(len(scores)):
        gone = set(exclude[row].tolist()) - {0} if excluding else set()
        assert found[row] == naive_rank(scores[row].tolist(), int(item[row]), gone)


def test_comparing_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, item, exclude = random_case(0)
    whole = ranks(scores, item, exclude)
    monkeypatch.setattr("sparsedp.data.ranking._BLOCK", 70)
    assert torch.equal(ranks(scores, item, exclude), whole)


def test_ties_and_what_is_not_a_number_count_against_the_item() -> None:
    item = torch.tensor([3])
    assert ranks(torch.zeros(1, 8), item) == 7
    assert ranks(torch.full((1, 8), -math.inf), item) == 7
    scores = torch.tensor([[math.nan, 0.0, math.nan, 5.0, 1.0]])
    assert ranks(scores, item) == 2
    with pytest.raises(SparseDPError, match="not a number"):
        ranks(torch.full((1, 8), math.nan), item)


def test_the_padding_column_is_not_ranked() -> None:
    scores = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    assert [int(ranks(scores, torch.tensor([i]))) for i in (1, 2, 3)] == [3, 2, 1]


def naive_metrics(score, held_out: HeldOutItems, k: int, full: list[list[int]] | None) -> tuple[float, float, float]:  # type: ignore[no-untyped-def]
    hits, gains, reciprocals = [], [], []
    for i, (history, item) in enumerate(held_out):
        gone = set() if full is None else set(full[i])
        place = naive_rank(score(history[None])[0].tolist(), int(item), gone)
        hits.append(place <= k)
        gains.append(1 / math.log2(1 + place) if place <= k else 0.0)
        reciprocals.append(1 / place)
    return sum(gains) / len(gains), sum(hits) / len(hits), sum(reciprocals) / len(reciprocals)


def cyclic(items: int):  # type: ignore[no-untyped-def]
    """Scores that depend on all of the history that a scorer is given."""
    return lambda history: ((history.sum(1)[:, None] * 7 + torch.arange(items + 1) * 13) % 11).float()


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("excluding", [False, True])
def test_metrics_are_those_of_a_loop_whatever_the_chunk(k: int, excluding: bool) -> None:
    random = np.random.default_rng(1)
    lists = [random.integers(1, 21, random.integers(3, 15)).tolist() for _ in range(50)]
    held_out = sequences(lists, 20).split(4).test
    full = [own[:-1] for own in lists] if excluding else None
    wanted = naive_metrics(cyclic(20), held_out, k, full)
    for chunk in (1, 7, 50, 1000):
        found = rank_held_out(cyclic(20), held_out, k=k, chunk=chunk, exclude_seen=excluding)
        assert (found.ndcg, found.hit, found.mrr) == pytest.approx(wanted) and found.users == 50
        assert found.to_dict() == {f"ndcg@{k}": found.ndcg, f"hit@{k}": found.hit, "mrr": found.mrr}
    assert 0 < found.ndcg <= found.hit < 1


def test_a_perfect_and_a_constant_scorer() -> None:
    held_out = sequences([[1, 2, 3, 4]] * 3, 30).split(5).test
    perfect = rank_held_out(lambda history: torch.eye(31)[4].expand(len(history), -1), held_out)
    assert (perfect.ndcg, perfect.hit, perfect.mrr) == (1.0, 1.0, 1.0)
    constant = rank_held_out(lambda history: torch.ones(len(history), 31), held_out)
    assert (constant.ndcg, constant.hit) == (0.0, 0.0) and constant.mrr == pytest.approx(1 / 30)


def test_all_items_of_the_past_are_excluded_not_only_the_visible_ones() -> None:
    held_out = sequences([[5, 6, 7, 8, 1]], 8).split(2).test

    def score(history: Tensor) -> Tensor:
        return torch.arange(9.0).expand(len(history), -1)

    assert rank_held_out(score, held_out, k=4).hit == 0
    assert rank_held_out(score, held_out, k=4, exclude_seen=True).ndcg == pytest.approx(
        1 / math.log2(5)
    )  # 2, 3, 4 first
    # An item that comes again is ranked all the same.
    again = sequences([[8, 2, 3, 8]], 8).split(2).test
    assert rank_held_out(score, again, k=1, exclude_seen=True).hit == 1


def test_a_subset_of_the_held_out_items() -> None:
    lists = [[1, 2, 3, i] for i in range(1, 21)]
    held_out = sequences(lists, 20).split(4).test
    part = Subset(Subset(held_out, list(range(5, 15))), [0, 9])
    alone = [rank_held_out(cyclic(20), Subset(held_out, [i]), exclude_seen=True).ndcg for i in (5, 14)]
    both = rank_held_out(cyclic(20), part, exclude_seen=True)
    assert both.users == 2 and both.ndcg == pytest.approx(sum(alone) / 2)


def test_popularity_counts_what_training_shows() -> None:
    split = sequences([[1, 1, 1, 2, 2, 3, 4], [2, 3, 4]], 5).split(2)
    training: SequenceDataset = split.training
    # The last three items before the held-out one; of a user with two such items, both.
    assert training.item_counts.tolist() == [0, 0, 3, 2, 0, 0]
    scores = popularity_scorer(training)(torch.zeros(7, 2, dtype=torch.long))
    assert scores.shape == (7, 6) and scores[3].tolist() == [0, 0, 3, 2, 0, 0]


def test_the_planted_model_beats_popularity_which_beats_a_constant() -> None:
    data = generated_sequences(1000, 100, seed=3)
    split = data.split(10)
    planted = rank_held_out(data.planted_scores, split.test)
    popular = rank_held_out(popularity_scorer(split.training), split.test)
    assert planted.ndcg > 1.5 * popular.ndcg > 0.05


def test_what_cannot_be_ranked_is_refused() -> None:
    held_out = sequences([[1, 2, 3, 4]], 5).split(2).test
    with pytest.raises(ValueError, match="k=0"):
        rank_held_out(cyclic(5), held_out, k=0)
    with pytest.raises(SparseDPError, match=r"must be sparsedp.data.HeldOutItems; got list"):
        rank_held_out(cyclic(5), [1, 2])
    with pytest.raises(SparseDPError, match="Nothing is held out"):
        rank_held_out(cyclic(5), Subset(held_out, []))
