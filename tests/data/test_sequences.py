"""Sequence data: the formats, what is dropped, what is held out, and generated sequences."""

from __future__ import annotations

import gzip
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from sparsedp.data import (
    Actions,
    Sequences,
    generated_sequences,
    make_sequences,
    open_sequences,
    read_action_columns,
    read_actions,
)
from sparsedp.errors import ConfigError, DataError

ROWS = [("u1", "a", 5), ("u2", "b", 1), ("u1", "b", 2), ("u1", "c", 5), ("u2", "a", 1)]


def write(path: Path, lines: list[str], newline: str = "\n") -> Path:
    path.write_bytes((newline.join(lines) + newline).encode())
    return path


def by_user(data: Sequences) -> list[list[str]]:
    """Each user's items under their names."""
    parts = np.split(data.actions, data.starts[1:-1])
    return [[data.item_names[item - 1] for item in part] for part in parts]


# ------------------------------------------------------------------ files


FILES = {
    "movielens": [f"{u}::{i}::3::{t}" for u, i, t in ROWS],
    "movielens_100k": [f"{u}\t{i}\t3\t{t}" for u, i, t in ROWS],
    "amazon": [f"{u},{i},3.0,{t}" for u, i, t in ROWS],
    "csv": ["user_id,timestamp,movie_id,split", *(f"{u},{t},{i},train" for u, i, t in ROWS)],
    "pairs": [f"{u} {i}" for u, i, t in ROWS],
}


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_every_format_gives_the_same_actions(format: str, zipped: bool, given: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "log", FILES[format])
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    found = read_actions(path, format if given else "auto")
    assert found.users.tolist() == [0, 1, 0, 0, 1] and found.items.tolist() == [0, 1, 1, 2, 0]
    assert found.item_names == ("a", "b", "c")
    assert (found.times is None) == (format == "pairs")
    if found.times is not None:
        assert found.times.tolist() == [5, 1, 2, 5, 1]


@pytest.mark.parametrize("format", ["lists", "auto"])
def test_lists(format: str, tmp_path: Path) -> None:
    found = read_actions(write(tmp_path / "log", ["7 1 2 1 3", "", "8 2"]), format)
    assert found.users.tolist() == [0, 0, 0, 0, 1] and found.items.tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_byte_order_marks_and_blank_lines(newline: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.csv", ["\ufeffuserId,movieId,rating,timestamp", "1,10,4.5,7", "", "2,10,3.0,8"], newline
    )
    found = read_actions(path)
    assert found.users.tolist() == [0, 1] and found.item_names == ("10",) and found.times is not None


