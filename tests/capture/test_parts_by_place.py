"""Parameters by place in the batch: what a unit gets must not depend on how many units come before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it at the first draw, and frames that it keeps then would keep a graph
import torch.nn.functional as F
from torch import Tensor, nn

from neighbours import CLIP, largest_influence
from sparsedp import UnsupportedError
from sparsedp.clipping import Clipping
from support import assert_exact, capture_uses

N, D = 6, 3


class ByPlace(nn.Module):
    """`rows` are all zero, so that their values do not tell them apart."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.rows, self.shared = nn.Parameter(torch.zeros(20, D)), nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.out, self.table = nn.Linear(D, D), nn.Embedding(40, D)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def scaled(m: Any, n: int) -> Tensor:
    return (m.rows * 2)[:n]


def activated(m: Any, n: int) -> Tensor:
    return torch.relu(m.rows + 1)[:n]


def added_in_backward_alone(m: Any, n: int) -> Tensor:
    return m.shared + (m.rows[:n] - m.rows[:n].detach())


def hardly(m: Any, n: int) -> Tensor:
    return m.shared + 1e-3 * torch.tanh(m.rows)[:n]


def dropped_out(m: Any, n: int) -> Tensor:
    return F.dropout(m.rows + 1, 0.5)[:n]


def dropped_out_zeros(m: Any, n: int) -> Tensor:
    return F.dropout(m.rows, 0.5)[:n]


def dropped_out_by_place(m: Any, n: int) -> Tensor:
    return F.dropout((m.rows + 1)[:n], 0.5)


def with_noise(m: Any, n: int) -> Tensor:
    return m.rows[:n] + torch.randn(n, D)


def noise_by_place(m: Any, n: int) -> Tensor:
    return m.shared * (torch.rand(n, D) + torch.arange(n)[:, None])


def drawn_rows_by_place(m: Any, n: int) -> Tensor:
    return m.table(torch.randint(2, (n,)) + 2 * torch.arange(n))


MAKERS = [
    noise_by_place,
    drawn_rows_by_place,
    scaled,
    activated,
    added_in_backward_alone,
    hardly,
    dropped_out,
    dropped_out_zeros,
    dropped_out_by_place,
    with_noise,
]
MEETING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, e: x * e,
    "add": lambda x, e: x + e,
    "cat": lambda x, e: torch.cat([x, e], 1)[:, 1:-2],
    "stack": lambda x, e: torch.stack([x, e], 1).sum(1),
    "where": lambda x, e: torch.where(x > 0, x, e),
    "bmm": lambda x, e: torch.bmm(x[:, None, :], e[:, :, None] * torch.ones(D)).squeeze(1),
    "einsum": lambda x, e: torch.einsum("bi,bi->bi", x, e),
    "matmul": lambda x, e: (x[:, None, :] @ (e[:, :, None] * torch.ones(D)))[:, 0],
}


@pytest.mark.parametrize("meeting", MEETING)
@pytest.mark.parametrize("make", MAKERS)
def test_parts_by_place_are_refused(make: Callable[[Any, int], Tensor], meeting: str) -> None:
    module = ByPlace(lambda m, x: m.out(MEETING[meeting](x, make(m, len(x)))))
    with pytest.raises(UnsupportedError):
        capture_uses(module, [torch.randn(N, D)])


def expanded(m: Any, n: int) -> Tensor:
    return (m.shared * 2).expand(n, D)


def repeated(m: Any, n: int) -> Tensor:
    return torch.tanh(m.shared).repeat(n, 1)


def projected(m: Any, n: int) -> Tensor:
    return m.out(m.shared.expand(n, D))


@pytest.mark.parametrize("meeting", MEETING)
@pytest.mark.parametrize("make", [expanded, repeated, projected])
def test_the_same_part_for_all_is_exact(make: Callable[[Any, int], Tensor], meeting: str) -> None:
    assert_exact(ByPlace(lambda m, x: m.out(MEETING[meeting](x, make(m, len(x))))).double(), torch.randn(N, D).double())


@pytest.mark.parametrize("draw", [
    lambda m, n: F.dropout(m.shared.expand(n, D), 0.5),
    lambda m, n: F.dropout(torch.tanh(m.shared).repeat(n, 1), 0.5) * 2,
    lambda m, n: m.shared * torch.rand(n, D),
    lambda m, n: F.dropout(m.shared, 0.5).expand(n, D),
    lambda m, n: torch.tanh(F.dropout(m.shared, 0.5)).repeat(n, 1),
    lambda m, n: m.table(torch.randint(5, (n,))),
])  # fmt: skip
def test_the_same_part_with_draws_of_its_own(draw: Callable[[Any, int], Tensor]) -> None:
    module = ByPlace(lambda m, x: m.out(x * draw(m, len(x))))
    assert capture_uses(module, [torch.randn(N, D)]).units == N


def test_what_parts_by_place_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of where gradients go, one unit moves the sum by several times the bound."""
    module, x = ByPlace(lambda m, x: x * scaled(m, len(x))), torch.ones(N, D)
    monkeypatch.setattr("sparsedp.capture.expressions._goes_back_alike", lambda expression, dim: True)
    assert largest_influence(module, [x], Clipping(CLIP)) <= CLIP * 1.001  # units that are all alike do not show it
    x = torch.diag(torch.ones(N))[:, :D] + 0.1
    assert largest_influence(module, [x], Clipping(CLIP)) > 1.5 * CLIP
