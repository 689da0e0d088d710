"""PrivateLoader: the user's DataLoader with batches whose law the accounting knows."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from sparsedp.errors import CheckpointError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.noise import RandomKey
from sparsedp.progress import Progress, no_progress
from sparsedp.sampling.collate import examine, refuse_reordering, stand_in
from sparsedp.sampling.columns import column_reader, one_ahead
from sparsedp.sampling.draws import BatchInfo, Draws, Place, Span
from sparsedp.sampling.share import Share
from sparsedp.sampling.stream import Stream
from sparsedp.sampling.users import Users
from sparsedp.sampling.workers import WorkerInit, kept_globals, seed_globals, torch_generator

_END = object()
_STATE_KEYS = ("step", "epoch", "epoch_position")


class PrivateLoader(DataLoader[Any]):
    """A DataLoader over the same data set that samples every batch from `key`.

    With `poisson` every unit joins logical batch t independently with probability `sample_rate`, which is
    batch_size / N; otherwise batches have a fixed size and follow a fresh permutation each epoch (or the
    order of the data, if the user's loader does not shuffle). `batch_size` is the expected size and
    `len(loader)` the number of logical batches in an epoch. With `max_physical_batch`, a larger logical batch
    comes as several physical ones of nearly equal size, so an epoch may yield more than `len(loader)`
    batches; `current` tells which is which.

    With a `stream` an epoch is one pass over its spans in order of time. Every batch is drawn from the units of one span,
    with probability batch_size / (units of the span), or the stream's own `sample_rate`; `sample_rate` is the largest of these.
    With `users`, the units of a span are those who have examples in it, and bring these.

    With `users` these are the units: `batch_size`, `dataset_size` and the epoch count users, and a drawn user brings all
    of their examples, or as many as `Users` says. `max_physical_batch` counts examples, and a physical batch holds
    whole users; `current.owners` says which example is whose.

    With a `share` it is the loader of one of several processes, which have the same key: its batches are that process's
    shares of the batches that one process alone would draw. `batch_size`, `dataset_size` and all numbers of steps are those
    of all processes together; `max_physical_batch` is for each process, and all of them yield equally many physical batches,
    also empty ones.

    What a batch holds beside rows of examples must be the same for every batch, or its name be in `public_inputs`: `layout`.

    Replay: batch t is a pure function of the key and t (shuffled: of the key, the epoch and the position in
    it), and t counts yielded logical batches. So no draw that anybody saw is made twice, also when `break`
    ends the loop; draws that workers prefetched and nobody saw are made again, which is harmless and makes
    runs with and without workers equal. To keep it so, one pass is live at a time: a new `iter(loader)` ends
    the one before.
    """

    # accelerate's prepare() hands on what says so. It would otherwise wrap the loader, which then yields nothing.
    _is_accelerate_prepared = True

    def __init__(
        self,
        loader: DataLoader,
        *,
        key: RandomKey,
        poisson: bool = True,
        max_physical_batch: int | None = None,
        stream: Stream | None = None,
        users: Users | None = None,
        share: Share | None = None,
        public_inputs: Sequence[str] = (),
        progress: Progress = no_progress,
    ) -> None:
        share = Share() if share is None else share
        size, batch_size, shuffle = _checked(loader, users, share, stream)
        if max_physical_batch is not None and max_physical_batch < 1:
            raise UnsupportedError(f"{max_physical_batch=}: it must be at least 1, or None.")
        if stream is not None and stream.sample_rate is not None and not poisson:
            raise UnsupportedError(
                "Stream(sample_rate=...) is for Poisson sampling, in which each unit joins a batch with that probability. Leave "
                "poisson_sampling on, or leave sample_rate out."
            )
        spans = _spans(size, batch_size, loader, stream, users)
        if users is not None:
            _refuse_for_users(loader, [span.users or users for span in spans], share, max_physical_batch)
        layout = examine(loader.dataset, loader.collate_fn, public_inputs)
        steps = sum(span.steps for span in spans)
        feed = _Feed(steps)
        super().__init__(
            loader.dataset,
            batch_sampler=feed,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )
        # torch sets these two to None and False beside a batch_sampler, and forbids to change them.
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "drop_last", loader.drop_last)
        self.poisson = poisson
        self.shuffled = shuffle
        self.dataset_size = size
        self.stream = stream
        self.users = users
        self.share = share
        self.layout = layout
        self.progress = progress  # told of passes that count the data
        self.steps_per_epoch = steps
        self.max_physical_batch = max_physical_batch
        self.current: BatchInfo | None = None
        self._draws = Draws(key, spans, batch_size, poisson, shuffle, max_physical_batch, users, share)
        self.sample_rate = max(map(self._draws.rate_of, spans))
        self._feed = feed
        self._pass = 0  # number of the live pass
        self.warns_of_cuts = True  # once, of a pass that somebody may have cut short by mistake
        self._done = Place(0, 0, 0)  # behind the last complete logical batch
        self._next = Place(0, 0, 0)  # where the next pass starts

    def __len__(self) -> int:
        return self.steps_per_epoch

    @property
    def span_steps(self) -> tuple[int, ...]:
        """Logical batches of an epoch on each span of the stream; without one, of the whole epoch."""
        return tuple(span.steps for span in self._draws.spans)

    @property
    def span_sizes(self) -> tuple[int, ...]:
        """Units of each span of the stream; without one, of all data."""
        return tuple(span.size for span in self._draws.spans)

    @property
    def drawn(self) -> int:
        """Logical batches of the run, also of a run that was resumed, of which a loop was given at least a part."""
        return self._next.step

    @property
    def next_epoch(self) -> int:
        """The epoch, from 0, that the next pass goes through: after loading a checkpoint, the one to finish."""
        return self._next.epoch

    @property
    def left_of_epoch(self) -> int:
        """Logical batches that the next pass yields: none after loading a checkpoint that was saved at an epoch's last one."""
        return self.steps_per_epoch - self._next.position

    @property
    def next_span(self) -> int | None:
        """The span of the stream that the next pass starts with; None without a stream."""
        return next((number for number, _ in self._draws.logical(self._next)), self._draws.spans[0].number)

    def indices(self, span: int | None) -> np.ndarray | None:
        """Where the units of a span are in the data set, users by their numbers among those of the span; None for all of it."""
        if span is None:
            return None
        found = self._draws.spans[span]
        return np.arange(found.size) if found.indices is None else found.indices

    @property
    def expected_units(self) -> float:
        """How many units a logical batch has on average, over all spans of a stream."""
        return sum(span.steps * self._units(span) for span in self._draws.spans) / self.steps_per_epoch

    @property
    def expected_examples(self) -> float:
        """How many examples a logical batch has on average, over all spans of a stream."""
        if self.users is None:
            return self.expected_units
        brought = (float(self.share.brought(span.users or self.users).mean()) for span in self._draws.spans)
        spans = zip(self._draws.spans, brought)
        return sum(span.steps * self._units(span) * each for span, each in spans) / self.steps_per_epoch

    def _units(self, span: Span) -> float:
        return float(self.batch_size or 0) if span.rate is None else span.rate * span.size

    def counted_examples(self, indices: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """Which of the examples of `indices` this process goes over in a count of the data, as places in its data set.

        None stands for all examples, both as `indices` and as places. And the most that a process goes over.
        """
        return self._draws.counted_examples(indices)

    def counted_users(
        self, users: np.ndarray, most: int | None = None, span: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The examples of those of `users` that this process goes over in a count of the data, and how many each user has.

        In a count of a span these are their examples in it, and `users` are numbers among its users.

        They bring as many as to a batch, chosen from the key. They come in parts of at most `most` examples or one user; all
        processes have the same number of parts, the last ones empty where one has fewer.
        """
        return self._draws.counted_users(users, most, span)

    def stand_in(self) -> Any:
        """A batch of one example, for a process that has nothing to go over where others have."""
        with kept_globals():
            return stand_in(self.dataset, self.collate_fn)

    def state_dict(self) -> dict[str, int]:
        """The place behind the last logical batch that was yielded completely; prefetched ones do not count.

        Within the loop's body the batch at hand counts as done, so save after `optimizer.step()`. A logical
        batch that was cut short is repeated from its start. After a `break` the epoch counts as interrupted.
        """
        return dict(zip(_STATE_KEYS, self._done))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass yield what was left of the interrupted epoch; later passes are full.

        What was left may be nothing: a state saved in the loop's body at the last batch of an epoch. The key
        is not part of the state: with the same key the batches are those of the uninterrupted run. With a
        new key Poisson batches keep their law; a shuffled epoch goes on in a new order and may repeat units.

        Going back takes a new key, unless the key is a test's: steps on a sample that was drawn before would cost more than
        those on samples of their own, which is what they are charged as.
        """
        if set(state) != set(_STATE_KEYS):
            raise CheckpointError(f"Loader state has the keys {list(state)}, expected {list(_STATE_KEYS)}.")
        place = Place(*(int(state[name]) for name in _STATE_KEYS))
        if min(place) < 0 or place.position > self.steps_per_epoch:
            raise CheckpointError(
                f"Loader state {state} does not fit a loader of {self.steps_per_epoch} steps per epoch: "
                "was it saved with another data set or batch size?"
            )
        if place.step < self._next.step and not self._draws.key.seeded:
            # Several processes must not take a key from the operating system each: they would draw different batches.
            is_alone = self.share.ranks == 1
            self.rekey(RandomKey.from_os() if is_alone else self._draws.key_after(self._next))
        self._done = self._next = place
        self.current = None
        self._pass += 1  # a pass that is still running would go on at the old place

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A private loader cannot be copied or pickled: a copy would draw the same samples again, and a file would hold the "
            "key that they are drawn from. Save a checkpoint."
        )

    def rekey(self, key: RandomKey) -> None:
        """Draws from another key from the next pass on."""
        self._draws = replace(self._draws, key=key)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.users is not None:
            self.users.refuse_change(self.dataset)
        self._pass += 1
        infos: deque[BatchInfo] = deque()
        read = None if self.num_workers or self._pins else column_reader(self.dataset, self.collate_fn)
        if read is not None:
            fetched = one_ahead(map(read, self._draws.physical(self._next, infos)))
            return self._batches(fetched, infos, self._next, self._pass)
        # The source must not refer to this loader: persistent workers in a cycle take seconds to shut down.
        source = (self._draws.listed if self.num_workers else self._draws.seeded)(self._next, infos)
        # For as long as torch starts its workers: what the user gave is a public seed, or the global generator, which must
        # stay as it is. (A resumed run starts one pass more than an uninterrupted one.)
        given = self.generator, self.worker_init_fn
        seeds = self._secret_seeds(self._draws.worker_key(self._next))
        self.generator, self.worker_init_fn = seeds["generator"], seeds["worker_init_fn"]
        try:
            with self._feed.handing_on(source):
                fetched = super().__iter__()
        finally:
            self.generator, self.worker_init_fn = given
        return self._batches(fetched, infos, self._next, self._pass)

    @property
    def _pins(self) -> bool:
        return self.pin_memory and torch.accelerator.is_available()

    def _secret_seeds(self, key: RandomKey) -> dict[str, Any]:
        """The arguments of a DataLoader that decide what its workers draw (`sparsedp.sampling.workers`)."""
        return {
            "generator": torch_generator(key.generator()),
            "worker_init_fn": WorkerInit(key, self.worker_init_fn) if self.num_workers else None,
        }

    def counting(self, data: Any, **how: Any) -> Iterator[Any]:
        """The batches of a count of `data`, with this loader's workers and collate function; `how` divides it into batches."""
        key = self._draws.worker_key(self._done, counting=True)
        batches = iter(
            DataLoader(
                data, **how, collate_fn=self.collate_fn, num_workers=self.num_workers, pin_memory=self.pin_memory,
                multiprocessing_context=self.multiprocessing_context, **self._secret_seeds(key),
            )
        )  # fmt: skip
        source = key.generator(0)  # this process stands for the first worker
        batch: Any = None
        while batch is not _END:
            with nullcontext() if self.num_workers else kept_globals():
                if not self.num_workers:
                    seed_globals(source)
                batch = next(batches, _END)
            if batch is not _END:
                yield batch

    def _batches(self, fetched: Iterator[Any], infos: deque[BatchInfo], start: Place, number: int) -> Iterator[Any]:
        """The batches of one pass, with the empty ones in their places and `current` set before each."""
        batch: Any = None
        given, info = 0, None
        try:
            while batch is not _END:
                # Before `next`: persistent workers serve all passes with one iterator, the newest pass's.
                self._require_live(number)
                with nullcontext() if self.num_workers else kept_globals():
                    batch = next(fetched, _END)
                while infos and infos[0].units == 0:
                    empty = self.stand_in()
                    given, info = given + 1, self._described(replace(infos.popleft(), stand_in=True), empty)
                    self._announce(info, start, number)
                    yield empty
                if batch is not _END:
                    given, info = given + 1, self._described(infos.popleft(), batch)
                    self._announce(info, start, number)
                    yield batch
        except GeneratorExit:
            if info is not None:
                self._warn_of_a_cut(info, given, start)
            raise
        self._require_live(number)
        end = start.step + self.steps_per_epoch - start.position
        if infos or (end > start.step and self._done.step != end):
            raise SparseDPError("The data set or its workers stopped before the epoch ended: batches were lost.")
        self._done = self._next = Place(end, start.epoch + 1, 0)

    def _announce(self, info: BatchInfo, start: Place, number: int) -> None:
        self._require_live(number)
        place = Place(info.step, start.epoch, start.position + info.step - start.step)
        if info.first:
            self._done = place
            self._next = Place(info.step + 1, start.epoch + 1, 0)  # after a `break`: a new epoch, a new draw
        if info.last:
            self._done = Place(info.step + 1, start.epoch, place.position + 1)
        self.current = info

    def _warn_of_a_cut(self, last: BatchInfo, given: int, start: Place) -> None:
        """Says so if a loop took `len(loader)` physical batches for an epoch, or went away within a logical batch.

        One batch alone is somebody who wants to see what a batch looks like.
        """
        logical = last.step - start.step + last.last
        as_many = given == self.steps_per_epoch != logical
        if not self.warns_of_cuts or given < 2 or (last.last and not as_many):
            return
        self.warns_of_cuts = False
        warnings.warn(
            f"A loop over the private loader ended after {given} physical batches, which hold {logical} whole logical batches, "
            f"one for each step, of the {self.steps_per_epoch} of an epoch. len(loader) counts logical batches; with "
            "max_physical_batch, more physical ones arrive, and a loop that counts them with len(loader) (transformers' Trainer "
            "does) leaves the rest out: it is not trained on, and costs no budget. Loop until the loader ends, or leave "
            "max_physical_batch out.",
            SparseDPWarning,
            stacklevel=3,
        )

    def _require_live(self, number: int) -> None:
        if number != self._pass:
            raise SparseDPError(
                "This pass over the private loader was ended by a newer iter(loader) or by load_state_dict: "
                "two passes at once would train on the same draws twice. Use one loop at a time."
            )

    def _described(self, info: BatchInfo, batch: Any) -> BatchInfo:
        """The info with what the layout knows of the batch's tensors; raises if it is not laid out like the others."""
        layout = self.layout
        layout.refuse_change(batch)
        return replace(
            info,
            offsets=layout.offsets_of(batch),
            constants=layout.constants_of(batch),
            unit_axes=layout.unit_axes_of(batch),
        )


def _spans(
    size: int, batch_size: int, loader: DataLoader, stream: Stream | None, users: Users | None
) -> tuple[Span, ...]:
    def steps(units: int) -> int:
        if stream is not None and stream.sample_rate is not None:  # the same for all spans, whoever is in them
            return stream.steps(loader.drop_last)
        return units // batch_size if loader.drop_last else math.ceil(units / batch_size)

    if stream is None:
        return (Span(size, steps(size)),)
    stream.refuse_length(len(loader.dataset))  # type: ignore[arg-type]
    rate = stream.sample_rate
    if users is None:
        stream.refuse_sizes(list(map(len, stream.spans)), batch_size, "examples")
        examples = enumerate(stream.spans)
        return tuple(Span(len(where), steps(len(where)), where, number, None, rate) for number, where in examples)
    parts = users.in_spans(stream.spans)
    stream.refuse_users(parts)
    stream.refuse_sizes([part.count for part in parts], batch_size, "users")
    return tuple(Span(part.count, steps(part.count), None, number, part, rate) for number, part in enumerate(parts))


class _Feed:
    """The batch sampler that torch sees: hands on the draws of a pass to the loader that they were drawn for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._source: Iterator[list[int]] | None = None

    @contextmanager
    def handing_on(self, source: Iterator[list[int]]) -> Iterator[None]:
        """Within it, iterating gives `source`. torch may ask twice while it sets a pass up, and must get the same one."""
        self._source = source
        try:
            yield
        finally:
            self._source = None

    def __iter__(self) -> Iterator[list[int]]:
        if self._source is None:
            raise UnsupportedError(
                "Another loader was made of the private loader's parts, as accelerator.prepare(loader) does. Which batch is "
                "which would not be known to it, and no step could be accounted for. Iterate over the loader that make_private "
                "returned, and leave it out of prepare()."
            )
        return self._source

    def __len__(self) -> int:
        return self.length


def _refuse_for_users(
    loader: DataLoader, together: Sequence[Users], share: Share, max_physical_batch: int | None
) -> None:
    """`together` are the users that are sampled from together: those of each span."""
    limit = together[0].limit
    most = max(int(share.brought(users).max()) for users in together) if limit is None else limit
    if max_physical_batch is not None and most > max_physical_batch:
        whose = "the largest user's" if limit is None else "max_examples_per_user"
        raise UnsupportedError(
            f"max_physical_batch={max_physical_batch} cannot hold a whole user, of up to {most} examples ({whose}): a "
            "user's gradient is clipped as one, so all of it has to be in one physical batch. Raise max_physical_batch, or "
            "lower max_examples_per_user."
        )
    refuse_reordering(loader.dataset, loader.collate_fn)


def _checked(loader: DataLoader, users: Users | None, share: Share, stream: Stream | None) -> tuple[int, int, bool]:
    """Number of units of all processes, batch size and whether to shuffle, of a loader that can be made private."""
    if isinstance(loader, PrivateLoader):
        raise UnsupportedError("The loader is already private: pass the original DataLoader.")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnsupportedError(
            f"{type(loader).__name__} iterates in its own way, which private sampling would replace: "
            "pass a plain torch.utils.data.DataLoader."
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UnsupportedError(
            f"{type(loader.dataset).__name__} is an IterableDataset or has no length, so units cannot be "
            "sampled with a known probability: use a map-style data set with __getitem__ and __len__."
        )
    kind = type(loader.dataset)
    if (package := kind.__module__.partition(".")[0]) in ("pyarrow", "pandas", "polars"):
        raise UnsupportedError(
            f"A {kind.__name__} of {package} is no data set of examples: its item i is no row i. Make one "
            "with sparsedp.data.open_table(table, schema), or a TensorDataset of its columns."
        )
    size = len(loader.dataset)
    if size == 0:
        raise UnsupportedError("The data set is empty: there is nothing to sample from.")
    if loader.batch_sampler is None:
        raise UnsupportedError("DataLoader(batch_size=None) makes no batches: give it a batch_size.")
    if loader.batch_size is None:
        raise UnsupportedError(
            f"A custom batch_sampler ({type(loader.batch_sampler).__name__}) decides who is sampled, which "
            "the accounting has to know: pass batch_size and shuffle instead."
        )
    share.refuse(size, users, stream)
    units, what = (size, "examples") if users is None else (users.count, "users, whom it counts with unit='user'")
    units = units if share.begin is None else share.begin[-1]
    if loader.batch_size > units and (stream is None or stream.sample_rate is None):
        raise UnsupportedError(
            f"batch_size={loader.batch_size} exceeds the data set's {units} {what}, a sampling probability "
            "above 1: use a smaller batch_size."
        )
    if not getattr(loader, "in_order", True):
        raise UnsupportedError("DataLoader(in_order=False) loses which batch is which: use in_order=True.")
    sampler = loader.sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement
    if not (shuffle or type(sampler) is SequentialSampler) or len(sampler) != size:  # type: ignore[arg-type]
        raise UnsupportedError(
            f"The sampler {type(sampler).__name__} need not visit every example once an epoch, which changes "
            "the sampling probabilities that the accounting needs: pass shuffle=True or shuffle=False, and "
            "weight examples in the loss."
        )
    return units, loader.batch_size, shuffle
