"""The law of the batches, their shapes when empty, micro-batches, and resuming."""

import copy
import gc
import itertools
import pickle
import tracemalloc
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from sparsedp.errors import CheckpointError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.noise import RandomKey
from sparsedp.sampling import PrivateLoader, poisson_indices, private_loader
from sparsedp.sampling.collate import empty_batch
from sparsedp.sampling.layout import BatchLayout

KEY = RandomKey.from_seed(11)


class Numbers(Dataset):
    """Example i is the tensor i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Ragged(Dataset):
    """Example i is a sequence of i + 2 nonzero ids and a label."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.full((index + 2,), 7), 1.0


def make(
    size: int = 50, batch_size: int = 8, key: RandomKey = KEY, poisson: bool = True, limit=None, **kwargs: Any
) -> PrivateLoader:
    loader = DataLoader(Numbers(size), batch_size=batch_size, **{"shuffle": True, **kwargs})
    return private_loader(loader, key=key, poisson=poisson, max_physical_batch=limit)


def passes(loader: PrivateLoader, count: int = 1) -> list[tuple[int, list[int]]]:
    """Step and indices of every physical batch of `count` passes."""
    return [(loader.current.step, batch.tolist()) for _ in range(count) for batch in loader]


class TestPoissonLaw:
    def test_inclusion_count_and_pairs(self):
        size, rate, draws = 12, 0.3, 20_000
        member = np.zeros((draws, size))
        for t in range(draws):
            member[t, poisson_indices(KEY.generator(t), size, rate)] = 1
        # Each unit with the right probability.
        z = (member.sum(0) - draws * rate) / np.sqrt(draws * rate * (1 - rate))
        assert stats.chi2.sf((z**2).sum(), size) > 1e-3
        # Pairs independent: correlations of independent bits are N(0, 1/draws).
        correlation = np.corrcoef(member.T)[np.triu_indices(size, 1)] * np.sqrt(draws)
        assert stats.chi2.sf((correlation**2).sum(), correlation.size) > 1e-3
        # The count binomial: its law, and so its variance.
        counts = member.sum(1)
        law = stats.binom(size, rate).pmf(np.arange(9))
        expected = draws * np.append(law, 1 - law.sum())
        observed = np.bincount(np.minimum(counts, 9).astype(int), minlength=10)
        assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3
        assert np.var(counts) == pytest.approx(size * rate * (1 - rate), rel=0.05)

    def test_steps_and_keys_are_independent(self):
        draws, size, rate = 4000, 10, 0.5
        member = np.zeros((3, draws, size))
        other = RandomKey.from_seed(12)
        for t in range(draws):
            member[0, t, poisson_indices(KEY.generator(t), size, rate)] = 1
            member[1, t, poisson_indices(KEY.generator(t + 1), size, rate)] = 1
            member[2, t, poisson_indices(other.generator(t), size, rate)] = 1
        for a, b in ((0, 1), (0, 2)):
            r = np.corrcoef(member[a].ravel(), member[b].ravel())[0, 1]
            assert abs(r) < 4 / np.sqrt(draws * size)

    @pytest.mark.parametrize("size, rate", [(1, 1.0), (1000, 1.0), (1000, 0.97), (20_000, 0.5), (1000, 1e-9)])
    def test_edges(self, size, rate):
        for t in range(20):
            indices = poisson_indices(KEY.generator(t), size, rate)
            assert indices.dtype == np.int64
            assert (np.diff(indices) > 0).all()
            assert indices.size == 0 or (indices[0] >= 0 and indices[-1] < size)
            if rate == 1.0:
                assert indices.size == size

    def test_cost_follows_the_batch(self):
        size = 1 << 40
        tracemalloc.start()
        batches = [poisson_indices(KEY.generator(t), size, 1000 / size) for t in range(20)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 22
        everything = np.concatenate(batches)
        assert abs(everything.size - 20_000) < 6 * np.sqrt(20_000)
        assert stats.kstest(everything / size, "uniform").pvalue > 1e-3

    def test_loader_over_a_huge_data_set(self):
        loader = make(size=1 << 40, batch_size=32)
        assert loader.steps_per_epoch == 1 << 35
        for _, batch in zip(range(3), loader):
            assert len(batch) == loader.current.units

    def test_loader_yields_these_draws(self):
        loader = make()
        for t, (step, indices) in enumerate(passes(loader, 3)):
            assert step == t
            assert indices == poisson_indices(KEY.generator(t), 50, 8 / 50).tolist()


class Pair(NamedTuple):
    ids: torch.Tensor
    label: torch.Tensor


@dataclass
class Record:
    ids: torch.Tensor
    name: str


def pad(examples):
    lengths = torch.tensor([len(ids) for ids, _ in examples])
    ids = pad_sequence([ids for ids, _ in examples], batch_first=True)
    return {"ids": ids, "lengths": lengths, "longest": ids.shape[1], "count": len(examples)}


def bags(examples, last=False):
    offsets = np.cumsum([0] + [len(ids) for ids, _ in examples])
    values = torch.cat([ids for ids, _ in examples])
    return values, torch.as_tensor(offsets if last else offsets[:-1])


def bags_with_last(examples):
    return bags(examples, last=True)


class TestEmptyBatch:
    def empty(self, collate, dataset=None, workers=0, public=()):
        """An empty batch of a loader whose every batch is empty, in effect."""
        loader = DataLoader(dataset or Ragged(), batch_size=1, collate_fn=collate, num_workers=workers)
        private = private_loader(loader, key=KEY, public_inputs=public)
        seen = []
        for batch in private:
            if private.current.units == 0:
                assert private.current.first and private.current.last and private.current.logical_units == 0
                seen.append(batch)
        assert seen
        return seen[0]

    def test_tensor_data_set_and_default_collate(self):
        data = TensorDataset(torch.ones(30, 5), torch.ones(30, dtype=torch.int32), torch.ones(30, 2, 3).bool())
        batch = self.empty(None, data)
        assert isinstance(batch, list)
        assert [(tuple(x.shape), x.dtype) for x in batch] == [
            ((0, 5), torch.float32),
            ((0,), torch.int32),
            ((0, 2, 3), torch.bool),
        ]

    def test_nested_structures(self):
        def collate(examples):
            ids = torch.stack([ids[:2] for ids, _ in examples])
            label = torch.tensor([label for _, label in examples])
            names = ["name"] * len(examples)
            array = np.ones((len(examples), 3), np.float16)
            return (
                OrderedDict(pair=Pair(ids, label), names=names, fields=[ids, label]),
                defaultdict(list, transposed=ids.T, total=label.sum(), nothing=None, scale=0.5, flag=True),
                Record(ids, "every"),
                array,
            )

        first, second, record, array = self.empty(collate, public=("total",))
        assert isinstance(first, OrderedDict) and isinstance(first["pair"], Pair)
        assert first["pair"].ids.shape == (0, 2) and first["pair"].ids.dtype == torch.int64
        assert first["pair"].label.shape == (0,) and first["names"] == []
        assert [x.shape for x in first["fields"]] == [(0, 2), (0,)]
        assert second["transposed"].shape == (2, 0)
        assert second["total"].shape == () and second["total"] == 0
        # What is the same for every batch is so for the empty one, too.
        assert (second["nothing"], second["scale"], second["flag"]) == (None, 0.5, True)
        assert record.ids.shape == (0, 2) and record.name == "every"
        assert array.shape == (0, 3) and array.dtype == np.float16

    def test_padding(self):
        batch = self.empty(pad, public=("longest", "count"))
        assert batch["ids"].shape == (0, 2) and batch["lengths"].shape == (0,)
        assert (batch["longest"], batch["count"]) == (2, 0)

    @pytest.mark.parametrize("collate, size", [(bags, 0), (bags_with_last, 1)])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_values_and_offsets(self, collate, size, workers):
        values, offsets = self.empty(collate, workers=workers)
        assert values.shape == (0,) and offsets.tolist() == [0] * size
        bag = torch.nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=bool(size))
        assert bag(values, offsets).shape == (0, 4)

    def test_getitems_is_used_and_never_with_nothing(self):
        class Batched(Numbers):
            def __getitem__(self, index):
                raise AssertionError("torch prefers __getitems__")

            def __getitems__(self, indices):
                return {"x": torch.stack([torch.full((3,), i) for i in indices])}

        batch = self.empty(lambda fetched: fetched, Batched(30))
        assert batch["x"].shape == (0, 3)
        assert self.empty(None, Subset(Numbers(40), range(30))).shape == (0,)

    def test_every_empty_batch_is_its_own(self):
        loader = DataLoader(Ragged(), batch_size=1, collate_fn=bags_with_last)
        private = private_loader(loader, key=KEY)
        for _, offsets in private:
            if private.current.units == 0:
                assert offsets.tolist() == [0]
                offsets += 1

    @pytest.mark.parametrize(
        ("collate", "named"),
        [
            (lambda examples: object(), r"builtins\.object"),
            (lambda examples: torch.zeros([1] * len(examples)), "number of axes"),
            (lambda examples: torch.zeros(len(examples), 2).to_sparse(), "layout"),
            (lambda examples: None if len(examples) == 1 else torch.zeros(2), "NoneType"),
        ],
    )
    def test_unknown_objects_are_refused_by_name(self, collate, named):
        with pytest.raises(UnsupportedError, match=f"empty batch.*{named}"):
            empty_batch(Ragged(), collate, BatchLayout())


