"""Constants by place in the batch: what a unit meets must not depend on how many units come before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it at the first draw, and frames that it keeps then would keep a graph
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import sparsedp
from neighbours import CLIP, largest_influence
from sparsedp import UnitsMixedError, UnsupportedError
from sparsedp.capture import Capture
from sparsedp.clipping import Clipping
from sparsedp.nn import sequence_loss
from support import assert_exact, batch_of, capture_uses, loader_of, make_private

N, D = 6, 3

Forward = Callable[[Any, Tensor], Tensor]


class ByPlace(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(D, D), nn.Linear(D, 1), nn.Linear(D + 1, 1)
        self.scale, self.bag = nn.Parameter(torch.rand(D)), nn.EmbeddingBag(8, D, mode="sum")
        self.frozen = nn.Embedding(20, D).requires_grad_(False)
        self.frozen_bag = nn.EmbeddingBag(8, D, mode="sum").requires_grad_(False)
        self.frozen_weight = nn.Parameter(torch.rand(20, D), requires_grad=False)
        self.register_buffer("buffer", torch.rand(20, D) * torch.arange(20)[:, None])
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def places(x: Tensor) -> Tensor:
    return torch.arange(len(x)).to(x)[:, None]


def even(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None] % 2 == 0


def columns(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % D


def ids_of(x: Tensor) -> Tensor:
    return (x > 0).long()


def changed(change: Callable[[Tensor, Tensor], Any]) -> Forward:
    """A forward pass in which `change(h, x)` changes activations in place."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1
        change(h, x)
        return m.b(h + x)

    return forward


def filled(make: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], Any]) -> Forward:
    """A forward pass in which `write(constant, activations)` changes a constant in place."""

    def forward(m: Any, x: Tensor) -> Tensor:
        constant = make(x)
        write(constant, m.a(x))
        return m.b(constant)

    return forward


def attended(m: Any, x: Tensor) -> Tensor:
    q = m.a(x)[:, None].expand(-1, 4, -1)
    mask = places(x)[:, :, None] * torch.arange(4)
    return m.b(
        F.scaled_dot_product_attention(q, q * torch.rand(4, 1), q * torch.arange(4)[:, None], attn_mask=mask).sum(1)
    )


def attended_by_heads(m: Any, x: Tensor) -> Tensor:
    q, eye = m.a(x)[:, None] * torch.arange(1.0, 5)[:, None], torch.eye(D)
    mask = (places(x)[:, :, None] * torch.arange(4).to(x)).expand(-1, 4, -1)
    out, _ = F.multi_head_attention_forward(
        *[q.transpose(0, 1)] * 3, D, 1, torch.cat([m.a.weight] * 3), None, None, None, False, 0.0, eye.to(x), None, attn_mask=mask
    )  # fmt: skip
    return m.b(out.sum(0))


def added(target: Tensor, values: Tensor) -> None:
    target += values


def put(target: Tensor, index: Any, value: Any) -> None:
    target[index] = value


def packed(sequences: Tensor, lengths: Tensor, is_sorted: bool = False) -> Tensor:
    """Sums of the first steps."""
    rows = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=is_sorted)
    return pad_packed_sequence(rows, batch_first=True, total_length=D)[0].sum(1)


