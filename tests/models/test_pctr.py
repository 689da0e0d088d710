"""The pCTR model: shapes of the paper, missing values, small batches, and that its tables matter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from sparsedp.data import CRITEO_VOCABULARY, auc, generated_click_log
from sparsedp.models import PCTR


def test_the_papers_architecture() -> None:
    model = PCTR(CRITEO_VOCABULARY)
    assert len(model.tables) == 26
    assert [table.weight.shape[0] for table in model.tables] == list(CRITEO_VOCABULARY)
    assert [table.weight.shape[1] for table in model.tables][:9] == [12, 9, 33, 23, 8, 4, 11, 10, 2]
    linears = [layer for layer in model.network if isinstance(layer, nn.Linear)]
    width = sum(int(2 * v**0.25) for v in CRITEO_VOCABULARY) + 13
    assert [(l.in_features, l.out_features) for l in linears] == [(width, 598), *[(598, 598)] * 3, (598, 1)]
    assert sum(isinstance(layer, nn.ReLU) for layer in model.network) == 4


def test_table_3_of_the_paper() -> None:
    assert len(CRITEO_VOCABULARY) == 26
    assert CRITEO_VOCABULARY[0] == 1472 and CRITEO_VOCABULARY[2] == 82741 and CRITEO_VOCABULARY[-1] == 12934


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_batches(batch: int, sparse: bool) -> None:
    model = PCTR([5, 7], integers=3, hidden=8, hidden_layers=2, dims=4, sparse=sparse)
    logits = model(torch.ones(batch, 3), torch.zeros(batch, 2, dtype=torch.int64))
    assert logits.shape == (batch,)
    logits.sum().backward()
    assert model.tables[0].weight.grad.is_sparse == sparse


def test_dims() -> None:
    assert [t.weight.shape[1] for t in PCTR([5, 7], hidden=4, dims=[2, 3]).tables] == [2, 3]
    assert [t.weight.shape[1] for t in PCTR([5, 7], hidden=4, dims=6).tables] == [6, 6]
    with pytest.raises(ValueError, match="1 dims for 2 tables"):
        PCTR([5, 7], dims=[2])


def test_integers_enter_as_logarithms_and_missing_ones_as_zero() -> None:
    model = PCTR([5], integers=2, hidden=8, hidden_layers=1)
    category = torch.tensor([[1]])
    weight = model.network[0].weight[:, -2:]
    seen: list[torch.Tensor] = []
    model.network[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, -2:]))
    model(torch.tensor([[9.0, -2.0]]), category)
    model(torch.tensor([[float("nan"), 0.0]]), category)
    assert weight.shape == (8, 2)
    torch.testing.assert_close(seen[0], torch.tensor([[10.0, 1.0]]).log())
    assert seen[1].eq(0).all()


def test_wrong_widths_are_refused() -> None:
    model = PCTR([5, 7], hidden=4)
    with pytest.raises(ValueError, match="13 integers and 2 categories per example, got 13 and 3"):
        model(torch.ones(1, 13), torch.zeros(1, 3, dtype=torch.int64))


@pytest.fixture
def one_thread():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads only get in each other's way in a model this small
    yield
    torch.set_num_threads(threads)


def test_trained_tables_beat_frozen_ones_on_a_generated_log(one_thread: None) -> None:
    training, held_out = generated_click_log(16_000, seed=1, scale=0.01).split(0.25)
    integers, categories, labels = held_out.collate(held_out.__getitems__(range(len(held_out))))

    def reached(train_tables: bool) -> float:
        torch.manual_seed(0)
        model = PCTR(training.vocabulary_sizes, hidden=64, hidden_layers=1)
        for table in model.tables:
            table.weight.requires_grad_(train_tables)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 2e-2)
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(training, batch_size=256, shuffle=True, generator=order, collate_fn=training.collate)
        for x, c, y in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(x, c), y).backward()
            optimizer.step()
        with torch.no_grad():
            return auc(labels, model(integers, categories))

    trained, frozen = reached(True), reached(False)
    assert trained > frozen + 0.05
    assert 0.70 < trained < held_out.planted_auc
