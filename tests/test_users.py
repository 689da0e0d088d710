"""unit="user": all examples of a user are one unit, in sampling, norms, maps, counts and the promise."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sparsedp
from sparsedp import AdaFEST, CheckpointError, ConfigError, DataError, SparseDPError, UnsupportedError
from sparsedp.capture import Captured, RowNorms, RowSpace
from sparsedp.capture.uses import Lookup, ParameterUses
from sparsedp.cli.main import main
from sparsedp.clipping import Clipping
from sparsedp.contribution import contribution_map, touched_pairs
from sparsedp.counting import count_rows
from sparsedp.data import generated_click_log, open_click_log, write_click_log
from sparsedp.data.clickparse import COLUMNS, detect_layout, parse_block, parse_block_python
from sparsedp.frequencies import count_lookups
from sparsedp.grid import grid_of
from sparsedp.noise import RandomKey, zero_others
from sparsedp.plan import PrivacyPlan, default_delta
from sparsedp.prediction import predict
from sparsedp.sampling import BatchInfo, PrivateLoader, Users
from sparsedp.tables import find_tables
from support import Apply, Clicks, Gradients, capture_uses, clicks, dense, make_private, one_by_one, unit_loss
from test_capture import CASES
from test_generated_models import BLOCKS, HEADS, ROWS, Generated

KEY = RandomKey.from_seed(0)
CLIP = 0.5
EXACT = [case for case in CASES if "length = batch" not in case]
MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    "lazydp": sparsedp.LazyDP,
    "eana": sparsedp.EANA,
    "fest": lambda: sparsedp.FEST(k=20, epsilon=1.0, split="tables"),
    "adafest": lambda: AdaFEST(threshold=0.5, noise_ratio=2.0),
    "adafest+": lambda: AdaFEST(threshold=0.5, noise_ratio=2.0, preselect=sparsedp.FEST(k=20, split="tables")),
    "exponential": lambda: sparsedp.ExponentialSelection(k=10, epsilon=1.0),
}


def batch_of_users(owners: Tensor, units: int) -> BatchInfo:
    return BatchInfo(units, units, True, True, 0, owners=owners)


def capture_users(
    module: nn.Module, inputs: Sequence[Tensor], owners: Sequence[int] | Tensor, units: int,
    loss: Callable[[Any], Tensor] = unit_loss,
) -> Captured:  # fmt: skip
    info = batch_of_users(torch.as_tensor(owners, dtype=torch.long), units)
    found = capture_uses(module, inputs, loss, lambda: info)
    assert found.units == units and found.examples == len(inputs[0])
    return found


def summed(examples: list[Gradients], owners: Sequence[int] | Tensor, units: int) -> list[Gradients]:
    """Each user's gradient: the sum of those of their examples."""
    totals = [{name: torch.zeros_like(value) for name, value in examples[0].items()} for _ in range(units)]
    for example, owner in zip(examples, torch.as_tensor(owners).tolist()):
        for name, value in example.items():
            totals[owner][name] += value
    return totals


def assert_exact(
    module: nn.Module, inputs: Sequence[Tensor], owners: Sequence[int] | Tensor, units: int,
    loss: Callable[[Any], Tensor] = unit_loss, tolerance: float = 1e-8,
) -> Captured:  # fmt: skip
    """Norms and weighted sums of users equal those of a float64 loop over single examples."""
    module = module.double()
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    wanted = summed(one_by_one(module, inputs, loss), owners, units)
    found = capture_users(module, inputs, owners, units, loss)
    factors = torch.linspace(0.2, 1.7, units, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        squares = torch.stack([gradient[name].square().sum() for gradient in wanted])
        if name not in found.uses:
            assert float(squares.max()) == 0, f"{name} has a gradient but no use"
            continue
        uses = found.uses[name]
        norms = found.squared_norms(uses)
        assert norms.shape == (units,) and norms.dtype == torch.float64
        torch.testing.assert_close(norms, squares, rtol=tolerance, atol=tolerance)
        total = sum(factor * gradient[name] for factor, gradient in zip(factors, wanted))
        mine = dense(uses.weighted_sum(found.each(factors), parameter.shape), parameter.shape)
        torch.testing.assert_close(mine, total, rtol=tolerance, atol=tolerance)
    return found


# ------------------------------------------------------------------ norms and sums


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_every_use(case: str) -> None:
    """With the examples of two and of three users interleaved, and in float64 the same as a loop."""
    torch.manual_seed(0)
    module, *inputs = CASES[case]()
    count = len(inputs[0])
    for owners, units in (
        ([i % 2 for i in range(count)], 2),
        ([0] * count, 1),
        ([(i * i) % 3 for i in range(count)], 3),
    ):
        assert_exact(module, inputs, owners, units)


OWNERS = st.integers(1, 9).flatmap(
    lambda examples: st.tuples(st.lists(st.integers(0, 4), min_size=examples, max_size=examples), st.just(5))
)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.sampled_from(BLOCKS), max_size=4),
    head=st.sampled_from(HEADS),
    length=st.integers(1, 4),
    padding=st.sampled_from([None, 0]),
    owned=OWNERS,
    seed=st.integers(0, 2**20),
)
def test_generated_models(
    blocks: list[str], head: str, length: int, padding: int | None, owned: tuple[list[int], int], seed: int
) -> None:
    """Repeated ids across a user's examples, bags, tied tables, layers called twice; users without examples, too."""
    torch.manual_seed(seed)
    owners, units = owned
    model = Generated(blocks, head, length, padding)
    ids = torch.randint(ROWS, (len(owners), length))
    assert_exact(model, [ids], owners, units, loss=lambda out: out.sin().sum() / 3)


@settings(max_examples=50, deadline=None)
@given(
    bags=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=7),
    mode=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_bags(bags: list[list[int]], mode: str, seed: int, data: st.DataObject) -> None:
    """Bags of any size, some empty; often as many users as bags, which must not pass for one bag per user."""
    torch.manual_seed(seed)
    units = data.draw(st.integers(1, len(bags)))
    owners = data.draw(st.lists(st.integers(0, units - 1), min_size=len(bags), max_size=len(bags)))
    length = max(max(map(len, bags)), 1)
    # Bags as rows, filled up with a row that is padding in the table.
    ids = torch.tensor([bag + [4] * (length - len(bag)) for bag in bags])
    table = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=4)
    scale = nn.Parameter(torch.randn(3))
    module = Apply(lambda m, i: m.bag(i) * m.scale, bag=table, scale=scale)
    assert_exact(module, [ids], owners, units)
    # The same table twice: bags and single lookups of one parameter.
    both = Apply(lambda m, i: m.bag(i) + nn.functional.embedding(i[:, 0], m.bag.weight), bag=table)
    assert_exact(both, [ids], owners, units)


