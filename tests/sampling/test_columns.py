"""Batches that are fetched whole equal those made of single items, and the thread that fetches them leaves nothing behind."""

import functools
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset, default_collate

from sparsedp.data import ArrayDataset, Sequences, TableDataset
from sparsedp.errors import ConfigError
from sparsedp.noise import RandomKey
from sparsedp.sampling import PrivateLoader
from sparsedp.sampling import columns as columns_module
from sparsedp.sampling import loader as loader_module
from sparsedp.sampling.columns import _equal, column_reader, one_ahead

KEY = RandomKey.from_seed(3)
TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
ARRAY_TYPES = ["f4", "f8", "f2", "i8", "i4", "i2", "u1", "u2", "?", "c8"]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    ids: Any
    label: Any


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    shape = (rows, *draw(st.lists(st.integers(1, 3), max_size=2)))
    values = torch.arange(int(np.prod(shape))).reshape(shape).to(draw(st.sampled_from(TYPES)))
    if values.is_floating_point() and values.numel():
        values.view(-1)[0] = float("nan")
    if draw(st.booleans()):  # a part of a wider tensor
        wide = torch.zeros(rows, 2, *shape[1:], dtype=values.dtype)
        wide[:, 1] = values
        return wide[:, 1]
    return values


@st.composite
def arrays(draw: st.DrawFn, rows: int) -> np.ndarray:
    shape = (rows, *draw(st.lists(st.integers(1, 3), max_size=2)))
    values = np.arange(int(np.prod(shape))).reshape(shape).astype(draw(st.sampled_from(ARRAY_TYPES)))
    if draw(st.booleans()):
        values.setflags(write=False)
    return np.asfortranarray(values) if draw(st.booleans()) else values


def structures(rows: int) -> st.SearchStrategy:
    """Nested tuples, named tuples, dicts and lists of arrays."""
    return st.recursive(
        tensors(rows) | arrays(rows),
        lambda parts: (
            st.lists(parts, min_size=1, max_size=3).map(tuple)
            | st.builds(Pair, parts, parts)
            | st.dictionaries(st.sampled_from("abc"), parts, min_size=1, max_size=3)
        ),
        max_leaves=4,
    )


@st.composite
def datasets(draw: st.DrawFn, depth: int = 2) -> Any:
    rows = draw(st.integers(1, 9))
    kind = draw(
        st.sampled_from(
            ["tensors", "array", "tensor", "structure", "stack", "stack of names", *["subset", "concat"] * depth]
        )
    )
    if kind == "tensors":
        return TensorDataset(*draw(st.lists(tensors(rows), min_size=1, max_size=3)))
    if kind == "array":
        return draw(arrays(rows))
    if kind == "tensor":
        return draw(tensors(rows))
    if kind == "structure":
        return ArrayDataset(draw(structures(rows)))
    if kind == "stack":
        return StackDataset(draw(tensors(rows)), ArrayDataset(draw(structures(rows))))
    if kind == "stack of names":
        return StackDataset(x=draw(arrays(rows)), y=TensorDataset(draw(tensors(rows))))
    inner = draw(datasets(depth - 1))
    if kind == "concat":
        return ConcatDataset([inner, Subset(inner, [0]), inner])
    places = draw(st.lists(st.integers(0, len(inner) - 1), min_size=1, max_size=9))
    return Subset(inner, draw(st.sampled_from([places, tuple(places), np.array(places), torch.tensor(places)])))


def one_by_one(dataset: Any, places: list[int]) -> Any:
    return default_collate([dataset[place] for place in places])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_batch_equals_the_one_of_single_items(data: st.DataObject) -> None:
    dataset = data.draw(datasets())
    places = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=12))
    reader = column_reader(dataset, default_collate)
    assert reader is not None
    batch = reader(np.array(places))
    assert _equal(batch, one_by_one(dataset, places))
    for tensor in _tensors(batch):  # nobody's memory but its own: a model may write into it
        tensor.zero_()
    assert _equal(reader(np.array(places)), one_by_one(dataset, places))


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [tensor for part in (batch.values() if isinstance(batch, dict) else batch) for tensor in _tensors(part)]


