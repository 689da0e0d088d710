"""A stream: data in periods (days, say) that are trained on in order of time, one or several at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, get_args

import numpy as np

from sparsedp.accounting.ledger import Composition
from sparsedp.errors import ConfigError, UnsupportedError
from sparsedp.sampling.periods import Every, period_name
from sparsedp.sampling.users import Users

COMPOSITIONS = (
    "'parallel' if each unit has data in one span of periods only: epsilon is then that of the costliest span; or "
    "'sequential' if a unit may have one example in every span: epsilon is then that of all spans together. More than "
    "one example of a unit in a span is covered by neither, unless unit='user'. Nothing in the data tells which it is"
)


_NAMED = 3  # spans of a user, in an error


@dataclass(frozen=True, eq=False)
class Stream:
    """Which period each example belongs to, and what is known about units in different periods.

    `periods` holds a whole number for each example of the data set, in its order. A span is `span` consecutive periods,
    counted by value from the first: with periods 3, 4, 5, 9 and span 2 the spans are {3, 4}, {5} and {9}. Spans without
    examples are left out. An epoch is one pass over the spans in order of time.

    `composition` has to be given: "parallel" if each unit has data in one span only, "sequential" if a unit may have an
    example in every span (and no more than one in each). With unit="user", users may have any number of examples in a span,
    and "parallel" is refused where it is seen to be wrong.

    With a `sample_rate` each unit of a span joins a batch with that probability, however many they are, and a pass over a span
    takes 1 / sample_rate steps. The loader's batch size is then what sums are divided by, the same for all spans: how many
    units a span has need not be public, and may be few.

    `every` says what messages call a period: with "day" its number counts days since 1970, and they name the date.
    """

    periods: np.ndarray  # int64 (N,); anything that reads as such can be passed
    composition: Composition = None  # type: ignore[assignment]  # no default: None is refused
    span: int = 1
    sample_rate: float | None = None  # None: the batch size, divided by the units of the span
    every: Every | None = None

    def __post_init__(self) -> None:
        if self.composition not in get_args(Composition):
            given = "is missing" if self.composition is None else f"cannot be {self.composition!r}"
            raise ConfigError(f"Stream: composition {given}. Say {COMPOSITIONS}.")
        if not isinstance(self.span, int) or isinstance(self.span, bool) or self.span < 1:
            raise ConfigError(f"Stream: span must be a whole number of periods, at least 1; got {self.span!r}")
        if self.sample_rate is not None:
            number = self.sample_rate
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= 1:
                raise ConfigError(f"Stream: sample_rate must be a probability above 0, or None; got {number!r}")
            object.__setattr__(self, "sample_rate", float(number))
        if self.every not in (None, *get_args(Every)):
            raise ConfigError(f"Stream: every must be hour, day, week or None; got {self.every!r}")
        object.__setattr__(self, "periods", _whole_numbers(self.periods))

    @cached_property
    def spans(self) -> tuple[np.ndarray, ...]:
        """The examples of each span, in order of time: int64 indices, ascending within a span."""
        _, number = np.unique((self.periods - self.periods.min()) // self.span, return_inverse=True)
        return tuple(np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1]))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The periods of each span, as in "period 3" or "periods 3 to 5"."""
        ends = [
            (self.period_name(self.periods[where].min()), self.period_name(self.periods[where].max()))
            for where in self.spans
        ]
        return tuple(f"period {first}" if first == last else f"periods {first} to {last}" for first, last in ends)

    def period_name(self, number: int | np.integer[Any]) -> str:
        """What messages call a period."""
        return period_name(int(number), self.every)

    def steps(self, drop_last: bool) -> int:
        """Of a pass over a span, with a `sample_rate`: as many as a unit joins one of, on average."""
        assert self.sample_rate is not None
        passes = 1 / self.sample_rate
        return max(1, math.floor(passes * (1 + 1e-9)) if drop_last else math.ceil(passes * (1 - 1e-9)))

    def refuse_length(self, examples: int) -> None:
        """Raises unless each of so many examples has a period."""
        if len(self.periods) != examples:
            raise UnsupportedError(
                f"The stream has periods for {len(self.periods)} examples, the data set has {examples}."
            )

    def refuse_sizes(self, sizes: Sequence[int], batch_size: int, units: str) -> None:
        """Raises unless every span, of so many `units`, fills a batch. With a `sample_rate` it need not."""
        for span, size in enumerate(sizes):
            if size < batch_size and self.sample_rate is None:
                raise UnsupportedError(
                    f"batch_size={batch_size} exceeds the {size} {units} of span {span} ({self.names[span]}), a "
                    f"sampling probability above 1: use a smaller batch_size, or a larger span than {self.span} period(s), "
                    f"or leave those {units} out of the data set, or give Stream(sample_rate=...) (stream.sample_rate)."
                )

    def refuse_users(self, spans: Sequence[Users]) -> None:
        """Raises if users of several spans are declared to have data in one only. `spans` are the users of each."""
        if self.composition != "parallel":
            return
        everyone = np.concatenate([users.ids for users in spans if users.ids is not None])
        ids, counts = np.unique(everyone, return_counts=True)
        if (counts > 1).any():
            user = ids[np.argmax(counts > 1)]
            where = [self.names[span] for span, users in enumerate(spans) if user in users.ids]  # type: ignore[operator]
            named = ", ".join(where[:_NAMED]) + (", ..." if len(where) > _NAMED else "")
            raise UnsupportedError(
                f"composition='parallel' says that each user has data in one span only, but {int((counts > 1).sum())} of "
                f"{len(ids)} users have some in several: user {user} in {named}. "
                "Each span would promise them an epsilon of its own, not one for all. Use composition='sequential', or larger "
                "spans."
            )

    def plan(self, steps: tuple[int, ...], sizes: tuple[int, ...] | None = None) -> StreamPlan:
        """What a plan knows of this stream; `steps` are an epoch's on each span, `sizes` its units (None: its examples)."""
        sizes = tuple(map(len, self.spans)) if sizes is None else sizes
        return StreamPlan(
            self.composition, self.span, sizes if self.sample_rate is None else (), steps, self.sample_rate
        )