def put_into(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


def row_by_row(change: Callable[[int, Tensor], Tensor]) -> Forward:
    return lambda m, x: m.b(m.a(torch.stack([change(number, row) for number, row in enumerate(x)])))


def written_row(row: Tensor, index: int, value: float) -> Tensor:
    row = row * 1
    row[index] = value
    return row


def in_part(row: Tensor, number: int) -> Tensor:
    row[:2].mul_(number)
    return row


def written_without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x.clone()
        h[0, 0] = 9.0
    return m.b(m.a(h))


def part_written_without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x.clone()
        h[0, :2].mul_(9)
    return m.b(m.a(h))


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x * places(x)
    return m.b(m.a(h))


def written_through_a_part(part: Callable[[Tensor], Tensor], write: Callable[[Tensor], Any]) -> Forward:
    return changed(lambda h, x: write(part(h)))


def deeper(m: Any, x: Tensor) -> Tensor:
    return m.a(x)[:, None] * torch.arange(1.0, 5).to(x)[:, None]  # (N, 4, D)


BY_PLACE: dict[str, Forward] = {
    "times": lambda m, x: m.b(m.a(x) * places(x)),
    "on inputs": lambda m, x: m.b(m.a(x * places(x))),
    "from the right": lambda m, x: m.b(m.a(1.0 + places(x) - x)),
    "a buffer": lambda m, x: m.b(m.a(x) * m.buffer[: len(x)]),
    "a frozen parameter": lambda m, x: m.b(m.a(x) + 9 * m.frozen_weight[: len(x)].sin()).tanh(),
    "a frozen table": lambda m, x: m.b(m.a(x) * m.frozen(torch.arange(len(x)))),
    "another bias": lambda m, x: m.b(F.linear(x, m.a.weight, 9 * places(x) * torch.ones(D).to(x))).tanh(),
    "a bias of frozen weights": lambda m, x: m.b(F.linear(m.a(x), torch.eye(D).to(x), places(x) * torch.ones(D).to(x))).tanh(),
    "beside": lambda m, x: m.wide(torch.cat([m.a(x), 9 * places(x)], 1)),
    "stacked": lambda m, x: m.b(torch.stack([m.a(x), m.buffer[: len(x)]], 1).prod(1)),
    "a mask": lambda m, x: m.b(m.a(x).masked_fill(even(x), 0.0)),
    "where": lambda m, x: m.b(torch.where(even(x), m.a(x), torch.zeros(()).to(x))),
    "where, with a parameter": lambda m, x: m.b(torch.where(even(x), m.a(x), m.scale)),
    "lerp": lambda m, x: m.b(torch.lerp(m.a(x), m.scale, places(x) % 2)),
    "maximum": lambda m, x: m.b(torch.maximum(m.a(x), places(x) - 2)),
    "max of two": lambda m, x: m.b(torch.max(m.a(x), places(x) - 2)),
    "clamp": lambda m, x: m.b(m.a(x).clamp(min=places(x) - 2)),
    "prelu": lambda m, x: m.b(F.prelu(m.a(x).T, torch.arange(len(x)).to(x)).T),
    "in place": changed(lambda h, x: h.__imul__(places(x))),
    "mul_": changed(lambda h, x: h.mul_(places(x))),
    "masked_fill_": changed(lambda h, x: h.masked_fill_(even(x), 0.0)),
    "copy_": changed(lambda h, x: h[:, :2].copy_(9 * places(x).expand(-1, 2))),
    "out": lambda m, x: m.b(m.a(torch.mul(x, places(x), out=torch.empty_like(x)))),
    "written": changed(lambda h, x: put(h, (slice(None), 0), 9 * torch.arange(len(x)).to(x))),
    "written to the first": changed(lambda h, x: put(h, 0, 0.0)),
    "written to some": changed(lambda h, x: put(h, slice(None, None, 2), 0.0)),
    "written to a part of some": changed(lambda h, x: put(h, (slice(3), slice(2)), 0.0)),
    "written by numbers": changed(lambda h, x: put(h, torch.tensor([0, 2, 4]), 0.0)),
    "written by a mask that is drawn": changed(lambda h, x: put(h, (torch.rand(len(x), D) < 2)[:, 0], places(x))),
    "written by a mask": changed(lambda h, x: put(h, even(x)[:, 0], 0.0)),
    "written on a diagonal": changed(lambda h, x: put(h, (torch.arange(len(x)), columns(x)), 0.0)),
    "written from units, on a diagonal": changed(lambda h, x: put(h, (torch.arange(len(x)), columns(x)), x[:, 0])),
    "written where units say": changed(lambda h, x: put(h, (torch.arange(len(x)), ids_of(x)[:, 0]), 9 * places(x)[:, 0])),
    "index_put": changed(lambda h, x: h.index_put_((torch.tensor([0, 2]),), torch.zeros(()).to(x))),
    "index_put, accumulated": lambda m, x: m.b(
        m.a(x).index_put((torch.arange(len(x)), columns(x)), torch.full((len(x),), 9.0).to(x), accumulate=True)
    ).tanh(),
    "scattered": lambda m, x: m.b(m.a(x).scatter(1, columns(x)[:, None], 0.0)),
    "scattered to the first": lambda m, x: m.b(m.a(x).scatter(1, torch.tensor([[0, 1]]), 9.0)),
    "scattered values": lambda m, x: m.b(m.a(x).scatter(1, ids_of(x), 9 * m.buffer.to(x))).tanh(),
    "index_add": lambda m, x: m.b(m.a(x).index_add(1, torch.tensor([0, 1]), 9 * places(x).expand(-1, 2))).tanh(),
    "a part of some": written_through_a_part(lambda h: h[:3], lambda part: part.zero_()),
    "a part of one": written_through_a_part(lambda h: h[0], lambda part: part.mul_(0)),
    "a diagonal": written_through_a_part(lambda h: h.diagonal(), lambda part: part.fill_(0)),
    "a part by constants": written_through_a_part(
        lambda h: h.view(-1)[: len(h) * D].as_strided((len(h), 1), (D, 1), 1), lambda part: part.mul_(places(part))
    ),
    "into a constant": filled(lambda x: 9 * places(x).repeat(1, D), lambda c, h: put(c, (slice(None), slice(2)), h[:, :2])),
    "added to a constant": filled(lambda x: places(x).repeat(1, D), added),
    "times a constant, in place": filled(lambda x: places(x).repeat(1, D), lambda c, h: c.mul_(h)),
    "a product of matrices": lambda m, x: m.b(torch.bmm(m.a(x)[:, None], torch.eye(D).to(x) * places(x)[:, :, None])[:, 0]),
    "a product from the left": lambda m, x: m.b(((torch.eye(D).to(x) * places(x)[:, :, None]) @ m.a(x)[:, :, None])[..., 0]),
    "baddbmm of a constant with itself": lambda m, x: m.b(
        torch.baddbmm(m.a(x)[:, None], places(x)[:, :, None], places(x)[:, :, None].expand(-1, 1, D))[:, 0]
    ).tanh(),
    "baddbmm twice the same": lambda m, x: m.b(
        torch.baddbmm(m.a(x)[:, None] * torch.ones(D, 1).to(x), *[torch.eye(D).to(x) * places(x)[:, :, None]] * 2).sum(1)
    ).tanh(),
    "einsum": lambda m, x: m.b(torch.einsum("bi,bi->bi", m.a(x), m.buffer[: len(x)])),
    "einsum with a parameter": lambda m, x: m.b(torch.einsum("bi,bi,i->bi", x, m.buffer[: len(x)], m.scale)),
    "packed": lambda m, x: packed(m.a(x)[:, :, None] * m.scale, torch.arange(len(x), 0, -1).clamp(max=D), True),
    "gathered": lambda m, x: m.b(m.a(x).gather(1, (torch.arange(len(x))[:, None] + torch.arange(D)) % D)),
    "gathered from a constant": lambda m, x: m.b(m.a(x) * m.buffer[: len(x)].gather(1, ids_of(x))),
    "take_along_dim": lambda m, x: m.b(torch.take_along_dim(m.a(x), (places(x).long() + torch.arange(D)) % D, 1)),
    "columns": lambda m, x: m.a(x)[torch.arange(len(x)), columns(x)],
    "columns of a list": lambda m, x: m.a(x)[torch.arange(len(x)), columns(x).tolist()],
    "rows of a constant": lambda m, x: m.b(m.a(x) * m.buffer[: len(x)][torch.arange(len(x)), ids_of(x)[:, 0]][:, None]),
    "a mask of one each": lambda m, x: m.a(x)[F.one_hot(columns(x), D).bool()],
    "a constant by a mask of one each": lambda m, x: m.b(
        m.a(x) * m.buffer[: len(x)][F.one_hot(x.argmax(1), D).bool()].reshape(-1, 1)
    ),
    "addcmul": lambda m, x: m.b(torch.addcmul(m.a(x), 9 * m.buffer[: len(x)], torch.ones(()).to(x))).tanh(),
    "addmm": lambda m, x: m.b(torch.addmm(9 * m.buffer[: len(x)], x, m.a.weight)).tanh(),
    "searchsorted": lambda m, x: m.b(m.a(x) * torch.searchsorted(places(x) + torch.tensor([-2.0, -1.0]).to(x), x.detach())),
    "transposed": lambda m, x: m.b((m.a(x).T * torch.arange(len(x))).T),
    "end to end": lambda m, x: m.b((m.a(x).reshape(-1) * torch.arange(len(x) * D)).reshape(-1, D)),
    "positions end to end": lambda m, x: m.b(
        (deeper(m, x).flatten(0, 1) * torch.arange(len(x) * 4)[:, None]).view(-1, 4, D)
    ).sum(1),
    "two batches": lambda m, x: sum((m.b(torch.cat([m.a(x)] * 2)) * places(torch.cat([x] * 2))).chunk(2)),
    "a power": lambda m, x: m.b(m.a(x).abs() ** places(x)),
    "compared": lambda m, x: m.b(m.a(x) * (x > places(x) - 2)),
    "numbers": lambda m, x: m.b(m.a(x) * torch.tensor([[float(i)] for i in range(len(x))])),
    "one after the other": lambda m, x: m.b(m.a(x) * torch.cat([torch.full((1, 1), i) for i in range(len(x))])),
    "counted up": lambda m, x: m.b(m.a(x) * torch.ones(len(x), 1).cumsum(0)),
    "broadcast": lambda m, x: m.b(m.a(x) * torch.broadcast_tensors(places(x), x)[0]),
    "not a number": lambda m, x: m.b(torch.fmax(m.a(x), torch.where(even(x), torch.nan, 9 * torch.ones(())))),
    "infinite": lambda m, x: m.b((m.a(x) + torch.where(even(x), -torch.inf, torch.zeros(()))).sigmoid()),
    "without gradient": without_gradient,
    "without gradient, written": written_without_gradient,
    "without gradient, a part written": part_written_without_gradient,
    "bags of weights end to end": lambda m, x: m.b(m.a(x) * m.bag(
        ids_of(x).flatten(), torch.arange(len(x)) * D, per_sample_weights=torch.arange(len(x) * D).to(m.scale)
    )),
    "weights of a loss": lambda m, x: F.binary_cross_entropy_with_logits(
        m.b(m.a(x)), torch.zeros(len(x), 1).to(x), weight=places(x), reduction="none"
    ),
    "weights of a summed loss": lambda m, x: F.binary_cross_entropy_with_logits(
        m.b(m.a(x)), torch.zeros(len(x), 1).to(x), weight=9 * even(x).to(x), reduction="sum"
    ),
    "targets": lambda m, x: F.mse_loss(m.b(m.a(x)), 9.0 * even(x).to(x) - 4, reduction="sum"),
    "classes": lambda m, x: F.cross_entropy(m.a(x), columns(x), reduction="sum"),
    "classes of a mean": lambda m, x: len(x) * F.cross_entropy(m.a(x), columns(x)),
    "classes of positions": lambda m, x: F.cross_entropy(
        deeper(m, x).transpose(1, 2), columns(x)[:, None].expand(-1, 4), reduction="sum"
    ),
    "likelihoods": lambda m, x: F.nll_loss(m.a(x).log_softmax(1), columns(x), reduction="sum"),
    "distributions": lambda m, x: F.cross_entropy(m.a(x), F.one_hot(columns(x), D).to(x), reduction="sum"),
    "classes of sequence_loss": lambda m, x: len(x) * sequence_loss(m.a(x), columns(x), ignore=-1),
    "a mask of attention": attended,
    "a mask of attention by heads": attended_by_heads,
    "bags of weights": lambda m, x: m.b(m.a(x) * m.bag(ids_of(x), per_sample_weights=places(x).float().expand(-1, D))),
    "frozen bags of weights": lambda m, x: m.b(
        m.a(x) * m.frozen_bag(ids_of(x), per_sample_weights=places(x).float().expand(-1, D))
    ),
    "row by row": row_by_row(lambda number, row: row * number),
    "row by row, constants": row_by_row(lambda number, row: row * torch.full((), float(number))),
    "row by row, written": row_by_row(lambda number, row: written_row(row, 0, float(number))),
    "row by row, a part written": row_by_row(lambda number, row: in_part(row * 1, number)),
    "row by row, other columns": row_by_row(lambda number, row: row[number % D].expand(D)),
    "row by row, other operations": row_by_row(lambda number, row: row if number % 2 else row.neg()),
    "row by row, by number": lambda m, x: m.b(m.a(torch.stack([x[i].roll(i) for i in range(len(x))]))),
    "row by row, of two tensors": lambda m, x: m.b(m.a(torch.stack([(x, -x)[i % 2][i] for i in range(len(x))]))),
}  # fmt: skip

# What is drawn, by a law that goes by the place.
DRAWN_BY_PLACE: dict[str, Forward] = {
    "times": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) * places(x))),
    "chances": lambda m, x: m.b(m.a(x) * torch.bernoulli(torch.linspace(0, 1, len(x)))[:, None]),
    "chances in place": lambda m, x: m.b(m.a(x) * torch.empty(len(x)).bernoulli_(torch.linspace(0, 1, len(x)))[:, None]),
    "compared": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) < torch.linspace(0, 1, len(x))[:, None])),
    "in place": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).mul_(places(x))),
    "moved": lambda m, x: m.b(m.a(x) * (torch.rand(1, len(x)) * places(x).T).transpose(0, 1).expand(-1, D)),
    "end to end": lambda m, x: m.b(
        (deeper(m, x).flatten(0, 1) * (torch.rand(len(x), 4) * places(x)).flatten()[:, None]).view(-1, 4, D)
    ).sum(1),
    "written": lambda m, x: m.b(m.a(x) * _with_first(torch.rand(len(x), 1))),
    "a mean": lambda m, x: m.b(m.a(x) * torch.normal(places(x).float(), 1.0)),
    "left out": lambda m, x: m.b(m.a(x) * F.dropout(places(x).float(), 0.5)),
    "counted up": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) < 2).cumsum(0)),
    "added up": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).cumsum(0)),
    "sorted": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).sort(0)[0]),
    "all in another order": lambda m, x: m.b(m.a(x) * torch.randperm(len(x))[:, None]),
    "all in order": lambda m, x: m.b(m.a(x) * torch.randperm(len(x)).sort()[0][:, None]),
    "where they are": lambda m, x: m.b(m.a(x) * (torch.rand(len(x)) >= 0).nonzero()),
    "beside a constant": lambda m, x: m.b(m.a(x) * torch.cat([torch.rand(1, 1), torch.full((len(x) - 1, 1), 9.0)])),
    "of other laws, one after the other": lambda m, x: m.b(m.a(x) * torch.cat([torch.rand(1, 1) * i for i in range(len(x))])),
    "of other laws, stacked": lambda m, x: m.b(m.a(x) * torch.stack([torch.randint(0, i + 1, (1,)) for i in range(len(x))])),
    "a part of another law": lambda m, x: m.b(m.a(x) * (torch.rand(20, 1) * torch.arange(20)[:, None])[: len(x)]),
    "turned round": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) * places(x)).flip(0)),
    "two each": lambda m, x: m.b(m.a(x) * (torch.rand(2 * len(x)) * torch.arange(2 * len(x))).view(-1, 2)[:, :1]),
    "scattered": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).scatter(0, torch.tensor([[0]]), 99.0)),
    "index_fill": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).index_fill(0, torch.tensor([0]), 99.0)),
    "padded": lambda m, x: m.b(m.a(x) * F.pad(torch.rand(len(x) - 1, 1), (0, 0, 1, 0), value=99.0)),
    "a triangle": lambda m, x: m.b(m.a(x) * torch.rand(len(x), D).tril()),
    "a part filled": lambda m, x: m.b(m.a(x) * _with_filled_part(torch.rand(len(x), 1))),
    "a view written": lambda m, x: m.b(m.a(x) * _with_written_view(torch.rand(len(x), 1))),
    "written behind a view": lambda m, x: m.b(m.a(x) * _written_behind(torch.rand(len(x), 1))),
    "drawn into the first": lambda m, x: m.b(m.a(x) * _with_drawn_part(9 * places(x), slice(1))),
    "drawn beside": lambda m, x: m.b(m.a(x) * _with_drawn_part(9 * places(x).repeat(1, 2), (slice(None), 1))[:, :1]),
    "of the type of activations": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) * places(x)).to(x).expand_as(x)),
    "row by row": row_by_row(lambda number, row: row * (torch.rand(1) * number)),
    "row by row, between": row_by_row(lambda number, row: row * torch.empty(1).uniform_(number, number + 0.1)),
    "row by row, integers": row_by_row(lambda number, row: row * torch.randint(number, number + 1, (1,))),
    "row by row, means": row_by_row(lambda number, row: row * torch.normal(float(number), 0.1, (1,))),
    "written by a mask": lambda m, x: m.b(
        m.a(x) * put_into(torch.ones(len(x), 1), torch.rand(len(x), 1) < torch.linspace(0, 1, len(x))[:, None], 0.0)
    ),
    "a constant times draws, in place": lambda m, x: m.b(m.a(x) * places(x).mul_(torch.rand(len(x), 1))),
}  # fmt: skip


