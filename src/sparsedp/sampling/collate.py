"""What is asked of a collate function: an empty batch, which it cannot make, and that examples stay apart and in order."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from sparsedp.errors import SparseDPWarning, UnsupportedError

_TRIED = 32  # examples on which a collate function is tried
_BESIDE = 8  # likewise, where all but one stay the same


def empty_batch(dataset: Any, collate: Callable[[Any], Any]) -> Any:
    """What `collate` would return for no examples: the structure and dtypes of its batches, sizes at n = 0.

    Every size is extrapolated linearly from a batch of one and a batch of two: size(0) = 2 size(1) - size(2).
    So [n, d] gives [0, d], concatenated values give [0] and offsets with the last one included give [1].
    Tensors hold zeros: of the example that was read, only shapes get out. Python ints count as sizes.
    """
    return _shrink(collate(_fetch(dataset, [0])), collate(_fetch(dataset, [0, 0])))


def refuse_mixing(dataset: Any, collate: Callable[[Any], Any]) -> None:
    """Raises if `collate` is seen to make an example's row of other examples too, such as in-batch negatives.

    One of some examples is exchanged for others: in what has one row per example, no more than one row may change. What
    cannot be judged passes: a collate function or a data set that makes other rows each time, or that fails here (with a
    warning), and what changes its shape.
    """
    size = len(dataset)
    places = np.unique(np.linspace(0, size - 1, min(size, _BESIDE)).astype(int)).tolist()
    others = list(islice((place for place in range(size) if place not in places), 3))
    if collate is default_collate or len(places) < 3 or not others:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            before, again, *changed = (
                list(_arrays(collate(_fetch(dataset, [*places[:-1], last]))))
                for last in (places[-1], places[-1], *others)
            )
    except Exception as error:  # such as of a data set that only workers can read
        warnings.warn(
            f"Whether collate_fn keeps examples apart was not seen, because it could not be tried here: {error!r}",
            SparseDPWarning,
            stacklevel=2,
        )
        return
    if not all(map(np.array_equal, before, again)):
        return
    for other in changed:
        for one, two in zip(before, other):
            if one.shape == two.shape and one.shape[:1] == (len(places),) and (_rows(one) - _rows(two)).total() > 1:
                raise UnsupportedError(
                    "collate_fn makes rows of an example from other examples of the batch (in-batch negatives?): with one "
                    "example exchanged, rows of others changed. A unit's gradient would then depend on other units, and "
                    "clipping would not bound what one of them does. Make each row of its own example alone; "
                    "sparsedp.nn.CandidateSampler draws negatives from the vocabulary."
                )


def refuse_reordering(dataset: Any, collate: Callable[[Any], Any]) -> None:
    """Raises if `collate` is seen to sort its examples: whose example is where would then not be known.

    Some examples are collated in order and in reverse. What has one row per example must come out reversed; if the same
    rows come out in any other order, they were sorted. A collate function that makes other rows each time cannot be judged
    like that, and passes.
    """
    size = len(dataset)
    places = np.unique(np.linspace(0, size - 1, min(size, _TRIED)).astype(int)).tolist()
    ahead = list(_arrays(collate(_fetch(dataset, places))))
    back = list(_arrays(collate(_fetch(dataset, places[::-1]))))
    pairs = [
        (one, other)
        for one, other in zip(ahead, back)
        if one.shape[:1] == (len(places),) and one.shape == other.shape and not _offsets(one)
    ]
    if any(not np.array_equal(one[::-1], other) and _rows(one) == _rows(other) for one, other in pairs):
        raise UnsupportedError(
            "collate_fn changes the order of its examples (it sorts them?), so that it is not known which example of a batch "
            "is which user's. Keep them in order, and mask what is padded instead."
        )


def _arrays(batch: Any) -> Iterator[np.ndarray]:
    """The tensors and arrays of a batch, always in the same order."""
    if isinstance(batch, torch.Tensor):
        if not batch.is_nested and batch.layout == torch.strided:
            yield batch.detach().cpu().numpy()
    elif isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from _arrays(batch[key])
    elif isinstance(batch, (tuple, list)):
        if batch and all(isinstance(item, (int, float, str, bytes)) for item in batch):
            yield np.asarray(batch)
        else:
            for item in batch:
                yield from _arrays(item)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for f in fields(batch):
            yield from _arrays(getattr(batch, f.name))


def _offsets(array: np.ndarray) -> bool:
    """Whether it ascends, as the offsets of bags and positions do: these do not turn around with the examples."""
    return array.ndim == 1 and array.dtype.kind in "iu" and bool((np.diff(array.astype(np.int64)) >= 0).all())


def _rows(array: np.ndarray) -> Counter[bytes]:
    return Counter(row.tobytes() for row in np.ascontiguousarray(array))


def _fetch(dataset: Any, places: Sequence[int]) -> Any:
    """The examples at `places`, in the way torch's loader fetches a batch."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(list(places))
    return [dataset[place] for place in places]


def _size(one: int, two: int) -> int:
    return max(0, 2 * one - two)


def _sizes(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    if len(one) != len(two):
        raise _unknown(f"an array whose number of axes changes with the batch: shapes {one} and {two}")
    return tuple(_size(a, b) for a, b in zip(one, two))


def _shrink(one: Any, two: Any) -> Any:
    """The batch of zero examples, from the same example once (`one`) and twice (`two`)."""
    if type(one) is not type(two):
        raise _unknown(f"a value of type {type(one).__name__} for one example, {type(two).__name__} for two")
    if isinstance(one, torch.Tensor):
        if one.is_nested or one.layout != torch.strided:
            raise _unknown(f"a tensor of layout {one.layout}, nested={one.is_nested}")
        return one.new_zeros(_sizes(tuple(one.shape), tuple(two.shape)))
    if isinstance(one, np.ndarray):
        return np.zeros(_sizes(one.shape, two.shape), one.dtype)
    if isinstance(one, Mapping):
        items = {key: _shrink(one[key], two[key]) for key in one if key in two}
        try:
            return type(one)(items)  # type: ignore[call-arg]
        except TypeError:  # a mapping with a constructor of its own, such as defaultdict
            return items
    if isinstance(one, (tuple, list)):
        # As many elements for two examples as for one: the fields of a batch. Otherwise: one per example.
        kept = [_shrink(a, b) for a, b in zip(one[: _size(len(one), len(two))], two)]
        return type(one)(*kept) if hasattr(one, "_fields") else type(one)(kept)
    if is_dataclass(one) and not isinstance(one, type):
        shrunk = {f.name: _shrink(getattr(one, f.name), getattr(two, f.name)) for f in fields(one)}
        return type(one)(**shrunk)
    if isinstance(one, int) and not isinstance(one, bool):
        return _size(one, two)
    if one is None or isinstance(one, (bool, float, str, bytes)):
        return one if one is None else type(one)()
    raise _unknown(f"a {type(one).__module__}.{type(one).__qualname__}")


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Poisson sampling drew an empty batch, and it cannot be built because collate_fn returns {what}. "
        "Return tensors in tuples, lists, dicts or dataclasses, and build other objects inside the loop."
    )
