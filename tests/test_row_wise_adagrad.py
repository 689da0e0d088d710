"""Row-wise Adagrad: its formula, on dense gradients and row-sparse ones, under every mechanism, and its checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp import RowWiseAdagrad, UnsupportedError
from support import Clicks, clicks, loader_of, make_private, train

SHAPES = [(7, 4), (5, 1), (6,), (3, 2, 2)]


def by_hand(
    weights: Tensor, gradients: list[Tensor], rows: list[Tensor] | None = None, lr: float = 0.1, lr_decay: float = 0.0,
    decay: float = 0.0, first: float = 0.0, eps: float = 1e-10,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights and sums after some gradients, row by row; `rows` are those that a step may move, by default all."""
    weights, sums = weights.clone(), torch.full((len(weights),), first, dtype=weights.dtype)
    for step, gradient in enumerate(gradients):
        for row in range(len(weights)) if rows is None else rows[step].tolist():
            g = gradient[row] + decay * weights[row]
            sums[row] += float((g**2).mean())
            weights[row] -= lr / (1 + step * lr_decay) * g / (float(sums[row]) ** 0.5 + eps)
    return weights, sums


def drawn(shape: tuple[int, ...], steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=torch.float64), [torch.randn(shape, dtype=torch.float64) for _ in range(steps)]


def moved(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"lr_decay": 0.5}, {"decay": 0.3}, {"first": 2.0, "eps": 0.1}])
def test_dense_gradients(shape: tuple[int, ...], options: dict[str, float]) -> None:
    weights, gradients = drawn(shape)
    names = {"decay": "weight_decay", "first": "initial_accumulator_value"}
    parameter = nn.Parameter(weights.clone())
    optimizer = RowWiseAdagrad([parameter], lr=0.1, **{names.get(key, key): value for key, value in options.items()})
    expected, sums = by_hand(weights, gradients, **options)
    assert torch.allclose(moved(optimizer, parameter, gradients), expected, rtol=1e-12)
    state = optimizer.state[parameter]["sum"]
    assert state.shape == (len(weights),) + (1,) * (len(shape) - 1), "one number a row"
    assert torch.allclose(state.flatten(), sums, rtol=1e-12)
    climbing = nn.Parameter(weights.clone())
    other = RowWiseAdagrad([climbing], lr=0.1, maximize=True)
    expected, _ = by_hand(weights, [-gradient for gradient in gradients])
    assert torch.allclose(moved(other, climbing, gradients), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_row_sparse_gradients(shape: tuple[int, ...]) -> None:
    """Rows that are not in a gradient stay as they are, with their state; rows that are in it twice are added up."""
    weights, gradients = drawn(shape)
    rows = [torch.tensor(some, dtype=torch.int64) for some in ([0, 2], [2], [], [1, 2])]
    sparse = [torch.sparse_coo_tensor(some[None], g[some], shape) for some, g in zip(rows, gradients)]
    sparse[1] = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), gradients[1][[2, 2]] * 0.5, shape)
    parameter = nn.Parameter(weights.clone())
    optimizer = RowWiseAdagrad([parameter], lr=0.1, lr_decay=0.5, initial_accumulator_value=1.0)
    expected, sums = by_hand(weights, gradients, rows, lr_decay=0.5, first=1.0)
    result = moved(optimizer, parameter, sparse)
    assert torch.allclose(result, expected, rtol=1e-12)
    assert torch.allclose(optimizer.state[parameter]["sum"].flatten(), sums, rtol=1e-12)
    untouched = sorted(set(range(len(weights))) - {0, 1, 2})
    assert torch.equal(result[untouched], weights[untouched])


def test_what_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="lr is a number of at least 0"):
        RowWiseAdagrad([parameter], lr=-1.0)
    parameter.grad = torch.eye(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="weight_decay changes all rows"):
        RowWiseAdagrad([parameter], weight_decay=0.1).step()
    parameter.grad = torch.eye(3, 2).to_sparse(2)
    with pytest.raises(RuntimeError, match="sparse by rows"):
        RowWiseAdagrad([parameter]).step()


def test_a_closure_and_a_state_dict() -> None:
    weights, gradients = drawn((4, 3), steps=4)
    parameter, other = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    optimizer, resumed = RowWiseAdagrad([parameter], lr=0.1), RowWiseAdagrad([other], lr=0.5)
    moved(optimizer, parameter, gradients[:2])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.data.copy_(parameter.data)
    assert torch.equal(moved(optimizer, parameter, gradients[2:]), moved(resumed, other, gradients[2:]))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    assert float(optimizer.step(closure)) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(parameter.detach(), before)


