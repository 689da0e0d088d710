"""Lookups grouped by row, and the compiled loops over them against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import sparsedp
from sparsedp.capture import RowNorms, RowSpace, TouchedRows
from sparsedp.capture.uses import Lookup, ParameterUses
from sparsedp.contribution import Contribution
from sparsedp.kernels import loops
from support import loader_of


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setattr(loops, "compiled", lambda *tensors: False)
    yield request.param


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("largest", [1, 20, 2**40, 2**62])
def test_group(size: int, largest: int) -> None:
    keys = torch.randint(largest, (size,), generator=generator())
    keys[-1] = keys[0]
    distinct, begin, order = loops.group(keys)
    assert torch.equal(distinct, torch.unique(keys))
    assert sorted(order.tolist()) == list(range(size))
    for row, (first, last) in enumerate(zip(begin.tolist(), begin.tolist()[1:])):
        mine = order[first:last]
        assert (keys[mine] == distinct[row]).all() and (mine.diff() > 0).all()


def test_group_of_nothing() -> None:
    distinct, begin, order = loops.group(torch.empty(0, dtype=torch.long))
    assert distinct.numel() == order.numel() == 0 and begin.tolist() == [0]


@pytest.mark.parametrize("size", [0, 5, 400])
def test_find(path: str, size: int) -> None:
    ascending = torch.randint(1000, (size,), generator=generator()).unique()
    for wanted in (torch.arange(0, 1000, 3), torch.tensor([4]), torch.empty(0, dtype=torch.long), ascending):
        places = {int(value): place for place, value in enumerate(ascending)}
        assert loops.find(ascending, wanted).tolist() == [places.get(int(value), -1) for value in wanted]


@pytest.mark.parametrize("width", [1, 16, 200])
def test_squared_rows(path: str, width: int) -> None:
    wide = torch.randn(30, 500, generator=generator())
    wide[3], wide[4], wide[5] = 1e-30, 1e25, 2e30  # squares beyond float32, and more than is permitted
    for x in (wide[:, 7 : 7 + width], wide[:, :width].contiguous(), wide.T[:30, :1].T, wide[:0, :width]):
        expected = x.double().square().sum(1)
        expected[expected > loops.LARGEST**2] = torch.inf
        torch.testing.assert_close(loops.squared_rows(x), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_rows_of_each(path: str, dtype: torch.dtype) -> None:
    """Parts of one matrix, in any order, overlapping and with gaps, are read together; all others one by one."""
    wide = torch.randn(300, 500, generator=generator(), dtype=dtype)
    wide[3], wide[4], wide[5], wide[6, 11] = 1e-30, 1e25, 2e30, torch.nan
    parts = [wide[:, 40:168], wide[:, 8:24], wide[:, 24:25], wide[:, 10:30], wide[:, 499:]]
    other = torch.randn(300, 16, generator=generator(), dtype=dtype)
    for tensors in (
        parts, parts[1:2], [*parts, other], [*parts, wide[:, :200]], [*parts, wide.T[:300, 200:210]],
        [part[::2] for part in parts], [parts[0][::2], parts[1][:150]], [part[:0] for part in parts],
        [*parts, torch.ones(300, 1, dtype=dtype).expand(300, 7)], [part.float() for part in parts], [wide[:, :0]] * 2,
    ):  # fmt: skip
        expected = torch.stack([loops.squared_rows(tensor.clone()) for tensor in tensors])
        torch.testing.assert_close(
            loops.squared_rows_of_each(list(tensors)), expected, rtol=1e-6, atol=0, equal_nan=True
        )
    with pytest.raises(RuntimeError):
        loops.squared_rows_of_each([parts[0], parts[1][:200]])


def test_numbered(path: str) -> None:
    assert loops.numbered(torch.tensor([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]
    assert loops.numbered(torch.tensor([0])).tolist() == []


def test_in_slots(path: str) -> None:
    ids = torch.randint(6, (40,), generator=generator())
    used = (ids > 0).nonzero().squeeze(1)  # the rest is padding
    rows, begin, order = loops.group(ids[used])
    slots = torch.tensor([0, -1, 3, -1, 1])
    values = torch.randn(40, dtype=torch.float64, generator=generator())
    expected = [value if row > 0 and slots[row - 1] >= 0 else 0.0 for row, value in zip(ids.tolist(), values.tolist())]
    assert rows.tolist() == [1, 2, 3, 4, 5] and loops.in_slots(values, slots, begin, used[order]).tolist() == expected
    nan = torch.full((3,), torch.nan)  # of rows without a slot, it must not stay
    none = torch.empty(0, dtype=torch.long)
    assert loops.in_slots(nan, none, torch.zeros(1, dtype=torch.long), none).tolist() == [0.0] * 3


@pytest.mark.parametrize("clip", [0.3, 1.0, 1.5, 100.0])
def test_clipped_counts(path: str, clip: float) -> None:
    """Every unit's part is its ones, scaled down to a norm of `clip`."""
    ones = torch.rand(20, 9, generator=generator()).sort(0).values > 0.5
    ones[0], ones[1] = False, True
    scale = (clip / ones.sum(1).clamp_min(1).double().sqrt()).clamp_max(1)
    pairs = ones.nonzero()[torch.randperm(int(ones.sum()), generator=generator())]
    found = Contribution(clip).sums(*pairs.T.contiguous(), 20, 11)
    torch.testing.assert_close(found, torch.nn.functional.pad((ones * scale[:, None]).sum(0), (0, 2)))


