"""The seam for mechanisms: selection before clipping, noise on the selection alone, sparse gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import sparsedp
from documentation import code_of
from sparsedp.clipping import Clipping
from sparsedp.mechanisms import DPSGD, mechanism_from_dict
from support import Clicks, capture_uses, clicks, dense, loader_of, make_private, train

PublicRows = code_of("extending.md")["PublicRows"]  # trains some rows, chosen without looking at the data
ROWS = (1, 4, 7, 20, 33)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam", "RowWiseAdagrad"])
def test_only_selected_rows_change(kind: str) -> None:
    module = Clicks()
    if kind == "SparseAdam":
        for part in (module.hidden, module.out):
            part.requires_grad_(False)
        inner: Any = torch.optim.SparseAdam([module.table.weight], lr=0.1)
    else:
        inner = getattr(torch.optim, kind, sparsedp.RowWiseAdagrad)(module.parameters(), lr=0.1)
    engine, module, optimizer, loader = make_private(
        module, loader_of(*clicks(64), batch_size=8), optimizer=inner, mechanism=PublicRows(ROWS)
    )
    before = copy.deepcopy(module.state_dict())
    train(module, optimizer, loader)
    changed = (module.table.weight != before["table.weight"]).any(1).nonzero().flatten().tolist()
    assert changed == list(ROWS)
    assert optimizer.last_step.tables["table.weight"].rows_selected == len(ROWS)
    assert optimizer.last_step.gradient_size == len(ROWS) * 6


@pytest.mark.parametrize("limit", [None, 3])
def test_selection_comes_before_clipping(limit: int | None) -> None:
    """What is masked does not count towards the norm; micro-batches make no difference."""
    torch.manual_seed(0)
    lr, clip = 0.5, 0.05
    ids, x, y = clicks(32)
    module = Clicks().double()
    engine, module, optimizer, loader = make_private(
        module, loader_of(ids, x.double(), y.double(), batch_size=16), optimizer=torch.optim.SGD(module.parameters(), lr=lr),
        noise_multiplier=0.0, max_grad_norm=clip, mechanism=PublicRows(ROWS), max_physical_batch=limit,
    )  # fmt: skip
    seen: list[tuple[Tensor, ...]] = []
    before = copy.deepcopy(module)
    for batch in loader:
        seen.append(batch)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(module(*batch[:2]), batch[2]).backward()
        optimizer.step()
        if loader.current.last:
            break
    i, v, t = (torch.cat(parts) for parts in zip(*seen))
    plain = Clicks().double()
    plain.load_state_dict(before.state_dict())
    found = capture_uses(
        plain, [i, v], lambda out: nn.functional.binary_cross_entropy_with_logits(out, t, reduction="sum")
    )
    found.uses["table.weight"] = found.uses["table.weight"].restricted(torch.tensor(ROWS), 6)
    norms = torch.stack([uses.squared_norms(len(i)) for uses in found.uses.values()]).sum(0).sqrt()
    factors = Clipping(clip).factors(norms)
    for name, parameter in module.named_parameters():
        total = dense(found.uses[name].weighted_sum(factors, parameter.shape), parameter.shape)
        torch.testing.assert_close(parameter.detach(), plain.get_parameter(name).detach() - lr * total / 16)


def test_noise_on_the_selection() -> None:
    sigma, clip, batch = 1.5, 0.4, 8
    rows = tuple(range(0, 2000, 2))
    module = Clicks(rows=2000, dim=20)
    engine, module, optimizer, loader = make_private(
        module, loader_of(*clicks(64, rows=2000), batch_size=batch), optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=sigma, max_grad_norm=clip, mechanism=PublicRows(rows),
    )  # fmt: skip
    before = module.table.weight.detach().clone()
    ids, x, _ = next(iter(loader))
    (module(ids, x) * 0).sum().backward()
    optimizer.step()
    moved = (module.table.weight.detach() - before)[list(rows)].flatten().numpy() / (sigma * clip / batch)
    assert stats.kstest(moved, "norm").pvalue > 1e-4
    assert stats.kstest(moved * 1.5, "norm").pvalue < 1e-4 and stats.kstest(moved / 1.5, "norm").pvalue < 1e-4
    assert np.array_equal(module.table.weight.detach()[1::2], before[1::2])


def test_tied_tables_are_masked_in_every_use() -> None:
    from support import Apply

    module = Apply(lambda m, i: m.e(i).sin() @ m.e.weight.T, e=nn.Embedding(10, 4)).double()
    found = capture_uses(module, [torch.randint(10, (5, 3))])
    keep = torch.tensor([0, 3, 9])
    uses = found.uses["e.weight"]
    whole = dense(uses.weighted_sum(torch.ones(5).double(), torch.Size([10, 4])), torch.Size([10, 4]))
    part = dense(
        uses.restricted(keep, 4).weighted_sum(torch.ones(5).double(), torch.Size([10, 4])), torch.Size([10, 4])
    )
    mask = torch.zeros(10, 1).double().index_fill_(0, keep, 1.0)
    torch.testing.assert_close(part, whole * mask)


def test_written_out_gradients_are_masked_too() -> None:
    """A table of which some rows are added whole, beside lookups."""
    from support import Apply

    module = Apply(lambda m, i: m.e(i) * m.e.weight[2:5].sum(0) * m.e.weight[3], e=nn.Embedding(10, 4)).double()
    uses = capture_uses(module, [torch.randint(10, (5,))]).uses["e.weight"]
    keep, ones, shape = torch.tensor([0, 3, 9]), torch.ones(5).double(), torch.Size([10, 4])
    mask = torch.zeros(10, 1).double().index_fill_(0, keep, 1.0)
    part = dense(uses.restricted(keep, 4).weighted_sum(ones, shape), shape)
    torch.testing.assert_close(part, dense(uses.weighted_sum(ones, shape), shape) * mask)


def test_restricted_to_nothing() -> None:
    found = capture_uses(Clicks(), [torch.randint(50, (5,)), torch.randn(5, 3)])
    uses = found.uses["table.weight"].restricted(torch.empty(0, dtype=torch.long), 6)
    assert float(uses.squared_norms(5).max()) == 0


def test_touched_rows_once_per_unit() -> None:
    from support import Apply

    module = Apply(lambda m, i: m.e(i) + m.e((i + 1) % 10), e=nn.Embedding(10, 4, padding_idx=0))
    found = capture_uses(module, [torch.tensor([[1, 1, 2], [9, 9, 9]])])
    units, rows = found.uses["e.weight"].touched()
    assert list(zip(units.tolist(), rows.tolist())) == [(0, 1), (0, 2), (0, 3), (1, 9)]


def test_round_trip_by_name() -> None:
    assert mechanism_from_dict(DPSGD().to_dict()) == DPSGD()
    assert mechanism_from_dict(PublicRows((1, 2)).to_dict()) == PublicRows((1, 2))
    with pytest.raises(ValueError, match="Unknown mechanism 'laplace'"):
        mechanism_from_dict({"name": "laplace"})
    with pytest.raises(ValueError, match="no setting 'threshold'"):
        mechanism_from_dict({"name": "dpsgd", "threshold": 1})
