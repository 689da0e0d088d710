"""Constants by place in the batch: what a unit meets must not depend on how many units come before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp import UnitsMixedError
from sparsedp.capture import Capture, constants_by_place, results
from support import assert_exact, batch_of, capture_uses

N, D = 6, 3

Forward = Callable[[Any, Tensor], Tensor]


class ByPlace(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(D, D), nn.Linear(D, 1), nn.Linear(D + 1, 1)
        self.frozen = nn.Embedding(20, D).requires_grad_(False)
        self.register_buffer("buffer", torch.rand(20, D))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def places(x: Tensor) -> Tensor:
    return torch.arange(len(x)).float()[:, None]


def even(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None] % 2 == 0


def written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h[:, 0] = torch.arange(len(x)).float()
    return m.b(h)


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h *= places(x)
    return m.b(h)


def attended(m: Any, x: Tensor) -> Tensor:
    q = m.a(x)[:, None].expand(-1, 4, -1)
    return m.b(F.scaled_dot_product_attention(q, q * 1, q * 1, attn_mask=places(x)[:, :, None] * torch.arange(4)).sum(1))


BY_PLACE: dict[str, Forward] = {
    "times": lambda m, x: m.b(m.a(x) * places(x)),
    "on inputs": lambda m, x: m.b(m.a(x * places(x))),
    "from the right": lambda m, x: m.b(m.a(1.0 + places(x) - x)),
    "a buffer": lambda m, x: m.b(m.a(x) * m.buffer[: len(x)]),
    "a frozen table": lambda m, x: m.b(m.a(x) + m.frozen(torch.arange(len(x)))),
    "beside": lambda m, x: m.wide(torch.cat([m.a(x), places(x)], 1)),
    "stacked": lambda m, x: m.b(torch.stack([m.a(x), m.buffer[: len(x)]], 1).sum(1)),
    "a mask": lambda m, x: m.b(m.a(x).masked_fill(even(x), 0.0)),
    "where": lambda m, x: m.b(torch.where(even(x), m.a(x), torch.zeros(()))),
    "in place": in_place,
    "mul_": lambda m, x: m.b((m.a(x) * 1).mul_(places(x))),
    "written": written,
    "a product of matrices": lambda m, x: m.b(torch.bmm(m.a(x)[:, None], torch.eye(D) * places(x)[:, :, None])[:, 0]),
    "einsum": lambda m, x: m.b(torch.einsum("bi,bi->bi", m.a(x), m.buffer[: len(x)])),
    "gathered": lambda m, x: m.b(m.a(x).gather(1, (torch.arange(len(x))[:, None] + torch.arange(D)) % D)),
    "columns": lambda m, x: m.a(x)[torch.arange(len(x)), torch.arange(len(x)) % D],
    "addcmul": lambda m, x: m.b(torch.addcmul(m.a(x), m.buffer[: len(x)], torch.ones(()))),
    "transposed": lambda m, x: m.b((m.a(x).T * torch.arange(len(x))).T),
    "end to end": lambda m, x: m.b((m.a(x).reshape(-1) * torch.arange(len(x) * D)).reshape(-1, D)),
    "a power": lambda m, x: m.b(m.a(x).abs() ** places(x)),
    "numbers": lambda m, x: m.b(m.a(x) * torch.tensor([[float(i)] for i in range(len(x))])),
    "counted up": lambda m, x: m.b(m.a(x) * torch.ones(len(x), 1).cumsum(0)),
    "not a number": lambda m, x: m.b(torch.nan_to_num(m.a(x) * torch.where(even(x), torch.nan, torch.ones(())))),
    "weights of a loss": lambda m, x: F.binary_cross_entropy_with_logits(
        m.b(m.a(x)), torch.zeros(len(x), 1), weight=places(x), reduction="none"
    ),
    "a mask of attention": attended,
}


@pytest.mark.parametrize("case", BY_PLACE)
def test_refused(case: str) -> None:
    with pytest.raises(UnitsMixedError, match="its place in the batch decides"):
        capture_uses(ByPlace(BY_PLACE[case]), torch.randn(N, D))


@pytest.mark.parametrize("case", BY_PLACE)
def test_refusing_nothing_breaks_the_bound(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the unit that comes first, the others' gradients change: the refusal is not for nothing."""
    monkeypatch.setattr(results, "require_same_for_all", lambda *_: None)
    monkeypatch.setattr(results, "is_same_in", lambda *_: True)
    torch.manual_seed(0)
    module, x = ByPlace(BY_PLACE[case]), torch.randn(N, D)

    def gradients(units: Tensor) -> Tensor:
        parameters = [p for p in module.parameters() if p.requires_grad]
        return torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(each.sum(), parameters, retain_graph=True, allow_unused=True) if g is not None])
                for each in module(units)
            ]
        )  # fmt: skip

    assert not torch.allclose(gradients(x)[1:], gradients(x[1:]), atol=1e-4)


ALIKE: dict[str, Forward] = {
    "zeros": lambda m, x: m.b(torch.tanh(m.a(x) + x.new_zeros(len(x), D))),
    "ones beside": lambda m, x: m.wide(torch.cat([m.a(x), torch.ones(len(x), 1)], 1)),
    "of all units": lambda m, x: m.b(m.a(x) + torch.arange(D)),
    "expanded": lambda m, x: m.b(m.a(x) * m.buffer[:1].expand(len(x), -1)),
    "repeated end to end": lambda m, x: m.b((m.a(x).reshape(-1) * torch.arange(D).repeat(len(x))).reshape(-1, D)),
    "a column of each unit's choice": lambda m, x: m.a(x)[torch.arange(len(x)), (x[:, 0] > 0).long()],
    "the same column": lambda m, x: m.a(x)[torch.arange(len(x)), torch.ones(len(x), dtype=torch.long)],
    "not a number, for all": lambda m, x: m.b(m.a(x)).nan_to_num() + 0 * torch.full((len(x), 1), torch.nan).nan_to_num(),
    "written for all": lambda m, x: m.b(torch.index_fill(m.a(x), 1, torch.tensor([0]), 2.0)),
    "a matrix for all": lambda m, x: m.b(m.a(x) @ m.buffer[:D]),
}


@pytest.mark.parametrize("units", [N, D, 2])
@pytest.mark.parametrize("case", ALIKE)
def test_what_is_the_same_for_all_units_is_exact(case: str, units: int) -> None:
    assert_exact(ByPlace(ALIKE[case]), torch.randn(units, D))


def test_evaluation_may_do_it() -> None:
    module = ByPlace(BY_PLACE["times"])
    capture = Capture(module, dict(module.named_parameters()), batch_of(N))
    capture.attach()
    with torch.no_grad():
        module(torch.randn(N, D))
    capture.detach()


def test_one_unit_alone_meets_a_constant_of_any_shape() -> None:
    capture_uses(ByPlace(BY_PLACE["times"]), torch.randn(1, D))


def test_where_a_constant_faces_units() -> None:
    """Counted by the rules of the operations themselves."""
    assert constants_by_place._COMBINING >= {"mul", "cat", "bmm", "einsum", "gather", "where"}