@pytest.mark.parametrize(
    ("format", "lines", "problem"),
    [
        ("movielens", ["1::2::3::4", "1::2::3"], r"line 2: 3 fields where format 'movielens' has 4"),
        ("movielens", ["1::2::3::4", "", "1::2::3::x"], r"line 3: the timestamp 'x' is not a whole number"),
        ("movielens", ["1::2::3::1.5"], r"line 1: the timestamp '1.5' is not a whole number"),
        ("movielens", [f"1::2::3::{2**70}"], r"line 1: the timestamp '\d+' is not a whole number of 64 bits"),
        ("amazon", ["a,b,1.0,4", ",b,1.0,4"], r"line 2: the user is empty"),
        ("amazon", ["a, ,1.0,4"], r"line 1: the item is empty"),
        ("pairs", ["1 2", "1 3 4"], r"line 2: 3 fields where format 'pairs' has 2; is it format='lists'\?"),
        ("lists", ["1 2 3", "2"], r"line 2: user '2' has no items"),
        ("lists", ["1 2 3", "1 4"], r"line 2: user '1' has a line before"),
        ("csv", ["user,item", "1,2"], r"line 1: no column is the time \(timestamp, .*\) in the header 'user,item'"),
        ("csv", ["user,user_id,item,time"], r"line 1: 2 columns are the user"),
        ("csv", ["user,item,time", "1,2,3,4"], r"line 2: 4 fields where format 'csv' has 3"),
        ("csv", ["user,item,time"], r"log: no actions in it"),
        ("auto", [""], r"log: its first line looks like none of the formats movielens, "),
        ("auto", ["word"], r"looks like none of the formats .*: 'word'"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(format: str, lines: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        read_actions(write(tmp_path / "log", lines), format)


@pytest.mark.parametrize(
    ("format", "good", "bad", "reason"),
    [
        ("movielens", "1::2::3::{}", "1::2::3", "3 fields"),
        ("amazon", "u{},b,1.0,4", ",b,1.0,4", "the user is empty"),
        ("pairs", "u{} i", "1 2 3", "3 fields"),
        ("lists", "u{} a b", "u0 a", "a line before"),
        ("columns", "u{},i,4", ",i,4", "the user is empty"),
        ("columns", "u{},i,4", "u,i", "2 fields"),
        ("columns", "u{},i,4", "bad,new,never", "is neither seconds"),
    ],
)
def test_malformed_lines_are_left_out_counted_and_named(
    format: str, good: str, bad: str, reason: str, tmp_path: Path
) -> None:
    def read(lines: list[str], max_malformed: float) -> Actions:
        if format == "columns":
            path = write(tmp_path / "log.csv", ["who,what,when", *lines])
            return read_action_columns(path, user="who", item="what", time="when", max_malformed=max_malformed)
        return read_actions(write(tmp_path / "log", lines), format, max_malformed=max_malformed)

    sound = [good.format(i) for i in range(30)]
    broken = [*sound[:20], bad, *sound[20:], bad]
    found, expected = read(broken, 0.1), read(sound, 0.0)
    for name in ("users", "items", "times"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.item_names == expected.item_names and found.user_names == expected.user_names
    line = 21 + (format == "columns")
    assert found.summary.malformed == 2 and found.summary.rows == 30
    assert [entry.line for entry in found.summary.first] == [line, line + 11]
    assert all(reason in str(entry) for entry in found.summary.first)
    with pytest.raises(DataError, match=r"2 of 32 lines are malformed, more than max_malformed=0\.01 allows"):
        read(broken, 0.01)
    many = make_sequences(found, min_actions=1)
    assert many.summary is found.summary


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such file"):
        read_actions(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"format must be one of auto, .*got 'movielense'. Did you mean 'movielens'\?"
    ):
        read_actions(write(tmp_path / "log", ["1 2"]), "movielense")
    cut = gzip.compress(b"1::2::3::4\n" * 1000)[:-20]
    (tmp_path / "cut.gz").write_bytes(cut)
    with pytest.raises(DataError, match=r"cut.gz: the gzip file is damaged or cut short"):
        read_actions(tmp_path / "cut.gz")
    (tmp_path / "latin").write_bytes(b"1::caf\xe9::3::4\n")
    with pytest.raises(DataError, match=r"latin: not text in UTF-8"):
        read_actions(tmp_path / "latin")


# ------------------------------------------------------------------ preprocessing


def actions(rows: list[tuple[int, int, int]]) -> Actions:
    users, items, times = np.array(rows, dtype=np.int64).T
    return Actions(users, items, times, tuple(str(item) for item in range(items.max() + 1)))


def test_actions_are_ordered_by_time_and_ties_stay_as_in_the_file(tmp_path: Path) -> None:
    data = open_sequences(write(tmp_path / "log", FILES["movielens"]), min_actions=1)
    assert by_user(data) == [["b", "a", "c"], ["b", "a"]]
    assert (data.users, data.items, data.vocabulary_is_private) == (2, 3, True)
    untimed = open_sequences(write(tmp_path / "pairs", FILES["pairs"]), min_actions=1)
    assert by_user(untimed) == [["a", "b", "c"], ["b", "a"]]


def test_counts_are_taken_once_on_the_raw_log_or_until_stable() -> None:
    # Item 0 has 2 actions, one of user 2, who has a single one. Users 0 and 1 have three and two.
    rows = [(0, 1, 0), (0, 2, 1), (0, 0, 2), (1, 1, 0), (1, 2, 1), (2, 0, 0)]
    once = make_sequences(actions(rows), min_actions=2)
    assert by_user(once) == [["1", "2", "0"], ["1", "2"]]  # item 0 is left with one action
    stable = make_sequences(actions(rows), min_actions=2, until_stable=True)
    assert by_user(stable) == [["1", "2"], ["1", "2"]] and stable.items == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("until_stable", [False, True])
def test_what_is_dropped_is_what_a_loop_drops(seed: int, until_stable: bool) -> None:
    random = np.random.default_rng(seed)
    rows = [(int(random.zipf(1.6)) % 60, int(random.zipf(1.5)) % 80, int(random.integers(50))) for _ in range(600)]
    kept = list(rows)
    while True:
        users, items = Counter(row[0] for row in kept), Counter(row[1] for row in kept)
        left = [row for row in kept if users[row[0]] >= 5 and items[row[1]] >= 5]
        done, kept = len(left) == len(kept) or not until_stable, left
        if done:
            break
    data = make_sequences(actions(rows), min_actions=5, until_stable=until_stable)
    wanted = [
        [str(item) for _, item, _ in sorted((row for row in kept if row[0] == user), key=lambda row: row[2])]
        for user in sorted({row[0] for row in kept})
    ]
    assert by_user(data) == wanted
    assert set(data.actions.tolist()) == set(range(1, data.items + 1))


def test_nothing_left(tmp_path: Path) -> None:
    path = write(tmp_path / "log", FILES["pairs"])
    with pytest.raises(DataError, match=r"log: none of the 5 actions is left with min_actions=5"):
        open_sequences(path)
    with pytest.raises(ConfigError, match="min_actions must be at least 1, got 0"):
        open_sequences(path, min_actions=0)
    with pytest.raises(DataError, match="none of the 2 users has the 4 items"):
        open_sequences(path, min_actions=1).split(3, validation=True)


# ------------------------------------------------------------------ examples


def sequences(*lists: list[int]) -> Sequences:
    flat = np.concatenate([np.asarray(own, np.int64) for own in lists])
    return Sequences(flat, np.cumsum([0, *map(len, lists)]), int(flat.max()))


def test_the_last_item_is_held_out_and_histories_are_cut() -> None:
    split = sequences([1, 2, 3, 4, 5, 6], [6, 5, 4]).split(3)
    assert split.validation is None
    assert [[part.tolist() for part in example] for example in split.training] == [
        [[2, 3, 4], [3, 4, 5]],  # the last 4 of 1..5
        [[6, 0, 0], [5, 0, 0]],
    ]
    assert [[part.tolist() for part in example] for example in split.test] == [[[3, 4, 5], 6], [[6, 5, 0], 4]]
    training = split.training
    assert (training.items, training.length, len(training)) == (6, 3, 2)
    assert training.users.tolist() == [0, 1] and training.users.dtype == np.int64
    history, target = training[0]
    assert history.dtype == target.dtype == torch.int64 and history.shape == target.shape == (3,)


def test_validation_takes_the_item_before_the_last_out_of_training() -> None:
    split = sequences([1, 2, 3, 4, 5, 6], [6, 5, 4, 3]).split(3, validation=True)
    assert split.validation is not None
    assert [part.tolist() for part in split.training[0]] == [[1, 2, 3], [2, 3, 4]]
    assert [part.tolist() for part in split.training[1]] == [[6, 0, 0], [5, 0, 0]]
    assert [part.tolist() for part in split.validation[0]] == [[2, 3, 4], 5]
    assert [part.tolist() for part in split.test[0]] == [[3, 4, 5], 6]


def test_a_user_with_too_few_items_is_trained_on_and_not_evaluated() -> None:
    data = sequences([1, 2, 3, 4], [3, 4], [2], [4, 3, 2])
    split = data.split(3)
    assert (len(split.training), len(split.test)) == (3, 2)
    assert [part.tolist() for part in split.training[1]] == [[3, 0, 0], [4, 0, 0]]
    both = data.split(3, validation=True)
    assert both.validation is not None
    assert (len(both.training), len(both.validation), len(both.test)) == (3, 1, 1)
    assert [part.tolist() for part in both.training[2]] == [[4, 3, 0], [3, 2, 0]]


def test_no_example_holds_what_is_held_out() -> None:
    data = generated_sequences(200, 50, seed=2)
    split = data.split(5, validation=True)
    assert split.validation is not None
    for i, part in enumerate(np.split(data.actions, data.starts[1:-1])):
        history, target = (row[row > 0].tolist() for row in split.training[i])
        assert history == part[:-3].tolist()[-5:] and target == part[1:-2].tolist()[-5:]
        for held_out, back in ((split.validation, 2), (split.test, 1)):
            seen, item = held_out[i]
            assert item == part[-back] and seen[seen > 0].tolist() == part[:-back].tolist()[-5:]
            assert held_out.seen([i])[0].tolist() == part[:-back].tolist()


def test_batches_are_the_examples_stacked() -> None:
    training = generated_sequences(40, 30).split(6).training
    single = training.collate([training[i] for i in (3, 5, 3)])
    many = training.collate(training.__getitems__([3, 5, 3]))
    assert all(torch.equal(a, b) for a, b in zip(single, many))
    assert [part.shape for part in training.collate([])] == [(0, 6), (0, 6)]
    assert torch.equal(training[-1][0], training[39][0])
    with pytest.raises(IndexError):
        training[40]
    loaded = list(DataLoader(training, batch_size=16, collate_fn=training.collate))
    assert [len(history) for history, _ in loaded] == [16, 16, 8]
    assert torch.equal(torch.cat([target for _, target in loaded]), training.collate(list(training))[1])
    copy = pickle.loads(pickle.dumps(training))
    assert torch.equal(copy[7][1], training[7][1])


def test_the_counts_of_items_are_those_of_the_examples() -> None:
    training = generated_sequences(60, 30).split(4).training
    wanted = Counter()  # type: ignore[var-annotated]
    for history, target in training:
        wanted.update([int(history[0]), *target[target > 0].tolist()])
    assert training.item_counts.tolist() == [wanted[i] for i in range(31)]


# ------------------------------------------------------------------ generated


def test_generated_sequences_are_those_of_their_seed() -> None:
    data, same, other = (generated_sequences(300, 80, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(data.actions, same.actions) and np.array_equal(data.starts, same.starts)
    assert not np.array_equal(data.actions[:500], other.actions[:500])
    assert data.actions.min() >= 1 and data.actions.max() <= 80 and not data.vocabulary_is_private
    assert np.diff(data.starts).min() >= 4


def test_generated_sequences_follow_the_planted_model() -> None:
    data = generated_sequences(4000, 60, seed=0, groups=6, structure=0.8, skew=1.0, mean_length=15)
    lengths = np.diff(data.starts)
    assert lengths.mean() == pytest.approx(15, rel=0.05)
    assert data.next_item.sum(1) == pytest.approx(np.ones(6)) and (data.next_item[:, 0] == 0).all()
    # P(next item | group of the last one), counted.
    last = np.ones(len(data.actions), bool)
    last[data.starts[1:] - 1] = False
    before, after = data.actions[np.flatnonzero(last)], data.actions[np.flatnonzero(last) + 1]
    counted = np.zeros((6, 61))
    np.add.at(counted, (data.group_of[before], after), 1)
    errors = np.sqrt(data.next_item / counted.sum(1, keepdims=True)).clip(1e-4)
    gaps = (counted / counted.sum(1, keepdims=True) - data.next_item) / errors
    assert np.abs(gaps).max() < 5 and np.abs(gaps[:, 1:]).mean() < 1.1
    history = torch.from_numpy(np.array([[before[0], 0], [before[1], before[2]]]))
    scores = data.planted_scores(history)
    assert torch.equal(scores, torch.from_numpy(data.next_item[data.group_of[[before[0], before[2]]]]))


def test_public_frequencies_are_about_the_true_ones() -> None:
    data = generated_sequences(5000, 100, seed=4, mean_length=10)
    have = np.zeros(101)
    for part in np.split(data.actions, data.starts[1:-1]):
        have[np.unique(part)] += 1
    public = data.public_frequencies.numpy()
    assert public[0] == 0 and np.corrcoef(public, have / 5000)[0, 1] > 0.98
    assert public.sum() == pytest.approx(have.sum() / 5000, rel=0.15)


@pytest.mark.parametrize(
    "wrong", [{"users": 0}, {"groups": 11}, {"structure": 1.5}, {"skew": -1.0}, {"mean_length": 3.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"generated_sequences: .*{next(iter(wrong))}="):
        generated_sequences(**{"users": 5, "items": 10, "groups": 5, **wrong})  # type: ignore[arg-type]


# ------------------------------------------------------------------ real data


REAL = {
    "ml-1m/ratings.csv.gz": ({}, 6040, 3416, 999_611),
    "ml-100k/ratings.csv.gz": ({}, 943, 1349, 99_287),
    "amazon-video-games/Video.txt.gz": ({"min_actions": 1}, 31_013, 23_715, 287_107),
    "amazon-beauty/beauty.txt.gz": ({"min_actions": 1}, 40_226, 54_542, 353_962),
    "amazon-instant-video/interactions.csv.gz": ({"until_stable": True}, 4035, 1361, 28_512),
    "amazon-5core/Beauty.txt.gz": ({"until_stable": True}, 22_363, 12_101, 198_502),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_has_the_known_size(name: str) -> None:
    folder = os.environ.get("SPARSEDP_DATA")
    if folder is None or not Path(folder, name).is_file():
        pytest.skip(f"set SPARSEDP_DATA to a folder that holds {name}")
    settings, users, items, count = REAL[name]
    data = open_sequences(Path(folder, name), **settings)  # type: ignore[arg-type]
    assert (data.users, data.items, len(data.actions)) == (users, items, count)


def test_columns_of_any_name(tmp_path: Path) -> None:
    """The same actions as text in several files, and as Parquet; ids of any kind, dates as times, ties as in the file."""
    rows = [
        ("ann", 7, "2026-01-03"),
        ("bob", 7, "2026-01-01"),
        ("ann", "größe", "2026-01-01"),
        ("ann", 9, "2026-01-02"),
    ]
    rows += [("bob", 9, "2026-01-01")]
    lines = [f"x;{item};{when};{who}" for who, item, when in rows]
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "1.csv").write_text("no;what;at;who\n" + "\n".join(lines[:2]) + "\r\n", encoding="utf-8-sig")
    (tmp_path / "days" / "2.csv").write_text("no;what;at;who\n" + "\n".join(lines[2:]) + "\n\n")
    table = pa.table(list(zip(*[(w, str(i), t) for w, i, t in rows])), names=["who", "what", "at"])
    pq.write_table(table, tmp_path / "all.parquet")
    columns = {"user": "who", "item": "what", "time": "at", "min_actions": 1}
    for path in (tmp_path / "days", tmp_path / "all.parquet", [tmp_path / "all.parquet"]):
        data = open_sequences(path, **columns)
        names = [data.item_names[i - 1] for i in data.actions]
        assert data.user_names == ("ann", "bob") and data.vocabulary_is_private
        assert names == ["größe", "9", "7", "7", "9"] and data.starts.tolist() == [0, 3, 5]
    untimed = open_sequences(tmp_path / "days", user="who", item="what", min_actions=1)
    assert [untimed.item_names[i - 1] for i in untimed.actions] == ["7", "größe", "9", "7", "9"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("u,i,t\na,1,5\na,,6\n", {}, "log, line 3: the item is empty"),
        ("u,i,t\na,1,5\n\n,1,6\n", {}, "log, line 4: the user is empty"),
        ("u,i,t\na,1,5\na,1,soon\n", {}, "log, line 3: t is neither seconds since 1970"),
        ("u,i,t\na,1,5\na,1\n", {}, "log, line 3: 2 fields, expected 3"),
        ("u,i,t\n", {}, "no actions in it"),
        ("u,i,t\na,1,5\n", {"item": "j"}, r"lacks the columns j; it has u, i, t"),
        ("u,i,t\na,1,5\n", {"item": "u"}, "different columns"),
        ("u,i,t\na,1,5\n", {"item": None}, "both columns, user and item"),
        ("u,i,t\na,1,5\n", {"format": "csv"}, "no format beside them"),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, content: str, options: dict, message: str) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises((ConfigError, DataError), match=message):
        open_sequences(tmp_path / "log", **{"user": "u", "item": "i", "time": "t", "min_actions": 1, **options})