def test_as_many_bags_as_users() -> None:
    """The shortcut for one bag per unit would take bag i for user i."""
    bag = nn.EmbeddingBag(5, 3, mode="sum")
    module = Apply(lambda m, i: m.bag(i), bag=bag)
    ids = torch.tensor([[0, 1], [0, 2], [3, 3], [1, 1]])
    for owners in ([0, 0, 1, 2], [3, 2, 1, 0], [1, 1, 1, 1], [0, 0, 3, 3]):  # some users have none
        assert_exact(module, [ids], owners, 4)


def test_a_bag_per_unit_is_told_by_identity() -> None:
    """Two lookups of the same numbers, one of which is relabelled: only where units are the bags does the shortcut hold."""
    grad = torch.tensor([[3.0], [4.0]])
    bags = torch.tensor([0, 1])
    own = Lookup(torch.tensor([7, 7]), bags, grad, source=bags)
    other = Lookup(torch.tensor([7, 7]), torch.tensor([1, 1]), grad, source=bags)
    squares = [ParameterUses.of([use]).squared_norms(2) for use in (own, other)]
    torch.testing.assert_close(squares[0], torch.tensor([9.0, 16.0]).double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares[1], torch.tensor([0.0, 49.0]).double(), rtol=1e-4, atol=1e-3)


def test_one_example_each_is_what_units_are_otherwise() -> None:
    module = Clicks().double()
    ids, x, _ = clicks(6)
    order = [3, 0, 5, 1, 2, 4]
    found = capture_users(module, [ids, x.double()], order, 6)
    plain = capture_users(module, [ids, x.double()], range(6), 6)
    for name, uses in found.uses.items():
        torch.testing.assert_close(found.squared_norms(uses)[order], plain.squared_norms(plain.uses[name]))
        torch.testing.assert_close(
            plain.squared_norms(plain.uses[name]), plain.uses[name].squared_norms(6).double(), rtol=1e-10, atol=1e-12
        )


def test_a_loss_of_zero_and_a_single_example() -> None:
    module = Clicks()
    ids, x, _ = clicks(5)
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    owners = [1, 0, 1, 0, 2]

    def loss(out: Tensor) -> Tensor:
        return (out * weights[: len(out)]).sum()

    found = capture_users(module, [ids, x], owners, 3, loss)
    norms = torch.stack([found.squared_norms(uses) for uses in found.uses.values()]).sum(0)
    assert norms[0] > 0 and norms[1] == norms[2] == 0
    assert_exact(Clicks(), [ids[:1], x[:1]], [0], 1)


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=7),
    tied=st.booleans(),
    data=st.data(),
)
def test_softmax_over_a_table(ids: list[list[int]], tied: bool, data: st.DataObject) -> None:
    """Target 0 does not count; users may have no target at all."""
    torch.manual_seed(0)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    rows, table = nn.Embedding(6, 3), nn.Embedding(6, 3)

    def losses(m: Any, i: Tensor) -> Tensor:
        weight = m.rows.weight if tied else m.table.weight
        return sparsedp.nn.table_softmax_loss(m.rows(i).tanh(), weight, i.roll(-1, 1))

    assert_exact(Apply(losses, rows=rows, table=table), [torch.tensor(ids)], owners, 4, loss=lambda out: out.sum())


def test_every_kind_of_use_is_grouped() -> None:
    """A kind of use that `Grouping` does not know would be missing from the norms of users. Teach it, then add it here."""
    kinds = {field.name for field in dataclasses.fields(ParameterUses)}
    assert kinds == {"lookups", "linears", "builts", "softmaxes"}


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("part", ["linear", "built", "lookup", "bag"])
def test_examples_of_a_user_that_cancel_hide_nothing(part: str, scale: float) -> None:
    """Huge examples of one user cancel and leave a gradient of a few C, below the rounding of their weighted sum."""
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {
        "linear": nn.Linear(8, 2, bias=False),
        "built": Apply(lambda m, x: m.b * x, b=nn.Parameter(torch.randn(8))),
        "lookup": Apply(lambda m, x: m.e(torch.ones_like(x[:, 0]).long()) * x, e=nn.Embedding(3, 8)),
        "bag": Apply(lambda m, x: m.e(torch.ones_like(x).long()) * x, e=nn.EmbeddingBag(3, 8, mode="sum")),
    }
    module = modules[part]
    for _ in range(10):
        large = scale * torch.randn(2, 8)
        x = torch.cat([large, -large.sum(0, keepdim=True), torch.randn(1, 8)])
        found = capture_users(module, [x], [0, 0, 0, 0], 1, lambda out: out.sum())
        assert float(clipped_sum(found, module, Clipping(1.0)).norm()) <= 1 + 1e-3


# ------------------------------------------------------------------ neighbours


def clipped_sum(found: Captured, module: nn.Module, clipping: Clipping, scale: float = 1.0) -> Tensor:
    squares = torch.stack([found.squared_norms(uses) for uses in found.uses.values()]).sum(0)
    factors = found.each(clipping.factors(squares.sqrt() * scale) * scale)
    return torch.cat([
        dense(found.uses[name].weighted_sum(factors.to(p.dtype), p.shape), p.shape).flatten()
        if name in found.uses
        else torch.zeros(p.numel(), dtype=p.dtype)
        for name, p in module.named_parameters()
    ])  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_neighbours(case: str) -> None:
    """A whole user more or less moves the clipped sum by at most C, in float32 and for gradients of every size."""
    torch.manual_seed(1)
    module, *inputs = CASES[case]()
    owners = torch.tensor([(i * i) % 3 for i in range(len(inputs[0]))])
    units = int(owners.max()) + 1
    for size in (1e-3, 1.0, 1e3):
        loss = lambda out, size=size: size * unit_loss(out)  # noqa: E731
        whole = clipped_sum(capture_users(module, inputs, owners, units, loss), module, Clipping(CLIP))
        for user in range(units):
            rest = owners != user
            if not rest.any():
                continue
            left = capture_users(module, [tensor[rest] for tensor in inputs], owners[rest], units, loss)
            moved = float((whole - clipped_sum(left, module, Clipping(CLIP))).norm())
            assert moved <= CLIP * (1 + 1e-4)
    assert units == 1 or moved > 0.5 * CLIP  # large gradients do reach the bound


def test_an_example_more_may_move_it_further() -> None:
    """What is protected is a user: an example, by the way, can move a user's clipped gradient by twice the bound."""
    module = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[3.0, 0.0], [-6.0, 0.0]])
    both = clipped_sum(capture_users(module, [x], [0, 0], 1, lambda o: o.sum()), module, Clipping(1.0))
    one = clipped_sum(capture_users(module, [x[:1]], [0], 1, lambda o: o.sum()), module, Clipping(1.0))
    assert float((both - one).norm()) == pytest.approx(2.0, rel=1e-3)