@pytest.mark.distributed
def test_it_is_torchrecs() -> None:
    """On dense gradients, to rounding, state and all; and it takes the other's state."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecs

    options: Any
    for options in ({}, {"lr_decay": 0.5, "initial_accumulator_value": 1.0}, {"weight_decay": 0.3}, {"maximize": True}):
        weights, gradients = drawn((7, 4), steps=6)
        weights, gradients = weights.float(), [gradient.float() for gradient in gradients]
        ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
        optimizer, other = RowWiseAdagrad([ours], lr=0.1, **options), TorchRecs([theirs], lr=0.1, **options)
        moved(optimizer, ours, gradients[:4])
        moved(other, theirs, gradients[:4])
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        state, its = optimizer.state[ours], other.state[theirs]
        assert state.keys() == its.keys() and state["sum"].shape == its["sum"].shape and state["step"] == its["step"]
        assert torch.allclose(state["sum"], its["sum"], rtol=1e-6)
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        assert torch.allclose(moved(optimizer, ours, gradients[4:]), moved(other, theirs, gradients[4:]), rtol=1e-6)


# ---------------------------------------------------------------------- private training

MECHANISMS: dict[str, Callable[[], sparsedp.Mechanism]] = {
    "dpsgd": sparsedp.DPSGD,
    "eana": sparsedp.EANA,
    "fest": lambda: sparsedp.FEST(k=10, epsilon=1.0, delta=1e-6),
    "adafest": lambda: sparsedp.AdaFEST(threshold=2.0, noise_ratio=2.0),
    "adafest+": lambda: sparsedp.AdaFEST(threshold=2.0, noise_ratio=2.0, preselect=sparsedp.FEST(k=20, epsilon=1.0, delta=1e-6)),
    "exponential": lambda: sparsedp.ExponentialSelection(k=5, epsilon=1.0),
}  # fmt: skip


def private(mechanism: str) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    module = Clicks()
    inner = RowWiseAdagrad(module.parameters(), lr=0.1)
    return make_private(
        module, loader_of(*clicks(64), batch_size=8), optimizer=inner, mechanism=MECHANISMS[mechanism](), seed=3
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism(mechanism: str) -> None:
    """The tables are moved by the formula, of the noisy gradients that the mechanism leaves, and their other rows are not."""
    _, module, optimizer, loader = private(mechanism)
    weights = module.table.weight.detach().clone()
    gradients: list[Tensor] = []
    rows: list[Tensor] = []
    hand_over = optimizer.private_step.hand_over

    def watched(gradient: Any) -> bool:
        values = gradient.values["table.weight"].clone()
        some = None if gradient.selection is None else gradient.selection["table.weight"]
        rows.append(torch.arange(len(weights)) if some is None else some.clone())
        gradients.append(values if some is None else torch.zeros_like(weights).index_copy(0, some, values))
        return hand_over(gradient)

    optimizer.private_step.hand_over = watched
    train(module, optimizer, loader)
    expected, sums = by_hand(weights.double(), [g.double() for g in gradients], rows)
    assert len(gradients) == 8 and any(len(some) for some in rows)
    assert torch.allclose(module.table.weight.detach().double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(optimizer.state[module.table.weight]["sum"].flatten().double(), sums, rtol=1e-5)
    if mechanism not in ("dpsgd", "eana"):
        assert (sums == 0).any(), "rows that were never selected have no state"


@pytest.mark.parametrize("mechanism", ["dpsgd", "adafest"])
def test_a_run_that_is_resumed(mechanism: str, tmp_path: Path) -> None:
    engine, module, optimizer, loader = private(mechanism)
    train(module, optimizer, loader)
    engine.save_checkpoint(tmp_path / "run.pt")
    train(module, optimizer, loader)
    again = private(mechanism)
    again[0].load_checkpoint(tmp_path / "run.pt")
    train(*again[1:])
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, again[1].state_dict()[name]), name
    mine, its = optimizer.state[module.table.weight], again[2].state[again[1].table.weight]
    assert torch.equal(mine["sum"], its["sum"]) and mine["step"] == its["step"] == 16


def test_lazydp_takes_linear_updates_alone() -> None:
    module = Clicks()
    with pytest.raises(UnsupportedError, match="RowWiseAdagrad"):
        make_private(
            module, loader_of(*clicks(64), batch_size=8), optimizer=RowWiseAdagrad(module.parameters()),
            mechanism=sparsedp.LazyDP(),
        )  # fmt: skip
