"""Neighbour replay: a model whose units stay apart moves by at most C, and one that mixes them where capture does not see it is
found, with the parameter that carries it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from sparsedp.audit import replay
from sparsedp.errors import SparseDPError, UnitsMixedError
from support import Apply

UNITS = 16


def table_model(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return Apply(function, table=nn.Embedding(40, 8), out=nn.Linear(8, 1))


def plain(self: Any, ids: Tensor) -> Tensor:
    return self.out(self.table(ids).sum(1).tanh()).squeeze(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(units: int = UNITS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randint(40, (units, 3), generator=random), 5 * torch.randn(units, generator=random)


def test_units_that_stay_apart_move_the_sum_by_at_most_c() -> None:
    model = table_model(plain)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for clip in (0.1, 1.0, 1e6):
        result = replay(model, loss, batch(), max_grad_norm=clip)
        assert result.holds and len(result.units) == UNITS and result.dtype == torch.float64
        assert "the bound holds" in str(result)
        assert (result.ratio > 0.999) == (clip < 1e6)  # clipped units move it by just C
        for unit in result.units:
            assert unit.ratio == pytest.approx(sum(part**2 for part in unit.parameters.values()) ** 0.5)
    assert all((value == before[name]).all() for name, value in model.state_dict().items())


def test_distances_are_those_of_gradients_taken_one_by_one() -> None:
    model, (ids, target) = table_model(plain), batch(4)
    result = replay(model, loss, (ids, target), max_grad_norm=1e6)
    for unit in range(4):
        model.zero_grad()
        loss(model(ids[unit : unit + 1]), target[unit : unit + 1]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert result.units[unit].parameters[name] * 1e6 == pytest.approx(float(parameter.grad.norm()), rel=1e-4)
    assert result.clipped == 0


def test_a_loop_that_mixes_units_before_the_model() -> None:
    """Capture sees the inputs of the module as they come: units that stay apart from there on."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(x.tanh()).squeeze(1)

    torch.manual_seed(0)
    model = Apply(forward, out=nn.Linear(8, 1))
    x, y = 0.1 * torch.randn(UNITS, 8), torch.randn(UNITS)
    x[3] += 50  # whose mean moves everybody's
    for centred in (False, True):

        def loop(module: nn.Module, both: tuple[Tensor, Tensor], centred: bool = centred) -> Tensor:
            inputs, target = both
            return loss(module(inputs - inputs.mean(0) if centred else inputs), target)

        result = replay(model, None, (x, y), loop=loop, max_grad_norm=1.0)
        assert result.holds != centred
        if centred:
            assert result.worst.unit == 3 and result.ratio > 2
            assert result.worst.worst_parameter in ("out.weight", "out.bias")
            assert "example 3" in str(result) and "does not cover" in str(result)


def test_a_model_that_depends_on_how_many_units_there_are() -> None:
    """Sizes are Python numbers: in a batch of 16, everybody's gradient turns round if one of them leaves."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        sign = -1.0 if len(ids) > UNITS - 1 else 1.0
        return sign * 1e-3 * plain(self, ids)

    result = replay(table_model(forward), loss, batch(), max_grad_norm=1e-3)
    assert not result.holds and result.ratio > 4
    assert replay(table_model(forward), loss, batch(UNITS - 2), max_grad_norm=1e-3).holds


def test_a_loss_that_divides_by_everybodys_sum() -> None:
    def shared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / target.abs().sum()

    ids, target = batch()
    target[5] = 1000.0
    result = replay(table_model(plain), shared, (ids, target), max_grad_norm=0.5)
    assert not result.holds and result.worst.unit == 5


def test_units_keep_their_random_numbers() -> None:
    """Masks that shifted with the place in the batch would make every unit behind the one that leaves look moved."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        return self.out(dropout(self.table(ids).sum(1), 0.5)).squeeze(1)

    assert replay(table_model(forward), loss, batch(), max_grad_norm=0.1).holds