class Tables(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(6, 2), nn.Embedding(5, 2)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        h = self.a(ids).sum(1) + self.b(ids[:, 0] % 5)
        return h @ self.b.weight.T if self.tied else h


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=8),
    clip=st.sampled_from([0.3, 1.0, 4.0]),
    within=st.booleans(),
    tied=st.booleans(),
    data=st.data(),
)
def test_neighbours_of_the_map(
    ids: list[list[int]], clip: float, within: bool, tied: bool, data: st.DataObject
) -> None:
    """AdaFEST's map: a user adds a vector of norm at most C1, however many examples touch a row; and by hand."""
    owners = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids))))
    module = Tables(tied)
    space = RowSpace.of(dict(module.named_parameters()))
    rows_within = torch.tensor([0, 2, 5, 7, 9]) if within else None

    def a_map(keep: Tensor) -> Tensor:
        out = torch.zeros(space.size, dtype=torch.float64)
        if keep.any():
            found = capture_users(module, [torch.tensor(ids)[keep]], owners[keep], 3)
            rows, values = contribution_map([found], space, clip, rows_within)
            out[rows] = values
        return out

    everyone = torch.ones(len(ids), dtype=torch.bool)
    whole, by_hand = a_map(everyone), torch.zeros(space.size, dtype=torch.float64)
    for user in range(3):
        own = torch.tensor(ids)[owners == user]
        rows = set(own.flatten().tolist()) | {6 + int(i) % 5 for i in own[:, 0]}
        if tied:  # whole, by every unit of the batch, also by one without examples, whom no loader draws
            rows |= set(range(6, 11))
        rows &= set(range(11)) if rows_within is None else set(rows_within.tolist())
        for row in rows:
            by_hand[row] += min(1.0, clip / len(rows) ** 0.5)
        if not tied:
            assert float((whole - a_map(owners != user)).norm()) <= clip * (1 + 1e-9)
    torch.testing.assert_close(whole, by_hand)


class Several(nn.Module):
    """Tables that are looked up once, in bags with weights and padding, and twice; one of them is used whole, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(6, 2), nn.EmbeddingBag(6, 3, mode="mean", padding_idx=5)
        self.c, self.d = nn.Embedding(6, 2, padding_idx=0), nn.Embedding(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        twice = self.c(ids[:, 0]) * self.c(ids[:, 1])
        scores = self.d(ids[:, 2]) @ self.d.weight.T
        return torch.cat([self.a(ids[:, 0]), self.b(ids), twice, scores], 1)


@settings(max_examples=80, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=8),
    chosen=st.none() | st.lists(st.lists(st.integers(0, 5), unique=True), min_size=4, max_size=4),
    data=st.data(),
)
def test_norms_of_all_tables_at_once(ids: list[list[int]], chosen: list[list[int]] | None, data: st.DataObject) -> None:
    """What a step does is what each table says for itself, on all rows and on a selection; also of nothing but padding."""
    torch.manual_seed(0)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    module = Several().double()
    found = capture_users(module, [torch.tensor(ids)], owners, 4)
    tables = dict(module.named_parameters())
    touched = found.touched(RowSpace.of(tables))
    assert touched.whole == ["d.weight"]
    selection = (
        None if chosen is None else {name: torch.tensor(sorted(rows)).long() for name, rows in zip(tables, chosen)}
    )
    slots = None if selection is None else touched.slots(selection)
    once = touched.squared_norms(slots, RowNorms())
    assert once is not None and once.names == ["a.weight", "b.weight", "c.weight"]
    for name, every, selected in zip(once.names, once.every, once.selected):
        torch.testing.assert_close(every, found.squared_norms(found.uses[name]), rtol=1e-9, atol=1e-12)
        uses = found.uses[name]
        uses = uses if selection is None else uses.restricted(selection[name], tables[name].shape[1])
        torch.testing.assert_close(selected, found.squared_norms(uses), rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=8),
    data=st.data(),
)
def test_touched_rows_of_users(ids: list[list[int]], data: st.DataObject) -> None:
    """Each (user, row) pair once."""
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    module = Tables()
    space = RowSpace.of(dict(module.named_parameters()))
    rows, units, at = touched_pairs(capture_users(module, [torch.tensor(ids)], owners, 4), space)
    found = list(zip(units.tolist(), rows[at].tolist()))
    wanted = {(o, r) for o, line in zip(owners, ids) for r in (*line, 6 + line[0] % 5)}
    assert len(found) == len(set(found)) and set(found) == wanted


# ------------------------------------------------------------------ sampling

# Users 0 to 9 with 1 to 10 examples, interleaved, under ids that are neither small nor in order.
SIZES = [1 + i for i in range(10)]
IDS = np.array([10**12 - 7 * u for u in range(10)])
WHOSE = np.random.default_rng(3).permutation(np.repeat(np.arange(10), SIZES))


class Numbered(Dataset):
    """Example i is (i,), with the users of `WHOSE`."""

    def __init__(self, whose: np.ndarray = WHOSE) -> None:
        self.users = IDS[whose]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, i: int) -> tuple[Tensor]:
        return (torch.tensor(i),)


def numbered(
    batch_size: int = 3, poisson: bool = True, limit: int | None = None, most: int | None = None, shuffle: bool = True,
    key: RandomKey = KEY, **options: Any,
) -> PrivateLoader:  # fmt: skip
    data = Numbered()
    return PrivateLoader(
        DataLoader(data, batch_size=batch_size, shuffle=shuffle, **options), key=key, poisson=poisson,
        max_physical_batch=most, users=Users.of(data.users, len(data), limit),
    )  # fmt: skip


def draws(loader: PrivateLoader, epochs: int = 1) -> list[tuple[BatchInfo, list[int]]]:
    found = []
    for _ in range(epochs):
        for (indices,) in loader:
            assert loader.current is not None
            found.append((loader.current, indices.tolist()))
    return found


@pytest.mark.parametrize("limit", [None, 1, 4, 100])
@pytest.mark.parametrize("poisson", [True, False])
def test_batches_hold_whole_users(limit: int | None, poisson: bool) -> None:
    loader = numbered(poisson=poisson, limit=limit)
    assert loader.dataset_size == 10 and len(loader) == 4 and loader.sample_rate == 0.3
    seen: list[list[int]] = [[] for _ in range(10)]
    for info, indices in draws(loader, 80):
        assert info.owners is not None and info.examples == len(indices) == len(info.owners)
        assert info.units == info.logical_units == len(set(info.owners.tolist()))
        whose = WHOSE[indices]
        for unit in range(info.units):
            own = np.array(indices)[info.owners.numpy() == unit]
            assert len(set(whose[info.owners.numpy() == unit])) == 1  # one user
            user = int(WHOSE[own[0]])
            assert len(set(own)) == len(own) == min(SIZES[user], limit or 100)
            assert (np.diff(own) > 0).all() if len(own) > 1 else True
            seen[user] += own.tolist()
        assert len(set(whose)) == info.units  # and no user twice
    for user in range(10):
        assert set(seen[user]) == set(np.flatnonzero(user == WHOSE))  # in the end everything was used
        if not poisson:
            assert len(seen[user]) == 80 * min(SIZES[user], limit or 100)


def test_users_join_independently_with_the_right_probability() -> None:
    """Counts over 2000 steps, with the chi-square statistics of single users and of pairs."""
    loader, steps = numbered(), 2000
    joined = np.zeros((steps, 10))
    for step, (_, indices) in enumerate(draws(loader, steps // 4)):
        joined[step, np.unique(WHOSE[indices])] = 1
    expected, deviation = 0.3 * steps, (0.3 * 0.7 * steps) ** 0.5
    assert (np.abs(joined.sum(0) - expected) < 4.5 * deviation).all()  # also: whether they have 1 or 10 examples
    both = joined.T @ joined
    pairs = both[np.triu_indices(10, 1)]
    assert (np.abs(pairs - 0.09 * steps) < 4.5 * (0.09 * 0.91 * steps) ** 0.5).all()


def test_the_chosen_examples_are_uniform() -> None:
    """Every set of 2 of a user's 4 examples is equally likely, and chosen anew at each draw."""
    ids = np.array([5] * 4 + [9] * 3)
    users = Users.of(ids, 7, 2)
    counts: dict[tuple[int, ...], int] = {}
    others = 0
    for step in range(3000):
        examples, sizes = users.examples(np.array([0, 1]), KEY.child(2).generator(step))
        assert sizes.tolist() == [2, 2]
        chosen = tuple(examples[:2].tolist())
        counts[chosen] = counts.get(chosen, 0) + 1
        others += 4 in examples
    assert len(counts) == 6
    statistic = sum((count - 500) ** 2 / 500 for count in counts.values())
    assert statistic < 27  # chi-square with 5 degrees of freedom: one in 20,000
    assert abs(others - 2000) < 4.5 * (3000 * 2 / 9) ** 0.5