@pytest.mark.parametrize(("height", "width"), [(1, 64), (3, 5), (1, 1), (4, 0)])
@pytest.mark.parametrize("rows", [0, 7, 3000])
def test_outer_products(path: str, rows: int, height: int, width: int) -> None:
    a = torch.randn(2 * rows, height, generator=generator())[::2]
    b = torch.randn(width, rows, generator=generator()).T
    expected = torch.einsum("ni,nj->nij", a, b).reshape(rows, height * width)
    assert torch.equal(loops.outer_products(a, b), expected)


@pytest.mark.parametrize(("height", "width"), [(2, 3), (5, 4), (32, 32), (3, 2)])
@pytest.mark.parametrize("rows", [0, 1, 7, 1024])
def test_add_products(path: str, rows: int, height: int, width: int) -> None:
    """The narrower one is multiplied by the factors in float32, and the products are added up in float64."""
    draw = generator()
    left, right = torch.randn(rows, 2 * height, generator=draw)[:, ::2], torch.randn(rows, width, generator=draw)
    factors = torch.rand(rows, generator=draw)
    scaled = (factors[:, None] * left, right) if height <= width else (left, factors[:, None] * right)
    out = torch.ones(height, width)
    loops.add_products(out, left, right, factors)
    torch.testing.assert_close(out, (1 + scaled[0].double().mT @ scaled[1].double()).float(), rtol=2e-7, atol=1e-8)


def test_many_equal_products_lose_no_digits(path: str) -> None:
    out, tenths = torch.zeros(2, 2), torch.full((100_000, 2), 0.1)
    loops.add_products(out, tenths, tenths, torch.ones(100_000))
    expected = 100_000 * float(tenths[0, 0]) ** 2
    torch.testing.assert_close(out.double(), torch.full((2, 2), expected, dtype=torch.float64), rtol=1e-7, atol=0)


def test_add_rows(path: str) -> None:
    """Strided gradients, bags (source), factors, rows left out, long sums."""
    draw = generator()
    ids = torch.randint(6, (5000,), generator=draw)
    ids[0] = 9  # used once
    rows, begin, order = loops.group(ids)
    slots = torch.tensor([2, -1, 0, 1, 3, 4, 5])
    grad = torch.randn(50, 40, generator=draw)[:, 5:21]
    source, factor = torch.randint(50, (5000,), generator=draw), torch.rand(5000, generator=draw)
    out = torch.ones(6, 16)
    loops.add_rows(out, slots, begin, order + 3, 3, grad, source, factor)
    expected = torch.ones(6, 16, dtype=torch.float64)
    for position, row in enumerate(ids.tolist()):
        slot = int(slots[rows.tolist().index(row)])
        if slot >= 0:
            expected[slot] += factor[position].double() * grad[source[position]].double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_move_rows(path: str) -> None:
    table, values = torch.randn(10, 3, generator=generator()), torch.randn(2, 3, generator=generator())
    expected, version = table.clone(), table._version
    expected[torch.tensor([1, 7])] -= 0.5 * values
    loops.move_rows(table, torch.tensor([1, 7]), values, -0.5)
    torch.testing.assert_close(table, expected)
    assert table._version > version  # a use that kept the table's rows must notice


def test_move_rows_within(path: str) -> None:
    """Rows that hold a number at the limit stay, bit for bit, and are named; of either sign, and in any column."""
    table, values = torch.zeros(10, 3), torch.randn(4, 3, generator=generator())
    table[1, 2], table[7, 0], table[4, 1] = 2.0, -2.5, 1.999
    rows, before, version = torch.tensor([4, 7, 0, 1]), table.clone(), table._version
    left = loops.move_rows_within(table, rows, values, -0.5, 2.0)
    assert left.tolist() == [1, 3]
    expected = before.clone()
    expected[torch.tensor([4, 0])] -= 0.5 * values[torch.tensor([0, 2])]
    torch.testing.assert_close(table, expected)
    assert torch.equal(table[torch.tensor([1, 7])], before[torch.tensor([1, 7])])
    assert table._version > version
    assert loops.move_rows_within(table, rows, values, 1.0, 0.0).tolist() == [0, 1, 2, 3]


def uses_of(lookup: Lookup) -> ParameterUses:
    return ParameterUses([lookup], [], [])


