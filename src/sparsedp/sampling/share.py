"""A share: which units of each logical batch one of several processes (ranks) that train one model together reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsedp.errors import ConfigError, UnsupportedError
from sparsedp.sampling.stream import Stream
from sparsedp.sampling.users import Users


@dataclass(frozen=True, eq=False)
class Share:
    """Rank `rank` of `ranks`. All of them draw the same logical batch from the same key, and each reads a piece of it.

    So the pieces of all ranks together are the batch that one process with that key draws.

    - Without `begin` every rank can read the whole data set, and a batch is cut into contiguous pieces of nearly the same
      number of examples.
    - With `begin` every rank has data of its own (`of_own_data`): in the numbering of all units, rank after rank, those of
      rank r are begin[r] to begin[r + 1] - 1, and it reads those of them that are drawn. With users as units, `examples` says
      how many examples each user has, so that all ranks divide a batch alike. All examples of a user have to be on one
      rank: a user on two of them would count as two units, each protected alone.
    """

    rank: int = 0
    ranks: int = 1
    begin: tuple[int, ...] | None = None  # (ranks + 1,)
    examples: np.ndarray | None = None  # int64 (all users,)

    def __post_init__(self) -> None:
        for name in ("rank", "ranks"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise ConfigError(f"Share: {name} must be a whole number; got {getattr(self, name)!r}")
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"Share: rank must lie between 0 and ranks - 1; got rank={self.rank}, ranks={self.ranks}")
        if self.begin is not None:
            object.__setattr__(self, "begin", _checked_begin(self.begin, self.ranks))
        if self.examples is not None:
            if self.begin is None:
                raise ConfigError(
                    "Share: examples without begin. Where all ranks read one data set, all know its users."
                )
            object.__setattr__(self, "examples", _checked_examples(self.examples, self.begin[-1]))

    @staticmethod
    def of_own_data(rank: int, units: Sequence[int], examples: Sequence[np.ndarray] | None = None) -> Share:
        """Of ranks that have so many `units` each; with users as units, `examples[r]` are those of each user of rank r."""
        begin = (0, *np.cumsum(np.asarray(units, dtype=np.int64)).tolist())
        return Share(rank, len(units), begin, None if examples is None else np.concatenate(examples))

    @property
    def key_path(self) -> tuple[int, ...]:
        """The end of the path of a key that is this rank's alone; nothing if there is one rank."""
        return () if self.ranks == 1 else (self.rank,)

    def pieces(self, units: np.ndarray, sizes: np.ndarray | None = None) -> list[np.ndarray]:
        """For each rank, the places in `units` of those that it reads; each place is in one piece.

        `sizes` are the units' numbers of examples; None: one each.
        """
        if self.begin is not None:
            home = np.searchsorted(self.begin, units, side="right") - 1
            ends = np.cumsum(np.bincount(home, minlength=self.ranks))[:-1]
            return np.split(np.argsort(home, kind="stable"), ends)
        if sizes is None:
            return np.array_split(np.arange(len(units)), self.ranks)
        ends = np.cumsum(sizes)
        # Piece k ends at the user in whose middle k / ranks of all examples are passed; all numbers times 2 * ranks.
        middles = (2 * ends - sizes) * self.ranks
        cuts = np.searchsorted(middles, 2 * sizes.sum() * np.arange(1, self.ranks))
        return np.split(np.arange(len(units)), cuts)

    def local(self, units: np.ndarray) -> np.ndarray:
        """The numbers in this rank's data set of units that it reads."""
        return units if self.begin is None else units - self.begin[self.rank]

    def brought(self, users: Users, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """How many examples each user brings to a batch: of all ranks' users, those with these numbers.

        `users` are those of this rank's data set.
        """
        sizes = (users.sizes if self.examples is None else self.examples)[numbers]
        return sizes if users.limit is None else np.minimum(sizes, users.limit)

    def refuse(self, size: int, users: Users | None, stream: Stream | None) -> None:
        """Raises unless it fits the data set of this rank, of `size` examples."""
        if self.begin is None:
            return
        if stream is not None:
            raise UnsupportedError(
                "A stream over data of which every rank has its own part is not available: the units of a span would have to "
                "be numbered over all ranks. Let every rank read the whole data set, or leave the stream out."
            )
        units, what = (size, "examples") if users is None else (users.count, "users")
        expected = self.begin[self.rank + 1] - self.begin[self.rank]
        if units != expected:
            raise UnsupportedError(
                f"The data set of rank {self.rank} has {units} {what}; its share says {expected}, of {self.begin[-1]} in all."
            )
        if (users is None) != (self.examples is None):
            raise UnsupportedError(
                "The share says how many examples each user has, but the units are examples: leave examples out."
                if users is None
                else "With users as units, and own data on every rank, the share has to say how many examples each user of "
                "each rank has, so that all ranks divide a batch alike: give it examples."
            )
        if users is not None and not np.array_equal(users.sizes, self.examples[self.begin[self.rank] :][:units]):  # type: ignore[index]
            raise UnsupportedError(f"The users of rank {self.rank} do not have as many examples as its share says.")


def _checked_begin(begin: Sequence[int], ranks: int) -> tuple[int, ...]:
    numbers = np.asarray(begin)
    if numbers.shape != (ranks + 1,) or numbers.dtype.kind not in "iu" or numbers[0] != 0:
        raise ConfigError(f"Share: begin must hold {ranks + 1} whole numbers, the first of them 0; got {begin!r}")
    if (np.diff(numbers) < 1).any():
        rank = int(np.argmax(np.diff(numbers) < 1))
        raise UnsupportedError(
            f"Rank {rank} has no data of its own. Where none of its units is drawn it needs an example that stands in, so "
            "give every rank at least one, or train with fewer ranks."
        )
    return tuple(numbers.tolist())


def _checked_examples(examples: np.ndarray, users: int) -> np.ndarray:
    numbers = np.array(examples)
    if numbers.shape != (users,) or numbers.dtype.kind not in "iu" or (numbers < 1).any():
        raise ConfigError(
            f"Share: examples must hold a whole number of at least 1 for each of the {users} users of all ranks; got "
            f"{numbers.dtype} of shape {numbers.shape}"
        )
    numbers = numbers.astype(np.int64)
    numbers.flags.writeable = False
    return numbers
