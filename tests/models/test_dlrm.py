"""DLRM: MLPerf's shapes, the interaction, exact capture with one id per feature and with several, and training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from cases import dlrm_batch, small_dlrm
from sparsedp.models import DLRM, dlrm_table_sizes
from support import assert_exact, loader_of, make_private


def test_mlperfs_architecture() -> None:
    model = DLRM(dlrm_table_sizes(1e-4))
    linears = [layer for layer in (*model.bottom, *model.top) if isinstance(layer, nn.Linear)]
    widths = [(layer.in_features, layer.out_features) for layer in linears]
    assert widths[:3] == [(13, 512), (512, 256), (256, 128)]
    # 128 of the integers' vector and 27 * 26 / 2 products.
    assert widths[3:] == [(479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert isinstance(model.bottom[-1], nn.ReLU) and isinstance(model.top[-1], nn.Linear)
    assert len(model.tables) == 26 and {table.weight.shape[1] for table in model.tables} == {128}
    assert "pairs" not in model.state_dict()


def test_the_papers_table_sizes() -> None:
    sizes = dlrm_table_sizes()
    assert len(sizes) == 26 and max(sizes) < 40_000_000
    assert sum(sizes) * 4 // 10**6 == 751  # MB of LazyDP's history, one int32 per row (section 7.2)
    assert sum(sizes) * 128 * 4 // 10**9 == 96  # GB of the model (section 6)
    assert min(dlrm_table_sizes(1e-9)) == max(dlrm_table_sizes(1e-9)) == 3
    assert sum(dlrm_table_sizes(0.01)) == pytest.approx(sum(sizes) / 100, rel=1e-4)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale must be positive"):
            dlrm_table_sizes(scale)


@pytest.mark.parametrize("pooling", [1, 3])
def test_interaction_by_hand(pooling: int) -> None:
    model = small_dlrm(pooling)
    integers, ids, _ = dlrm_batch(3, pooling)
    integers[0, 1], integers[1, 2] = float("nan"), -3.0
    seen: list[Tensor] = []
    model.top.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(integers, ids)
    for unit in range(3):
        logs = torch.log(1 + integers[unit].nan_to_num(0).clamp(min=0))
        vectors = [model.bottom(logs)]
        for j, table in enumerate(model.tables):
            vectors.append(table.weight[ids[unit, j]] if pooling == 1 else table.weight[ids[unit, j]].sum(0))
        products = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        torch.testing.assert_close(seen[0][unit], torch.cat([vectors[0], torch.stack(products)]))


@pytest.mark.parametrize("units", [0, 1, 3])
@pytest.mark.parametrize("pooling", [1, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_batches(units: int, pooling: int, sparse: bool) -> None:
    model = small_dlrm(pooling, sparse)
    integers, ids, _ = dlrm_batch(units, pooling)
    logits = model(integers, ids)
    assert logits.shape == (units,)
    logits.sum().backward()
    assert model.tables[0].weight.grad.is_sparse == sparse


def test_wrong_shapes_are_refused() -> None:
    integers, ids, _ = dlrm_batch(2)
    with pytest.raises(ValueError, match="4 integers and 3 categories per example, got 5 and 3"):
        small_dlrm()(torch.ones(2, 5), ids)
    with pytest.raises(ValueError, match="4 integers and 3 x 2 categories per example, got 4 and 3"):
        small_dlrm(pooling=2)(integers, ids)
    with pytest.raises(ValueError, match="pooling must be at least 1"):
        small_dlrm(pooling=0)


@pytest.mark.parametrize("pooling", [1, 3])
@pytest.mark.parametrize("units", [1, 6])
def test_captured_gradients_equal_one_by_one(pooling: int, units: int) -> None:
    integers, ids, _ = dlrm_batch(units, pooling)
    assert_exact(small_dlrm(pooling), integers, ids)


@pytest.mark.parametrize("pooling", [1, 3])
def test_check_passes(pooling: int) -> None:
    report = sparsedp.check(small_dlrm(pooling), binary_cross_entropy_with_logits, dlrm_batch(6, pooling))
    assert report.parameters == 3 + 2 * 2 + 2 * 3


MECHANISMS = [sparsedp.DPSGD(), sparsedp.EANA(), sparsedp.AdaFEST(threshold=1.0), sparsedp.LazyDP()]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
@pytest.mark.parametrize("pooling", [1, 3])
def test_trains_under_every_mechanism(mechanism: sparsedp.Mechanism, pooling: int) -> None:
    torch.manual_seed(0)
    model = small_dlrm(pooling, sparse=True)
    integers, ids, labels = dlrm_batch(40, pooling)
    loader = loader_of(integers, ids, labels, batch_size=10)
    _, model, optimizer, loader = make_private(model, loader, mechanism=mechanism)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, c, y in loader:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(x, c), y).backward()
        optimizer.step()
    after = model.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    if mechanism.name == "eana":  # ids are below 5
        assert torch.equal(after["tables.1.weight"][5:], before["tables.1.weight"][5:])
