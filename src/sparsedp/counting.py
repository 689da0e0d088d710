"""Counts how many units of the training data touch each row of each table, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsedp.capture import Capture
from sparsedp.mechanisms.contribution import RowSpace, contribution_map
from sparsedp.sampling import PrivateLoader

_CHUNK = 8192  # units looked at together


def count_rows(
    module: nn.Module,
    capture: Capture,
    loader: PrivateLoader,
    tables: Collection[str],
    inputs: Callable[[Any], Any] | None,
    clip: float | None,
) -> dict[str, Tensor]:
    """For each table, the sum over all units of their contributions to each row, (rows,) float64.

    A unit adds min(1, clip / sqrt(n)) to each of the n distinct rows that it touches; 1 if `clip` is None. The module's
    forward pass decides what a unit touches. `inputs(batch)` gives its arguments; by default a tuple without its last
    element, the target, or a dict as keyword arguments.
    """
    parameters = dict(module.named_parameters())
    space = RowSpace.of({name: parameters[name] for name in tables})
    counts = torch.zeros(space.size, dtype=torch.float64)
    data = DataLoader(
        loader.dataset, batch_size=min(_CHUNK, loader.dataset_size), collate_fn=loader.collate_fn,
        num_workers=loader.num_workers, worker_init_fn=loader.worker_init_fn, pin_memory=loader.pin_memory,
        multiprocessing_context=loader.multiprocessing_context,
    )  # fmt: skip
    with Progress(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as bar:
        task = bar.add_task("counting rows", total=len(data))
        for batch in data:
            args, kwargs = _arguments(batch, inputs)
            seen = capture.glance(lambda args=args, kwargs=kwargs: module(*args, **kwargs))  # type: ignore[misc]
            # A bound of sqrt(size) never clips: no unit touches more rows than there are.
            rows, values = contribution_map([seen], space, space.size**0.5 if clip is None else clip)
            counts.index_add_(0, rows, values)
            bar.advance(task)
    return dict(zip(space.names, counts.split(list(space.sizes))))


def _arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple, dict]:
    if inputs is not None:
        chosen = inputs(batch)
        return ((), dict(chosen)) if isinstance(chosen, Mapping) else (tuple(chosen), {})
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch[:-1]), {}