def test_units_that_are_users() -> None:
    users = torch.arange(UNITS) // 4 + 100
    result = replay(table_model(plain), loss, batch(), max_grad_norm=0.1, users=users)
    assert result.holds and [unit.unit for unit in result.units] == ["100", "101", "102", "103"]
    assert result.batch == 4 and "4 users" in str(result)

    def shared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() / (1 + target.abs().sum())

    ids, target = batch()
    target[6] = 1000.0
    assert not replay(table_model(plain), shared, (ids, target), max_grad_norm=1.0, users=users).holds
    with pytest.raises(SparseDPError, match="one entry for each of the 16 examples"):
        replay(table_model(plain), loss, batch(), max_grad_norm=0.1, users=users[:3])


def test_the_map_of_contributions_moves_by_at_most_c1() -> None:
    for clip in (0.5, 1.0):
        result = replay(table_model(plain), loss, batch(), max_grad_norm=1.0, map_clip=clip)
        worst = result.worst_of_map
        assert result.holds and worst is not None and worst.map_ratio == pytest.approx(1.0)
        assert "C1" in str(result)


def test_rows_that_others_decide_show_in_the_map() -> None:
    """The largest id of the batch decides which rows all units touch: their number and their places."""

    def loop(module: nn.Module, both: tuple[Tensor, Tensor]) -> Tensor:
        ids, target = both
        return loss(module((ids + int(ids.max())) % 40), target)

    ids, target = batch()
    ids = ids.clamp(max=30)
    ids[2, 0] = 39
    result = replay(table_model(plain), None, (ids, target), loop=loop, max_grad_norm=1.0, map_clip=1.0)
    worst = result.worst_of_map
    assert worst is not None and worst.unit == 2 and (worst.map_ratio or 0) > 2 and not result.holds


def test_a_batch_of_one_unit_and_some_of_many() -> None:
    one = replay(table_model(plain), loss, batch(1), max_grad_norm=0.1, map_clip=1.0)
    assert one.holds and one.ratio == pytest.approx(1.0) and len(one.units) == 1
    assert len(replay(table_model(plain), loss, batch(), max_grad_norm=0.1, units=3).units) == 3


def test_a_model_that_runs_in_float32_alone() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return plain(self, ids) + torch.ones(1, dtype=torch.float32) @ self.fixed

    model = table_model(forward)
    model.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
    result = replay(model, loss, batch(), max_grad_norm=0.1)
    assert result.holds and result.dtype == torch.float32 and "float32" in str(result)


def test_what_is_refused() -> None:
    model = table_model(plain)
    with pytest.raises(SparseDPError, match="either a loss function or a loop"):
        replay(model, None, batch(), max_grad_norm=1.0)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(SparseDPError, match="max_grad_norm must be positive"):
            replay(model, loss, batch(), max_grad_norm=wrong)
    with pytest.raises(SparseDPError, match="no units"):
        replay(model, loss, batch(0), max_grad_norm=1.0)
    with pytest.raises(SparseDPError, match="At least one"):
        replay(model, loss, batch(), max_grad_norm=1.0, units=0)
    with pytest.raises(SparseDPError, match="no table"):
        replay(
            nn.Linear(3, 1),
            lambda o, t: (o.squeeze(1) - t).mean(),
            (torch.randn(4, 3), torch.randn(4)),
            max_grad_norm=1.0,
            map_clip=1.0,
        )
    with pytest.raises(UnitsMixedError):  # what capture sees is refused as ever
        replay(
            table_model(lambda self, ids: plain(self, ids) - plain(self, ids).mean()), loss, batch(), max_grad_norm=1.0
        )


def test_as_json() -> None:
    plain_result = replay(table_model(plain), loss, batch(), max_grad_norm=0.1).to_dict()
    assert plain_result["holds"] is True and plain_result["units"][0]["unit"] == 0
    assert set(plain_result["units"][0]["parameters"]) == {"table.weight", "out.weight", "out.bias"}
