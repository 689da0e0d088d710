"""Rows of which units decide how many they have, or the order, are followed by their owners: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import sparsedp.nn
from neighbours import CLIP, largest_influence
from sparsedp import UnitsMixedError, UnsupportedError
from sparsedp.clipping import Clipping
from support import Apply, assert_exact, capture_uses

B, L, D, E = 5, 4, 6, 3
REFUSED = (UnsupportedError, UnitsMixedError)


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed)).double()


def module(forward: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(3)
    return Apply(
        forward, gate=nn.Linear(D, E), a=nn.Linear(D, D), b=nn.Linear(D, D), norm=nn.LayerNorm(D), table=nn.Embedding(9, D),
        w=nn.Parameter(torch.randn(D)), experts=nn.Parameter(torch.randn(E, D, D)), out=nn.Linear(D, 1),
    ).double()  # fmt: skip


def routed_by_where(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, D)
    weights, chosen = m.gate(flat).softmax(-1).topk(2, dim=-1)
    mask = F.one_hot(chosen, E).permute(2, 1, 0)
    total = torch.zeros_like(flat)
    for number in range(E):
        which, rows = torch.where(mask[number])
        done = m.norm(m.a(flat[None, rows].reshape(-1, D)).relu() * (number + 1)) * m.w
        total.index_add_(0, rows, done * weights[rows, which, None])
    return m.out(total.view(x.shape))


def routed_over_hits(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, D)
    mask = F.one_hot(m.gate(flat).argmax(-1), E).T[:, None]
    total = torch.zeros_like(flat)
    for number in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        which, rows = torch.where(mask[number].squeeze(0))
        total.index_add_(0, rows, F.linear(flat[rows], m.experts[int(number)]) + which[:, None])
    return m.out(total.view(x.shape))


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    try:
        return F.grouped_mm(rows, weights, offs=ends)
    except RuntimeError:  # torch's own does not take float64
        edges = [0, *ends.tolist()]
        return torch.cat([rows[first:last] @ weights[n] for n, (first, last) in enumerate(pairwise(edges))])


def routed_by_sort(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, D)
    weights, chosen = m.gate(flat).softmax(-1).topk(2, dim=-1)
    keys, order = torch.sort(chosen.reshape(-1))
    rows = flat[order // 2]
    ends = torch.cumsum(torch.histc(keys.float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)
    done = grouped(rows, m.experts.transpose(-2, -1), ends) + m.table(keys)
    done = done * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return m.out(done[back].view(-1, 2, D).sum(1).view(x.shape))


def by_mask(m: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 0
    picked = m.a(x[mask])
    result = torch.zeros_like(x)
    result[mask] = picked * m.w + picked.square()
    return m.out(result + x)


def whole_units_by_mask(m: Any, x: Tensor) -> Tensor:
    mask = x[:, 0, 0] > 0
    result = torch.zeros(len(x), D, dtype=x.dtype)
    result[mask] = m.a(x[mask, 1]) * m.b(x[mask]).sum(1)
    return m.out(result + x[:, 0])


def selected_elements(m: Any, x: Tensor) -> Tensor:
    mask = x[:, 0, 0] > 0
    result = torch.zeros(len(x), L, D, dtype=x.dtype)
    result[mask] = m.a(torch.masked_select(x, mask.view(-1, 1, 1)).view(-1, L, D))
    return m.out(result)


def ids_by_nonzero(m: Any, x: Tensor) -> Tensor:
    ids = (x[..., 1] * 2).long().abs().clamp(max=8).reshape(-1)
    rows = (x[..., 0].reshape(-1) > 0).nonzero().squeeze(1)
    result = torch.zeros(len(ids), D, dtype=x.dtype)
    result[rows] = m.table(ids[rows]) + m.a(m.table(ids.index_select(0, rows)))
    return m.out(result.view(len(x), L, D))


def there_and_back(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort(descending=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    states = m.a(x[order])
    return m.out((states.transpose(0, 1) * m.w).transpose(0, 1)[back] + x)


def losses_of_rows(m: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 0
    target = (x[..., 1] > 0).long()
    result = torch.zeros(mask.shape, dtype=x.dtype)
    result[mask] = F.cross_entropy(m.gate(x[mask]), target[mask], reduction="none")
    return result


EXACT: dict[str, Callable[..., Tensor]] = {
    "experts by where": routed_by_where,
    "experts that are hit": routed_over_hits,
    "experts by sort": routed_by_sort,
    "a mask": by_mask,
    "whole units": whole_units_by_mask,
    "masked_select": selected_elements,
    "nonzero": ids_by_nonzero,
    "a sort that comes back": there_and_back,
    "losses": losses_of_rows,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_exact_by_their_owners(name: str, seed: int) -> None:
    assert_exact(module(EXACT[name]), tokens(seed))


@pytest.mark.parametrize("name", EXACT)
def test_one_unit_moves_the_clipped_sum_by_no_more_than_the_bound(name: str) -> None:
    assert largest_influence(module(EXACT[name]), [tokens()], Clipping(CLIP)) <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("name", EXACT)
def test_units_without_any_row_and_batches_of_one(name: str) -> None:
    x = tokens()
    x[1, :, 0] = -1.0
    assert_exact(module(EXACT[name]), x)
    assert_exact(module(EXACT[name]), x[1:2])
    assert_exact(module(EXACT[name]), x[:1])


def mask_of(x: Tensor) -> Tensor:
    return x[..., 0] > 0


def numbers_of(x: Tensor) -> Tensor:
    return mask_of(x).reshape(-1).nonzero().squeeze(1)


def back_to(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(B * L, values.shape[-1], dtype=x.dtype).index_add(0, rows, values).view(len(x), L, -1)


def sorted_units(x: Tensor) -> Tensor:
    return x[:, 0, 0].argsort()


def written(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[mask] = values
    return result


def groups_of_others(m: Any, x: Tensor) -> Tensor:
    """Rows sorted by one number, and grouped by how many have another."""
    flat = x.reshape(-1, D)
    keys, order = torch.sort((flat[:, 0] > 0).long())
    ends = torch.cumsum(torch.histc((flat[:, 1] > 0).float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)
    done = F.grouped_mm(flat[order], m.experts.transpose(-2, -1), offs=ends)
    return m.out(torch.zeros_like(flat).index_add(0, order, done).view(x.shape))


def of_flat(x: Tensor) -> Tensor:
    return x.reshape(-1, D)


MIXING: dict[str, Callable[..., Tensor]] = {
    "rows in another order": lambda m, x: m.out(m.a(x) + m.a(x)[sorted_units(x)]),
    "a sort that does not come back": lambda m, x: m.out(m.a(x[sorted_units(x)])),
    "sorted by another": lambda m, x: m.out(m.a(x[sorted_units(x)])[x[:, 1, 0].argsort()]),
    "a constant order": lambda m, x: m.out(m.a(x) + x[torch.arange(len(x)).roll(1)]),
    "a constant order of units alone": lambda m, x: m.out(m.a(x[torch.arange(len(x)).roll(1)])),
    "numbers that are ids": lambda m, x: back_to(x, numbers_of(x), m.table(numbers_of(x) % 9)),
    "numbers as data": lambda m, x: back_to(x, numbers_of(x), m.a(of_flat(x)[numbers_of(x)]) * numbers_of(x)[:, None]),
    "ranks as data": lambda m, x: m.out(m.a(x)) * sorted_units(x).argsort()[:, None, None],
    "numbers of the next row": lambda m, x: back_to(x, numbers_of(x), m.a(of_flat(x)[(numbers_of(x) + L) % len(of_flat(x))])),
    "rows to the next unit": lambda m, x: back_to(x, (numbers_of(x) + L) % len(of_flat(x)), m.a(of_flat(x)[numbers_of(x)])),
    "ids of units as numbers": lambda m, x: m.out(m.a(x)[(x[:, 0, 0] > 0).long()]),
    "constants by row": lambda m, x: back_to(
        x, numbers_of(x), m.a(of_flat(x)[numbers_of(x)]) * torch.arange(len(numbers_of(x)))[:, None]),
    "constants by row, in place": lambda m, x: back_to(
        x, numbers_of(x), m.a(of_flat(x)[numbers_of(x)]).add_(torch.arange(len(numbers_of(x)))[:, None])),
    "constants by row, joined": lambda m, x: back_to(x, numbers_of(x), torch.cat(
        [m.a(of_flat(x)[numbers_of(x)]), torch.arange(len(numbers_of(x)))[:, None].to(x.dtype)], 1)),
    "the first rows": lambda m, x: m.out(m.a(x[mask_of(x)])[:2]),
    "the first row": lambda m, x: m.out(x) * m.a(x[mask_of(x)])[0],
    "all rows but one": lambda m, x: m.out(m.a(x[mask_of(x)])[1:]),
    "a sum of rows": lambda m, x: m.out(x) * m.a(x[mask_of(x)]).sum(0),
    "a mean of rows": lambda m, x: m.a(x[mask_of(x)]).square().mean(),
    "a mean loss of rows": lambda m, x: F.cross_entropy(m.gate(x[mask_of(x)]), (x[..., 1] > 0).long()[mask_of(x)]),
    "rows as output": lambda m, x: m.a(x[mask_of(x)]),
    "a cumulative sum of rows": lambda m, x: written(x, mask_of(x), m.a(x[mask_of(x)]).cumsum(0)),
    "rows turned around": lambda m, x: written(x, mask_of(x), m.a(x[mask_of(x)]).flip(0)),
    "rows of another mask": lambda m, x: written(x, x[..., 1] > x[..., 1].quantile(0.5, keepdim=True), m.a(x[mask_of(x)])[: 10]),
    "all pairs of rows": lambda m, x: written(x, mask_of(x), m.a(x[mask_of(x)]) @ m.b(x[mask_of(x)]).T @ x[mask_of(x)]),
    "rows beside those of another order": lambda m, x: m.a(x)[sorted_units(x)] * m.b(x)[x[:, 1, 0].argsort()],
    "rows beside the batch": lambda m, x: m.out(m.a(x[:, 0])[sorted_units(x)] * x[:, 1]),
    "pairs of rows": lambda m, x: m.out(m.a(x[mask_of(x)][: 2 * (int(mask_of(x).sum()) // 2)].view(-1, 2, D)).sum(1)),
    "groups of others": groups_of_others,
    "a part that others decide": lambda m, x: m.out(m.a(x)[:, (mask_of(x).sum(0) > 2).nonzero()[0, 0]]),
    "a part of the inputs that others decide": lambda m, x: m.out(m.a(x[:, (mask_of(x).sum(0) > 2).nonzero()[0, 0]])),
    "ids that others decide": lambda m, x: m.table((x[..., 0] > 0).long()[:, (mask_of(x).sum(0) > 2).nonzero()[0, 0]]),
    "a mask that others decide": lambda m, x: m.out(m.a(x)) * mask_of(x)[:, (mask_of(x).sum(0) > 2).nonzero()[0]][..., None],
    "an expert that others decide": lambda m, x: F.linear(x, m.experts[(mask_of(x).sum(0)[:E] > 0).nonzero()[0, 0]]),
    "row norms of the batch": lambda m, x: written(x, mask_of(x), m.a(F.normalize(x[mask_of(x)], dim=0))),
    "one constant after the other": lambda m, x: m.out(m.a(x) * written(x, mask_of(x), torch.arange(
        int(mask_of(x).sum())).to(x.dtype)[:, None].expand(-1, D))),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_others_are_refused(name: str) -> None:
    with pytest.raises(REFUSED):
        capture_uses(module(MIXING[name]), [tokens()])


def lengths_of(x: Tensor) -> Tensor:
    return 1 + (x[..., 0] > 0).sum(1).clamp(max=L - 1)


LAYERS = {"GRU": sparsedp.nn.GRU, "LSTM": sparsedp.nn.LSTM, "RNN": sparsedp.nn.RNN}


def packed(kind: str, total: bool = True, **options: Any) -> nn.Module:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        states = pack_padded_sequence(m.a(x), lengths, batch_first=True, enforce_sorted=False)
        out, last = m.layer(PackedSequence(states.data.tanh(), *states[1:]))
        padded, sizes = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1] if total else None)
        last = last[0] if isinstance(last, tuple) else last
        return (m.end(padded).sum(1) / sizes[:, None] + m.end(last[-2:].transpose(0, 1).flatten(1))).squeeze(1)

    torch.manual_seed(1)
    layer = LAYERS[kind](D, 3, batch_first=True, bidirectional=True, **options)
    return Apply(forward, a=nn.Linear(D, D), layer=layer, end=nn.Linear(6, 1)).double()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layers", [1, 2])
def test_packed_sequences_are_exact(kind: str, layers: int) -> None:
    found = packed(kind, num_layers=layers)
    assert_exact(found, tokens(), torch.tensor([2, 4, 1, 4, 3]))
    assert_exact(found, tokens()[:2], torch.tensor([1, 1]))
    influence = largest_influence(found, [tokens(), torch.tensor([2, 4, 1, 4, 3])], Clipping(CLIP))
    assert influence <= CLIP * (1 + 1e-9)


def test_a_packed_sequence_with_states_that_units_have() -> None:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        first = m.a(x[:, 0])[None]
        sequence = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        out, last = m.layer(sequence, first)
        _, again = m.layer(out, torch.zeros(1, len(x), D, dtype=x.dtype))
        return last[0] + again[0]

    found = Apply(forward, a=nn.Linear(D, D), layer=sparsedp.nn.GRU(D, D))
    assert_exact(found, tokens(), torch.tensor([2, 4, 1, 4, 3]))


def test_sequences_padded_to_the_longest_of_the_batch_are_refused() -> None:
    module = packed("GRU", total=False)
    with pytest.raises(UnitsMixedError, match="total_length"):
        capture_uses(module, [tokens(), torch.tensor([2, 3, 1, 3, 3])])
    assert_exact(module, tokens()[:3], torch.tensor([4, 4, 4]))


def lengths_of_others(m: Any, x: Tensor) -> Tensor:
    lengths = lengths_of(x).sort(descending=True).values
    out, last = m.layer(pack_padded_sequence(m.a(x), lengths, batch_first=True))
    return last[0]


def rows_in_packed_order(m: Any, x: Tensor) -> Tensor:
    sequence = pack_padded_sequence(m.a(x), lengths_of(x), batch_first=True, enforce_sorted=False)
    return m.layer(sequence._replace(unsorted_indices=None, sorted_indices=None))[1][0]


PACKED_MIXING: dict[str, Callable[..., Tensor]] = {
    "lengths of others": lengths_of_others,
    "not in order again": rows_in_packed_order,
    "the rows of the last step": lambda m, x: pack_padded_sequence(
        m.a(x), lengths_of(x), batch_first=True, enforce_sorted=False).data[-2:],
    "rows times how many there are": lambda m, x: m.a(x) * pack_padded_sequence(
        x, lengths_of(x), batch_first=True, enforce_sorted=False).batch_sizes[0],
    "other sizes": lambda m, x: pad_packed_sequence(PackedSequence(
        pack_padded_sequence(m.a(x), torch.full((B,), 2), batch_first=True).data, torch.tensor([B, B - 1, 1])), True, total_length=9)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_MIXING)
def test_packed_sequences_that_mix_units_are_refused(name: str) -> None:
    torch.manual_seed(1)
    found = Apply(PACKED_MIXING[name], a=nn.Linear(D, D), layer=sparsedp.nn.GRU(D, D, batch_first=True)).double()
    with pytest.raises(REFUSED):
        capture_uses(found, [tokens()])


def of_looked_up_rows(m: Any, x: Tensor) -> Tensor:
    positions = m.table(torch.arange(L)) * 0.5
    again = m.table(torch.arange(L - 1, -1, -1)).T.tanh()
    return m.out(x + F.normalize(positions, dim=-1) + again.T * positions)


def of_rows_and_the_table(m: Any, x: Tensor) -> Tensor:
    rows = m.table(torch.arange(L)) * 0.5
    return m.out(x + rows * m.table.weight.mean(0))


@pytest.mark.parametrize("forward", [of_looked_up_rows, of_rows_and_the_table])
def test_what_is_computed_from_looked_up_rows_is_exact(forward: Callable[..., Tensor]) -> None:
    assert_exact(module(forward), tokens())


def test_looked_up_rows_of_a_large_table_may_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedp.capture.expressions.SMALL", 30)
    found = assert_exact(module(lambda m, x: m.out(x + m.table(torch.arange(L)) * 0.5)), tokens())
    assert found.uses["table.weight"].lookups and not found.uses["table.weight"].builts
    assert_exact(module(lambda m, x: m.out(F.linear(x, m.a.weight * 2))), tokens())


def test_looked_up_rows_may_change_after_their_use() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.table(torch.arange(L))
        out = m.out(x + rows * 0.5)
        rows.mul_(2)
        return out

    assert_exact(module(forward), tokens())


def test_rows_that_meet_a_computed_copy_of_a_large_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a mask picks, by a copy whose gradient is written out for one unit at a time."""
    monkeypatch.setattr("sparsedp.capture.expressions.SMALL", 1)
    monkeypatch.setattr("sparsedp.capture.expressions._WRITTEN", 0)

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        out = torch.zeros_like(x)
        out[mask] = F.linear(x[mask], torch.tanh(m.a.weight))
        return m.out(x + out)

    found = assert_exact(module(forward), tokens())
    assert found.uses["a.weight"].carrieds
