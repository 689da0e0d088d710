"""Shares: several ranks draw one batch together, unit for unit that of one process, in equally many physical batches."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sparsedp import ConfigError, Stream, UnsupportedError
from sparsedp.counting import count_rows
from sparsedp.noise import RandomKey
from sparsedp.sampling import BatchInfo, PrivateLoader, Share, Users
from sparsedp.sampling.draws import Draws, Place, Span
from sparsedp.tables import find_tables
from users import start

KEY = RandomKey.from_seed(5)
RANKS = [1, 2, 3, 7]
SIZE = 41
WHOSE = np.random.default_rng(1).permutation(np.repeat(np.arange(12), [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 5]))
PERIODS = np.random.default_rng(2).permutation(np.repeat([2, 3, 7], [9, 20, 12]))
UNEVEN = [5, 1, 17, 3]  # units of ranks that have data of their own

Batches = list[tuple[BatchInfo, list[int]]]


class Numbers(Dataset):
    """Example i is i, beside a number that is drawn."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(i), torch.rand(())


# The units: how the loader of a data set of SIZE examples is told of them.
UNITS: dict[str, Callable[[], dict[str, Any]]] = {
    "examples": dict,
    "users": lambda: {"users": Users.of(WHOSE, SIZE)},
    "users with at most 3 examples": lambda: {"users": Users.of(WHOSE, SIZE, 3)},
    "a stream": lambda: {"stream": Stream(PERIODS, "parallel")},
}


def make(
    share: Share | None, units: str = "examples", *, size: int = SIZE, batch_size: int = 5, poisson: bool = True,
    shuffle: bool = True, most: int | None = None, workers: int = 0, key: RandomKey = KEY, **options: Any,
) -> PrivateLoader:  # fmt: skip
    loader = DataLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle, num_workers=workers)
    how = {**UNITS[units](), **options}
    return PrivateLoader(loader, key=key, poisson=poisson, max_physical_batch=most, share=share, **how)


def batches(loader: PrivateLoader, epochs: int = 2) -> Batches:
    found = []
    for _ in range(epochs):
        for places, _ in loader:
            assert loader.current is not None
            found.append((loader.current, places.tolist() if loader.current.units else []))
    return found


def by_step(physical: Batches) -> dict[int, list[int]]:
    """The examples of each logical batch, in order."""
    found: dict[int, list[int]] = {}
    for info, places in physical:
        found.setdefault(info.step, []).extend(places)
    return found


def require_shares(alone: Batches, ranks: Sequence[Batches], most: int | None = None) -> None:
    """The ranks' batches are those of one process, in order, and all ranks have the same physical ones."""
    pieces = [by_step(physical) for physical in ranks]
    whole = by_step(alone)
    units = {info.step: info.logical_units for info, _ in alone}
    for step, drawn in whole.items():
        assert [place for piece in pieces for place in piece[step]] == drawn
    for infos in zip(*([info for info, _ in physical] for physical in ranks), strict=True):
        assert len({(info.step, info.first, info.last, info.span, info.logical_units) for info in infos}) == 1
        assert infos[0].logical_units == units[infos[0].step]
    for step, count in units.items():
        assert sum(info.units for physical in ranks for info, _ in physical if info.step == step) == count
    for physical in ranks:
        before = None
        for info, places in physical:
            assert info.first == (before is None or before.last) and info.stand_in == (not places)
            assert before is None or info.step == before.step + before.last
            assert most is None or len(places) <= most
            assert info.owners is None or len(info.owners) == len(places)
            before = info
        assert before is not None and before.last


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_make_up_the_batch_of_one_process(ranks: int, units: str, poisson: bool, most: int | None) -> None:
    alone = make(None, units, poisson=poisson)
    loaders = [make(Share(rank, ranks), units, poisson=poisson, most=most) for rank in range(ranks)]
    for loader in loaders:
        for name in ("dataset_size", "sample_rate", "steps_per_epoch", "batch_size", "expected_examples", "span_steps"):
            assert getattr(loader, name) == getattr(alone, name)
        assert len(loader) == len(alone)
    shares = [batches(loader) for loader in loaders]
    require_shares(batches(alone), shares, most)
    assert len({loader.state_dict()["step"] for loader in loaders}) == 1
    if ranks == 1:
        assert shares[0] == batches(make(None, units, poisson=poisson, most=most))


@pytest.mark.parametrize("units", UNITS)
def test_workers_read_the_same_shares(units: str) -> None:
    for rank in range(2):
        shares = [batches(make(Share(rank, 2), units, most=6, workers=workers), 1) for workers in (0, 2)]
        assert shares[0] == shares[1]