def _with_filled_part(drawn: Tensor) -> Tensor:
    drawn[0].fill_(99.0)
    return drawn


def _with_written_view(drawn: Tensor) -> Tensor:
    drawn.view(-1)[0] = 99.0
    return drawn


def _written_behind(drawn: Tensor) -> Tensor:
    view = drawn[:, :1]
    drawn[0] = 99.0
    return view


def _with_drawn_part(constant: Tensor, index: Any) -> Tensor:
    constant[index].uniform_()
    return constant


def _with_first(drawn: Tensor) -> Tensor:
    drawn[0] = 9.0
    return drawn


def loss_of(output: Tensor) -> Tensor:
    return output if output.ndim == 0 else output.sin().sum() + output.square().sum() / 7


def inputs() -> list[Tensor]:
    return [2 * torch.randn(N, D)]


@pytest.mark.parametrize("case", BY_PLACE)
def test_refused(case: str) -> None:
    with pytest.raises((UnitsMixedError, UnsupportedError)) as raised:
        capture_uses(ByPlace(BY_PLACE[case]), inputs(), loss_of)
    refusal = raised.value.refusal
    if case.startswith("without gradient"):  # where it is refused is where a parameter meets what came of it
        assert refusal is not None and refusal.origin
        return
    assert "its place in the batch decides" in raised.value.message
    assert refusal is not None and refusal.file == __file__ and refusal.line and refusal.operation


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    results = "sparsedp.capture.results"
    for name, answer in (
        ("meets_by_place", False), ("writes_alike", True), ("is_index_alike", True), ("is_part_alike", True),
        ("are_joined_by_place", False), ("is_same", True),
    ):  # fmt: skip
        monkeypatch.setattr(f"{results}.{name}", lambda *_, answer=answer: answer)