class TestOwnDataSets:
    def click_log(self) -> TableDataset:
        integers = np.arange(20 * 13, dtype=np.int32).reshape(20, 13)
        return TableDataset(integers, np.ones((20, 26), np.int32), np.arange(20, dtype=np.uint8) % 2, None, [3] * 26)

    def sequences(self) -> Any:
        sequences = Sequences(np.arange(1, 41), np.arange(0, 41, 5), 40)
        return sequences.split(3).training

    @pytest.mark.parametrize("make", ["click_log", "sequences"])
    @pytest.mark.parametrize("own", [True, False])
    def test_equal_single_items(self, make: str, own: bool) -> None:
        dataset = getattr(self, make)()
        collate = dataset.collate if own else default_collate
        reader = column_reader(Subset(dataset, [4, 3, 2, 1, 0]), collate)
        assert reader is not None
        assert _equal(reader(np.array([0, 4, 4])), collate([dataset[4], dataset[0], dataset[0]]))

    def test_a_dataclass_stays_one_with_its_own_collate(self) -> None:
        data = ArrayDataset(
            Record(np.arange(6).reshape(3, 2), Pair(torch.arange(3.0), [np.arange(3, dtype=np.float32)]))
        )
        reader = column_reader(data, data.collate)
        assert reader is not None and column_reader(data, default_collate) is None
        batch = reader(np.array([2, 0]))
        assert _equal(batch, data.collate([data[2], data[0]])) and isinstance(batch, Record)
        assert isinstance(batch.label.right, list) and batch.label.right[0].dtype == torch.float32

    def test_what_is_no_data_set_of_arrays_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"\['a'\]: 3, \['b'\]\[0\]: 4"):
            ArrayDataset({"a": torch.zeros(3), "b": (torch.zeros(4),)})
        with pytest.raises(ConfigError, match=r"\['a'\] is str: give tensors"):
            ArrayDataset({"a": "text"})
        with pytest.raises(ConfigError, match="there is no array"):
            ArrayDataset({})
        with pytest.raises(ConfigError, match=r"\[1\] has the type object"):
            ArrayDataset((np.zeros(2), np.array([None, 1])))
        with pytest.raises(IndexError, match="item 3 of 3"):
            ArrayDataset(torch.zeros(3))[3]


class Named(TensorDataset):
    """A user's own that leaves to torch what an item is."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.users = torch.arange(len(tensors[0]))


def test_a_subclass_that_reads_like_its_base() -> None:
    reader = column_reader(Named(torch.arange(5)), default_collate)
    assert reader is not None and torch.equal(reader(np.array([4, 1]))[0], torch.tensor([4, 1]))


class Doubled(TensorDataset):
    """A user's own: counts how often each item is read, and draws from every global generator."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.reads: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        noise = torch.rand(()) + np.random.rand() + random.random()
        return (*(2 * part for part in super().__getitem__(index)), noise)


class TestWhoGoesItemByItem:
    class OwnClicks(TableDataset):
        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(i)

    class OwnSubset(Subset):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(i)

        def __getitems__(self, places: Any) -> Any:
            return super().__getitems__(places)

    class OwnTensor(torch.Tensor):
        pass

    @pytest.mark.parametrize(
        "dataset",
        [
            Doubled(torch.zeros(4)),
            Subset(Doubled(torch.zeros(4)), [0, 1]),
            ConcatDataset([TensorDataset(torch.zeros(4)), Doubled(torch.zeros(4))]),
            ConcatDataset([TensorDataset(torch.zeros(4)), TensorDataset(torch.zeros(4, dtype=torch.int64))]),
            OwnSubset(TensorDataset(torch.zeros(4)), [0]),
            OwnClicks(np.zeros((3, 13)), np.zeros((3, 26)), np.zeros(3), None, [3] * 26),
            Subset(TensorDataset(torch.zeros(4)), [-1, 0]),
            TensorDataset(torch.zeros(4).to_sparse()),
            TensorDataset(torch.zeros(4, requires_grad=True)),
            TensorDataset(torch.zeros(4).as_subclass(OwnTensor)),
            TensorDataset(torch.zeros(4, 0)),
            np.array(["a", "b"]),
            np.zeros(3, dtype=">f4"),
            [(1, 2), (3, 4)],
        ],
        ids=lambda dataset: type(dataset).__name__,
    )
    def test_what_is_not_known_to_be_arrays(self, dataset: Any) -> None:
        assert column_reader(dataset, default_collate) is None

    def test_a_collate_function_of_the_users_own(self) -> None:
        assert column_reader(TensorDataset(torch.zeros(4)), lambda items: default_collate(items)) is None

    def test_a_changed_collate_map(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_: torch.stack(batch) + 1)
        assert column_reader(TensorDataset(torch.zeros(4)), default_collate) is None

    def test_each_example_is_read_once_and_draws_what_it_drew(self) -> None:
        dataset = Doubled(torch.arange(12.0))
        loader = PrivateLoader(DataLoader(dataset, batch_size=4, shuffle=True), key=KEY, poisson=False)
        dataset.reads.clear()
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        first = [batch[1].tolist() for batch in loader]
        assert dataset.reads == Counter(range(12))
        after = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        assert torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]
        again = PrivateLoader(DataLoader(dataset, batch_size=4, shuffle=True), key=KEY, poisson=False)
        assert [batch[1].tolist() for batch in again] == first


