"""torch's recurrent layers and cells in private training: replaced for a while, or taken apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.fused import replace_fused, restore_fused
from support import Apply, assert_exact

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {
    "LSTM": lambda n: nn.LSTMCell(4, n),
    "GRU": lambda n: nn.GRUCell(4, n),
    "tanh": lambda n: nn.RNNCell(4, n),
    "relu": lambda n: nn.RNNCell(4, n, nonlinearity="relu", bias=False),
}
FORMS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "bias": False},
    {"num_layers": 2, "dropout": 0.0, "hidden_size": 7},
]


class Sequence(nn.Module):
    def __init__(self, kind: str, **form: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        form = {"hidden_size": 5, **form}
        self.table = nn.Embedding(9, 4)
        self.recurrent = LAYERS[kind](4, batch_first=True, **form)
        self.out = nn.Linear(form["hidden_size"] * (1 + form.get("bidirectional", False)), 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.recurrent(self.table(ids))[0].mean(1))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_replaced_layers_compute_the_same_and_are_exact(kind: str, form: dict[str, Any]) -> None:
    module = Sequence(kind, **form).double()
    ids = torch.randint(0, 9, (4, 3))
    before, weights = module(ids), copy.deepcopy(module.state_dict())
    layer = module.recurrent
    layers = replace_fused(module)
    assert layers == [layer] and isinstance(layer, LAYERS[kind]) and type(layer) is not LAYERS[kind]
    torch.testing.assert_close(module(ids), before)
    assert list(module.state_dict()) == list(weights)
    assert_exact(module, ids)
    restore_fused(layers)
    assert type(layer) is LAYERS[kind] and module.recurrent is layer
    assert torch.equal(module(ids), before)


def test_relu() -> None:
    layer = nn.RNN(4, 3, nonlinearity="relu", batch_first=True)
    x = torch.randn(2, 5, 4)
    before = layer(x)
    replace_fused(layer)
    torch.testing.assert_close(layer(x), before)
    ours = sparsedp.nn.RNN(4, 3, nonlinearity="relu", batch_first=True)
    ours.load_state_dict(layer.state_dict())
    torch.testing.assert_close(ours(x), before)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("given", [False, True])
def test_large_hidden_states(kind: str, given: bool) -> None:
    """A product of zeros with a weight of more than 65,536 elements is none of parameters alone."""
    torch.manual_seed(0)
    layer = getattr(sparsedp.nn, kind)(4, 260, batch_first=True)

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 260, dtype=x.dtype)
        hx = None if not given else (state, state) if kind == "LSTM" else state
        return module.layer(x, hx)[0].sum((1, 2))

    assert_exact(Apply(forward, layer=layer), torch.randn(3, 3, 4))


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("width", [5, 260])
@pytest.mark.parametrize("given", [False, True])
def test_cells_are_exact(kind: str, width: int, given: bool) -> None:
    torch.manual_seed(0)

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        state: Any = None
        if given:
            state = torch.zeros(len(x), width, dtype=x.dtype)
            state = (state, state) if kind == "LSTM" else state
        for step in range(x.shape[1]):
            state = module.cell(x[:, step], state)
        return (state[0] if kind == "LSTM" else state).sum(1)

    assert_exact(Apply(forward, cell=CELLS[kind](width)), torch.randn(3, 2, 4))


def test_a_cell_over_positions_as_units_is_refused() -> None:
    module = Apply(lambda m, x: m.cell(x.mean(0)), cell=nn.GRUCell(4, 5))
    with pytest.raises(SparseDPError):
        assert_exact(module, torch.randn(3, 2, 4))


def _make(module: nn.Module, engine: sparsedp.PrivacyEngine, **settings: Any) -> Any:
    data = TensorDataset(torch.randint(0, 9, (12, 3)), torch.randn(12, 1))
    return engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_make_private_replaces_until_close(kind: str) -> None:
    module, engine = Sequence(kind), sparsedp.PrivacyEngine(seed=1)
    with pytest.raises(UnsupportedError, match=r"'recurrent'.*replace_recurrent=True"):
        _make(module, engine)
    layer, before = module.recurrent, copy.deepcopy(module.state_dict())
    module, optimizer, loader = _make(module, engine, replace_recurrent=True)
    for ids, target in loader:
        optimizer.zero_grad()
        (module(ids) - target).square().mean().backward()
        optimizer.step()
    engine.close()
    assert module.recurrent is layer and type(layer) is LAYERS[kind]
    after = module.state_dict()
    assert list(after) == list(before) and not torch.equal(
        after["recurrent.weight_hh_l0"], before["recurrent.weight_hh_l0"]
    )
    module(torch.randint(0, 9, (2, 3))).sum().backward()
    assert module.recurrent.weight_hh_l0.grad is not None


def test_what_is_refused_stays_as_it_was() -> None:
    module, engine = Sequence("GRU"), sparsedp.PrivacyEngine(seed=1)
    with pytest.raises(ValueError):
        _make(module, engine, replace_recurrent=True, loss_reduction="none")
    assert type(module.recurrent) is nn.GRU
    with pytest.raises(UnsupportedError, match="proj_size"):
        _make(nn.LSTM(4, 5, proj_size=2), engine, replace_recurrent=True)


def test_check_takes_the_switch() -> None:
    module = Sequence("LSTM")
    batch = (torch.randint(0, 9, (4, 3)), torch.randn(4, 1))
    with pytest.raises(UnsupportedError, match="replace_recurrent"):
        sparsedp.check(module, nn.functional.mse_loss, batch)
    sparsedp.check(module, nn.functional.mse_loss, batch, replace_recurrent=True)
    assert type(module.recurrent) is nn.LSTM