@pytest.mark.parametrize("case", BY_PLACE)
def test_what_it_would_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal, one unit moves the sum by more than the bound, in one of some batches."""
    unguarded(monkeypatch)
    for _ in range(40):
        influence = largest_influence(ByPlace(BY_PLACE[case]), inputs(), Clipping(CLIP), loss_of) / CLIP
        if influence > 1.05:
            print(f"{influence:.1f} C: {case}")
            return
    pytest.fail("The refusal is for nothing.")


@pytest.mark.parametrize("case", DRAWN_BY_PLACE)
def test_laws_by_place_are_refused(case: str) -> None:
    with pytest.raises(UnitsMixedError, match="its place in the batch decides"):
        capture_uses(ByPlace(DRAWN_BY_PLACE[case]), inputs())


def padded(m: Any, x: Tensor) -> Tensor:
    buffer = torch.empty(len(x), 4).to(x)
    buffer[:, :3] = m.a(x)
    buffer[:, 3] = 1.0
    return m.wide(buffer)


def pooled(m: Any, x: Tensor) -> Tensor:
    """Of unequal lengths, by each unit's own data: what Python does with them is not compared."""
    picked = [row[row > 0] for row in x]
    return m.b(m.a(torch.stack([(row.sum() / max(len(row), 1)).expand(D) for row in picked])))


