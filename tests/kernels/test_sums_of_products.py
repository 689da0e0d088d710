"""Sums of products in one compiled pass, of any layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsedp.kernels import loops, threads


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def layouts(rows: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "plain": torch.randn(rows, width, dtype=dtype),
        "transposed": torch.randn(width, rows, dtype=dtype).mT,
        "every other row": torch.randn(2 * rows, width, dtype=dtype)[::2],
        "every other column": torch.randn(rows, 2 * width, dtype=dtype)[:, ::2],
        "columns": torch.randn(rows, width + 5, dtype=dtype)[:, 3 : 3 + width],
        "one row": torch.randn(1, width, dtype=dtype).expand(rows, width),
        "one column": torch.randn(rows, 1, dtype=dtype).expand(rows, width),
        "one number": torch.randn(1, 1, dtype=dtype).expand(rows, width),
        "overlapping": torch.randn(rows + width - 1, dtype=dtype).unfold(0, width, 1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "height", "width"), [(1, 2, 2), (3, 3, 2), (4, 5, 7), (5, 2, 9), (130, 4, 4)])
def test_sums_of_any_layout(rows: int, height: int, width: int, dtype: torch.dtype) -> None:
    digits = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    weights = {"plain": torch.rand(rows, dtype=dtype), "one": torch.rand(1, dtype=dtype).expand(rows),
               "every other": torch.rand(2 * rows, dtype=dtype)[::2]}  # fmt: skip
    for left, right, factors in itertools.product(
        layouts(rows, height, dtype).values(), layouts(rows, width, dtype).values(), weights.values()
    ):
        out = torch.randn(height, width, dtype=dtype)
        one, other = (left * factors[:, None], right) if height <= width else (left, right * factors[:, None])
        wanted = out.double() + one.double().mT @ other.double()
        loops.add_products(out, left, right, factors)
        torch.testing.assert_close(out.double(), wanted, rtol=digits, atol=digits * max(1.0, float(wanted.abs().max())))


def test_sums_into_a_part_and_of_rows_that_lie_far_apart() -> None:
    memory = torch.zeros(30)
    loops.add_products(memory[7:19].view(3, 4), torch.ones(6, 3), torch.ones(6, 4), torch.ones(6))
    assert memory.tolist() == [0.0] * 7 + [6.0] * 12 + [0.0] * 11
    far = torch.empty((1 << 24) * 4 + 3)
    rows = far.as_strided((5, 3), (1 << 24, 1))
    rows.copy_(torch.arange(15.0).view(5, 3))
    out = torch.zeros(3, 3)
    loops.add_products(out, rows, rows, torch.ones(5))
    assert torch.equal(out.double(), rows.double().mT @ rows.double())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", range(6))
def test_what_is_not_finite_stays_where_it_is(value: float, at: int) -> None:
    for side in (0, 1):
        both = [torch.randn(6, 3), torch.randn(6, 4)]
        both[side][at, 1] = value
        out, factors = torch.zeros(3, 4), torch.rand(6) + 0.1
        loops.add_products(out, *both, factors)
        assert torch.equal(out.isfinite(), ((factors[:, None] * both[0]).mT @ both[1]).isfinite())


def test_pieces_of_any_size_are_all_of_the_work() -> None:
    torch.set_num_threads(2)
    counts, weights = (0, 1, 2, 63, 1000, 131071, 131072, 300000), (0, 1, 2, 7, 1 << 16, 1 << 17, 1 << 18)
    for count, weight in itertools.product(counts, weights):
        pieces = threads.split(count, weight)
        assert [p.start for p in pieces] == [0][: len(pieces)] + [p.stop for p in pieces[:-1]]
        assert (pieces[-1].stop if pieces else 0) == count
