"""Which units form each batch of a run: a pure function of the key, the place in the run and the share of the process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sparsedp.noise import RandomKey
from sparsedp.sampling.poisson import poisson_indices
from sparsedp.sampling.share import Share
from sparsedp.sampling.users import Users, owners_of, whole_users
from sparsedp.sampling.workers import seed_globals

# First element of the path of an epoch's permutation. Poisson draws have the path (step,).
_SHUFFLE = 0
# Keys of their own, for which of their examples users bring to a batch, and to a count of the data.
_EXAMPLES = 2
_COUNTED = 3
# And for what data sets draw: in the workers of a pass, in those of a count, and where there are no workers.
_PASS, _COUNT, _FETCH = 4, 5, 6
# And for the samples after several ranks went back to an earlier place.
_AFTER = 7


@dataclass(frozen=True)
class BatchInfo:
    """What is known about a physical batch besides its content."""

    units: int  # in this physical batch
    logical_units: int  # in its logical batch, one step of the optimizer; those of all ranks
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
    places: np.ndarray | None = field(default=None, compare=False)  # of its examples in the data set
    stand_in: bool = False  # whether it is empty, and the loop is given an example in its place

    @property
    def examples(self) -> int:
        """How many the loop is given: as many as units if the units are examples; a stand-in is one more, which is nobody's."""
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
    users: Users | None = None  # where these are the units: those of the span, with their examples in it
    rate: float | None = None  # with which a unit joins a batch; None: the batch size, divided by the span's size


