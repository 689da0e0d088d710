"""The training loop itself: the same one that any user of the library writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sparsedp.cli.prepare import Prepared, forward
from sparsedp.optimizer import StepReport


@dataclass(frozen=True)
class Step:
    """What one step was."""

    loss: float  # mean over the examples; not a number if there were none
    lr: float
    seconds: float
    report: StepReport
    table_lr: float | None = None  # if the tables have a learning rate of their own
    span: int | None = None  # of the stream


def steps_of_epoch(
    parts: Prepared,
    held: Callable[[], AbstractContextManager[None]] = nullcontext,
    completed: Callable[[Step], None] = lambda step: None,
    watch: Callable[[str], AbstractContextManager[None]] = lambda part: nullcontext(),
) -> Iterator[Step]:
    """Takes the steps that are left of an epoch, one each time that the next `Step` is asked for.

    The weights change, and `completed` is called with the step, in one block `with held()`. `watch` times the parts of a step.
    """
    optimizer, loader = parts.optimizer, parts.loader
    mean = parts.engine.plan.loss_reduction == "mean"
    started, total = time.monotonic(), 0.0
    for batch in _timed(loader, watch):
        info = loader.current
        assert info is not None
        optimizer.zero_grad()
        # A Poisson sample may be empty: then the step is noise alone. But other processes may look rows up here.
        if info.units or parts.processes.several:
            with watch("forward"):
                _, _, loss = forward(parts.model, parts.loss, batch)
            with watch("backward"):
                loss.backward()
            total += loss.item() * (info.examples if mean else 1) if info.units else 0.0
        with held():
            with watch("optimizer"):
                optimizer.step()
            if not info.last:
                continue
            lr, *table_lr = [group["lr"] for group in optimizer.param_groups]  # as `make_optimizer` orders them
            parts.scheduler.step()
            assert optimizer.last_step is not None
            examples = optimizer.last_step.examples
            total = parts.processes.add_up(total)
            loss_per_example = total / examples if examples else math.nan
            seconds = time.monotonic() - started
            rate = table_lr[0] if table_lr else None
            step = Step(loss_per_example, lr, seconds, optimizer.last_step, rate, info.span)
            completed(step)
        yield step
        started, total = time.monotonic(), 0.0


def _timed(batches: Iterable[Any], watch: Callable[[str], AbstractContextManager[None]]) -> Iterator[Any]:
    waiting = iter(batches)
    while True:
        with watch("batches"):
            try:
                batch = next(waiting)
            except StopIteration:
                return
        yield batch
