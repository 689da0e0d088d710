"""unit="user": norms, sums and maps of users are those of their examples together, and neighbours differ by the bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsedp
from cases import BLOCKS, CASES, HEADS, ROWS, Generated
from sparsedp.capture import Captured, RowNorms, RowSpace
from sparsedp.capture.uses import Lookup, ParameterUses
from sparsedp.clipping import Clipping
from sparsedp.contribution import contribution_map, touched_pairs
from support import Apply, Clicks, clicks, dense, unit_loss
from users import CLIP, Tables, assert_exact, capture_users

EXACT = [case for case in CASES if "length = batch" not in case]


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
    assert kinds == {"lookups", "linears", "builts", "softmaxes", "carrieds"}


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
    assert touched.used_in_full == ["d.weight"]
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
