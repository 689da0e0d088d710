"""Timelines: who is trained on, labels drawn evenly and by nobody else's generator, and what is held out."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from documentation import code_of
from sparsedp.data import (
    Actions,
    LabelCollate,
    Timeline,
    generated_timelines,
    make_sequences,
    open_sequences,
    rank_held_out,
    split_timelines,
)
from sparsedp.errors import ConfigError, DataError, SparseDPError
from sparsedp.noise import RandomKey


def log(users: list[str], each: int = 6) -> Actions:
    """User number u has the items u, u + 1, ... of ten, in order of time."""
    names = tuple(str(item) for item in range(10))
    who = np.repeat(np.arange(len(users)), each)
    what = np.concatenate([(int(user[1:]) + np.arange(each)) % 10 for user in users])
    return Actions(who, what, np.tile(np.arange(each), len(users)), names, tuple(users))


def seeded(context: int, seed: int = 0) -> LabelCollate:
    return LabelCollate(context, RandomKey.from_seed(seed).generator())


# ------------------------------------------------------------------ who is where


def places(users: list[str]) -> dict[tuple[int, ...], str]:
    """Whether each timeline is for training or for testing, by its items' names; every user has other items."""
    sequences = make_sequences(log(users), min_actions=1)
    split = split_timelines(sequences, test_share=0.4)
    name = dict(enumerate(sequences.item_names, 1))
    found = {tuple(int(name[i]) for i in timeline.items): "training" for timeline in split.training}
    assert split.test is not None
    for i in range(len(split.test)):
        history, label = split.test[i]
        found[int(name[int(history[0])]),] = "test"
    return found


def test_a_user_more_or_less_moves_nobody_else() -> None:
    users = [f"u{u}" for u in range(10)]
    all_of_them = places(users)
    assert {"training", "test"} == set(all_of_them.values())
    for left_out in users:
        rest = places([user for user in users if user != left_out])
        assert set(rest) <= set(all_of_them) and all(all_of_them[key] == where for key, where in rest.items())


def test_the_share_of_test_users_and_the_seed() -> None:
    sequences = generated_timelines(4000, 50, groups=5)
    split = split_timelines(sequences, seed=1)
    assert split.test is not None
    assert len(split.training) + len(split.test) == 4000 and abs(len(split.test) - 800) < 4 * 26  # 4 deviations
    other = split_timelines(sequences, seed=2)
    assert len(other.training) != len(split.training) or not np.array_equal(
        other.training[0].items, split.training[0].items
    )
    five = split_timelines(sequences, seed=1, test_labels=5).test
    assert five is not None and len(five) == 5 * len(split.test)
    assert split_timelines(sequences, test_share=0.0).test is None


def test_users_with_one_item_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a x\nb x\nb y\nc y\nd x\nd y\nd z\n")
    split = split_timelines(open_sequences(tmp_path / "log", min_actions=1), test_share=0.0)
    assert [timeline.items.tolist() for timeline in split.training] == [[1, 2], [1, 2, 3]]
    (tmp_path / "short").write_text("a x\nb x\n")
    with pytest.raises(DataError, match="none of the 2 users is left to train on"):
        split_timelines(open_sequences(tmp_path / "short", min_actions=1))
    for wrong in ({"test_share": 1.0}, {"test_share": -0.1}, {"test_labels": 0}):
        with pytest.raises(ConfigError, match="expected test_share"):
            split_timelines(generated_timelines(9, 9, groups=3), **wrong)  # type: ignore[arg-type]


def test_training_data_and_counts() -> None:
    split = split_timelines(generated_timelines(200, 30, groups=5), context=7)
    data = split.training
    assert data.length == 7 and data.items == 30 and not data.vocabulary_is_private
    counted = Counter(item for timeline in data for item in timeline.items.tolist())
    assert data.item_counts.tolist() == [counted[item] for item in range(31)]
    assert data.users.tolist() == list(range(len(data)))
    assert np.array_equal(data.__getitems__([3, 1])[0].items, data[3].items)


def test_names_of_users_are_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("user,item,timestamp\nz,1,5\nb,1,1\nz,2,0\nb,2,2\nq,9,1\n")
    sequences = open_sequences(tmp_path / "log", min_actions=2)
    assert sequences.user_names == ("z", "b") and sequences.actions.tolist() == [2, 1, 1, 2]
    (tmp_path / "lists").write_text("z 1 2 3\nb 3 2 1\n")
    assert open_sequences(tmp_path / "lists", min_actions=1).user_names == ("z", "b")


# ------------------------------------------------------------------ labels


