"""Which units form each batch of a run: a pure function of the key and the place in the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sparsedp.noise import RandomKey
from sparsedp.sampling.poisson import poisson_indices

# First elements of the paths of an epoch's permutation and of the workers' seeds. Poisson draws have the path (step,).
_SHUFFLE = 0
_WORKERS = 1


@dataclass(frozen=True)
class BatchInfo:
    """What is known about a physical batch besides its content."""

    units: int  # in this physical batch
    logical_units: int  # in its logical batch, one step of the optimizer
    first: bool  # of the physical batches of its logical batch
    last: bool
    step: int  # of the logical batch, from 0 over the whole run


class Place(NamedTuple):
    """A point between two logical batches of a run."""

    step: int  # the next logical batch's; also the index of its draw
    epoch: int
    position: int  # logical batches of this epoch that lie behind


@dataclass(frozen=True)
class Draws:
    """The batches over `size` units: Poisson, shuffled, or in the order of the data."""

    key: RandomKey
    size: int
    batch_size: int  # expected (Poisson), or exact
    steps_per_epoch: int
    poisson: bool
    shuffle: bool
    max_physical_batch: int | None

    def logical(self, start: Place) -> Iterator[np.ndarray]:
        """Indices of each logical batch from `start` to the end of its epoch, int64 [n]."""
        steps_left = self.steps_per_epoch - start.position
        if self.poisson:
            for step in range(start.step, start.step + steps_left):
                yield poisson_indices(self.key.numpy(step), self.size, self.batch_size / self.size)
            return
        order = self.key.numpy(_SHUFFLE, start.epoch).permutation(self.size) if self.shuffle else None
        for position in range(start.position, self.steps_per_epoch):
            first = position * self.batch_size
            batch = np.arange(first, min(first + self.batch_size, self.size))
            yield batch if order is None else order[batch]

    def worker_generator(self, start: Place) -> torch.Generator:
        """What seeds the workers of a pass that begins at `start`."""
        return self.key.torch(_WORKERS, start.step)

    def physical(self, start: Place, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """Indices of the physical batches from `start` on, for torch's machinery, which may run ahead.

        An info for each goes to `infos`, in the same order. Empty batches are in `infos` only: what a data
        set's `__getitems__([])` or a collate function do with them is anybody's guess.
        """
        for step, indices in enumerate(self.logical(start), start.step):
            limit = self.max_physical_batch or max(1, len(indices))
            parts = np.array_split(indices, max(1, math.ceil(len(indices) / limit)))
            for i, part in enumerate(parts):
                infos.append(BatchInfo(len(part), len(indices), i == 0, i == len(parts) - 1, step))
                if len(part):
                    yield part.tolist()
