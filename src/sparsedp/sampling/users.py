"""Users as units: which examples are whose, and which of them a drawn user brings to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.generator import CipherGenerator


@dataclass(frozen=True, eq=False)
class Users:
    """The examples of each user. Users are numbered from 0 in the order of their ids.

    With a `limit` (m) a user brings at most so many of their examples to a batch, chosen uniformly at random without
    replacement, anew each time.
    """

    order: np.ndarray  # int64 (N,): the examples, user after user
    begin: np.ndarray  # int64 (users + 1,): where each user's begin in `order`
    limit: int | None = None
    ids: np.ndarray | None = None  # (users,), ascending
    declared: np.ndarray | None = None  # what the data set said of its examples' users; None: somebody else did

    @staticmethod
    def of(ids: Any, size: int, limit: int | None = None) -> Users:
        """From the user id of each of `size` examples: whole numbers that need not be in order or without gaps."""
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise UnsupportedError(
                f"max_examples_per_user must be a whole number of at least 1, or None; got {limit!r}"
            )
        distinct, number, counts = np.unique(_whole_numbers(ids, size), return_inverse=True, return_counts=True)
        begin = np.concatenate([[0], np.cumsum(counts)])
        return Users(np.argsort(number, kind="stable"), begin, limit, ids=distinct)

    @property
    def count(self) -> int:
        return len(self.begin) - 1

    @property
    def sizes(self) -> np.ndarray:
        """How many examples each user has, int64 (users,)."""
        return np.diff(self.begin)

    def in_spans(self, spans: Sequence[np.ndarray]) -> tuple[Users, ...]:
        """The users of each of some sets of examples, with their examples in it alone.

        In each they are numbered from 0, in the order of their ids. A user may be in several, or in none.
        """
        number = np.empty(len(self.order), dtype=np.int64)  # of each example's user
        number[self.order] = np.repeat(np.arange(self.count), self.sizes)
        parts = (replace(Users.of(number[where], len(where), self.limit), declared=None) for where in spans)
        return tuple(
            replace(part, order=where[part.order], ids=part.ids if self.ids is None else self.ids[part.ids])
            for part, where in zip(parts, spans)
        )

    def refuse_change(self, dataset: Any) -> None:
        """Raises if the data set says something else of its examples' users than before."""
        if self.declared is not None and not np.array_equal(_array(getattr(dataset, "users", None)), self.declared):
            raise SparseDPError(
                "The data set's `users` changed after make_private, so it is not known any more whose its examples are. "
                "Leave a data set as it is while it is trained on."
            )

    def examples(self, users: np.ndarray, generator: CipherGenerator) -> tuple[np.ndarray, np.ndarray]:
        """What `users` bring: places in the data set, user after user, and how many there are of each user.

        A user's choice must not depend on who else is there, so `generator` has to be secret wherever that counts.
        """
        sizes = self.begin[users + 1] - self.begin[users]
        whose = np.repeat(np.arange(len(users)), sizes)
        rank = np.arange(len(whose)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # among the user's own
        if self.limit is not None and (sizes > self.limit).any():
            shuffled = np.lexsort((generator.words(len(whose)), whose))  # each user's own, in random order
            kept = np.sort(shuffled[rank < self.limit])
            whose, rank, sizes = whose[kept], rank[kept], np.minimum(sizes, self.limit)
        return self.order[self.begin[users][whose] + rank], sizes


def users_of(dataset: Any, ids: Any, limit: int | None) -> Users:
    """From `ids`, or else the data set's own `users`. Nobody is taken for a user because nothing is known of users."""
    if not hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"{type(dataset).__name__} has no length, so that nobody can say whose its examples are."
        )
    is_declared = ids is None
    ids = getattr(dataset, "users", None) if is_declared else ids
    if ids is None:
        raise UnsupportedError(
            f"unit='user' needs to know whose each example is, and {type(dataset).__name__} has no attribute `users`. Pass "
            "users=..., a whole number for each example of the data set, in its order; or use unit='example', which protects "
            "single examples, not people with several."
        )
    users = Users.of(ids, len(dataset), limit)
    return replace(users, declared=_array(ids).copy()) if is_declared else users


def whole_users(sizes: np.ndarray, limit: int | None) -> Iterator[slice]:
    """Parts of a sequence of users with so many examples each: at most `limit` examples, or one user, in each part."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = ends[begin] - sizes[begin]
        end = len(sizes) if limit is None else int(np.searchsorted(ends, before + limit, side="right"))
        yield slice(begin, max(end, begin + 1))
        begin = max(end, begin + 1)


def owners_of(sizes: np.ndarray) -> torch.Tensor:
    """The user of each example, int64: user i has the next sizes[i] of them."""
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


def _array(ids: Any) -> np.ndarray:
    return ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)


def _whole_numbers(ids: Any, size: int) -> np.ndarray:
    numbers = _array(ids)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise UnsupportedError(
            f"users must hold one whole number per example, in a vector; got {numbers.dtype} of shape {numbers.shape}. "
            "Number other ids first, as np.unique(ids, return_inverse=True)[1] does."
        )
    if len(numbers) != size:
        raise UnsupportedError(f"users has {len(numbers)} entries, the data set has {size} examples.")
    if size and int(numbers.min()) < 0:
        raise UnsupportedError(
            "users holds a negative number, which mostly stands for a user who is not known (as pandas.factorize gives it). "
            "Taken as one user they would not be protected one by one: leave their examples out, or number these users, too."
        )
    return numbers