def test_draws_are_a_function_of_key_and_step() -> None:
    plain = draws(numbered(limit=3), 3)
    assert draws(numbered(limit=3), 3) == plain
    assert [indices for _, indices in draws(numbered(limit=3, key=RandomKey.from_seed(1)), 3)] != [i for _, i in plain]
    later = numbered(limit=3)
    later.load_state_dict({"step": 5, "epoch": 1, "epoch_position": 1})
    assert [(info.step, indices) for info, indices in draws(later)] == [
        (i.step, x) for i, x in plain if 5 <= i.step < 8
    ]
    # Which users are drawn does not depend on how many of their examples they bring.
    unlimited = draws(numbered(), 3)
    assert [sorted(set(WHOSE[x])) for _, x in unlimited] == [sorted(set(WHOSE[x])) for _, x in plain]


@pytest.mark.parametrize("limit", [None, 3])
def test_workers_draw_the_same(limit: int | None) -> None:
    alone, helped = draws(numbered(limit=limit), 2), draws(numbered(limit=limit, num_workers=2), 2)
    assert alone == helped
    assert all(torch.equal(one.owners, other.owners) for (one, _), (other, _) in zip(alone, helped))


@pytest.mark.parametrize("most", [10, 11, 17])
@pytest.mark.parametrize("poisson", [True, False])
def test_physical_batches_are_parts_of_the_logical_one(most: int, poisson: bool) -> None:
    """At most `most` examples each, users never split, the same examples in the same order."""
    whole = {info.step: x for info, x in draws(numbered(5, poisson), 3)}
    parts: dict[int, list[tuple[BatchInfo, list[int]]]] = {}
    for info, x in draws(numbered(5, poisson, most=most), 3):
        parts.setdefault(info.step, []).append((info, x))
    assert parts.keys() == whole.keys()
    split = 0
    for step, found in parts.items():
        assert [i for _, x in found for i in x] == whole[step]
        assert [info.first for info, _ in found] == [True] + [False] * (len(found) - 1)
        assert [info.last for info, _ in found] == [False] * (len(found) - 1) + [True]
        assert sum(info.units for info, _ in found) == found[0][0].logical_units == len(set(WHOSE[whole[step]]))
        users = [set(WHOSE[x]) for _, x in found]
        assert all(len(x) <= most for _, x in found)
        assert sum(map(len, users)) == len(set().union(*users))  # attack: a user in two physical batches, clipped twice
        split += len(found) > 1
    assert split > 2


def test_empty_batches() -> None:
    loader = numbered(1)  # with rate 0.1 every third batch is empty
    sizes = [(info.units, info.examples, len(x)) for info, x in draws(loader, 10)]
    assert (0, 0, 0) in sizes and all(examples == length for _, examples, length in sizes)


# ------------------------------------------------------------------ training


def with_users(batch_size: int = 4, users: int = 12, examples: int = 40, **options: Any) -> DataLoader:
    """Clicks of some users, interleaved; each has at least one."""
    data: Any = TensorDataset(*clicks(examples))
    data.users = np.random.default_rng(0).permutation(np.arange(examples) ** 2 % 37 % users)
    data.users[:users] = np.arange(users)
    return DataLoader(data, batch_size=batch_size, shuffle=True, **options)


