"""The inner products of every two kinds of uses, against gradients that are written out by hand in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from sparsedp.capture import ParameterUses, RowNorms, products
from sparsedp.capture.uses import Built, Carried, Linear, Lookup, Part, Softmax, Use, logit_gradients
from sparsedp.capture.uses.inner import INNER, inner

UNITS, ROWS, DIM = 5, 9, 4

# Each example makes a use and every unit's gradient by it, (UNITS, ROWS, DIM).
Example = Callable[[torch.Generator], tuple[Use, Tensor]]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lookup(
    generator: torch.Generator, positions: int = 3, bags: bool = False, weights: bool = False
) -> tuple[Use, Tensor]:
    """Ids that repeat, with padding, in any order of the units; unit 3 has no position."""
    count = UNITS * positions
    units = torch.tensor([0, 1, 2, 4])[torch.randint(4, (count,), generator=generator)]
    ids = torch.randint(-1, ROWS, (count,), generator=generator)
    source = torch.randint(7, (count,), generator=generator) if bags else None
    weight = normal(generator, count) if weights else None
    grad = normal(generator, 7 if bags else count, DIM)
    wanted = torch.zeros(UNITS, ROWS, DIM, dtype=torch.float64)
    for n in range(count):
        if ids[n] >= 0:
            row = grad[n if source is None else source[n]]
            wanted[units[n], ids[n]] += row if weight is None else weight[n] * row
    return Lookup(ids, units, grad, source, weight), wanted


def one_each(generator: torch.Generator) -> tuple[Use, Tensor]:
    ids, grad = torch.tensor([3, -1, 0, 8, 3]), normal(generator, UNITS, DIM)
    wanted = torch.zeros(UNITS, ROWS, DIM, dtype=torch.float64)
    for unit, row in enumerate(ids.tolist()):
        if row >= 0:
            wanted[unit, row] = grad[unit]
    return Lookup(ids, torch.arange(UNITS), grad, one_each=True), wanted


def one_bag_each(generator: torch.Generator) -> tuple[Use, Tensor]:
    units = torch.tensor([0, 0, 0, 1, 2, 2, 4, 4])
    ids, weight = torch.tensor([3, 3, -1, 0, 8, 1, 1, 1]), normal(generator, 8)
    grad = normal(generator, UNITS, DIM)
    wanted = torch.zeros(UNITS, ROWS, DIM, dtype=torch.float64)
    for unit, row, factor in zip(units.tolist(), ids.tolist(), weight):
        if row >= 0:
            wanted[unit, row] += factor * grad[unit]
    return Lookup(ids, units, grad, units, weight), wanted


def linear(
    generator: torch.Generator, positions: int = 3, offset: int = 0, height: int = ROWS, width: int = DIM
) -> tuple[Use, Tensor]:
    """The elements from `offset` on as a matrix (height, width)."""
    inputs, grad = normal(generator, UNITS, positions, width), normal(generator, UNITS, positions, height)
    wanted = torch.zeros(UNITS, ROWS * DIM, dtype=torch.float64)
    for unit, position in product(range(UNITS), range(positions)):
        block = grad[unit, position, :, None] * inputs[unit, position, None, :]
        wanted[unit, offset : offset + height * width] += block.flatten()
    return Linear(inputs, grad, offset), wanted.view(UNITS, ROWS, DIM)


def built(generator: torch.Generator, offset: int = 0, length: int = ROWS * DIM) -> tuple[Use, Tensor]:
    values = normal(generator, UNITS, length)
    wanted = torch.zeros(UNITS, ROWS * DIM, dtype=torch.float64)
    wanted[:, offset : offset + length] = values
    return Built(values, offset), wanted.view(UNITS, ROWS, DIM)


def carried(generator: torch.Generator, parts: int = 1) -> tuple[Use, Tensor]:
    """Gradients of six elements on each copy, which is a linear map of the whole table."""
    size, uses = ROWS * DIM, []
    wanted = torch.zeros(UNITS, size, dtype=torch.float64)
    for _ in range(parts):
        values, jacobian = normal(generator, UNITS, 6), normal(generator, 6, size)
        part = Part(lambda s, v=values: v[s], lambda v, j=jacobian: v @ j, (values,))  # type: ignore[misc]
        uses.append(Carried.of(part, values.new_zeros(size), UNITS))
        wanted += values @ jacobian
    (use,) = Carried.merged(uses)
    return use, wanted.view(UNITS, ROWS, DIM)


def softmax(
    generator: torch.Generator,
    first: int = 0,
    rows: int = ROWS,
    left_out: int | None = None,
    some: list[int] | None = None,
) -> tuple[Use, Tensor]:
    """A table of `rows` rows from the row `first` on; positions without target, and unit 1 has none at all."""
    positions = 3
    hidden, table = normal(generator, UNITS, positions, DIM), normal(generator, rows, DIM)
    target = torch.randint(-1, rows, (UNITS, positions), generator=generator)
    target[1] = -1
    if left_out is not None:
        target[target == left_out] = -1
    hidden[target < 0] = 0
    scale = normal(generator, UNITS, positions).masked_fill(target < 0, 0)
    log_sum = torch.zeros(UNITS, positions, dtype=torch.float64)
    wanted = torch.zeros(UNITS, ROWS, DIM, dtype=torch.float64)
    for unit, position in product(range(UNITS), range(positions)):
        if target[unit, position] < 0:
            continue
        logits = table @ hidden[unit, position]
        if left_out is not None:
            logits[left_out] = -torch.inf
        log_sum[unit, position] = logits.logsumexp(0)
        grad = logits.softmax(0)
        grad[target[unit, position]] -= 1
        if some is not None:
            grad = torch.where(torch.isin(torch.arange(rows), torch.tensor(some)), grad, 0)
        wanted[unit, first : first + rows] += scale[unit, position] * grad[:, None] * hidden[unit, position]
    kept = None if some is None else torch.tensor(some)
    return Softmax(hidden, target, log_sum, scale, lambda: table, first, left_out, kept), wanted


EXAMPLES: dict[str, Example] = {
    "lookup": lookup,
    "lookup of bags": lambda g: lookup(g, bags=True),
    "weighted lookup of bags": lambda g: lookup(g, 6, bags=True, weights=True),
    "weighted lookup": lambda g: lookup(g, weights=True),
    "lookup of one row each": one_each,
    "lookup of one bag each": one_bag_each,
    "linear": linear,
    "linear at one position": lambda g: linear(g, 1),
    "linear at many positions": lambda g: linear(g, 40),
    "linear of some rows": lambda g: linear(g, 2, 2 * DIM, 3),
    "linear of later rows": lambda g: linear(g, 2, 6 * DIM, 3),
    "linear across rows": lambda g: linear(g, 2, 3, 4, 6),
    "linear of shifted rows": lambda g: linear(g, 2, 5, 3),
    "built": built,
    "built of some elements": lambda g: built(g, 7, 15),
    "built of others": lambda g: built(g, 30, 6),
    "carried": carried,
    "carried from two copies": lambda g: carried(g, 2),
    "softmax": softmax,
    "softmax of some rows": lambda g: softmax(g, 2, 5),
    "softmax without a row": lambda g: softmax(g, 1, 8, left_out=3),
    "softmax on a selection": lambda g: softmax(g, 1, 8, left_out=0, some=[1, 2, 6]),
}


def made(name: str, seed: int) -> tuple[Use, Tensor]:
    return EXAMPLES[name](torch.Generator().manual_seed(seed))


def test_every_two_kinds_are_in_the_table() -> None:
    kinds = {Lookup, Linear, Built, Softmax, Carried}
    assert set(Use.__subclasses__()) == kinds
    assert set(INNER) == set(product(kinds, kinds))
    assert {type(made(name, 0)[0]) for name in EXAMPLES} == kinds  # each is tried below


@pytest.mark.parametrize("elements", [1, 60, 1 << 24])
@pytest.mark.parametrize("one", EXAMPLES)
def test_inner_products(one: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both orders, with all units at a time and with few."""
    monkeypatch.setattr(products, "TEMPORARY", elements)
    monkeypatch.setattr(products, "WRITTEN", elements)
    use, gradient = made(one, 1)
    for seed, name in enumerate(EXAMPLES):
        other, other_gradient = made(name, 2 + seed)
        wanted = (gradient * other_gradient).sum((1, 2))
        for pair in ((use, other), (other, use)):
            torch.testing.assert_close(inner(*pair, UNITS, RowNorms()).double(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("elements", [1, 60, 1 << 24])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_use_with_itself(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the faster `squared_norms` agree, and no norm exceeds the sum of the terms' norms."""
    for setting in ("TEMPORARY", "WRITTEN"):
        monkeypatch.setattr(products, setting, elements)
    for setting in ("CHUNK", "WHOLE"):
        monkeypatch.setattr(logit_gradients, setting, elements)
    use, gradient = made(name, 1)
    wanted = gradient.square().sum((1, 2))
    squares = use.squared_norms(UNITS, RowNorms()).double()
    torch.testing.assert_close(inner(use, use, UNITS, RowNorms()).double(), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(squares, wanted, rtol=1e-9, atol=1e-9)
    assert (squares.sqrt() <= use.reach(UNITS, RowNorms()) * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_weighted_sums_and_selected_rows(name: str) -> None:
    use, gradient = made(name, 1)
    factors = torch.linspace(0.3, 1.9, UNITS, dtype=torch.float64)
    rows = torch.tensor([0, 2, 3, 7])
    mask = torch.zeros(ROWS, 1, dtype=torch.float64).index_fill_(0, rows, 1)
    for which, wanted in ((use, gradient), (use.restricted(rows, DIM), gradient * mask)):
        out = torch.ones(ROWS * DIM, dtype=torch.float64)
        which.add_weighted_sum(out, factors)
        torch.testing.assert_close(out.view(ROWS, DIM), 1 + (factors[:, None, None] * wanted).sum(0))
        squares = which.squared_norms(UNITS, RowNorms()).double()
        torch.testing.assert_close(squares, wanted.square().sum((1, 2)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*EXAMPLES, "all"])
def test_uses_of_one_parameter(name: str) -> None:
    """Some together, and all of them."""
    names = list(EXAMPLES) if name == "all" else [name, "lookup", "linear"]
    made_of = [made(each, seed) for seed, each in enumerate(names)]
    total = torch.stack([gradient for _, gradient in made_of]).sum(0)
    uses = ParameterUses.of([use for use, _ in made_of])
    torch.testing.assert_close(uses.squared_norms(UNITS), total.square().sum((1, 2)), rtol=1e-9, atol=1e-9)
    factors = torch.linspace(0.3, 1.9, UNITS, dtype=torch.float64)
    wanted = (factors[:, None, None] * total).sum(0)
    torch.testing.assert_close(uses.weighted_sum(factors, torch.Size([ROWS, DIM])), wanted)


def test_an_unknown_kind_is_not_left_out() -> None:
    class Other(Built):
        pass

    with pytest.raises(KeyError):
        ParameterUses.of([Other(torch.zeros(2, 3), 0)])


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_linears_beyond_the_range_of_float32(size: float) -> None:
    """Products of four numbers leave its range, although each of them is within."""
    generator = torch.Generator().manual_seed(0)
    one, other = linear(generator)[0], linear(generator)[0]
    assert isinstance(one, Linear) and isinstance(other, Linear)
    large = Linear(one.inputs.float() * size, one.grad.float() * size, 0)
    small = Linear(other.inputs.float(), other.grad.float(), 0)
    pairs = ((large, small), (small, large), (large, large))
    for pair in pairs:
        exact = [use.in_float64() for use in pair]
        wanted = inner(*exact, UNITS, RowNorms())
        torch.testing.assert_close(inner(*pair, UNITS, RowNorms()), wanted, rtol=1e-5, atol=0)
    wanted = inner(large.in_float64(), large.in_float64(), UNITS, RowNorms())
    torch.testing.assert_close(large.squared_norms(UNITS, RowNorms()), wanted, rtol=1e-5, atol=0)


def test_no_units() -> None:
    """A batch without units has no norms, whatever the uses."""
    empty = torch.zeros(0, 3, dtype=torch.float64)
    nothing = torch.zeros(0, dtype=torch.long)
    uses: list[Use] = [
        Lookup(nothing, nothing, empty),
        Linear(torch.zeros(0, 2, 3).double(), torch.zeros(0, 2, 5).double(), 0),
        Built(torch.zeros(0, 15).double(), 0),
        Softmax(torch.zeros(0, 2, 3).double(), torch.zeros(0, 2).long(), torch.zeros(0, 2).double(), torch.zeros(0, 2).double(),
                lambda: torch.ones(5, 3, dtype=torch.float64), 0),
    ]  # fmt: skip
    for one, other in product(uses, uses):
        assert inner(one, other, 0, RowNorms()).shape == (0,)
    assert ParameterUses.of(uses).squared_norms(0).shape == (0,)
