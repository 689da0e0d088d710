"""optimizer.step(closure): the closure runs once, and the step is the one that step() behind it would have taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsedp import DPSGD, AdaFEST, LazyDP, Mechanism, SparseDPError
from support import Clicks, clicks, loader_of, make_private

loss_fn = nn.functional.binary_cross_entropy_with_logits


def trained(
    with_closure: bool, mechanism: Mechanism, max_physical_batch: int | None
) -> tuple[dict[str, Tensor], list[float], int, int]:
    """The weights, the losses, the steps in the ledger, and how often the loss was worked out, a batch each."""
    torch.manual_seed(0)
    engine, module, optimizer, loader = make_private(
        Clicks(), loader_of(*clicks(64), batch_size=16), mechanism=mechanism, max_physical_batch=max_physical_batch
    )
    losses, evaluated, batches = [], 0, 0
    for ids, features, target in loader:

        def closure() -> Tensor:
            nonlocal evaluated
            evaluated += 1
            optimizer.zero_grad()
            loss = loss_fn(module(ids, features), target)
            loss.backward()
            return loss

        if with_closure:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            assert optimizer.step() is None
        losses.append(loss.item())
        batches += 1
    assert evaluated == batches == len(losses)
    return copy.deepcopy(module.state_dict()), losses, engine.ledger.steps, batches


@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP(), AdaFEST(threshold=1.0)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("max_physical_batch", [None, 5])
def test_equals_the_loop_without(mechanism: Mechanism, max_physical_batch: int | None) -> None:
    weights, losses, steps, batches = trained(False, mechanism, max_physical_batch)
    same, same_losses, same_steps, same_batches = trained(True, mechanism, max_physical_batch)
    assert steps == same_steps == 4
    assert batches == same_batches and (batches > steps) == (max_physical_batch is not None)
    torch.testing.assert_close(same_losses, losses, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(value, same[name]) for name, value in weights.items())


class Loop:
    """A private run with one batch drawn, and a closure on it."""

    def __init__(self) -> None:
        self.engine, self.module, self.optimizer, self.loader = make_private(
            Clicks(), loader_of(*clicks(32), batch_size=16)
        )
        self.batches = iter(self.loader)
        self.batch = next(self.batches)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        *inputs, target = self.batch
        loss = loss_fn(self.module(*inputs), target)
        loss.backward()
        return loss

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.module.state_dict())

    def refused(self, closure: Any, message: str) -> None:
        """A step with this closure is refused, and changes nothing."""
        before, steps = self.weights(), self.engine.ledger.steps
        with pytest.raises(SparseDPError, match=message):
            self.optimizer.step(closure)
        assert self.engine.ledger.steps == steps
        assert all(torch.equal(value, before[name]) for name, value in self.module.state_dict().items())


def test_has_gradients_inside_no_grad() -> None:
    loop = Loop()
    with torch.no_grad():
        loss = loop.optimizer.step(loop.closure)
    assert loss.requires_grad and loop.engine.ledger.steps == 1


def test_guards_stand() -> None:
    loop = Loop()
    loop.refused(lambda: loss_fn(loop.module(*loop.batch[:-1]), loop.batch[-1]), "without a backward")

    def on_half() -> None:
        loop.optimizer.zero_grad()
        ids, features, target = (part[: len(part) // 2] for part in loop.batch)
        loss_fn(loop.module(ids, features), target).backward()

    loop.refused(on_half, "not the loader's current batch")

    def with_ordinary_gradient() -> None:
        loop.closure()
        loop.module.out.bias.grad = torch.ones(1)

    loop.refused(with_ordinary_gradient, "ordinary gradient")
    loop.optimizer.step(loop.closure)
    loop.refused(loop.closure, "already had its step")

    def with_a_step_inside() -> None:
        loop.closure()
        loop.optimizer.step()

    loop.batch = next(loop.batches)
    with pytest.raises(SparseDPError, match="already had its step"):
        loop.optimizer.step(with_a_step_inside)
    assert loop.engine.ledger.steps == 2  # the one inside counts


def test_a_closure_that_fails_takes_nothing_away() -> None:
    loop = Loop()

    def fails() -> None:
        loop.closure()
        raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        loop.optimizer.step(fails)
    assert loop.engine.ledger.steps == 0
    loop.optimizer.step(loop.closure)  # whose zero_grad forgets what was left
    assert loop.engine.ledger.steps == 1