def start(
    mechanism: str = "dpsgd", workers: int = 0, module: nn.Module | None = None, batch_size: int = 4, **options: Any
) -> tuple[sparsedp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    return make_private(
        Clicks() if module is None else module, with_users(batch_size, num_workers=workers), unit="user",
        mechanism=MECHANISMS[mechanism](), **options,
    )  # fmt: skip


def steps(run: tuple, count: int, reduction: str = "mean") -> None:
    engine, module, optimizer, loader = run
    until = engine.ledger.steps + count
    while engine.ledger.steps < until:
        for ids, x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(module(ids, x), y, reduction=reduction).backward()
            optimizer.step()
            if engine.ledger.steps == until:
                break


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("most", [None, 12])
def test_a_step_by_hand(reduction: str, most: int | None) -> None:
    """w - lr / B * sum over users of the clipped sum of their examples' gradients, from the data set's own labels."""
    run = start(module=Clicks().double(), noise_multiplier=0.0, loss_reduction=reduction, max_physical_batch=most)
    _, module, optimizer, loader = run
    users = loader.dataset.users
    whole = list(zip(*loader.dataset.tensors))
    by_ids = {tuple(x.tolist()): user for (_, x, _), user in zip(whole, users)}  # features tell examples apart
    before, seen = None, []
    copy_of = Clicks().double()
    taken = 0
    for ids, x, y in loader:
        if loader.current.first:
            before, seen = {n: p.detach().clone() for n, p in module.named_parameters()}, []
        seen += list(zip(ids, x, y))
        optimizer.zero_grad()
        out = module(ids, x.double())
        nn.functional.binary_cross_entropy_with_logits(out, y.double(), reduction=reduction).backward()
        optimizer.step()
        if not loader.current.last:
            continue
        copy_of.load_state_dict(before)
        totals: dict[int, Gradients] = {}
        for i, features, label in seen:
            loss = nn.functional.binary_cross_entropy_with_logits(
                copy_of(i[None], features[None].double()), label[None].double()
            )
            grads = torch.autograd.grad(loss, list(copy_of.parameters()))
            mine = totals.setdefault(int(by_ids[tuple(features.tolist())]), {})
            for (name, _), grad in zip(copy_of.named_parameters(), grads):
                mine[name] = mine.get(name, 0) + grad
        report = optimizer.last_step
        assert (report.units, report.examples) == (len(totals), len(seen))
        for name, parameter in module.named_parameters():
            wanted = before[name].clone()
            for mine in totals.values():
                norm = torch.stack([grad.square().sum() for grad in mine.values()]).sum().sqrt()
                divisor = 4 if reduction == "mean" else 1
                wanted -= 0.1 / divisor * mine[name] / max(1.0, float(norm))
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-9)
        taken += 1
    assert taken == 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_neighbours_of_a_private_step(mechanism: str, reduction: str) -> None:
    """The same selection and noise, with and without each of the users: the sums differ by at most C. In float32.

    With their noise they are rounded, by no more than half a step of the grid.
    """
    run = start(mechanism, loss_reduction=reduction, max_grad_norm=CLIP)
    engine, module, optimizer, loader = run
    engine.prepare()
    ids, x, y = clicks(9, seed=4)
    owners = torch.tensor([0, 1, 0, 2, 2, 2, 3, 0, 1])

    def captured(keep: Tensor) -> Captured:
        left, numbers = owners[keep].unique(return_inverse=True)
        loader.current = batch_of_users(numbers, len(left))
        out = module(ids[keep], x[keep])
        (50 * nn.functional.binary_cross_entropy_with_logits(out, y[keep], reduction=reduction)).backward()
        found = optimizer._capture.collect()
        assert found is not None and found.units == len(left)
        return found

    def released(keep: Tensor, noise: bool) -> Tensor:
        gradient = optimizer.private_step.begin(selection)
        optimizer.private_step.add(captured(keep), gradient)
        if noise:
            optimizer.private_step.add_noise(gradient)
        else:
            for sums in gradient.sums.values():
                zero_others(sums)
        return torch.cat([value.flatten() for value in gradient.values.values()]).double() * optimizer.plan.divisor

    def moves(noise: bool) -> list[float]:
        whole = released(everyone, noise)
        return [float((whole - released(owners != user, noise)).norm()) for user in range(4)]

    everyone = torch.ones(9, dtype=torch.bool)
    tables = optimizer.private_step.trained_tables()
    with torch.no_grad():
        selection = engine.plan.mechanism.select(
            [torch.enable_grad()(captured)(everyone)], optimizer.private_step.context(0, tables)
        )
    with torch.enable_grad():
        if selection is not None:
            assert any(rows.numel() for rows in selection.values())
        moved, moved_with_noise = moves(False), moves(True)
        size = released(everyone, True).numel()
    plan = engine.plan
    grid = grid_of(plan.mechanism.gradient_noise(plan.noise_multiplier) * CLIP / plan.divisor) * plan.divisor
    assert max(moved_with_noise) <= CLIP * (1 + 1e-4) + grid * size**0.5
    assert max(moved) <= CLIP * (1 + 1e-4)
    assert min(moved) > 0.9 * CLIP  # the loss is so steep that everybody is clipped


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("limit", [None, 2])
def test_counts_are_of_users(clip: float | None, limit: int | None) -> None:
    """FEST's counts: a row counts once for each user that touches it, whatever the chunks."""
    engine, module, _, loader = start("fest", max_examples_per_user=limit)
    counted = []
    for most in (8192, 5):
        loader.max_physical_batch = most
        found = count_rows(module, engine._capture, loader, find_tables(module), None, clip)["table.weight"]
        counted.append(found)
    torch.testing.assert_close(*counted)
    ids, users = loader.dataset.tensors[0].numpy(), loader.dataset.users
    examples, sizes = loader.counted(np.arange(12))
    assert sizes.tolist() == [min((users == u).sum(), limit or 100) for u in range(12)]
    wanted = np.zeros(50)
    for user in range(12):
        own = np.unique(ids[examples[users[examples] == user]])
        wanted[own] += 1 if clip is None else min(1.0, clip / len(own) ** 0.5)
    np.testing.assert_allclose(counted[0].numpy(), wanted)
    if limit is None:
        assert float(counted[0].max()) <= 12 < torch.bincount(loader.dataset.tensors[0]).sum()