def loaded(size: int = 40, batch: int = 8, **how: Any) -> PrivateLoader:
    data = TensorDataset(torch.arange(size), torch.arange(size).float())
    return PrivateLoader(DataLoader(data, batch_size=batch, shuffle=True), key=KEY, **how)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sparsedp-batch"]


class TestThePassOverALoader:
    @pytest.fixture(autouse=True, params=[0.0, 60.0], ids=["by threads", "at once"])
    def quick(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """All batches are worth a thread, or none is."""
        monkeypatch.setattr(loader_module, "one_ahead", functools.partial(one_ahead, quick=request.param))

    @pytest.mark.parametrize("how", [{}, {"poisson": False}, {"max_physical_batch": 3}])
    def test_batches_and_places_are_those_of_single_items(self, how: dict, monkeypatch: pytest.MonkeyPatch) -> None:
        def run() -> list[Any]:
            loader = loaded(batch=2, **how)  # some batches are empty
            return [
                (batch[0].tolist(), loader.current, loader.state_dict(), batch[1].dtype)
                for _ in range(2)
                for batch in loader
            ]

        whole = run()
        monkeypatch.setattr(loader_module, "column_reader", lambda *_: None)
        assert whole == run()

    def test_a_resumed_pass_goes_on_behind_the_batch_that_was_handed_out(self) -> None:
        all_of_it = [batch[0].tolist() for batch in loaded(batch=2)]
        one, batches = loaded(batch=2), []
        for batch in one:
            batches.append(batch[0].tolist())
            if len(batches) == 7:
                state = one.state_dict()
                break
        other = loaded(batch=2)
        other.load_state_dict(state)
        assert batches + [batch[0].tolist() for batch in other] == all_of_it

    def test_no_thread_is_left(self) -> None:
        for _ in loaded():
            pass
        assert not threads()
        for number, _ in enumerate(loader := loaded()):
            if number == 2:
                break
        assert not threads()
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                1 / 0  # noqa: B018
        pass_kept = iter(loader)
        next(pass_kept)
        pass_kept.close()
        assert not threads()
        unfinished = iter(loader)
        next(unfinished)
        for thread in threading.enumerate():
            if thread.name == "sparsedp-batch":
                thread.join(10)
        assert not threads()  # none waits for the loop to go on

    def test_one_batch_at_most_is_fetched_ahead(self) -> None:
        made: list[int] = []

        def source() -> Any:
            for number in range(9):
                made.append(number)
                yield number

        for number in one_ahead(source(), quick=0.0):
            assert len(made) <= number + 2

    def test_a_thread_makes_what_follows_on_an_item_that_took_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        makers: list[str] = []
        now = 0.0

        def source() -> Any:
            nonlocal now
            for seconds in (0.0, 0.3, 0.0, 0.0):
                makers.append(threading.current_thread().name)
                now += seconds
                yield seconds

        monkeypatch.setattr(columns_module, "time", SimpleNamespace(perf_counter=lambda: now))
        assert list(one_ahead(source(), quick=0.2)) == [0.0, 0.3, 0.0, 0.0]
        main = threading.current_thread().name
        assert makers == [main, main, "sparsedp-batch", main]

    def test_a_failure_comes_where_its_batch_would_have(self) -> None:
        places = list(range(12))
        loader = PrivateLoader(
            DataLoader(Subset(TensorDataset(torch.arange(12)), places), batch_size=4), key=KEY, poisson=False
        )
        places[9] = 10**6
        seen = []
        with pytest.raises(IndexError):
            for batch in loader:
                seen.append(batch[0].tolist())
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] and loader.state_dict()["step"] == 2 and not threads()

    def test_what_a_thread_raises_is_raised_in_the_loop(self) -> None:
        def source() -> Any:
            yield 1
            raise KeyError("lost")

        batches = one_ahead(source(), quick=0.0)
        assert next(batches) == 1
        with pytest.raises(KeyError, match="lost"):
            next(batches)
        assert not threads()

    def test_the_global_generators_are_left_alone(self) -> None:
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        drawn = [torch.rand(()) for _, batch in zip(range(3), loaded())]
        assert torch.equal(torch.stack(drawn), expected)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
    def test_a_forked_loop_says_so_or_ends(self) -> None:
        program = """
            import os, threading, time, torch
            from torch.utils.data import DataLoader, TensorDataset
            from sparsedp.sampling import columns
            from sparsedp.errors import SparseDPError
            go = threading.Event()
            def source():
                yield 1
                go.wait(20)
                yield 2
            batches = columns.one_ahead(source(), quick=0.0)
            next(batches)
            child = os.fork()
            if child == 0:
                try:
                    next(batches)
                except SparseDPError as error:
                    os._exit(7 if "forked" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            go.set()
            assert next(batches) == 2
        """
        subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=120)

    def test_the_interpreter_ends_within_a_loop(self) -> None:
        program = """
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            from sparsedp.noise import RandomKey
            from sparsedp.sampling import PrivateLoader
            loader = PrivateLoader(DataLoader(TensorDataset(torch.arange(99)), batch_size=9), key=RandomKey.from_os())
            kept = iter(loader)
            next(kept)
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_a_reader_that_gives_something_else_is_not_used() -> None:
    class Named(Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return self.read_columns(np.array([i]))

        def read_columns(self, places: np.ndarray) -> Any:
            return {"a": torch.zeros(len(places))}

    assert column_reader(Named(), default_collate) is None  # its items have an axis too many


@pytest.mark.parametrize("environment, held", [({}, True), ({"OMP_WAIT_POLICY": "active"}, False)])
def test_waiting_threads_of_openmp_are_told_to_sleep(environment: dict[str, str], held: bool) -> None:
    """The thread that holds OpenMP's others is there, unless the user decided; `os.cpu_count` of one core needs none."""
    program = """
        import os, threading, torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        from sparsedp.kernels.threads import let_waiting_threads_sleep
        let_waiting_threads_sleep()
        let_waiting_threads_sleep()
        print(sum(thread.name == "sparsedp-openmp" for thread in threading.enumerate()))
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=inherited | environment, check=True, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    assert int(done.stdout) == (1 if held and cores > 1 else 0)


@pytest.mark.models
def test_hugging_face_data_sets() -> None:
    hugging_face = pytest.importorskip("datasets")
    columns = {
        "id": list(range(20)), "x": [i / 3 for i in range(20)], "b": [i % 2 == 0 for i in range(20)],
        "text": [str(i) for i in range(20)], "pair": [[i, i + 1] for i in range(20)],
    }  # fmt: skip
    data = hugging_face.Dataset.from_dict(columns)
    for chosen in (data, data.with_format("torch"), data.shuffle(seed=1), Subset(data, [3, 2, 1])):
        reader = column_reader(chosen, default_collate)
        assert reader is not None
        assert _equal(reader(np.array([2, 0])), default_collate(chosen.__getitems__([2, 0])))
    assert column_reader(data.with_transform(lambda batch: batch), default_collate) is None
