"""Counts how many units of the training data touch each row of each table, in one pass over the data or a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from sparsedp.capture import Capture, Captured, RowSpace
from sparsedp.contribution import Contribution
from sparsedp.fallback import real_ids
from sparsedp.sampling import BatchInfo, PrivateLoader, owners_of

_CHUNK = 8192  # examples in one forward pass, at most


def count_rows(
    module: nn.Module,
    capture: Capture,
    loader: PrivateLoader,
    tables: Collection[str],
    inputs: Callable[[Any], Any] | None,
    clip: float | None,
    indices: np.ndarray | None = None,
    span: int | None = None,
) -> dict[str, Tensor]:
    """For each table, the sum over all units of their contributions to each row, (rows,) float64.

    With `indices`, over these units only: examples by their places in the data set, users by their numbers. With a `span` of
    the stream these are numbers among its users, with their examples in it. Of several processes, over this one's share of the
    units: the sums of all processes have to be added up.

    What a unit adds to the rows that it touches is a `Contribution`. The module's forward pass decides what a unit touches.
    `inputs(batch)` gives its arguments; by default a tuple without its last element, the target, or a dict as keyword
    arguments.
    """
    parameters = dict(module.named_parameters())
    space = RowSpace.of({name: parameters[name] for name in tables})
    with real_ids(module):
        sums = count_touches(captured_forwards(module, capture, loader, inputs, indices, span=span), space, clip)[1]
    return dict(zip(space.names, sums.split(list(space.sizes))))


def count_touches(
    uses: Iterator[Captured], space: RowSpace, clip: float | None, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each global row, how many units touch it, int64, and the sum of their contributions to it, float64; (rows,).

    What a unit adds to its rows is a `Contribution`. `within` (global rows) restricts what is added, and the number of rows
    that decides how much it is, but not what is counted.
    """
    counts = torch.zeros(space.size, dtype=torch.long)
    sums = torch.zeros(space.size, dtype=torch.float64)
    eligible = torch.ones(space.size, dtype=torch.bool)
    if within is not None:
        eligible.zero_()[within] = True
    for captured in uses:
        touched = captured.touched(space)
        units, at = touched.pairs()
        counts[touched.rows] += torch.bincount(at, minlength=touched.rows.numel())
        if within is not None:
            inside = eligible[touched.rows][at]
            units, at = units[inside], at[inside]
        rows_each = torch.bincount(units, minlength=captured.units)  # that a unit touches
        used_in_full = [
            slice(start, start + size)
            for name, start, size in zip(space.names, space.starts, space.sizes)
            if name in captured.uses and name not in touched.lookups  # every unit uses every row, as in a softmax
        ]
        for table in used_in_full:
            counts[table] += captured.units
            rows_each += eligible[table].sum()
        shares = Contribution(clip).shares(rows_each)
        sums[touched.rows] += torch.bincount(at, shares[units], touched.rows.numel())
        for table in used_in_full:
            sums[table] += shares.sum() * eligible[table]
    return counts, sums


def captured_forwards(
    module: nn.Module,
    capture: Capture,
    loader: PrivateLoader,
    inputs: Callable[[Any], Any] | None,
    indices: np.ndarray | None = None,
    chunk: int | None = None,
    span: int | None = None,
) -> Iterator[Captured]:
    """The uses of forward passes over all units, or those in `indices` (of a `span`), at most `chunk` examples at a time.

    Users are never taken apart: one with more examples than that has a forward pass of their own.

    Of several processes each gives the uses of its own share of these units. All of them make equally many forward passes,
    those with fewer units at the end over a stand-in, whose uses are thrown away.
    """
    most = min(_CHUNK, loader.max_physical_batch or _CHUNK)
    most = min(most, chunk or most)
    data = loader.dataset
    infos: Iterable[BatchInfo]
    if loader.users is None:
        indices, largest = loader.counted_examples(indices)
        data = data if indices is None else Subset(data, indices.tolist())
        size: int = len(data)  # type: ignore[arg-type]
        most = min(most, largest)
        how: dict[str, Any] = {"batch_size": most}
        count = math.ceil(largest / most)
        sizes = (min(most, size - first) for first in range(0, size, most))
        infos = (BatchInfo(n, n, True, True, 0) for n in sizes)
    else:
        users = np.arange(loader.dataset_size) if indices is None else indices
        parts = loader.counted_users(users, most, span)
        count, parts = len(parts), [part for part in parts if len(part[0])]
        how = {"batch_sampler": [examples.tolist() for examples, _ in parts]}
        infos = (BatchInfo(len(sizes), len(sizes), True, True, 0, owners=owners_of(sizes)) for _, sizes in parts)
    batches = zip(loader.counting(data, **how), infos)
    with loader.progress("counting rows", count) as advance:
        for _ in range(count):
            batch, info = next(batches, (None, None))
            if info is None:  # other processes have more: their forward passes wait for this one's
                _forward(module, capture, loader, loader.stand_in(), inputs, BatchInfo(1, 1, True, True, 0))
            else:
                yield _forward(module, capture, loader, batch, inputs, info)
            advance(1)


def _forward(
    module: nn.Module, capture: Capture, loader: PrivateLoader, batch: Any, inputs: Callable[[Any], Any] | None,
    info: BatchInfo,
) -> Captured:  # fmt: skip
    args, kwargs = _arguments(batch, inputs)
    info = replace(info, unit_axes=loader.layout.unit_axes_of(batch))
    return capture.capture_forward_only(lambda: module(*args, **kwargs), info)


def _arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple, dict]:
    if inputs is not None:
        chosen = inputs(batch)
        return ((), dict(chosen)) if isinstance(chosen, Mapping) else (tuple(chosen), {})
    args, kwargs, _ = arguments_of(batch)
    return args, kwargs


def arguments_of(batch: Any) -> tuple[tuple, dict, Any]:
    """What a module and a loss are given of a batch: arguments, arguments by name, and the target.

    (inputs..., target) is for loss_fn(module(*inputs), target), a mapping for loss_fn(module(**batch), batch), and an object of a
    dataclass for loss_fn(module(batch), batch).
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if is_dataclass(batch):
        return (batch,), {}, batch
    return tuple(batch[:-1]), {}, batch[-1]