def test_released_frequencies_are_of_users() -> None:
    """Each user counts once for a row, and adds a vector of norm at most the clip."""
    module, ids, owners = Tables(tied=True), torch.tensor([[0, 0, 1], [0, 2, 3], [5, 5, 5]]), torch.tensor([1, 1, 0])
    space = RowSpace.of(dict(module.named_parameters()))
    found = count_lookups(iter([capture_users(module, [ids], owners, 2)]), space, 100.0)
    assert found["a.weight"].tolist() == [1, 1, 1, 1, 0, 1] and found["b.weight"].tolist() == [2, 0, 0, 0, 0]
    clipped = count_lookups(iter([capture_users(module, [ids[:2]], owners[:2] - 1, 1)]), space, 0.5)
    assert float(torch.cat(list(clipped.values())).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_physical_batches_train_the_same(mechanism: str) -> None:
    one, parts = start(mechanism), start(mechanism, max_physical_batch=8)
    steps(one, 6)
    steps(parts, 6)
    assert one[2].last_step.units == parts[2].last_step.units
    assert one[2].last_step.examples == parts[2].last_step.examples
    for name, value in one[1].state_dict().items():
        torch.testing.assert_close(parts[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_one_example_per_user_trains_as_examples_do(mechanism: str) -> None:
    """The same noise and the same sample: users with one example each are examples."""
    runs = []
    for options in ({}, {"unit": "user", "users": torch.arange(40)}):
        torch.manual_seed(0)
        run = make_private(Clicks(), with_users(8), mechanism=MECHANISMS[mechanism](), **options)
        steps(run, 5)
        runs.append(run)
    assert runs[0][0].ledger == runs[1][0].ledger
    for name, value in runs[0][1].state_dict().items():
        torch.testing.assert_close(runs[1][1].state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"max_physical_batch": 8}, {"poisson_sampling": False},
                                     {"max_examples_per_user": 2}, {"mechanism": "adafest+"}],
                         ids=lambda o: next(iter(o), "plain"))  # fmt: skip
def test_resumed_equals_uninterrupted(options: dict, tmp_path: Path) -> None:
    whole = start(**options)
    steps(whole, 8)
    first = start(**options)
    steps(first, 4)  # in the middle of the second epoch
    first[0].save_checkpoint(tmp_path / "c.pt")
    second = start(**options)
    second[0].load_checkpoint(tmp_path / "c.pt")
    steps(second, 4)
    assert second[0].ledger == whole[0].ledger
    for name, value in whole[1].state_dict().items():
        assert torch.equal(second[1].state_dict()[name], value), name


def test_empty_batches_are_steps() -> None:
    run = start(batch_size=1)
    steps(run, 30)
    assert run[0].ledger.steps == 30


def test_predictions_are_about_users() -> None:
    """Without noise and with a batch of everybody, a step does what was predicted."""
    predictions = []
    for seed in range(20):  # each with the examples that its users happen to bring
        engine, module, optimizer, loader = start(
            module=Clicks(rows=400),
            mechanism="adafest",
            noise_multiplier=0.0,
            batch_size=12,
            max_examples_per_user=2,
            seed=seed,
        )
        predicted = predict(engine.plan, engine.look())
        assert predicted.source == "all 12 training users"
        predictions.append(predicted.rows_touched)
    touched = []
    for _ in range(40):
        steps((engine, module, optimizer, loader), 1)
        touched.append(optimizer.last_step.rows_touched)
    assert np.mean(predictions) == pytest.approx(np.mean(touched), rel=0.04)


# ------------------------------------------------------------------ the promise


def test_plan_statement_and_ledger_count_users(tmp_path: Path) -> None:
    run = start(max_examples_per_user=3)
    engine, _, _, loader = run
    plan = engine.plan
    assert (plan.unit, plan.dataset_size, plan.batch_size, plan.sample_rate) == ("user", 12, 4, 4 / 12)
    assert len(loader) == 3 and plan.divisor == 4
    steps(run, 5)
    assert engine.ledger == plan.ledger(5)
    example = make_private(Clicks(), DataLoader(TensorDataset(*clicks(12)), batch_size=4, shuffle=True))[0]
    assert plan.step_event() == example.plan.step_event()
    assert engine.get_epsilon() == pytest.approx(example.plan.epsilon(5, 0.008))  # the default delta: 0.1 / 12
    said = engine.statement()
    assert said.unit == "user" and json.loads(said.to_json())["unit"] == "user"
    text = str(said)
    for words in (
        "protects:     one user; neighbouring data sets differ by adding or removing one user, with all of their examples",
        "Poisson of users, rate 4/12",
        "each with at most 3 of their examples",
        "The number of users, 12, is public.",
    ):
        assert words in text
    assert "40" not in text  # how many examples there are is private now
    assert "all of their examples" in str(start()[0].statement())
    shuffled = str(start(poisson_sampling=False)[0].statement())
    assert "did NOT happen" in shuffled and "batches of users" in shuffled


def test_plan_as_a_dict() -> None:
    plan = start(max_examples_per_user=3)[0].plan
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["unit"] == "user" and plan.to_dict()["max_examples_per_user"] == 3
    hashes = {start()[0].plan.hash, plan.hash, start(max_examples_per_user=2)[0].plan.hash}
    assert len(hashes) == 3
    example = make_private(Clicks(), with_users())[0].plan
    assert "max_examples_per_user" not in example.to_dict()  # checkpoints from before there were users stay readable


def test_calibration_counts_users() -> None:
    module = Clicks()
    engine = sparsedp.PrivacyEngine()
    _, _, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=with_users(), unit="user",
        target_epsilon=2.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0, max_examples_per_user=4,
    )  # fmt: skip
    assert engine.plan.steps == 6 and len(loader) == 3
    assert 1.9 < engine.plan.epsilon(6, 1e-3) <= 2.0


# ------------------------------------------------------------------ how would I make a user exceed the bound?


def refused(match: str, loader: DataLoader | None = None, **options: Any) -> None:
    with pytest.raises((UnsupportedError, SparseDPError), match=match):
        make_private(Clicks(), with_users() if loader is None else loader, **{"unit": "user", **options})


