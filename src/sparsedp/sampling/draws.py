"""Which units form each batch of a run: a pure function of the key and the place in the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sparsedp.noise import RandomKey
from sparsedp.sampling.poisson import poisson_indices
from sparsedp.sampling.users import Users, owners_of, whole_users
from sparsedp.sampling.workers import seed_globals

# First element of the path of an epoch's permutation. Poisson draws have the path (step,).
_SHUFFLE = 0
# Keys of their own, for which of their examples users bring to a batch, and to a count of the data.
_EXAMPLES = 2
_COUNTED = 3
# And for what data sets draw: in the workers of a pass, in those of a count, and where there are no workers.
_PASS, _COUNT, _FETCH = 4, 5, 6


@dataclass(frozen=True)
class BatchInfo:
    """What is known about a physical batch besides its content."""

    units: int  # in this physical batch
    logical_units: int  # in its logical batch, one step of the optimizer
    first: bool  # of the physical batches of its logical batch
    last: bool
    step: int  # of the logical batch, from 0 over the whole run
    span: int | None = None  # of the stream, whose units alone were sampled from; None without a stream
    # int64 (examples,): which of this batch's units each of its examples belongs to; None: example i is unit i.
    owners: torch.Tensor | None = field(default=None, compare=False)
    # Tensors of the batch with an entry for each example, which other examples decide: where bags begin.
    offsets: tuple[torch.Tensor, ...] = field(default=(), compare=False)
    constants: tuple[torch.Tensor, ...] = field(default=(), compare=False)  # the same in every batch
    # Tensors of the batch of which it is known on which axis the examples are (None: on none).
    unit_axes: tuple[tuple[torch.Tensor, int | None], ...] = field(default=(), compare=False)
    stand_in: bool = False  # whether it is empty, and the loop is given an example in its place

    @property
    def examples(self) -> int:
        """That the loop is given: as many as units if the units are examples; a stand-in is one more, which is nobody's."""
        return int(self.stand_in) + (self.units if self.owners is None else len(self.owners))


class Place(NamedTuple):
    """A point between two logical batches of a run."""

    step: int  # the next logical batch's; also the index of its draw
    epoch: int
    position: int  # logical batches of this epoch that lie behind


@dataclass(frozen=True)
class Span:
    """Units that are sampled from together, and the steps of an epoch on them. Without a stream: all units."""

    size: int
    steps: int
    indices: np.ndarray | None = None  # of the units in the data set; None: 0 to size - 1
    number: int | None = None  # in the stream


@dataclass(frozen=True)
class Draws:
    """The batches of an epoch, span by span: Poisson, shuffled, or in the order of the data."""

    key: RandomKey
    spans: tuple[Span, ...]
    batch_size: int  # expected (Poisson), or exact
    poisson: bool
    shuffle: bool
    max_physical_batch: int | None  # in examples
    users: Users | None = None  # None: the units are the examples

    def logical(self, start: Place) -> Iterator[tuple[int | None, np.ndarray]]:
        """Number of the span and indices, int64 [n], of each logical batch from `start` to the end of its epoch."""
        begin = -start.position  # of the span, in steps from `start`
        for span in self.spans:
            if begin + span.steps > 0:
                first = max(0, -begin)
                for drawn in self._of_span(span, first, start.step + begin, start.epoch):
                    yield span.number, drawn if span.indices is None else span.indices[drawn]
            begin += span.steps

    def _of_span(self, span: Span, first: int, step: int, epoch: int) -> Iterator[np.ndarray]:
        """The batches of a span from its `first` on, as places in the span; batch 0 is that of step `step`."""
        if self.poisson:
            for position in range(first, span.steps):
                yield poisson_indices(self.key.generator(step + position), span.size, self.batch_size / span.size)
            return
        path = (_SHUFFLE, epoch, span.number) if span.number else (_SHUFFLE, epoch)
        order = self.key.generator(*path).permutation(span.size) if self.shuffle else None
        for position in range(first, span.steps):
            begin = position * self.batch_size
            batch = np.arange(begin, min(begin + self.batch_size, span.size))
            yield batch if order is None else order[batch]

    def worker_key(self, start: Place, counting: bool = False) -> RandomKey:
        """Of what the workers of a pass over the batches from `start` on draw, or those of a count of the data there."""
        return self.key.child(_COUNT if counting else _PASS, start.step)

    def seeded(self, start: Place, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """As `physical`, for data that are fetched in this process: the global generators have secret states at each fetch.

        They are a function of the key and the batch, so that a resumed run draws the same.
        """
        step, source = -1, self.key.child(_FETCH).generator()
        for indices in self.physical(start, infos):
            if infos[-1].step != step:
                step = infos[-1].step
                source = self.key.child(_FETCH).generator(step)
            seed_globals(source)
            yield indices

    def physical(self, start: Place, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """Indices of the physical batches from `start` on, for torch's machinery, which may run ahead.

        An info for each goes to `infos`, in the same order. Empty batches are in `infos` only: the loader puts a stand-in
        there.
        """
        for step, (span, indices) in enumerate(self.logical(start), start.step):
            if self.users is not None:
                yield from self._of_users(self.users, indices, step, infos)
                continue
            limit = self.max_physical_batch or max(1, len(indices))
            parts = np.array_split(indices, max(1, math.ceil(len(indices) / limit)))
            for i, part in enumerate(parts):
                infos.append(BatchInfo(len(part), len(indices), i == 0, i == len(parts) - 1, step, span))
                if len(part):
                    yield part.tolist()

    def _of_users(self, users: Users, drawn: np.ndarray, step: int, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """The physical batches of one logical batch of users: each user is in one of them, with all that they bring."""
        examples, sizes = users.examples(drawn, self.key.child(_EXAMPLES).generator(step))
        ends = np.cumsum(sizes)
        parts = list(whole_users(sizes, self.max_physical_batch)) or [slice(0, 0)]
        for i, part in enumerate(parts):
            own = sizes[part]
            infos.append(BatchInfo(len(own), len(sizes), i == 0, i == len(parts) - 1, step, owners=owners_of(own)))
            if len(own):
                yield examples[ends[part.start] - own[0] : ends[part.stop - 1]].tolist()

    def counted(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples that `users` bring to a count of the data, as `Users.examples`; with one key, the same ones again."""
        assert self.users is not None
        return self.users.examples(users, self.key.child(_COUNTED).generator(0))
