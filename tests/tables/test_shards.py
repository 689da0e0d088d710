"""Tables in shards, each in memory of its own with an optimizer of its own, become what one owner of all makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from sparsedp import SparseDPError
from sparsedp.noise import GaussianNoise, RandomKey, Sums
from sparsedp.tables import LazyOwner, LocalOwner, Owner, Ownership, SeveralOwners, Shard, TableSpec, table_specs

KEY, STD, RATE, STEPS, ROWS = RandomKey.from_seed(4), 0.3, 0.1, 10, 37
# Columns in one block of the cipher, in one that is not full, and in several.
WIDTHS = {"narrow": 5, "table": 12, "wide": 40}
# Where shards of rows and of columns begin; the last ones end with the table. Of three shards of rows, one is empty.
CUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((0,), (0,)),
    "2 of rows": ((0, 11), (0,)),
    "3 of rows": ((0, 26, 26), (0,)),
    "4 columns and others": ((0,), (0, 4)),
    "1 column and others": ((0,), (0, 1)),
    "2 x 2": ((0, 11), (0, 4)),
}
ROW_CUTS = [name for name, (_, columns) in CUTS.items() if len(columns) == 1]


def shards_of(table: TableSpec, cut: tuple[Sequence[int], Sequence[int]]) -> list[Shard]:
    rows, columns = (
        [range(*ends) for ends in pairwise((*starts, size))] for starts, size in zip(cut, table.shape, strict=True)
    )
    return [Shard(some_rows, some_columns) for some_rows in rows for some_columns in columns]


def part_of(shard: Shard, whole: Tensor) -> Tensor:
    return whole[shard.rows.start : shard.rows.stop, shard.columns.start : shard.columns.stop]


class Run:
    """Seeded steps of tables that are cut into shards, or not (None), each with an owner and an optimizer of its own."""

    def __init__(
        self, make: Callable[[Ownership], Owner], optimizer: Callable[[list[nn.Parameter]], Optimizer],
        cut: tuple[Sequence[int], Sequence[int]] | None, tables: Mapping[str, Tensor] | None = None, std: float = STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(1)
        weights = tables or {name: torch.randn(ROWS, dim, generator=random).to(dtype) for name, dim in WIDTHS.items()}
        self.tables, self.std, self.steps = table_specs(weights, weights), std, 0
        self._random, self._noise = torch.Generator().manual_seed(2), GaussianNoise(KEY)
        placed = {name: shards_of(table, cut or ((0,), (0,))) for name, table in self.tables.items()}
        self.owners: list[Owner] = []
        self.shards: list[dict[str, Shard]] = [dict(zip(placed, parts)) for parts in zip(*placed.values(), strict=True)]
        for shards in self.shards:
            parameters = {name: nn.Parameter(part_of(shard, weights[name]).clone()) for name, shard in shards.items()}
            self.owners.append(
                make(
                    Ownership(
                        self.tables, parameters, optimizer(list(parameters.values())), lambda: KEY, std, lambda: self.steps,
                        shards={} if cut is None else shards,
                    )
                )
            )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[Owner, Mapping[str, Shard]]]:
        return iter(zip(self.owners, self.shards, strict=True))

    def read(self, name: str, rows: Tensor) -> None:
        for owner, shards in self:
            owned = shards[name].rows
            owner.before_read(name, rows[(rows >= owned.start) & (rows < owned.stop)])

    def step(self, rate: float = RATE, dense: bool = False, scale: float = 0.1) -> None:
        """One step with random sums on random rows, which have been read, as others have; `dense`: with noise on all rows."""
        chosen, sums = {}, {}
        for name, table in self.tables.items():
            self.read(name, torch.randint(table.rows, (2, 3), generator=self._random))
            rows = torch.randperm(table.rows, generator=self._random)[: table.rows // 4].sort().values
            self.read(name, rows)
            chosen[name] = rows
            sums[name] = (scale * torch.randn(len(rows), table.dim, generator=self._random)).to(table.dtype)
        for owner, shards in self:
            for group in owner.run.optimizer.param_groups:
                group["lr"] = rate
            owner.begin(self.tables)
            mine = {name: self._sums(name, shard, chosen[name], sums[name], dense) for name, shard in shards.items()}
            if not owner.adds_noise:
                self._noise.add({self.tables[name].index: part for name, part in mine.items()}, self.std, self.steps)
            owner.advance()
            for name, part in mine.items():
                if part.numbers is None:
                    owner.run.parameters[name].grad = part.values
                else:
                    owner.apply(name, part.numbers, part.values)
            owner.run.optimizer.step()
            owner.run.optimizer.zero_grad()
        self.steps += 1

    def _sums(self, name: str, shard: Shard, rows: Tensor, sums: Tensor, dense: bool) -> Sums:
        """What the owner of a shard is given of the sums of some rows."""
        width, inside = self.tables[name].dim, (rows >= shard.rows.start) & (rows < shard.rows.stop)
        rows, values = rows[inside], sums[inside, shard.columns.start : shard.columns.stop].contiguous()
        if not dense:
            return Sums(values, numbers=rows, columns=shard.columns, width=width)
        held = rows - shard.rows.start
        every = torch.full(shard.shape, torch.nan, dtype=values.dtype)  # what holds no sum is not looked at
        every[held] = values
        return Sums(every, held, first=shard.rows.start, columns=shard.columns, width=width)

    def train(self, **options: Any) -> Run:
        for step in range(STEPS):
            self.step(rate=RATE / (1 + step / 3), **options)
            if step == 6:
                for owner in self.owners:
                    owner.settle_all(["table"])
        return self

    def state(self) -> dict[str, Tensor]:
        """All that the owners hold, put together."""
        state: dict[str, Tensor] = {}
        for owner, shards in self:
            for name, kept in owner.state().items():
                for key, value in kept.items():
                    assert value.shape == shards[name].shape
                    whole = state.setdefault(f"{name} {key}", torch.full(self.tables[name].shape, torch.nan).to(value))
                    part_of(shards[name], whole).copy_(value)
        return state


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert not value.isnan().any() and torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=RATE),
    "momentum": lambda parameters: SGD(parameters, lr=RATE, momentum=0.9),
    "adagrad": lambda parameters: Adagrad(parameters, lr=RATE),
    "sparse adam": lambda parameters: SparseAdam(parameters, lr=RATE),
}


# Not of bfloat16, whose steps torch rounds by the place of an element in its memory: the noise below has the same bits there.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_selected_rows(name: str, dtype: torch.dtype) -> None:
    expected = Run(LocalOwner, OPTIMIZERS[name], None, dtype=dtype).train().state()
    keeps = {"sgd": [], "momentum": [], "adagrad": ["sum"], "sparse adam": ["exp_avg", "exp_avg_sq"]}[name]
    assert expected.keys() == {f"{table} {key}" for table in WIDTHS for key in ("weight", *keeps)}
    for cut in CUTS.values():
        assert_same_bits(Run(LocalOwner, OPTIMIZERS[name], cut, dtype=dtype).train().state(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_on_all_rows(dtype: torch.dtype) -> None:
    for decay in (0.0, 0.1):

        def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
            return SGD(parameters, lr=RATE, momentum=0.9, weight_decay=decay)

        expected = Run(LocalOwner, optimizer, None, dtype=dtype).train(dense=True).state()
        for cut in CUTS.values():
            assert_same_bits(Run(LocalOwner, optimizer, cut, dtype=dtype).train(dense=True).state(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("aggregate", [True, False])
def test_rows_that_wait_for_noise(aggregate: bool, momentum: float, decay: float, dtype: torch.dtype) -> None:
    # In bfloat16 some columns of a row are beyond the grid of the noise, and others are not.
    cuts = ROW_CUTS if dtype == torch.bfloat16 and aggregate and not momentum else list(CUTS)

    def run(cut: tuple[Sequence[int], Sequence[int]] | None, std: float) -> Run:
        return Run(
            lambda ownership: LazyOwner(ownership, aggregate),
            lambda parameters: SGD(parameters, lr=RATE, momentum=momentum, weight_decay=decay),
            cut, std=std, dtype=dtype,
        ).train()  # fmt: skip

    for std in (STD, 0.0):
        whole = run(None, std)
        pending, expected = whole.owners[0].pending(), whole.state()
        assert len(expected) == len(WIDTHS) * (2 if momentum else 1)
        assert min(pending.values()) > 0 and max(pending.values()) <= ROWS
        for cut in cuts:
            shards = run(CUTS[cut], std)
            found = [sum(owner.pending()[name] for owner in shards.owners) for name in pending]
            assert found == [count * len(CUTS[cut][1]) for count in pending.values()]
            assert_same_bits(shards.state(), expected)
            assert all(sum(owner.pending().values()) == 0 for owner in shards.owners)


def lazy(tables: Mapping[str, Tensor], cut: tuple[Sequence[int], Sequence[int]] | None, **sgd: Any) -> Run:
    return Run(LazyOwner, lambda parameters: SGD(parameters, lr=RATE, **sgd), cut, tables)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rows_with_large_weights(decay: float) -> None:
    """They take gradient and noise together. In a shard of rows all columns decide which do, so that any row may be large."""
    signs = {name: torch.randn(ROWS, dim) for name, dim in WIDTHS.items()}
    rows_alike = {
        name: (sign + sign.sign()) * 3000 ** (torch.arange(ROWS)[:, None] % 2) for name, sign in signs.items()
    }
    mixed = {name: sign * 3000 ** (torch.rand(sign.shape) < 0.1) for name, sign in signs.items()}
    for tables, cuts in ((rows_alike, list(CUTS)), (mixed, ROW_CUTS)):
        expected = lazy(tables, None, weight_decay=decay).train().state()
        for cut in cuts:
            assert_same_bits(lazy(tables, CUTS[cut], weight_decay=decay).train().state(), expected)


def test_the_law_of_noise_where_columns_of_a_row_decide_differently() -> None:
    """Column 0 is large: its shard takes noise together with gradients, and the shard of the others does later."""
    before = torch.cat([torch.full((4000, 1), 5000.0), torch.randn(4000, 3)], 1)
    run = lazy({"table": before}, ((0,), (0, 1)))
    for _ in range(STEPS):
        run.step(scale=0.0)
    waiting = [owner.pending()["table"] for owner in run.owners]
    assert waiting[0] < waiting[1]  # rows of the latest step have its noise in column 0 alone
    moved = (run.state()["table weight"] - before).double() / (RATE * STD * math.sqrt(STEPS))
    for column in range(4):
        assert stats.kstest(moved[:, column].numpy(), "norm").pvalue > 1e-4
        assert stats.kstest(1.2 * moved[:, column].numpy(), "norm").pvalue < 1e-4
    assert float(torch.corrcoef(moved.T).fill_diagonal_(0).abs().max()) < 5 / math.sqrt(4000)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_of_shards_are_put_in_place_again(momentum: float) -> None:
    run = lazy({"table": torch.randn(ROWS, 12)}, CUTS["2 x 2"], momentum=momentum)
    for _ in range(4):
        run.step()
    saved = [
        {name: {k: v.clone() for k, v in kept.items()} for name, kept in owner.state().items()} for owner in run.owners
    ]
    expected = {name: value.clone() for name, value in run.state().items()}
    for _ in range(3):
        run.step()
    assert not torch.equal(run.state()["table weight"], expected["table weight"])
    run.step()
    for owner, state in zip(run.owners, saved, strict=True):
        owner.load_state(state)
        assert owner.pending() == {"table": 0}
    assert_same_bits(run.state(), expected)


def test_guarded_shards_settle_the_rows_at_the_places_that_are_read() -> None:
    tables = {"table": torch.randn(ROWS, 12)}
    whole, shards = lazy(tables, None), lazy(tables, CUTS["2 of rows"])
    for run in (whole, shards):
        run.step()
        for owner in run.owners:
            owner.attach()
    (all_rows,), (_, later) = whole.owners, shards.owners
    waiting = later.pending()["table"]
    read = embedding(torch.tensor([[3, 20], [3, 0]]), later.run.parameters["table"])  # rows 14, 31 and 11
    assert waiting - 3 <= later.pending()["table"] < waiting
    assert torch.equal(read, embedding(torch.tensor([[14, 31], [14, 11]]), all_rows.run.parameters["table"]))
    last = later.run.parameters["table"][-1].clone()
    assert torch.equal(last, all_rows.run.parameters["table"][-1].clone()) and later.pending()["table"] == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_noise_of_any_part_of_sums(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kind = data.draw(st.sampled_from(["selected rows", "all rows", "rows with sums"]))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    left, right = sorted(data.draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(rows, width, generator=random).to(dtype)
    chosen = torch.randperm(1000, generator=random)[:rows].sort().values
    held = torch.arange(rows)[torch.rand(rows, generator=random) < 0.4]
    part, columns = values[begin:end, left:right].clone(), range(left, right)
    if kind == "selected rows":
        whole, some = Sums(values, numbers=chosen), Sums(part, numbers=chosen[begin:end], columns=columns, width=width)
    elif kind == "all rows":
        whole, some = Sums(values), Sums(part, first=begin, columns=columns, width=width)
    else:
        mine = held[(held >= begin) & (held < end)] - begin
        whole, some = Sums(values, held), Sums(part, mine, first=begin, columns=columns, width=width)
    for sums in (whole, some):
        GaussianNoise(KEY).add({3: sums}, STD, 5)
    assert_same_bits({"part": part}, {"part": values[begin:end, left:right].clone()})


def test_noise_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedp.noise.CHUNK", 64)
    for options in ({}, {"dense": True}):
        states = [Run(LocalOwner, OPTIMIZERS["sgd"], cut).train(**options).state() for cut in (None, CUTS["2 x 2"])]
        assert_same_bits(*states)


@pytest.mark.parametrize(
    ("shard", "shape", "said"),
    [
        (Shard(range(3, 9), range(12)), (37, 12), "has its shape"),
        (Shard(range(30, 40), range(12)), (10, 12), "part of its table"),
        (Shard(range(3, 9), range(5, 13)), (6, 8), "part of its table"),
        (Shard(range(0, 12, 2), range(12)), (6, 12), "part of its table"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shard: Shard, shape: tuple[int, int], said: str) -> None:
    spec = TableSpec("table", ROWS, 12, torch.float32, 0)
    parameter = nn.Parameter(torch.zeros(shape))
    with pytest.raises(SparseDPError, match=said):
        Ownership(
            {"table": spec},
            {"table": parameter},
            SGD([parameter]),
            lambda: KEY,
            STD,
            lambda: 0,
            shards={"table": shard},
        )


def test_owners_of_shards_share_no_parameters() -> None:
    run = lazy({"table": torch.randn(ROWS, 12)}, CUTS["2 of rows"])
    with pytest.raises(AssertionError, match="of their own"):
        SeveralOwners(run.owners)
    shard, owner = run.shards[0]["table"], run.owners[0].run
    with pytest.raises(SparseDPError, match="both in cut and in shards"):
        Ownership(
            owner.tables, owner.parameters, owner.optimizer, owner.key, STD, owner.steps,
            cut={"table": range(3)}, shards={"table": shard},
        )  # fmt: skip