def pooled_by_numbers(m: Any, x: Tensor) -> Tensor:
    counts = (x > 0).sum(1).tolist()
    return m.b(m.a(torch.stack([row[: max(count, 1)].mean().expand(D) for row, count in zip(x, counts)])))


def decided(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(torch.stack([row if row.sum() > 0 else -row for row in x])))


ALIKE: dict[str, Forward] = {
    "zeros": lambda m, x: m.b(torch.tanh(m.a(x) + x.new_zeros(len(x), D))),
    "ones beside": lambda m, x: m.wide(torch.cat([m.a(x), torch.ones(len(x), 1).to(x)], 1)),
    "of all units": lambda m, x: m.b(m.a(x) + torch.arange(D)),
    "expanded": lambda m, x: m.b(m.a(x) * m.buffer[1:2].expand(len(x), -1)),
    "of shape 1": lambda m, x: m.b(m.a(x) * m.buffer[1:2]),
    "repeated": lambda m, x: m.b(m.a(x) * m.buffer[1].repeat(len(x), 1)),
    "repeated end to end": lambda m, x: m.b((m.a(x).reshape(-1) * torch.arange(D).repeat(len(x))).reshape(-1, D)),
    "through frozen layers": lambda m, x: m.b(
        m.a(x) * F.linear(m.buffer[1].expand(len(x), -1), m.frozen_weight[:D])
    ),
    "positions": lambda m, x: m.b(deeper(m, x) * m.buffer[:4]).sum(1),
    "as many positions as units": lambda m, x: m.b(
        m.a(x)[:, None].expand(-1, len(x), -1) * m.buffer[:1].expand(len(x), -1)
    ).sum(1) / len(x),
    "positions end to end": lambda m, x: m.b(
        (deeper(m, x).flatten(0, 1) * m.buffer[:4].repeat(len(x), 1)).view(-1, 4, D)
    ).sum(1),
    "a column of each unit's choice": lambda m, x: m.a(x)[torch.arange(len(x)), (x[:, 0] > 0).long()],
    "the same column": lambda m, x: m.a(x)[torch.arange(len(x)), torch.ones(len(x), dtype=torch.long)],
    "a constant by each unit's choice": lambda m, x: m.b(m.a(x) * m.buffer[ids_of(x)[:, 0] + 1]),
    "not a number, for all": lambda m, x: m.b(m.a(x)).nan_to_num() + (0 * torch.full((len(x), 1), torch.nan).to(x) + x[:, :1]).nan_to_num(),
    "infinite for all": lambda m, x: m.b((m.a(x) + torch.tensor([0.0, 0.0, -torch.inf]).expand(len(x), -1).clone().to(x)).sigmoid()),
    "written for all": lambda m, x: m.b(torch.index_fill(m.a(x), 1, torch.tensor([0]), 2.0)),
    "a matrix for all": lambda m, x: m.b(m.a(x) @ m.buffer[:D]),
    "a column written": changed(lambda h, x: put(h, (slice(None), 0), torch.ones(len(x)).to(x))),
    "all written": changed(lambda h, x: put(h[:, 1:], slice(None), 2.0)),
    "where units say": changed(lambda h, x: put(h, x > 0, 1.0)),
    "written where units say": changed(lambda h, x: put(h, (torch.arange(len(x)), ids_of(x)[:, 0]), torch.ones(len(x)).to(x))),
    "a diagonal of each": lambda m, x: m.b(_without_diagonal(m.a(x)[:, :, None] * m.a(x)[:, None]).sum(1)),
    "scattered": lambda m, x: m.b(m.a(x).scatter(1, torch.tensor([[0, 2]]).expand(len(x), -1), 0.0)),
    "into zeros": filled(lambda x: torch.zeros_like(places(x)).repeat(1, D), lambda c, h: put(c, (slice(None), slice(2)), h[:, :2])),
    "into nothing yet": padded,
    "a mask of one each": lambda m, x: m.a(x)[torch.tensor([True, False, False]).expand(len(x), -1)],
    "classes": lambda m, x: F.cross_entropy(m.a(x), torch.ones(len(x), dtype=torch.long), reduction="none"),
    "class weights": lambda m, x: F.cross_entropy(
        m.a(x), ids_of(x)[:, 0], weight=torch.arange(1.0, D + 1).to(x), reduction="none"
    ),
    "targets": lambda m, x: F.mse_loss(m.b(m.a(x)), torch.zeros(len(x), 1).to(x), reduction="none"),
    "bags of weights": lambda m, x: m.b(
        m.a(x) + m.bag(ids_of(x), per_sample_weights=torch.arange(D).to(x).expand(len(x), -1))
    ),
    "bags of weights end to end": lambda m, x: m.b(
        m.a(x) + m.bag(ids_of(x).flatten(), torch.arange(len(x)) * D, torch.arange(D).to(x).repeat(len(x)))
    ),
    "all of them, by number": lambda m, x: m.b(m.a(x).index_select(0, torch.arange(len(x)))),
    "packed": lambda m, x: packed(m.a(x)[:, :, None] * m.scale, torch.full((len(x),), 2)),
    "packed by units": lambda m, x: packed(m.a(x)[:, :, None] * m.scale, (x > 0).sum(1).clamp(1)),
    "row by row, written": row_by_row(lambda number, row: written_row(row, 1, 2.0)),
    "row by row": row_by_row(lambda number, row: row * 2 + torch.full((), 3.0).to(row)),
    "row by row, of two tensors": lambda m, x: m.b(m.a(torch.stack([a * b[0] for a, b in zip(x, x.sin())]))),
    "row by row, by its own shape": pooled,
    "row by row, by its own numbers": pooled_by_numbers,
    "row by row, by its own values": decided,
}  # fmt: skip