def test_padding_is_in_no_row_and_no_other_table() -> None:
    """-1 plus a table's first global row would be the last row of the table before it."""
    one = Lookup(torch.tensor([4, -1, 0]), torch.arange(3), torch.ones(3, 2), one_each=True)
    two = Lookup(torch.tensor([-1, -1, 1]), torch.arange(3), torch.ones(3, 2), one_each=True)
    space = RowSpace(("a", "b"), (5, 3))
    touched = TouchedRows({"a": uses_of(one), "b": uses_of(two)}, space, 3)
    assert touched.rows.tolist() == [0, 4, 6]
    assert touched.of("a").tolist() == [0, 4] and touched.of("b").tolist() == [1]
    units, at = touched.pairs()
    assert sorted(zip(units.tolist(), at.tolist())) == [(0, 1), (2, 0), (2, 2)]
    norms = touched.squared_norms(touched.slots({"a": torch.tensor([4]), "b": torch.tensor([0, 1])}), RowNorms())
    assert norms is not None and norms.selected.tolist() == [[2, 0, 0], [0, 0, 2]]


def test_lookups_that_compiled_loops_could_not_trust() -> None:
    ids, units, grad = torch.arange(4), torch.arange(4), torch.ones(4, 2)
    for broken in (
        (ids, units[:3], grad), (ids, units, grad[:3]), (ids, units, grad, units[:3]), (ids, units, grad, None, grad[:3, 0]),
        (ids.int(), units, grad), (ids, units.int(), grad),
    ):  # fmt: skip
        with pytest.raises(sparsedp.SparseDPError, match="A lookup has"):
            Lookup(*broken)
    Lookup(ids, units, grad[:1], torch.zeros(4, dtype=torch.long), grad[:, 0])


def test_slots_count_within_each_table() -> None:
    lookups = {
        name: uses_of(Lookup(torch.tensor(ids), torch.arange(3), torch.ones(3, 1), one_each=True))
        for name, ids in (("a", [3, 1, 3]), ("b", [0, 2, 1]), ("c", [1, 1, 1]))
    }
    touched = TouchedRows(lookups, RowSpace(("a", "b", "c"), (4, 3, 2)), 3)
    slots = touched.slots({"a": torch.tensor([0, 3]), "b": torch.tensor([1, 2]), "c": torch.empty(0, dtype=torch.long)})
    assert slots.tolist() == [-1, 1, -1, 0, 1, -1]  # of rows a1, a3, b0, b1, b2, c1


class Bags(nn.Module):
    """A bag, an embedding, a shared and a padded table."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 3, mode="mean", padding_idx=0)
        self.one = nn.Embedding(9, 2)
        self.twice = nn.Embedding(7, 4, padding_idx=2)
        self.out = nn.Linear(13, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        one, twice = ids[:, 0] % 9, ids % 7
        parts = [self.bag(ids), self.one(one), self.twice(twice[:, 1]), self.twice(twice[:, 2])]
        return self.out(torch.cat(parts, 1)).squeeze(1)


def trained(mechanism: sparsedp.Mechanism, watched: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Bags()
    data = torch.randint(12, (60, 5), generator=generator()), torch.rand(60, generator=generator()).round()
    inner = torch.optim.SGD(module.parameters(), lr=0.3)
    if watched:
        inner.register_step_pre_hook(lambda *_: None)
    engine = sparsedp.PrivacyEngine(seed=4)
    _, private, loader = engine.make_private(
        module=module, optimizer=inner, data_loader=loader_of(*data, batch_size=20), noise_multiplier=0.7,
        max_grad_norm=0.5, mechanism=mechanism,
    )  # fmt: skip
    for ids, target in loader:
        private.zero_grad()
        if len(ids):
            nn.functional.binary_cross_entropy_with_logits(module(ids), target).backward()
        private.step()
    return copy.deepcopy(module.state_dict())


MECHANISMS = [sparsedp.DPSGD(), sparsedp.EANA(), sparsedp.AdaFEST(threshold=2.0, noise_ratio=1.0)]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_compiled_and_plain_paths_train_alike(mechanism: sparsedp.Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = trained(mechanism)
    monkeypatch.setattr(loops, "compiled", lambda *tensors: False)
    for name, value in trained(mechanism).items():
        torch.testing.assert_close(value, compiled[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS[1:], ids=lambda m: m.name)
def test_rows_move_as_torch_moves_them(mechanism: sparsedp.Mechanism) -> None:
    """Plain SGD is applied to the rows directly, unless a hook watches the step: the same weights."""
    direct = trained(mechanism)
    for name, value in trained(mechanism, watched=True).items():
        torch.testing.assert_close(value, direct[name], rtol=1e-6, atol=1e-7)


def test_norms_are_not_those_of_a_tensor_that_had_the_same_memory() -> None:
    known = RowNorms()
    for size in range(1, 30):
        x = torch.full((64, 8), float(size))  # the allocator likes to give memory that was just freed
        assert torch.equal(known.squared(x), torch.full((64,), 8.0 * size**2, dtype=torch.float64))
        del x


@pytest.mark.parametrize("largest", [1, 50, 1 << 60])  # beyond what is sorted together with its positions, too
def test_distinct_keys_have_the_places_that_torch_gives_them(largest: int) -> None:
    draw = torch.Generator().manual_seed(0)
    for count in (0, 1, 300):
        keys = torch.randint(0, largest, (count,), generator=draw)
        for mine, torchs in zip(loops.distinct_with_places(keys), torch.unique(keys, return_inverse=True), strict=True):
            assert torch.equal(mine, torchs)
