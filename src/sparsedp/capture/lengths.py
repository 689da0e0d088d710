"""Units of unequal lengths side by side: those of about equal length are taken together, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def units_by_length(lengths: Tensor, elements: int, most: int) -> Iterator[tuple[Tensor, int]]:
    """Groups of units, (u,), each with the length n of its longest one; units of length 0 are in none.

    A group takes at most `most` elements, at n * `elements` for each unit, or it is a single unit. Within a group no unit
    is less than half as long as another.
    """
    ascending, order = lengths.sort(stable=True)
    sizes = ascending.tolist()
    begin = 0
    for end in range(1, len(sizes) + 1):
        if sizes[end - 1] == 0:
            begin = end
            continue
        closed = end == len(sizes)
        if not closed:
            longer = sizes[end]
            closed = (end + 1 - begin) * longer * elements > most or longer > 2 * sizes[begin]
        if closed:
            yield order[begin:end], sizes[end - 1]
            begin = end


def is_range(units: Tensor) -> bool:
    """Whether units are consecutive and ascending, so that a slice does for an index."""
    return bool((units.diff() == 1).all())


def places_of(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """How many positions each key has, (count,), and where they are, (N,): those of key 0 first, in order."""
    lengths = torch.bincount(keys, minlength=count)
    ordered = bool((keys.diff() >= 0).all())
    return lengths, torch.arange(keys.numel(), device=keys.device) if ordered else keys.argsort(stable=True)