@dataclass(frozen=True)
class Draws:
    """The batches of an epoch, span by span: Poisson, shuffled, or in the order of the data."""

    key: RandomKey
    spans: tuple[Span, ...]
    batch_size: int  # expected (Poisson), or exact
    poisson: bool
    shuffle: bool
    max_physical_batch: int | None  # in examples, on one rank
    users: Users | None = None  # None: the units are the examples
    share: Share = field(default_factory=Share)

    def logical(self, start: Place) -> Iterator[tuple[int | None, np.ndarray]]:
        """Number of the span and units, int64 [n], of each logical batch from `start` to the end of its epoch, over all ranks.

        Users of a stream have their numbers among the users of their span.
        """
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
                yield poisson_indices(self.key.generator(step + position), span.size, self.rate_of(span))
            return
        path = (_SHUFFLE, epoch, span.number) if span.number else (_SHUFFLE, epoch)
        order = self.key.generator(*path).permutation(span.size) if self.shuffle else None
        for position in range(first, span.steps):
            begin = position * self.batch_size
            batch = np.arange(begin, min(begin + self.batch_size, span.size))
            yield batch if order is None else order[batch]

    def rate_of(self, span: Span) -> float:
        """The probability with which each unit of a span joins a batch."""
        return self.batch_size / span.size if span.rate is None else span.rate

    def users_of(self, span: int | None) -> Users | None:
        """Those that are sampled from together, with what they bring then; None: the units are examples."""
        return self.users if span is None else self.spans[span].users

    def key_after(self, place: Place) -> RandomKey:
        """A key of which no batch was drawn yet, for going back from `place`: the same on all ranks."""
        return self.key.child(_AFTER, place.step)

    def worker_key(self, start: Place, counting: bool = False) -> RandomKey:
        """The key of what workers draw in a pass over the batches from `start` on, or in a count of the data there."""
        return self.key.child(_COUNT if counting else _PASS, start.step, *self.share.key_path)

    def seeded(self, start: Place, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """As `physical`, for data that are fetched in this process: the global generators have secret states at each fetch.

        They are a function of the key, the rank and the batch, so that a resumed run draws the same.
        """
        key = self.key.child(_FETCH, *self.share.key_path)
        step, source = -1, key.generator()
        for indices in self.listed(start, infos):
            if infos[-1].step != step:
                step = infos[-1].step
                source = key.generator(step)
            seed_globals(source)
            yield indices

    def listed(self, start: Place, infos: deque[BatchInfo]) -> Iterator[list[int]]:
        """As `physical`, for torch's machinery."""
        return (places.tolist() for places in self.physical(start, infos))

    def physical(self, start: Place, infos: deque[BatchInfo]) -> Iterator[np.ndarray]:
        """Places in this rank's data set of its physical batches from `start` on, for what fetches them and may run ahead.

        An info for each goes to `infos`, in the same order. Empty batches are in `infos` only: the loader puts a stand-in
        there. Every rank has as many physical batches of a logical one as the others.
        """
        for step, (span, drawn) in enumerate(self.logical(start), start.step):
            parts: Sequence[tuple[np.ndarray, np.ndarray | None]]
            if (users := self.users_of(span)) is None:
                parts = [(places, None) for places in self._parts_of_examples(drawn)]
            else:
                parts = self._parts_of_users(users, drawn, self.max_physical_batch, _EXAMPLES, step)
            for i, (places, sizes) in enumerate(parts):
                units = places if sizes is None else sizes
                owners = None if sizes is None else owners_of(sizes)
                first, last = i == 0, i == len(parts) - 1
                infos.append(BatchInfo(len(units), len(drawn), first, last, step, span, owners, places=places))
                if len(units):
                    yield places

    def _parts_of_examples(self, drawn: np.ndarray) -> list[np.ndarray]:
        """This rank's physical batches of a logical one: places in its data set. As many as the rank with the most needs."""
        pieces = self.share.pieces(drawn)
        limit = self.max_physical_batch or max(1, len(drawn))
        count = max(1, *(math.ceil(len(piece) / limit) for piece in pieces))
        places = self.share.local(drawn[pieces[self.share.rank]])
        return np.array_split(places, count)

    def _parts_of_users(
        self, users: Users, drawn: np.ndarray, limit: int | None, purpose: int, number: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """This rank's parts of `drawn` users: places in its data set, and how many there are of each user.

        Each user is in one part, with all that they bring; a part has at most `limit` examples or one user. There are as many
        parts as the rank with the most needs, the last ones empty on others. What users bring is chosen with generator
        `number` of the key for `purpose`: by all ranks alike where they read the same data.
        """
        share = self.share
        if share.begin is None:
            examples, sizes = users.examples(drawn, self.key.child(purpose).generator(number))
            pieces = share.pieces(drawn, sizes)
            is_mine = np.zeros(len(drawn), dtype=bool)
            is_mine[pieces[share.rank]] = True
            examples = examples[np.repeat(is_mine, sizes)]
        else:
            sizes, pieces = share.brought(users, drawn), share.pieces(drawn)
            mine = share.local(drawn[pieces[share.rank]])
            examples, _ = users.examples(mine, self.key.child(purpose, *share.key_path).generator(number))
        count = max(1, *(sum(1 for _ in whole_users(sizes[piece], limit)) for piece in pieces))
        sizes = sizes[pieces[share.rank]]
        begin = np.concatenate([[0], np.cumsum(sizes)])
        slices = list(whole_users(sizes, limit))
        slices += [slice(len(sizes), len(sizes))] * (count - len(slices))
        return [(examples[begin[part.start] : begin[part.stop]], sizes[part]) for part in slices]

    def counted_examples(self, indices: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """Which of the examples of `indices` this rank counts, as places in its data set; and the most that a rank counts.

        None stands for all examples, both as `indices` and as places. Every example is counted by one rank.
        """
        share, size = self.share, sum(span.size for span in self.spans)
        if indices is None and (share.ranks == 1 or share.begin is not None):
            return None, int(np.diff(share.begin or (0, size)).max())
        indices = np.arange(size) if indices is None else indices
        pieces = share.pieces(indices)
        return share.local(indices[pieces[share.rank]]), max(map(len, pieces))

    def counted_users(
        self, users: np.ndarray, most: int | None, span: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The examples of those of `users` that this rank counts, with at most `most` or one user's in each part.

        Every user is counted by one rank. All ranks have the same number of parts, the last ones empty where a rank has
        fewer. With one key, users bring the same examples again. In a span, `users` are numbers among its users.
        """
        found = self.users_of(span)
        assert found is not None
        # Numbers of their own for each span: what a user brings to one must tell nothing of others in another.
        return self._parts_of_users(found, users, most, _COUNTED, 0 if span is None else span + 1)