def test_settings_that_do_not_go_together() -> None:
    plain = DataLoader(TensorDataset(*clicks(40)), batch_size=4, shuffle=True)
    refused("needs to know whose each example is", plain)  # and not: one user per example
    refused("users is for unit='user'", plain, unit="example", users=np.arange(40))
    refused("max_examples_per_user is for unit='user'", plain, unit="example", max_examples_per_user=2)
    refused("'example' or a 'user'", unit="person")
    refused("stream together with unit='user'", stream=sparsedp.Stream(np.arange(40) // 20, "parallel"))
    refused("batch_size=16 exceeds the data set's 12 users", with_users(16))
    for most in (0, -1, 1.5, True, "3"):
        refused("max_examples_per_user must be a whole number", max_examples_per_user=most)
    with pytest.raises(UnsupportedError, match="max_examples_per_user"):
        PrivacyPlan(
            dataset_size=10, batch_size=2, shuffled=True, noise_multiplier=1.0, clipping=Clipping(1.0), parameters=(),
            max_examples_per_user=2,
        )  # fmt: skip


@pytest.mark.parametrize(
    "users, match",
    [
        (np.arange(39), "users has 39 entries, the data set has 40"),
        (np.arange(41), "users has 41 entries"),
        (np.arange(40) / 2, "one whole number per example"),
        (np.arange(40).reshape(40, 1), "one whole number per example"),
        ([str(i) for i in range(40)], "one whole number per example"),
        (np.arange(40) - 1, "negative number"),  # as pandas.factorize says for a missing user
        (torch.arange(40) > 3, "one whole number per example"),
    ],
)
def test_users_that_cannot_be_read(users: Any, match: str) -> None:
    refused(match, users=users)


@pytest.mark.parametrize("form", [list, torch.tensor, np.array, lambda ids: np.array(ids, dtype=np.uint64) + (2**63)])
def test_forms_of_users(form: Callable) -> None:
    ids = [10**9 * (i % 5) for i in range(40)]
    run = make_private(Clicks(), with_users(), unit="user", users=form(ids))
    assert run[0].plan.dataset_size == 5
    groups = [set(np.array(ids)[run[3].users.order[a:b]]) for a, b in zip(run[3].users.begin, run[3].users.begin[1:])]
    assert sorted(groups, key=min) == [{10**9 * u} for u in range(5)]


def test_a_user_larger_than_a_physical_batch() -> None:
    """A user in two physical batches would be clipped twice."""
    largest = np.bincount(with_users().dataset.users).max()  # type: ignore[attr-defined]
    refused("cannot hold a whole user", max_physical_batch=int(largest) - 1)
    refused("max_examples_per_user", max_physical_batch=3, max_examples_per_user=4)
    assert start(max_physical_batch=int(largest))[0].plan.dataset_size == 12
    assert start(max_physical_batch=3, max_examples_per_user=3)[0].plan.dataset_size == 12


def test_users_changed_afterwards_have_no_effect() -> None:
    ids = np.arange(40) % 12
    run = make_private(Clicks(), with_users(), unit="user", users=ids)
    before = run[3].users.order.copy()
    ids[:] = 0
    assert (run[3].users.order == before).all()


class OwnMechanism(sparsedp.Mechanism):
    """Selects by example, as it was written before there were users."""

    selects = True
    guarantee = "none"
    name = "own"

    def to_dict(self) -> dict:
        return {"name": "own"}


def test_mechanisms_that_look_at_examples_are_refused() -> None:
    refused("takes_users", mechanism=OwnMechanism())


def dropping(items: list) -> Any:
    return torch.utils.data.default_collate(items[:-1] or items)


def repeating(items: list) -> Any:
    return torch.utils.data.default_collate([*items, items[0]])


@pytest.mark.parametrize("collate", [dropping, repeating])
def test_collate_that_drops_or_repeats(collate: Callable) -> None:
    """The batch is then not as long as its owners: refused at the loss, before anything is written."""
    loader = with_users(8)
    run = make_private(Clicks(), DataLoader(loader.dataset, batch_size=8, collate_fn=collate), unit="user")
    before = {name: p.detach().clone() for name, p in run[1].named_parameters()}
    with pytest.raises(SparseDPError, match="must pass through the module exactly once"):
        steps(run, 1)
    for name, parameter in run[1].named_parameters():
        assert torch.equal(parameter, before[name])
    assert run[0].ledger.steps == 0
    with pytest.raises(UnsupportedError, match="must neither drop nor repeat"):
        run[0].look()


class Words(Dataset):
    """Sequences of different lengths; `users` are two of them each."""

    def __init__(self, lengths: Sequence[int] = (3, 1, 4, 1, 5, 9, 2, 6)) -> None:
        self.users = np.arange(len(lengths)) // 2
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((self.lengths[i],), i), torch.tensor(float(i % 3))


def padded(items: list) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
    return ids, torch.stack([y for _, y in items])


def bags(items: list) -> tuple[Tensor, Tensor, Tensor]:
    offsets = torch.tensor([0, *(len(ids) for ids, _ in items)]).cumsum(0)
    return torch.cat([ids for ids, _ in items]), offsets[:-1], torch.stack([y for _, y in items])


def longest_first(items: list) -> tuple[Tensor, Tensor]:
    return padded(sorted(items, key=lambda item: -len(item[0])))


def longest_first_as_dict(items: list) -> dict[str, Tensor]:
    ids, y = longest_first(items)
    return {"ids": ids, "y": y}


@pytest.mark.parametrize("collate", [longest_first, longest_first_as_dict])
def test_collate_that_sorts_is_refused(collate: Callable) -> None:
    """With examples as units their order does not matter; here it says whose they are."""
    module = nn.Embedding(10, 2)
    loader = DataLoader(Words(), batch_size=2, collate_fn=collate)
    with pytest.raises(UnsupportedError, match="changes the order of its examples"):
        make_private(module, loader, unit="user")
    make_private(module, loader)


@pytest.mark.parametrize("collate", [padded, bags])
@pytest.mark.parametrize("lengths", [(3, 1, 4, 1, 5, 9, 2, 6), (2, 2, 2, 2), (1, 1)])
def test_collate_that_keeps_the_order_is_fine(collate: Callable, lengths: tuple[int, ...]) -> None:
    loader = DataLoader(Words(lengths), batch_size=1, collate_fn=collate)
    make_private(nn.Embedding(10, 2), loader, unit="user")


PLACES = torch.tensor([2, 0, 1, 3])
REORDERINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0)[0],
    "index": lambda x: x[PLACES],
    "index_select": lambda x: x.index_select(0, PLACES),
    "argsort": lambda x: x[x[:, 0].argsort()],
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "split": lambda x: torch.cat(x.split(2)[::-1]),
    "unbind": lambda x: torch.stack(x.unbind(0)[::-1]),
    "gather": lambda x: x.gather(0, PLACES[:, None].expand(4, 3)),
    "flatten": lambda x: x.flatten().flip(0).view(4, 3),
    "transposed": lambda x: x.T.flip(1).T,
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, PLACES, x),
    "matmul": lambda x: torch.eye(4)[PLACES] @ x,
    "einsum": lambda x: torch.einsum("ij,jk->ik", torch.eye(4)[PLACES], x),
    "data": lambda x: x.data[PLACES],
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()[PLACES.numpy()]),
    "list": lambda x: torch.tensor(x.tolist()[::-1]),
}


@pytest.mark.parametrize("case", REORDERINGS)
def test_another_order_in_forward_is_refused(case: str) -> None:
    """Examples in other places would be added up with another user's."""
    module = Apply(lambda m, x: m.l(REORDERINGS[case](x)), l=nn.Linear(3, 2))
    with pytest.raises(SparseDPError):
        capture_users(module, [torch.randn(4, 3)], [0, 0, 1, 1], 2)


@pytest.mark.parametrize("owners", [[0, 0, 1, 1, 2], [0, 1], None])
def test_owners_of_another_length(owners: list[int] | None) -> None:
    """A batch whose owners are not its examples' is not the batch of the forward pass."""
    engine, module, optimizer, loader = start()
    ids, x, y = clicks(3)
    units = 3 if owners is None else 2
    loader.current = BatchInfo(units, units, True, True, 0, owners=None if owners is None else torch.tensor(owners))
    if owners is None:  # examples for users: what capture saw is not what the loader says
        seen = module(ids, x)
        seen.sum().backward()
        loader.current = batch_of_users(torch.tensor([0, 1, 2]), 3)
        with pytest.raises(SparseDPError, match="not the loader's current batch"):
            optimizer.step()
    else:
        with pytest.raises(SparseDPError, match="must pass through the module exactly once"):
            module(ids, x).sum().backward()
    assert engine.ledger.steps == 0


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_loss_from_before_the_first_batch(unit: Any) -> None:
    """Nobody sampled its examples, although there are as many of them as in the batch that is drawn then: everybody's."""
    loader = with_users(40 if unit == "example" else 12)
    engine, module, optimizer, loader = make_private(Clicks(), loader, unit=unit)
    ids, x, _ = clicks(40, seed=1)
    module(ids, x).sum().backward()
    next(iter(loader))
    assert loader.current.examples == 40
    with pytest.raises(SparseDPError, match="not the loader's current batch"):
        optimizer.step()
    assert engine.ledger.steps == 0