class TestCurrent:
    @pytest.mark.parametrize("poisson", [True, False])
    @pytest.mark.parametrize("limit", [None, 1])
    def test_workers_see_the_same_batches_with_counts_in_order(self, poisson, limit):
        expected = self.trace(make(size=80, batch_size=2, poisson=poisson, limit=limit))
        workers = make(size=80, batch_size=2, poisson=poisson, limit=limit, num_workers=2)
        assert self.trace(workers) == expected
        if poisson:
            assert any(info.units == 0 for info, _ in expected)

    def trace(self, loader):
        seen = [(loader.current, batch.tolist()) for batch in loader]
        assert all(info.units == len(indices) for info, indices in seen)
        assert loader.current == seen[-1][0]
        return seen

    @pytest.mark.parametrize("poisson", [True, False])
    def test_micro_batches_partition_the_logical_batch(self, poisson):
        whole = dict(passes(make(poisson=poisson, batch_size=20), 3))
        loader = make(poisson=poisson, batch_size=20, limit=6)
        parts = [(loader.current, batch.tolist()) for _ in range(3) for batch in loader]
        for step, group in itertools.groupby(parts, key=lambda part: part[0].step):
            infos, indices = zip(*group)
            assert list(itertools.chain(*indices)) == whole.pop(step)
            sizes = [info.units for info in infos]
            assert max(sizes) <= 6 and max(sizes) - min(sizes) <= 1
            assert len(sizes) == max(1, -(-sum(sizes) // 6))
            assert {info.logical_units for info in infos} == {sum(sizes)}
            assert [info.first for info in infos] == [True] + [False] * (len(sizes) - 1)
            assert [info.last for info in infos] == [False] * (len(sizes) - 1) + [True]
        assert not whole

    def test_limit_above_the_batch_changes_nothing(self):
        assert passes(make(limit=1000)) == passes(make())


class TestShuffled:
    @pytest.mark.parametrize("drop_last, sizes", [(False, [8] * 6 + [2]), (True, [8] * 6)])
    def test_every_epoch_is_a_fresh_permutation(self, drop_last, sizes):
        loader = make(poisson=False, drop_last=drop_last)
        epochs = [[indices for _, indices in passes(loader)] for _ in range(2)]
        for epoch in epochs:
            assert [len(batch) for batch in epoch] == sizes
            flat = list(itertools.chain(*epoch))
            assert len(set(flat)) == len(flat) == sum(sizes)
        assert epochs[0] != epochs[1]

    def test_sequential_loader_stays_sequential(self):
        batches = [indices for _, indices in passes(make(poisson=False, shuffle=False))]
        assert list(itertools.chain(*batches)) == list(range(50))


class TestResume:
    @pytest.mark.parametrize("poisson", [True, False])
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("limit", [None, 3])
    def test_mid_epoch(self, poisson, workers, limit):
        kwargs = {"poisson": poisson, "limit": limit}
        expected = passes(make(**kwargs), 3)
        loader, seen, state = make(num_workers=workers, **kwargs), [], None
        for epoch in range(2):
            for batch in loader:
                info = loader.current
                seen.append((info.step, batch.tolist()))
                if epoch == 1 and info.step == 10 and info.last:
                    state = loader.state_dict()
                    break
        assert state == {"step": 11, "epoch": 1, "epoch_position": 4}
        assert loader.state_dict() == state and loader.next_epoch == 2  # after a break, too
        resumed = make(num_workers=workers, **kwargs)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state and resumed.next_epoch == 1
        first = passes(resumed)
        assert len({step for step, _ in first}) == 3  # the rest of the interrupted epoch
        assert resumed.next_epoch == 2
        assert seen + first + passes(resumed) == expected

    @pytest.mark.parametrize("poisson", [True, False])
    def test_between_epochs_and_at_the_last_batch(self, poisson):
        loader = make(poisson=poisson)
        for _ in loader:
            inside = loader.state_dict()
        between = loader.state_dict()
        assert inside == {"step": 7, "epoch": 0, "epoch_position": 7}
        assert between == {"step": 7, "epoch": 1, "epoch_position": 0}
        expected = passes(loader)
        for state, rest in ((between, expected), (inside, [])):  # inside: nothing was left of that loop
            resumed = make(poisson=poisson)
            resumed.load_state_dict(state)
            assert resumed.next_epoch == state["epoch"]
            assert passes(resumed) == rest
        assert resumed.next_epoch == 1 and passes(resumed) == expected

    def test_logical_batch_cut_short_is_repeated(self):
        expected = passes(make(limit=2))
        loader = make(limit=2)
        for _ in loader:
            if loader.current.step == 3 and loader.current.first:
                assert not loader.current.last
                state = loader.state_dict()
        assert state == {"step": 3, "epoch": 0, "epoch_position": 3}
        resumed = make(limit=2)
        resumed.load_state_dict(state)
        assert passes(resumed) == [batch for batch in expected if batch[0] >= 3]

    def test_iterators_that_nobody_used_change_nothing(self):
        loader = make(num_workers=1)
        loader.load_state_dict({"step": 3, "epoch": 0, "epoch_position": 3})
        iter(loader)
        assert loader.state_dict() == {"step": 3, "epoch": 0, "epoch_position": 3}
        assert [step for step, _ in passes(loader)] == [3, 4, 5, 6]

    def test_new_key_draws_new_batches(self):
        state = {"step": 3, "epoch": 0, "epoch_position": 3}
        loaders = [make(), make(key=RandomKey.from_os())]
        for loader in loaders:
            loader.load_state_dict(state)
        a, b = map(passes, loaders)
        assert [step for step, _ in a] == [step for step, _ in b]
        assert a != b

    def test_foreign_states_are_refused(self):
        loader = make()
        for state in (
            {"step": 1},
            {"step": -1, "epoch": 0, "epoch_position": 0},
            {"step": 9, "epoch": 0, "epoch_position": 9},
        ):
            with pytest.raises(CheckpointError):
                loader.load_state_dict(state)


class TestBreak:
    @pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
    def test_no_draw_is_seen_twice(self, workers, persistent):
        loader = make(num_workers=workers, persistent_workers=persistent)
        seen = []
        for stop in (2, 1, 7):
            for _, batch in zip(range(stop), loader):
                seen.append((loader.current.step, batch.tolist()))
        assert [step for step, _ in seen] == list(range(10))
        assert all(indices == poisson_indices(KEY.generator(t), 50, 8 / 50).tolist() for t, indices in seen)

    def test_half_seen_logical_batch_is_not_drawn_again(self):
        loader = make(limit=2)
        next(iter(loader))
        assert not loader.current.last
        next(iter(loader))
        assert loader.current.step == 1 and loader.current.first

    def test_shuffled_starts_a_new_epoch(self):
        loader = make(poisson=False)
        next(iter(loader))
        epoch = passes(loader)
        assert [step for step, _ in epoch] == list(range(1, 8))
        assert sorted(itertools.chain(*(indices for _, indices in epoch))) == list(range(50))
        assert loader.state_dict() == {"step": 8, "epoch": 2, "epoch_position": 0}

    @pytest.mark.parametrize("workers", [0, 2])
    def test_two_passes_at_once_are_refused(self, workers):
        loader = make(num_workers=workers, persistent_workers=workers > 0)
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(SparseDPError, match="one loop at a time"):
            next(old)
        assert [loader.current.step for _ in new] == list(range(1, 8))
        running = iter(loader)
        next(running)
        loader.load_state_dict({"step": 0, "epoch": 0, "epoch_position": 0})
        with pytest.raises(SparseDPError, match="load_state_dict"):
            next(running)


def use_own_data_set(worker: int) -> None:
    assert isinstance(get_worker_info().dataset, Numbers)


class TestLoader:
    def test_it_is_a_data_loader_with_the_users_settings(self):
        generator = torch.Generator()
        collate = torch.utils.data.default_collate
        user = DataLoader(
            Numbers(50),
            batch_size=8,
            num_workers=2,
            collate_fn=collate,
            pin_memory=True,
            timeout=30,
            worker_init_fn=use_own_data_set,
            multiprocessing_context="fork",
            generator=generator,
            prefetch_factor=3,
            persistent_workers=True,
        )
        loader = private_loader(user, key=KEY)
        assert isinstance(loader, DataLoader)
        for name in [
            "dataset",
            "collate_fn",
            "num_workers",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory_device",
            "batch_size",
            "drop_last",
        ]:
            assert getattr(loader, name) == getattr(user, name), name

    def test_worker_init_fn_meets_the_users_data_set(self):
        assert passes(make(num_workers=1, worker_init_fn=use_own_data_set)) == passes(make())

    @pytest.mark.parametrize(
        "size, batch_size, drop_last, steps",
        [(50, 8, False, 7), (50, 8, True, 6), (48, 8, False, 6), (8, 8, True, 1), (1, 1, False, 1)],
    )
    def test_numbers(self, size, batch_size, drop_last, steps):
        loader = make(size, batch_size, drop_last=drop_last)
        assert len(loader) == loader.steps_per_epoch == len(passes(loader)) == steps
        assert (loader.batch_size, loader.dataset_size) == (batch_size, size)
        assert loader.sample_rate == batch_size / size
        assert loader.poisson is True and make(poisson=False).poisson is False

    def test_freed_without_the_garbage_collector(self):
        # In a reference cycle, torch's workers take five seconds each to shut down.
        loader = make(num_workers=1, persistent_workers=True)
        next(iter(loader))
        ref = weakref.ref(loader)
        gc.disable()
        try:
            del loader
            assert ref() is None
        finally:
            gc.enable()

    def test_a_data_set_that_stops_early_is_an_error(self):
        class Stops(Numbers):
            def __getitem__(self, index):
                raise StopIteration

        loader = private_loader(DataLoader(Stops(50), batch_size=8), key=KEY)
        with pytest.raises(SparseDPError, match="batches were lost"):
            passes(loader)

    def test_current_is_none_before_the_first_batch(self):
        assert make().current is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class OwnWay(DataLoader):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "loader, words",
    [
        (lambda: DataLoader(Stream(), batch_size=2), "Stream is an IterableDataset.*map-style"),
        (lambda: DataLoader(NoLength(), batch_size=2), "NoLength.*__len__"),
        (lambda: DataLoader(Numbers(9), batch_size=None), "batch_size=None"),
        (
            lambda: DataLoader(Numbers(9), batch_sampler=BatchSampler(range(9), 2, False)),
            "batch_sampler.*shuffle",
        ),
        (
            lambda: DataLoader(Numbers(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 9)),
            "WeightedRandomSampler.*shuffle",
        ),
        (lambda: DataLoader(Numbers(9), 2, sampler=SubsetRandomSampler(range(5))), "SubsetRandomSampler"),
        (
            lambda: DataLoader(Numbers(9), 2, sampler=RandomSampler(range(9), replacement=True)),
            "RandomSampler",
        ),
        (
            lambda: DataLoader(Numbers(9), 2, sampler=RandomSampler(range(9), num_samples=4)),
            "RandomSampler",
        ),
        (lambda: DataLoader(Numbers(0), batch_size=2), "empty"),
        (lambda: DataLoader(Numbers(9), batch_size=10), "smaller batch_size"),
        (lambda: DataLoader(Numbers(9), batch_size=2, num_workers=1, in_order=False), "in_order"),
        (lambda: make(), "already private"),
        (lambda: OwnWay(Numbers(9), batch_size=2), "OwnWay.*plain"),
    ],
)
@pytest.mark.parametrize("poisson", [True, False])
def test_refusals(loader, words, poisson):
    with pytest.raises(UnsupportedError, match=f"(?s){words}"):
        private_loader(loader(), key=KEY, poisson=poisson)


@pytest.mark.parametrize("limit", [0, -1])
def test_impossible_micro_batches_are_refused(limit):
    with pytest.raises(UnsupportedError, match="max_physical_batch"):
        make(limit=limit)


# ------------------------------------------------------------------ collate functions that mix examples


def _padded(examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted by length, padded on the left."""
    ids = sorted((torch.arange(int(x[0] * 5) + 1) for x, _ in examples), key=len)
    widest = max(map(len, ids))
    return torch.stack([torch.nn.functional.pad(own, (widest - len(own), 0)) for own in ids]), torch.ones(len(ids))


@pytest.mark.parametrize(
    ("collate", "mixes"),
    [
        (lambda examples: (torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples])), False),
        (_padded, False),
        (
            lambda examples: (torch.stack([x for x, _ in examples]), torch.rand(len(examples))),
            False,
        ),  # cannot be judged
        (lambda examples: torch.stack([torch.cat([y for _, y in examples]).sort()[0]] * len(examples)), True),
        (lambda examples: {"x": (x := torch.stack([x for x, _ in examples])) - x.mean(0)}, True),
    ],
)
def test_collate_functions_that_mix_examples(collate: Any, mixes: bool) -> None:
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(20, 2, generator=random), torch.rand(20, 1, generator=random))
    state = torch.get_rng_state()
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    if mixes:
        with pytest.raises(UnsupportedError, match="from other examples of the batch"):
            PrivateLoader(loader, key=RandomKey.from_seed(0))
    else:
        PrivateLoader(loader, key=RandomKey.from_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


class Fetched(torch.utils.data.Dataset):
    """Reads the examples of a batch at once, as data sets with transformations of whole batches do."""

    def __init__(self, change: Any) -> None:
        self.x, self.change = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)), change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[int]) -> list[torch.Tensor]:
        return list(self.change(self.x[places]))


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: torch.utils.data.Subset(data, range(4, 19))])
@pytest.mark.parametrize(
    ("change", "mixes"),
    [
        (lambda x: x - x.mean(0), True),
        (lambda x: torch.cat([x, x.roll(1, 0)], 1), True),
        (lambda x: x / len(x), True),
        (lambda x: x * 2, False),
        (lambda x: x + torch.rand(3), False),  # cannot be judged
    ],
)
def test_data_sets_that_read_a_batch_at_once_and_mix_it(wrap: Any, change: Any, mixes: bool) -> None:
    """default_collate has nothing to do with it."""
    data = wrap(Fetched(change))
    if mixes:
        with pytest.raises(
            UnsupportedError, match=f"__getitems__ of {type(data).__name__}, makes rows .* other examples"
        ):
            PrivateLoader(DataLoader(data, batch_size=4), key=KEY)
    else:
        loader = PrivateLoader(DataLoader(data, batch_size=4), key=KEY)
        assert sum(loader.current.units for _ in loader) > 0  # type: ignore[union-attr]


def test_the_layout_says_on_which_axis_examples_are() -> None:
    def collate(examples: list[Any]) -> dict[str, Any]:
        x = torch.stack([x for (x,) in examples])
        return {
            "x": x,
            "sequence": x.T.contiguous(),
            "flat": x.flatten(),
            "both": x[:, :1] @ x[:, :1].T * 0,
            "name": ["a"] * len(x),
        }

    data = TensorDataset(torch.rand(12, 4))
    plain = PrivateLoader(DataLoader(data, batch_size=4), key=KEY, poisson=False)
    for (x,) in plain:
        assert plain.current is not None and plain.current.unit_axes == ((x, 0),)
    loader = PrivateLoader(DataLoader(data, batch_size=4, collate_fn=collate), key=KEY, poisson=False)
    for batch in loader:
        axes = dict(zip(("x", "both", "sequence", "flat"), (0, 0, 1, None)))
        assert loader.current is not None
        found = {name: axis for tensor, axis in loader.current.unit_axes for name in axes if batch[name] is tensor}
        assert found == axes


def test_a_collate_function_that_cannot_be_tried() -> None:
    def collate(examples: list[Any]) -> Any:
        raise OSError("only in workers")

    with pytest.warns(SparseDPWarning, match="OSError\\('only in workers'\\)"):
        PrivateLoader(DataLoader(TensorDataset(torch.rand(20, 2)), batch_size=4, collate_fn=collate), key=KEY)


class TestKeyStaysInside:
    def test_going_back_draws_other_samples(self):
        loader = make(key=RandomKey.from_os())
        state = loader.state_dict()
        seen = passes(loader)
        loader.load_state_dict(state)
        again = passes(loader)
        assert [step for step, _ in again] == [step for step, _ in seen]
        assert again != seen

    @pytest.mark.parametrize("let_out", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_no_copies(self, let_out):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            let_out(make())