def _without_diagonal(squares: Tensor) -> Tensor:
    squares.diagonal(dim1=1, dim2=2).fill_(0)
    return squares


@pytest.mark.parametrize("units", [4, D, 1])
@pytest.mark.parametrize("case", ALIKE)
def test_what_is_the_same_for_all_units_is_exact(case: str, units: int) -> None:
    assert_exact(ByPlace(ALIKE[case]), torch.randn(units, D))


@pytest.mark.parametrize("case", ["times", "columns", "written", "in place", "gathered", "classes", "into a constant"])
def test_a_batch_without_units_meets_nothing(case: str) -> None:
    assert capture_uses(ByPlace(BY_PLACE[case]), [torch.zeros(0, D)], loss_of).units == 0


DRAWN: dict[str, Forward] = {
    "times": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1)),
    "stochastic depth": lambda m, x: m.b(m.a(x) * x.new_empty(len(x), 1).bernoulli_(0.5).div_(0.5)),
    "stochastic depth, another": lambda m, x: m.b(m.a(x) * (0.5 + torch.rand(len(x), 1)).floor_()),
    "orders": lambda m, x: m.b(m.a(x).gather(1, torch.rand(len(x), D).argsort(1)[:, :2].repeat(1, 2)[:, :D])),
    "by position": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), D) * torch.arange(D))),
    "chances by position": lambda m, x: m.b(m.a(x) * torch.bernoulli(torch.linspace(0, 1, D).expand(len(x), -1))),
    "written": lambda m, x: m.b(m.a(x) * _with_drawn(torch.ones(len(x), D))),
    "rows of a frozen table": lambda m, x: m.b(m.a(x) * m.frozen(torch.randint(20, (len(x),)))),
    "masked": lambda m, x: m.b(m.a(put_into(x.clone(), torch.rand_like(x.detach()) < 0.5, 0.0))),
    "masked by numbers from the shape": lambda m, x: m.b(m.a(put_into(x.clone(), torch.rand(len(x), D) < 0.5, 0.0))),
    "a mask of a mask": lambda m, x: m.b(m.a(x) * put_into(torch.ones(len(x), D), torch.rand(len(x), D) < 0.5, 0.0)),
    "a column each": lambda m, x: m.b(m.a(put_into(x.clone(), (torch.arange(len(x)), torch.randint(D, (len(x),))), 0.0))),
    "a column each, put": lambda m, x: m.b(
        m.a(x.index_put((torch.arange(len(x)), torch.randint(D, (len(x),))), torch.zeros(())))
    ),
    "noise in place": lambda m, x: m.b(m.a(x) + torch.zeros(len(x), D).normal_().clamp_(-1, 1)),
    "of the same mean": lambda m, x: m.b(m.a(x) * torch.normal(torch.ones(len(x), 1), 1.0)),
    "a part": lambda m, x: m.b(m.a(x) * torch.rand(2 * len(x), 1)[: len(x)]),
    "two each": lambda m, x: m.b(m.a(x) * torch.rand(2 * len(x)).view(-1, 2)[:, :1]),
    "one for all": lambda m, x: m.b(m.a(x) * torch.rand(1, D).expand(len(x), -1)),
    "turned": lambda m, x: m.b(m.a(x) * (torch.rand(D, len(x)) * torch.arange(D)[:, None]).T),
    "kept of each": lambda m, x: m.b(m.a(x) * torch.rand(len(x), D).softmax(1).cumsum(1)),
    "compared with a number": lambda m, x: m.b(m.a(x) * (torch.rand(len(x), 1) < torch.tensor(0.5)).to(x).div_(0.5)),
    "a column of zeros": lambda m, x: m.b(m.a(x) * put_into(torch.rand(len(x), D), (slice(None), 0), 0.0)),
    "of the type of activations": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).to(x).type_as(x)),
    "row by row": row_by_row(lambda number, row: F.dropout(row * (torch.rand(D) * torch.arange(D)), 0.2)),
    "of the shape of activations": lambda m, x: m.b(m.a(x) * torch.rand(len(x), 1).expand_as(x)),
    "a matrix for each": lambda m, x: m.b((torch.rand(len(x), D, D).tril() @ m.a(x)[:, :, None])[..., 0]),
}  # fmt: skip