def test_a_checkpoint_of_other_units_is_refused(tmp_path: Path) -> None:
    run = start(max_examples_per_user=3)
    steps(run, 2)
    run[0].save_checkpoint(tmp_path / "c.pt")
    others = {
        "unit": make_private(Clicks(), DataLoader(TensorDataset(*clicks(12)), batch_size=4, shuffle=True))[0],
        "max_examples_per_user": start()[0],
        "dataset_size": make_private(
            Clicks(), with_users(4, users=11), unit="user", users=np.arange(40) % 11, max_examples_per_user=3
        )[0],
    }
    for name, engine in others.items():
        with pytest.raises(CheckpointError, match=f"another plan.*{name}"):
            engine.load_checkpoint(tmp_path / "c.pt")


def test_checkpoints_say_nothing_about_single_users(tmp_path: Path) -> None:
    """Two data sets in which the same number of users have other examples: nothing of the plan tells which is which.

    A digest of who has which examples would tell, to whoever knows everybody else's.
    """
    plans = [
        make_private(Clicks(), with_users(), unit="user", users=ids)[0].plan
        for ids in (np.arange(40) % 12, np.minimum(np.arange(40), 11))
    ]
    assert plans[0] == plans[1] and plans[0].hash == plans[1].hash


# ------------------------------------------------------------------ click logs and the command line

WITH_USER = detect_layout(",".join([*COLUMNS, "Uid", "day"]).encode(), Path("x"), "uid")
USER_FIELDS = ["0", "7", "123456789012345678", "1234567890123456789", "", "-1", "1.0", "a", " 3", "3\r", "00", "é"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(USER_FIELDS), st.sampled_from(["\n", "\r\n"])), max_size=6))
def test_user_fields(fields: list[tuple[str, str]]) -> None:
    """A user is a whole number of at most 18 digits; a line without one is malformed, and nobody is taken for user 0."""
    rows = [",".join(["1"] + ["2"] * 13 + ["a"] * 26 + [user, "4"]) + end for user, end in fields]
    block = "".join(rows).encode()
    parsed = [parse(block, WITH_USER) for parse in (parse_block, parse_block_python)]
    wanted = [int(user) for user, _ in fields if user.isdigit() and len(user) <= 18]
    for found in parsed:
        assert found.users.tolist() == wanted and found.malformed == len(fields) - len(wanted)
    assert np.array_equal(parsed[0].bad, parsed[1].bad)


def test_click_logs_with_a_user_column(tmp_path: Path) -> None:
    log = generated_click_log(300, scale=0.01, users=40, days=2)
    assert log.users is not None and log.users.dtype == np.int64 and 20 < len(np.unique(log.users)) <= 40
    without = generated_click_log(300, scale=0.01, days=2)
    assert without.users is None and (without.labels == log.labels).all()  # users change nothing else
    write_click_log(log, tmp_path / "{day}.tsv", header=True)
    read = open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache", user_column="User")
    assert read.users is not None and np.array_equal(read.users, log.users)
    training, held_out = read.split(0.25)
    assert np.array_equal(training.users, log.users[:225]) and np.array_equal(held_out.users, log.users[225:])  # type: ignore[arg-type]
    assert np.array_equal(pickle.loads(pickle.dumps(training)).users, training.users)  # type: ignore[arg-type]
    assert open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache").users is None  # a cache of its own
    with pytest.raises(ConfigError, match="header=True"):
        write_click_log(log, tmp_path / "plain_{day}.tsv")
    for column in ("visitor", "C3", "label"):
        with pytest.raises(DataError, match=f"user column '{column}'"):
            open_click_log(tmp_path / "*.tsv", cache_dir=tmp_path / "cache", user_column=column)
    write_click_log(without, tmp_path / "bare_{day}.csv", separator=",")
    with pytest.raises(DataError, match="there is no header"):
        open_click_log(tmp_path / "bare_0.csv", cache_dir=tmp_path / "cache", user_column="user")
    with pytest.raises(ConfigError, match="at least one user"):
        generated_click_log(300, users=0)


CONFIG = """
data: {kind: generated, rows: 1000, scale: 0.01, users: 300}
model: {kind: pctr, hidden: 8, hidden_layers: 1}
optimizer: {name: Adagrad, lr: 0.05}
training: {epochs: 1, batch_size: 40, log_every: 1}
privacy: {target_epsilon: 5, max_grad_norm: 2, unit: user, max_examples_per_user: 3}
"""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("c.yaml").write_text(CONFIG)
    users = len(np.unique(generated_click_log(1000, scale=0.01, users=300).split(0.1)[0].users))  # type: ignore[arg-type]
    assert main(["plan", "c.yaml", "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["unit"], report["dataset_size"], report["examples"]) == ("user", users, 900)
    assert report["steps"] == -(-users // 40) and report["sample_rate"] == 40 / users
    assert report["delta"] == default_delta(users) and report["expected_examples"] < 3 * 40
    assert report["predicted"]["source"] == f"all {users} training users"
    assert main(["plan", "c.yaml", "--no-measure"]) == 0
    shown = capsys.readouterr().out
    assert f"users{'':16}{users}" in shown and "40 users with" in shown and "at most 3 of a user's" in shown
    assert main(["train", "c.yaml", "--run-dir", "run"]) == 0
    shown = capsys.readouterr().out
    assert "steps of 40 users" in shown and "protects:     one user" in shown and "for each user" in shown
    assert json.loads(Path("run/release/plan.json").read_text())["max_examples_per_user"] == 3
    logged = [json.loads(line) for line in Path("run/private/metrics.jsonl").read_text().splitlines()]
    taken = [row for row in logged if row["kind"] == "step"]
    assert all(row["units"] <= row["examples"] <= 3 * row["units"] for row in taken)
    assert sum(row["examples"] for row in taken) > sum(row["units"] for row in taken)
    assert all(0.3 < row["loss"] < 2 for row in taken)  # a mean over examples
    assert main(["plan", "c.yaml", "--no-measure", "--set", "data.users=null"]) != 0
    assert "needs to know whose each example is" in capsys.readouterr().err
    assert main(["plan", "c.yaml", "--no-measure", "--set", "privacy.unit=example"]) != 0
    assert "privacy.max_examples_per_user" in capsys.readouterr().err