@dataclass(frozen=True)
class StreamPlan:
    """What is fixed about a stream before training. Sizes and borders of the spans count as public; with a rate, borders alone.

    Not who is in which span, nor a digest of it: whoever knows everybody else's period would try what fits.
    """

    composition: Composition
    span: int  # periods in one
    sizes: tuple[int, ...]  # units of each span; empty if there is a `sample_rate`, for which nobody has to know them
    steps: tuple[int, ...]  # of an epoch, on each span
    sample_rate: float | None = None  # of all spans; None: of each, the batch size divided by its size

    def taken(self, steps: int) -> tuple[int, ...]:
        """How many of the first `steps` steps of a run are on each span."""
        passes, rest = divmod(steps, sum(self.steps))
        starts = accumulate(self.steps, initial=0)
        return tuple(
            passes * steps_of_span + min(max(rest - start, 0), steps_of_span)
            for steps_of_span, start in zip(self.steps, starts)
        )

    def to_dict(self) -> dict[str, Any]:
        values = {**vars(self), "sizes": list(self.sizes), "steps": list(self.steps)}
        if self.sample_rate is None:  # plans from before there were rates do not have it
            del values["sample_rate"]
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamPlan:
        return StreamPlan(**{**values, "sizes": tuple(values["sizes"]), "steps": tuple(values["steps"])})


def _whole_numbers(periods: Any) -> np.ndarray:
    """The periods as a read-only array of int64, or an error."""
    numbers = np.asarray(periods)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iu":
        shape = f"{numbers.dtype} of shape {numbers.shape}"
        raise ConfigError(f"Stream: periods must be one whole number per example, in a vector; got {shape}")
    if int(numbers.min()) < -(2**62) or int(numbers.max()) >= 2**62:
        raise ConfigError("Stream: periods must lie between -2^62 and 2^62")
    numbers = numbers.astype(np.int64)
    numbers.flags.writeable = False
    return numbers