def _with_drawn(constant: Tensor) -> Tensor:
    constant[:, 0] = torch.rand(len(constant))
    constant[:, 1].bernoulli_(0.5)
    return constant


def test_ids_that_count_the_units_by_accident() -> None:
    """They are each unit's own."""
    module = ByPlace(lambda m, x: m.b(m.a(x) * m.frozen_weight[:2][x[:, 0].detach().long()]))
    assert_exact(module, torch.tensor([[0.0, 1.0, 2.0], [1.0, 3.0, 1.0]]))


@pytest.mark.parametrize("case", DRAWN)
def test_numbers_of_one_law_may_differ(case: str) -> None:
    assert capture_uses(ByPlace(DRAWN[case]), inputs()).units == N


def test_elements_by_place_in_memory_have_no_known_units() -> None:
    forward = lambda m, x: m.a(x).as_strided((len(x), 1), (D + 1, 1)) * 1  # noqa: E731  the diagonal
    with pytest.raises(UnitsMixedError, match="in a place that is not known"):
        capture_uses(ByPlace(forward), [torch.randn(D, D)])


def routed(meet: Callable[[Any, Tensor], Tensor]) -> Forward:
    """Rows that a mask of the units picks, with a parameter."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h, mask = m.a(x), x[:, 0] > 0
        out = torch.zeros_like(h)
        out[mask] = meet(m, h[mask])
        return m.b(out)

    return forward


def test_rows_that_units_pick_meet_the_same() -> None:
    assert_exact(ByPlace(routed(lambda m, rows: torch.addcmul(rows, m.scale, torch.ones_like(m.scale)))), *inputs())
    for meet in (
        lambda m, rows: torch.addcmul(rows, m.scale, places(rows)),
        lambda m, rows: torch.where(even(rows), rows, m.scale),
    ):
        with pytest.raises(UnitsMixedError, match="its place in the batch decides"):
            capture_uses(ByPlace(routed(meet)), [torch.randn(N, D).abs()])


@pytest.mark.parametrize("diagonal", [
    lambda m, h: torch.einsum("bb->b", h),
    lambda m, h: torch.einsum("bb,bi->b", h, m.frozen_weight[:1].expand(len(h), -1)),
    lambda m, h: torch.einsum("bb,i->bi", h, m.scale),
])  # fmt: skip
def test_diagonals_are_refused(diagonal: Callable[[Any, Tensor], Tensor]) -> None:
    """As wide as there are units, by accident: place b in the batch would pick element b."""
    forward = lambda m, x: diagonal(m, m.a(x)[:, :1] * torch.arange(len(x)))  # noqa: E731
    with pytest.raises((UnitsMixedError, UnsupportedError), match=r"combines the units|diagonal"):
        capture_uses(ByPlace(forward), inputs())


class ByPlaceBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.arange(len(grad))[:, None]


def test_gradients_by_place_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not keep units apart"):
        capture_uses(ByPlace(lambda m, x: m.b(ByPlaceBackwards.apply(m.a(x)))), inputs())


def test_evaluation_may_do_it() -> None:
    module = ByPlace(BY_PLACE["times"])
    capture = Capture(module, dict(module.named_parameters()), batch_of(N))
    capture.attach()
    with torch.no_grad():
        module(torch.randn(N, D))
    capture.detach()


def test_one_unit_alone_meets_a_constant_of_any_shape() -> None:
    capture_uses(ByPlace(BY_PLACE["times"]), [torch.randn(1, D)])


def test_explained() -> None:
    """With the line, and what comes behind it is seen as well."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * places(x)
        return m.b(h - h.mean(0))

    explained = sparsedp.explain(
        ByPlace(forward), lambda out, y: (out - y).square().mean(), (torch.randn(N, D), torch.randn(N, 1))
    )
    (by_place, mixing) = explained.refusals
    assert "its place in the batch decides" in by_place.reason and by_place.operation == "mul"
    assert by_place.source == "h = m.a(x) * places(x)" and by_place.operands[0].startswith("(6*, 3)")
    assert "mean" in mixing.reason


