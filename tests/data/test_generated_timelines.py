"""Generated timelines: their planted model, and titles that tell groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsedp.data import generated_timelines, popularity_scorer, rank_held_out, split_timelines
from sparsedp.errors import ConfigError


def test_the_same_arguments_give_the_same_timelines() -> None:
    one, other, third = (generated_timelines(50, 40, groups=4, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.actions, other.actions) and np.array_equal(one.words, other.words)
    assert not np.array_equal(one.actions[:20], third.actions[:20])
    assert one.actions.min() >= 1 and one.actions.max() <= 40 and np.diff(one.starts).min() >= 4


@pytest.mark.parametrize("structure", [0.0, 0.6, 1.0])
def test_planted_scores_are_bayes_rule(structure: float) -> None:
    planted = generated_timelines(10, 12, groups=3, structure=structure)
    history = torch.tensor([[1, 2, 5, 0], [4, 0, 0, 0]])
    if structure == 1.0:  # all items of one taste
        mine = np.flatnonzero(planted.group_of[1:] == planted.group_of[1]) + 1
        history = torch.tensor([[1, int(mine[0]), int(mine[1]), 0], [4, 0, 0, 0]])
    scores = planted.planted_scores(history)
    of_taste = np.stack([
        structure * planted.popularity * (planted.group_of == g) / planted.mass[g] + (1 - structure) * planted.popularity
        for g in range(3)
    ])  # fmt: skip
    for row, items in enumerate(history.tolist()):
        likelihood = np.prod([of_taste[:, item] for item in items if item], axis=0)
        wanted = likelihood @ of_taste / likelihood.sum()
        np.testing.assert_allclose(scores[row].numpy(), wanted, rtol=1e-6, atol=1e-9)
        assert scores[row].sum() == pytest.approx(1)


def test_tastes_can_be_learned_from_contexts() -> None:
    split = split_timelines(generated_timelines(2000, 100, groups=5))
    assert split.test is not None
    planted = rank_held_out(split.training.sequences.planted_scores, split.test).hit  # type: ignore[attr-defined]
    popular = rank_held_out(popularity_scorer(split.training), split.test).hit
    assert planted > 1.3 * popular


def test_titles_tell_the_group() -> None:
    planted = generated_timelines(10, 300, groups=4)
    assert planted.words.shape == (301, 3) and not planted.words[0].any() and (planted.words[1:] > 0).all()
    for place in (0, 1):
        groups_of_word = {
            word: set(planted.group_of[1:][planted.words[1:, place] == word]) for word in planted.words[1:, place]
        }
        assert all(len(groups) == 1 for groups in groups_of_word.values())


def test_what_is_impossible() -> None:
    for wrong in ({"users": 0}, {"groups": 50}, {"structure": 1.5}, {"skew": -1.0}, {"mean_length": 3.0}):
        with pytest.raises(ConfigError, match="generated_timelines: expected"):
            generated_timelines(**{"users": 5, "items": 20, **wrong})  # type: ignore[arg-type]