def test_data_in_their_order_are_shared() -> None:
    shares = [batches(make(Share(rank, 3), poisson=False, shuffle=False), 1) for rank in range(3)]
    require_shares(batches(make(None, poisson=False, shuffle=False), 1), shares)
    assert by_step(shares[1])[0] == [2, 3]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (5, 1), (41, 1), (41, 3)])
def test_fewer_units_than_ranks_and_none(ranks: int, size: int, batch_size: int) -> None:
    how: dict[str, Any] = {"size": size, "batch_size": batch_size}
    alone = batches(make(None, **how), 3)
    shares = [batches(make(Share(rank, ranks), most=1, **how), 3) for rank in range(ranks)]
    require_shares(alone, shares, 1)
    counts = {len(drawn) for drawn in by_step(alone).values()}
    assert size == 1 or 0 in counts
    for step, drawn in by_step(alone).items():  # a batch of nobody is one physical batch on every rank
        assert sum(info.step == step for info, _ in shares[0]) == max(1, -(-len(drawn) // ranks))


def test_every_rank_has_the_number_of_the_largest_piece() -> None:
    """7 examples on 2 ranks with 3 at a time: 4 and 3, so two physical batches for both."""
    shares = [batches(make(Share(r, 2), size=7, batch_size=7, poisson=False, most=3), 1) for r in range(2)]
    assert [[info.units for info, _ in share] for share in shares] == [[2, 2], [2, 1]]


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("poisson", [True, False])
def test_resuming_goes_on_with_the_same_shares(units: str, poisson: bool) -> None:
    for rank in range(3):
        how: dict[str, Any] = {"poisson": poisson, "most": 6}
        uninterrupted = batches(make(Share(rank, 3), units, **how))
        loader, seen, state = make(Share(rank, 3), units, **how), 0, {}
        for _ in loader:
            assert loader.current is not None
            seen += not state
            if loader.current.step == 1 and loader.current.last:
                state = loader.state_dict()
        assert state == {"step": 2, "epoch": 0, "epoch_position": 2}
        resumed = make(Share(rank, 3), units, **how)
        resumed.load_state_dict(state)
        assert batches(resumed) == uninterrupted[seen:]


def test_going_back_gives_all_ranks_one_new_key() -> None:
    key = RandomKey(os.urandom(32), seeded=False)
    loaders = [make(Share(rank, 2), key=key) for rank in range(2)]
    before = [by_step(batches(loader, 1)) for loader in loaders]
    for loader in loaders:
        loader.load_state_dict({"step": 0, "epoch": 0, "epoch_position": 0})
    again = [batches(loader, 1) for loader in loaders]
    assert [by_step(share) for share in again] != before
    assert all(info == other for (info, _), (other, _) in zip(*again) if info.units == other.units)
    drawn = {step: sum(len(by_step(share)[step]) for share in again) for step in before[0]}
    assert drawn == {info.step: info.logical_units for info, _ in again[0]}


def test_different_keys_draw_different_shares() -> None:
    shares = [by_step(batches(make(Share(1, 2), key=RandomKey.from_seed(seed)))) for seed in (1, 2)]
    assert shares[0] != shares[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_data_sets_draw_is_each_ranks_own(workers: int) -> None:
    """Ranks that read the same example of a batch of all examples draw other numbers; one rank draws as no share does."""

    def drawn(share: Share | None, counting: bool) -> list[float]:
        how: dict[str, Any] = {"poisson": False, "shuffle": False, "size": 4, "batch_size": 4, "workers": workers}
        loader = make(share, **how)
        found = loader.counting(loader.dataset, batch_size=4) if counting else iter(loader)
        return [float(number) for _, numbers in found for number in numbers]

    for counting in (False, True):
        alone, one = (drawn(share, counting) for share in (None, Share(0, 1)))
        assert alone == one
        several = [drawn(share, counting) for share in (None, Share(0, 3), Share(1, 3), Share(2, 3))]
        assert len({number for numbers in several for number in numbers}) == sum(map(len, several))


# ------------------------------------------------------------------ own data


def own(rank: int, sizes: Sequence[int] = UNEVEN, **options: Any) -> PrivateLoader:
    return make(Share.of_own_data(rank, sizes), size=sizes[rank], **options)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("sizes", [[26], [13, 13], UNEVEN, [1, 1, 1, 1, 20, 1, 1]])
def test_own_data_are_drawn_as_those_of_one_process(sizes: list[int], poisson: bool, most: int | None) -> None:
    """Each unit is in a batch if the draw over all units has it, whatever rank it is on."""
    alone = make(None, size=26, poisson=poisson)
    loaders = [own(rank, sizes, poisson=poisson, most=most) for rank in range(len(sizes))]
    for loader in loaders:
        assert loader.dataset_size == 26 and loader.sample_rate == 5 / 26 and len(loader) == len(alone) == 6
    shares = [batches(loader, 4) for loader in loaders]
    begin = np.cumsum([0, *sizes])
    home = np.repeat(np.arange(len(sizes)), sizes)
    whole = {  # Poisson batches are in this order anyway
        step: sorted(drawn, key=lambda unit: home[unit]) for step, drawn in by_step(batches(alone, 4)).items()
    }
    numbered = [[(i, [p + int(b) for p in places]) for i, places in share] for b, share in zip(begin, shares)]
    infos = {info.step: info for info, _ in shares[0]}
    require_shares([(infos[step], drawn) for step, drawn in whole.items()], numbered, most)
    for step, drawn in whole.items():
        needed = max(1, int(np.bincount(home[drawn], minlength=1).max()) if drawn else 1)
        expected = -(-needed // most) if most else 1
        assert all(sum(info.step == step for info, _ in share) == expected for share in shares)
    if len(sizes) == 1:
        assert shares[0] == batches(make(None, size=26, poisson=poisson, most=most), 4)


def own_users(
    rank: int, whose: Sequence[np.ndarray], limit: int | None, most: int | None = None, **options: Any
) -> PrivateLoader:
    users = [Users.of(ids, len(ids), limit) for ids in whose]
    share = Share.of_own_data(rank, [one.count for one in users], [one.sizes for one in users])
    return make(share, size=len(whose[rank]), users=users[rank], most=most, **options)


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("limit", [None, 3])
def test_own_users_are_drawn_as_those_of_one_process(limit: int | None, most: int | None) -> None:
    parts = [(0, 2), (2, 3), (3, 12)]  # the users of WHOSE on each rank
    places = [np.flatnonzero((first <= WHOSE) & (end > WHOSE)) for first, end in parts]
    alone = make(None, users=Users.of(WHOSE, SIZE, limit))
    loaders = [own_users(rank, [WHOSE[where] for where in places], limit, most) for rank in range(3)]
    assert all(loader.dataset_size == 12 and loader.sample_rate == 5 / 12 for loader in loaders)
    assert all(loader.expected_examples == pytest.approx(alone.expected_examples) for loader in loaders)
    shares = [batches(loader, 4) for loader in loaders]
    for infos in zip(*([info for info, _ in share] for share in shares), strict=True):
        assert len({(info.step, info.first, info.last, info.logical_units) for info in infos}) == 1
    assert any(not places and info.logical_units for share in shares for info, places in share)
    read = [by_step(share) for share in shares]
    for step, drawn in by_step(batches(alone, 4)).items():
        brought = np.concatenate([places[rank][np.array(read[rank][step], int)] for rank in range(3)])
        assert WHOSE[brought].tolist() == WHOSE[drawn].tolist()  # as many of each user, in the same order
        assert len(set(brought)) == len(brought) and (limit is not None or brought.tolist() == drawn)
    assert all(most is None or len(places) <= most for share in shares for _, places in share)


def test_own_users_choose_their_examples_apart() -> None:
    """Two ranks with the same data, all of whose users are in every batch, do not choose alike."""
    whose = np.repeat(np.arange(3), 6)
    chosen = [by_step(batches(own_users(rank, [whose, whose], 2, batch_size=6), 4)) for rank in range(2)]
    assert all(len(places) == 6 for share in chosen for places in share.values())
    assert all(chosen[0][step] != chosen[1][step] for step in chosen[0])


def test_own_data_resume() -> None:
    for rank in range(4):
        uninterrupted = batches(own(rank, most=2), 2)
        resumed = own(rank, most=2)
        resumed.load_state_dict({"step": 4, "epoch": 0, "epoch_position": 4})
        assert batches(resumed) == [(info, places) for info, places in uninterrupted if info.step >= 4]
        helped = batches(own(rank, most=2, workers=2), 1)
        assert helped == [(info, places) for info, places in uninterrupted if info.step < 6]


# ------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2, "ranks": 2}, "rank must lie between"),
        ({"rank": -1, "ranks": 2}, "rank must lie between"),
        ({"rank": 0, "ranks": 0}, "rank must lie between"),
        ({"rank": 0.0, "ranks": 2}, "whole number"),
        ({"rank": 0, "ranks": True}, "whole number"),
        ({"rank": 0, "ranks": 2, "begin": (0, 4)}, "3 whole numbers"),
        ({"rank": 0, "ranks": 2, "begin": (1, 4, 5)}, "the first of them 0"),
        ({"rank": 0, "ranks": 2, "begin": (0, 4, 5.5)}, "whole numbers"),
        ({"rank": 0, "ranks": 2, "examples": np.ones(5, int)}, "without begin"),
        ({"rank": 0, "ranks": 2, "begin": (0, 4, 5), "examples": np.ones(4, int)}, "each of the 5 users"),
        ({"rank": 0, "ranks": 2, "begin": (0, 4, 5), "examples": np.zeros(5, int)}, "at least 1"),
    ],
)
def test_shares_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Share(**given)


def test_a_rank_without_data_is_refused_on_every_rank() -> None:
    for rank in range(3):
        with pytest.raises(UnsupportedError, match="Rank 1 has no data of its own"):
            Share.of_own_data(rank, [4, 0, 3])


def test_own_data_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="rank 1 has 4 examples; its share says 3, of 7 in all"):
        make(Share.of_own_data(1, [4, 3]), size=4)
    with pytest.raises(UnsupportedError, match="numbered over all ranks"):
        make(Share.of_own_data(0, [SIZE, 3]), "a stream")
    with pytest.raises(UnsupportedError, match="the units are examples"):
        make(Share.of_own_data(0, [4, 3], [np.ones(4, int), np.ones(3, int)]), size=4)
    with pytest.raises(UnsupportedError, match="give it examples"):
        make(Share.of_own_data(0, [12, 3]), "users")
    with pytest.raises(UnsupportedError, match="as many examples as its share says"):
        make(Share.of_own_data(0, [12, 3], [np.ones(12, int), np.ones(3, int)]), "users")
    with pytest.raises(UnsupportedError, match="exceeds the data set's 26 examples"):
        own(0, batch_size=27)
    own(1, batch_size=26)  # more than this rank has


def test_the_largest_user_of_any_rank_has_to_fit() -> None:
    whose = [np.array([0, 0, 1]), np.zeros(9, int)]
    for rank in range(2):
        with pytest.raises(UnsupportedError, match="up to 9 examples"):
            own_users(rank, whose, None, most=8, batch_size=1)
        own_users(rank, whose, 3, most=8, batch_size=1)


# ------------------------------------------------------------------ counts of the data


@pytest.mark.parametrize("ranks", RANKS)
def test_every_unit_is_counted_by_one_rank(ranks: int) -> None:
    some = np.array([3, 4, 9, 17, 40])
    for indices, wanted in ((None, np.arange(SIZE)), (some, some)):
        counted = [make(Share(rank, ranks)).counted_examples(indices) for rank in range(ranks)]
        if ranks == 1 and indices is None:
            assert counted == [(None, SIZE)]
            continue
        places = [where for where, _ in counted if where is not None]
        assert np.concatenate(places).tolist() == wanted.tolist()
        assert {most for _, most in counted} == {max(map(len, places))}
    units = "users with at most 3 examples"
    ((alone, sizes),) = make(None, units).counted_users(np.arange(12))
    parts = [make(Share(rank, ranks), units).counted_users(np.arange(12), 4) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert np.concatenate([examples for part in parts for examples, _ in part]).tolist() == alone.tolist()
    assert np.concatenate([n for part in parts for _, n in part]).tolist() == sizes.tolist()


def test_own_data_are_counted_where_they_are() -> None:
    for rank in range(4):
        assert own(rank).counted_examples(None) == (None, 17)
    found = [own(rank).counted_examples(np.array([0, 4, 5, 7, 25])) for rank in range(4)]
    assert [places.tolist() for places, _ in found if places is not None] == [[0, 4], [0], [1], [2]]
    assert {most for _, most in found} == {2}


@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("mode", ["shared", "own"])
def test_the_counts_of_all_ranks_add_up(unit: str, mode: str) -> None:
    """Also those of a rank with fewer units, which runs the module as often as the others."""
    engine, module, _, loader = start("fest")
    assert engine._capture is not None
    tables, ids = find_tables(module), loader.dataset.tensors[0]
    whose = torch.as_tensor(loader.dataset.users)
    rest = loader.dataset.tensors[1:]
    home = whose % 3 // 2 if mode == "own" else torch.zeros_like(whose)  # two thirds of the users on rank 0
    passes: list[int] = []
    handle = module.register_forward_hook(lambda *_: passes.append(1))

    def count(where: Tensor, share: Callable[[Users | None], Share | None]) -> tuple[Tensor, int]:
        data = TensorDataset(ids[where], *(part[where] for part in rest))
        users = Users.of(whose[where], len(data)) if unit == "user" else None
        most = int(torch.bincount(whose).max())
        given = DataLoader(data, batch_size=2, collate_fn=loader.collate_fn)
        private = PrivateLoader(given, key=KEY, users=users, share=share(users), max_physical_batch=most)
        passes.clear()
        return count_rows(module, engine._capture, private, tables, None, 1.5)["table.weight"], len(passes)

    everyone = torch.arange(len(ids))
    alone, _ = count(everyone, lambda _: None)
    if mode == "shared":
        counted = [count(everyone, lambda _, r=rank: Share(r, 7)) for rank in range(7)]  # type: ignore[misc]
    else:
        places = [torch.nonzero(home == rank)[:, 0] for rank in range(2)]
        users = [Users.of(whose[where], len(where)) for where in places]
        sizes = [one.count if unit == "user" else len(where) for one, where in zip(users, places)]
        examples = [one.sizes for one in users] if unit == "user" else None
        counted = [
            count(where, lambda _, r=rank: Share.of_own_data(r, sizes, examples))  # type: ignore[misc]
            for rank, where in enumerate(places)
        ]
    handle.remove()
    torch.testing.assert_close(sum(rows for rows, _ in counted), alone)
    assert len({number for _, number in counted}) == 1


# ------------------------------------------------------------------ any sizes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 8))
def test_pieces_are_contiguous_and_nearly_even(sizes: list[int], ranks: int) -> None:
    examples, units = np.array(sizes, dtype=np.int64), np.arange(len(sizes)) * 3
    for given_sizes in (None, examples):
        pieces = Share(0, ranks).pieces(units, given_sizes)
        assert len(pieces) == ranks and np.concatenate(pieces).tolist() == list(range(len(sizes)))
        each = [len(piece) if given_sizes is None else examples[piece].sum() for piece in pieces]
        largest = 1 if given_sizes is None else max(sizes, default=0)
        assert all(abs(n - sum(each) / ranks) <= largest for n in each)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shares_of_any_data_make_up_the_batch(data: st.DataObject) -> None:
    ranks, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    batch_size, limit = data.draw(st.integers(1, size)), data.draw(st.integers(1, 9))
    whose = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    is_own, key = data.draw(st.booleans()), RandomKey.from_seed(data.draw(st.integers(0, 99)))
    users = Users.of(whose, size, data.draw(st.one_of(st.none(), st.integers(1, 4))))
    cuts = data.draw(st.sets(st.integers(1, size - 1), max_size=ranks - 1)) if size > 1 else set()
    begin = (0, *sorted(cuts), size)
    shares = [Share(rank, len(begin) - 1, begin) for rank in range(len(begin) - 1)]
    shares = shares if is_own else [Share(rank, ranks) for rank in range(ranks)]

    def read(share: Share, units: int, users: Users | None, limit: int | None) -> Batches:
        draws = Draws(key, (Span(units, 3),), batch_size, True, True, limit, users, share)
        infos: deque[BatchInfo] = deque()
        fetched = draws.physical(Place(0, 0, 0), infos)
        offset = 0 if share.begin is None else share.begin[share.rank]
        found, batch = [], []
        while batch is not None:
            batch = next(fetched, None)  # type: ignore[arg-type]
            while infos and infos[0].units == 0:
                found.append((infos.popleft(), []))
            if batch is not None:
                found.append((infos.popleft(), [place + offset for place in batch]))
        return found

    def require(pieces: list[Batches], alone: Batches) -> None:
        assert len({tuple((i.step, i.first, i.last, i.logical_units) for i, _ in piece) for piece in pieces}) == 1
        for step, drawn in by_step(alone).items():
            assert [place for piece in pieces for place in by_step(piece)[step]] == drawn

    pieces = [read(share, size, None, limit) for share in shares]
    require(pieces, read(Share(), size, None, None))
    assert all(len(places) <= limit for piece in pieces for _, places in piece)
    if not is_own:
        batch_size = min(batch_size, users.count)
        pieces = [read(share, users.count, users, limit) for share in shares]
        require(pieces, read(Share(), users.count, users, None))