def test_explained_in_the_loss() -> None:
    """Capture does not follow a loss outside of forward(); `explain` does, and `check` compares."""
    module, batch = ByPlace(lambda m, x: m.a(x)), (torch.randn(N, D), torch.zeros(N, 1))
    loss = lambda out, y: F.cross_entropy(out, torch.arange(len(out)) % D)  # noqa: E731
    assert any("its place in the batch decides" in r.reason for r in sparsedp.explain(module, loss, batch).refusals)
    with pytest.raises(UnitsMixedError):
        sparsedp.check(module, loss, batch)


def test_refused_in_training() -> None:
    _, module, _, loader = make_private(ByPlace(BY_PLACE["a buffer"]), loader_of(torch.randn(40, D), batch_size=20))
    with pytest.raises(UnitsMixedError, match="its place in the batch decides"):
        for (x,) in loader:
            module(x)


class Remembering(nn.Module):
    """Draws a mask once, and uses it again."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.mask = nn.Linear(D, 1), [torch.ones(())]

    def forward(self, x: Tensor) -> Tensor:
        if self.mask[0].shape[:1] != x.shape[:1]:
            self.mask[0] = torch.rand(len(x), 1)
        return self.out(x * self.mask[0])


def test_numbers_that_were_drawn_for_another_batch_are_constants() -> None:
    module, batches = Remembering(), [batch_of(N)(), batch_of(N)()]
    capture = Capture(module, dict(module.named_parameters()), lambda: batches[0])
    capture.attach()
    module(torch.randn(N, D)).sum().backward()
    capture.collect()
    module(torch.randn(N, D)).sum().backward()  # of the same batch
    capture.collect()
    batches.pop(0)
    with pytest.raises(UnitsMixedError, match="its place in the batch decides"):
        module(torch.randn(N, D))
    capture.detach()


@torch.jit.script
def scripted_by_place(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[0]).unsqueeze(1)


def test_scripted_functions() -> None:
    """They are tried with the units in another order."""
    with pytest.raises(UnsupportedError, match="is not known"):
        capture_uses(ByPlace(lambda m, x: m.b(m.a(scripted_by_place(x)))), inputs())


def test_what_is_not_seen() -> None:
    """A loss outside of forward(), and rows in a pass that made Python values of units: docs/pitfalls.md has the sizes."""

    def by_place(out: Tensor) -> Tensor:
        return F.cross_entropy(out, columns(out), reduction="sum")

    def rows(m: Any, x: Tensor) -> Tensor:
        counts = (x > 0).sum(1).tolist()
        return m.b(
            m.a(torch.stack([row * number * (1 + 0 * count) for number, (row, count) in enumerate(zip(x, counts))]))
        )

    outside = largest_influence(ByPlace(lambda m, x: m.a(x)), inputs(), Clipping(CLIP), by_place) / CLIP
    python = max(largest_influence(ByPlace(rows), inputs(), Clipping(CLIP)) / CLIP for _ in range(5))
    print(f"{outside:.1f} C: targets outside of forward; {python:.1f} C: rows by Python numbers")
    assert outside > 1.05 and python > 1.05
