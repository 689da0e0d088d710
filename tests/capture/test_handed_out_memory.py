"""What gets the memory of an activation, such as numpy, can write to it unseen: that is noticed, and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsedp
from neighbours import contribution
from support import Apply


def _numpy(h: Tensor) -> Any:
    return h.numpy()


def _array(h: Tensor) -> Any:
    return np.asarray(h)


def _view(h: Tensor) -> Any:
    return h[:, 1:].numpy()


WAYS = {"numpy": _numpy, "asarray": _array, "a view": _view}


def _mix(array: Any) -> None:
    array[:] = array.mean(0)


def before_a_use(m: Any, x: Tensor, give: Callable) -> Tensor:
    h = x * 1.0
    _mix(give(h))
    return m.layer(h)


def after_a_use(m: Any, x: Tensor, give: Callable) -> Tensor:
    h = x * 1.0
    array = give(h)
    out = m.layer(h)
    _mix(array)
    return out


def and_back_again(m: Any, x: Tensor, give: Callable) -> Tensor:
    h = x * 1.0
    array = give(h)
    kept = array.copy()
    _mix(array)
    out = m.layer(h)
    array[:] = kept
    return out


def through_the_array(m: Any, x: Tensor, give: Callable) -> Tensor:
    h = x * 1.0
    array = give(h)
    _mix(array)
    return m.layer(torch.nn.functional.pad(torch.from_numpy(array), (0, 5 - array.shape[1])))


def behind_a_write(m: Any, x: Tensor, give: Callable) -> Tensor:
    h = x * 1.0
    array = give(h)
    _mix(array)
    h += 1
    return m.layer(h)


ATTACKS = [before_a_use, after_a_use, and_back_again, through_the_array, behind_a_write]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_units_cannot_be_mixed_through_memory_that_was_given_away(attack: Callable, way: str) -> None:
    """Unseen, the mean of a batch moved the sum by 10 C."""
    torch.manual_seed(0)
    x = torch.randn(8, 5) * 3
    x[0] *= 50
    module = Apply(lambda m, x: attack(m, x, WAYS[way]), layer=nn.Linear(5, 3))
    with pytest.raises(sparsedp.UnsupportedError):
        contribution(module, (x, torch.zeros(8)), lambda m, b: m(b[0]).tanh().sum())


def test_between_forward_and_step() -> None:
    arrays = []

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        arrays.append(h.numpy())
        return m.layer(h)

    def loop(m: nn.Module, batch: Any) -> Tensor:
        out = m(batch[0]).tanh().sum()
        _mix(arrays[-1])
        return out

    with pytest.raises(sparsedp.UnsupportedError, match="given away by 'numpy'"):
        contribution(Apply(forward, layer=nn.Linear(5, 3)), (torch.randn(8, 5), torch.zeros(8)), loop)


def test_reading_is_fine() -> None:
    """So is changing the activation with torch meanwhile, and changing a copy."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        longest = float(np.abs(h.numpy()).max())
        assert longest >= 0
        h += 1
        array = h.numpy().copy()
        array[:] = 0
        h.mul_(2)
        return m.layer(h)

    x = torch.randn(8, 5)
    moved = contribution(Apply(forward, layer=nn.Linear(5, 3)), (x, torch.zeros(8)), lambda m, b: m(b[0]).tanh().sum())
    assert 0 < moved <= 1 + 1e-4


def data_of_an_input_of_a_use(m: Any, x: Tensor) -> Tensor:
    h = x * 1.0
    alias = h.data
    out = m.layer(h)
    alias[1:] = alias[:1]
    return out


def view_of_data(m: Any, x: Tensor) -> Tensor:
    h = x * 1.0
    alias = h.data.view(-1)
    out = m.layer(h)
    del h
    alias[5:].copy_(alias[:-5].clone())
    return out


def what_autograd_keeps(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    out = h * h
    h.data.copy_(h.data[:1].expand_as(h))
    return out


def another_tensor_on_its_memory(m: Any, x: Tensor) -> Tensor:
    h = x * 1.0
    alias = torch.FloatTensor(h)
    out = m.layer(h)
    alias[1:] = alias[:1]
    return out


@pytest.mark.parametrize(
    "attack", [data_of_an_input_of_a_use, view_of_data, what_autograd_keeps, another_tensor_on_its_memory]
)
def test_units_cannot_be_written_behind_autograds_back(attack: Callable) -> None:
    """x.data has its own count of changes: what uses and autograd had kept was changed unnoticed, by 10 C."""
    torch.manual_seed(0)
    x = torch.randn(8, 5) * 3
    x[0] *= 50
    with pytest.raises((sparsedp.UnsupportedError, sparsedp.UnitsMixedError)):
        contribution(Apply(attack, layer=nn.Linear(5, 3)), (x, torch.zeros(8)), lambda m, b: m(b[0]).tanh().sum())


def test_data_may_be_read() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.layer(x)
        return h * h.data.abs()

    x = torch.randn(8, 5)
    moved = contribution(Apply(forward, layer=nn.Linear(5, 3)), (x, torch.zeros(8)), lambda m, b: m(b[0]).tanh().sum())
    assert 0 < moved <= 1 + 1e-4