def test_labels_are_drawn_evenly_and_contexts_come_before_them() -> None:
    timeline = Timeline(np.arange(11, 18))  # labels 12 to 17
    contexts, labels = seeded(3)([timeline] * 6000)
    assert contexts.shape == (6000, 3)
    counts = torch.bincount(labels - 12, minlength=6).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # chi-squared with 5 degrees of freedom, beyond 0.001
    for context, label in zip(contexts[:100].tolist(), labels[:100].tolist()):
        before = list(range(max(11, label - 3), label))
        assert context == before + [0] * (3 - len(before))


def test_a_label_may_be_fixed() -> None:
    contexts, labels = seeded(4)([Timeline(np.array([5, 6, 7]), first=2)] * 50)
    assert (labels == 7).all() and (contexts == torch.tensor([5, 6, 0, 0])).all()


def test_no_timelines_and_bad_ones() -> None:
    contexts, labels = seeded(4)([])
    assert contexts.shape == (0, 4) and labels.shape == (0,) and labels.dtype == torch.int64
    for wrong in (
        Timeline(np.array([3])),
        Timeline(np.array([], np.int64)),
        Timeline(np.array([3, 4]), 2),
        Timeline(np.array([3, 4]), 0),
    ):
        with pytest.raises(DataError, match="needs an item that can be the label"):
            seeded(4)([Timeline(np.array([1, 2])), wrong])
    with pytest.raises(ConfigError, match="at least 1 item"):
        LabelCollate(0)


def test_labels_come_from_the_stream_cipher_alone() -> None:
    """Neither numpy's nor torch's generator decides a label, or is moved by drawing one."""
    timelines = [Timeline(np.arange(1, 200))] * 8
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr, index]
        drawn.append(LabelCollate(20)(timelines)[1])
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
    assert not torch.equal(*drawn)
    assert torch.equal(seeded(20)(timelines)[1], seeded(20)(timelines)[1])


def test_the_place_in_the_sequence_of_labels_can_be_restored() -> None:
    timelines = [Timeline(np.arange(1, 200))] * 8
    generator = RandomKey.from_seed(3).generator()
    collate = LabelCollate(20, generator)
    collate(timelines)
    state = generator.state()
    wanted = collate(timelines)[1]
    assert not torch.equal(collate(timelines)[1], wanted)
    generator.restore(state)
    assert torch.equal(collate(timelines)[1], wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_another_process_is_refused() -> None:
    """A worker would draw the labels that the main process draws."""
    collate = seeded(4)
    ends = multiprocessing.Pipe()

    def draw() -> None:
        try:
            collate([Timeline(np.array([1, 2]))])
        except SparseDPError as error:
            ends[1].send(str(error))

    worker = multiprocessing.get_context("fork").Process(target=draw)
    worker.start()
    worker.join()
    assert "another process" in ends[0].recv()


def test_the_code_of_the_documentation() -> None:
    page = code_of("dual-encoder.md")
    assert page["losses"].shape == (64,) and page["scores"].shape == (64, 101)


# ------------------------------------------------------------------ what is held out


def test_labels_of_test_users() -> None:
    sequences = generated_timelines(300, 40, groups=5)
    split = split_timelines(sequences, context=5, test_labels=3)
    again = split_timelines(sequences, context=5, test_labels=3).test
    test = split.test
    assert test is not None and again is not None
    trained = {timeline.items.tobytes() for timeline in split.training}
    users = [sequences.actions[b:e] for b, e in zip(sequences.starts[:-1], sequences.starts[1:])]
    tested = [user for user in users if user.tobytes() not in trained]
    assert len(test) == 3 * len(tested)
    for i in range(len(test)):
        history, label = test[i]
        assert all(map(torch.equal, test[i], again[i]))  # the same at every evaluation
        user = tested[i // 3].tolist()
        inside = [
            k
            for k in range(1, len(user))
            if user[k] == label and user[max(0, k - 5) : k] == history[history > 0].tolist()
        ]
        assert inside


def test_precision_and_recall_by_hand() -> None:
    sequences = generated_timelines(300, 40, groups=5)
    test = split_timelines(sequences).test
    assert test is not None
    ranking = rank_held_out(lambda history: -torch.arange(41.0).expand(len(history), -1), test)  # item i has rank i
    labels = torch.stack([test[i][1] for i in range(len(test))])
    metrics = ranking.to_dict()
    assert list(test.cutoffs) == [1, 5, 10, 20]
    for k in test.cutoffs:
        share = (labels <= k).double().mean().item()
        assert metrics[f"recall@{k}"] == pytest.approx(share) and metrics[f"precision@{k}"] == pytest.approx(share / k)
    assert metrics["hit@10"] == metrics["recall@10"]
