"""Buffers that forward computes anew from constants, such as a bias by position, and those that keep something of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsedp.capture import Capture
from sparsedp.errors import UnsupportedError
from support import assert_exact, batch_of


class WithBias(nn.Module):
    """Adds a buffer that is computed anew by `make(x)` where it is too short."""

    def __init__(self, make: Callable[[Tensor], Tensor], persistent: bool = False, always: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.make, self.persistent, self.always = make, persistent, always
        self.adds = True
        self.register_buffer("bias", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.bias is None or self.bias.shape[0] < x.shape[1]:
            self.register_buffer("bias", self.make(x), persistent=self.persistent)
        hidden = self.linear(x)
        return ((hidden + self.bias.sum()).sin() if self.adds else hidden).mean((1, 2))


def by_position(x: Tensor) -> Tensor:
    return -torch.arange(x.shape[1], dtype=x.dtype).square()


def run(module: nn.Module, *shapes: tuple[int, int]) -> None:
    """Training passes over batches of (units, length)."""
    current = batch_of(0)
    capture = Capture(module, dict(module.named_parameters()), lambda: current())
    capture.attach()
    try:
        for units, length in shapes:
            current = batch_of(units)
            module(torch.randn(units, length, 3)).mean().backward()
            assert capture.collect() is not None
    finally:
        capture.detach()


def test_a_bias_by_position_may_grow() -> None:
    assert_exact(WithBias(by_position), torch.randn(4, 5, 3))
    run(WithBias(by_position), (4, 5), (2, 3), (3, 8), (1, 2))
    run(WithBias(by_position, always=True), (4, 5), (2, 3), (3, 8), (1, 2))
    run(WithBias(lambda x: by_position(x).flip(0), always=True), (4, 5), (2, 3), (3, 8))  # agrees at its end


REFUSED: dict[str, Callable[[], WithBias]] = {
    "a batch mean": lambda: WithBias(lambda x: x.detach().mean((0, 2))),
    "one unit": lambda: WithBias(lambda x: x[0, :, 0].detach().clone()),
    "the number of examples": lambda: WithBias(lambda x: torch.full((1,), float(len(x))), always=True),
    "an item": lambda: WithBias(lambda x: by_position(x) + x.sum().item()),
    "random numbers": lambda: WithBias(lambda x: torch.rand(x.shape[1])),
    "the state_dict": lambda: WithBias(by_position, persistent=True),
    "something of a parameter": lambda: WithBias(lambda x: by_position(x) * torch.ones(1, requires_grad=True)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_keep_something_of_a_batch_is_refused(case: str) -> None:
    module = REFUSED[case]()
    module.adds = False
    with pytest.raises(UnsupportedError, match="'bias' was changed during forward"):
        run(module, (4, 5), (2, 8))
