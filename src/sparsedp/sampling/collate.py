"""The empty batch: Poisson sampling draws it now and then, and no collate function can make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from sparsedp.errors import UnsupportedError


def empty_batch(dataset: Any, collate: Callable[[Any], Any]) -> Any:
    """What `collate` would return for no examples: the structure and dtypes of its batches, sizes at n = 0.

    Every size is extrapolated linearly from a batch of one and a batch of two: size(0) = 2 size(1) - size(2).
    So [n, d] gives [0, d], concatenated values give [0] and offsets with the last one included give [1].
    Tensors hold zeros: of the example that was read, only shapes get out. Python ints count as sizes.
    """
    return _shrink(collate(_fetch(dataset, 1)), collate(_fetch(dataset, 2)))


def _fetch(dataset: Any, count: int) -> Any:
    """Example 0, `count` times, in the way torch's loader fetches a batch."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__([0] * count)
    return [dataset[0] for _ in range(count)]


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
