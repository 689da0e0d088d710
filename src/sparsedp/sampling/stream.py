"""A stream: data in periods (days, say) that are trained on in order of time, one or several at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, get_args

import numpy as np

from sparsedp.accounting.ledger import Composition
from sparsedp.errors import ConfigError, UnsupportedError

COMPOSITIONS = (
    "'parallel' if each unit has data in one span of periods only: epsilon is then that of the costliest span; or "
    "'sequential' if a unit may have one example in every span: epsilon is then that of all spans together. More than "
    "one example of a unit in a span is covered by neither. Nothing in the data tells which it is"
)


@dataclass(frozen=True, eq=False)
class Stream:
    """Which period each example belongs to, and what is known about units in different periods.

    `periods` holds a whole number for each example of the data set, in its order. A span is `span` consecutive periods,
    counted by value from the first: with periods 3, 4, 5, 9 and span 2 the spans are {3, 4}, {5} and {9}. Spans without
    examples are left out. An epoch is one pass over the spans in order of time.

    `composition` has to be given: "parallel" if each unit has data in one span only, "sequential" if a unit may have an
    example in every span (and no more than one in each).
    """

    periods: np.ndarray  # int64 (N,); anything that reads as such can be passed
    composition: Composition = None  # type: ignore[assignment]  # no default: None is refused
    span: int = 1

    def __post_init__(self) -> None:
        if self.composition not in get_args(Composition):
            given = "is missing" if self.composition is None else f"cannot be {self.composition!r}"
            raise ConfigError(f"Stream: composition {given}. Say {COMPOSITIONS}.")
        if not isinstance(self.span, int) or isinstance(self.span, bool) or self.span < 1:
            raise ConfigError(f"Stream: span must be a whole number of periods, at least 1; got {self.span!r}")
        object.__setattr__(self, "periods", _whole_numbers(self.periods))

    @cached_property
    def spans(self) -> tuple[np.ndarray, ...]:
        """The examples of each span, in order of time: int64 indices, ascending within a span."""
        _, number = np.unique((self.periods - self.periods.min()) // self.span, return_inverse=True)
        return tuple(np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1]))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The periods of each span, as in "period 3" or "periods 3 to 5"."""
        ends = [(int(self.periods[where].min()), int(self.periods[where].max())) for where in self.spans]
        return tuple(f"period {first}" if first == last else f"periods {first} to {last}" for first, last in ends)

    def refuse(self, size: int, batch_size: int) -> None:
        """Raises unless each of `size` examples has a period and every span fills a batch."""
        if len(self.periods) != size:
            raise UnsupportedError(f"The stream has periods for {len(self.periods)} examples, the data set has {size}.")
        for span, indices in enumerate(self.spans):
            if len(indices) < batch_size:
                raise UnsupportedError(
                    f"batch_size={batch_size} exceeds the {len(indices)} examples of span {span} ({self.names[span]}), a "
                    f"sampling probability above 1: use a smaller batch_size, or a larger span than {self.span} period(s), "
                    "or leave those examples out of the data set."
                )

    def plan(self, steps: tuple[int, ...]) -> StreamPlan:
        """What a plan knows of this stream; `steps` are an epoch's on each span."""
        return StreamPlan(self.composition, self.span, tuple(map(len, self.spans)), steps)


@dataclass(frozen=True)
class StreamPlan:
    """What is fixed about a stream before training. Sizes and borders of the spans count as public.

    Not who is in which span, nor a digest of it: whoever knows everybody else's period would try what fits.
    """

    composition: Composition
    span: int  # periods in one
    sizes: tuple[int, ...]  # examples of each span
    steps: tuple[int, ...]  # of an epoch, on each span

    def taken(self, steps: int) -> tuple[int, ...]:
        """How many of the first `steps` steps of a run are on each span."""
        passes, rest = divmod(steps, sum(self.steps))
        starts = accumulate(self.steps, initial=0)
        return tuple(
            passes * steps_of_span + min(max(rest - start, 0), steps_of_span)
            for steps_of_span, start in zip(self.steps, starts)
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "sizes": list(self.sizes), "steps": list(self.steps)}

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
