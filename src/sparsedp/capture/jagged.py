"""Inputs that say themselves whose their rows are: objects with the fields of TorchRec's JaggedTensor and KeyedJaggedTensor.

`_values` (N, ...) lie end to end, feature by feature and within a feature unit by unit. `_lengths` (features x units,) says how
many of them each unit has, or `_offsets` where they begin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.capture.inputs import is_jagged, slots_of
from sparsedp.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class JaggedInput:
    """A jagged tensor of a batch of `units` units. `rows` are its values and its weights, if it has any, (N, ...)."""

    rows: list[Tensor]
    places: Tensor  # (N,), int64: row n is of feature places[n] // units and of unit places[n] % units
    units: int
    lengths: Tensor | None  # (features x units,), as the object has them

    @property
    def owners(self) -> Tensor:
        """The unit of each row, (N,)."""
        return self.places % max(self.units, 1)

    @property
    def features(self) -> Tensor:
        """The feature of each row, (N,)."""
        return self.places // max(self.units, 1)

    def of_unit(self, unit: int) -> tuple:
        """All that a unit has, in a form that can be compared: its rows, and the feature of each."""
        its = self.owners == unit
        return self.features[its].tolist(), *(tensor.detach()[its].tolist() for tensor in self.rows)


def jagged_inputs(value: Any, units: int) -> Iterator[JaggedInput]:
    """The jagged tensors of a batch of `units` units among arguments; raises for one whose lengths contradict its values.

    One whose lengths are not as many as it has features and the batch has units is left out: whose its rows are is not known.
    """
    if isinstance(value, (Tensor, type, nn.Module)):
        return
    if isinstance(value, (tuple, list)):
        parts: Any = value
    elif isinstance(value, Mapping):
        parts = value.values()
    else:
        if is_jagged(value):
            jagged = _read(value, units)
            if jagged is not None:
                yield jagged
        parts = [getattr(value, slot, None) for slot in slots_of(value)] + list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from jagged_inputs(part, units)


def _read(value: Any, units: int) -> JaggedInput | None:
    offsets: Tensor | None = value._offsets
    lengths = _lengths_of(value)
    if lengths is None or lengths.ndim != 1 or lengths.numel() != _features_of(value) * units:
        return None
    values, weights = value._values, value._weights
    rows = [values] if weights is None else [values, weights]
    if bool((lengths < 0).any()) or any(int(lengths.sum()) != len(tensor) for tensor in rows):
        raise _contradiction(value, f"its lengths do not add up to its {len(values)} values")
    if offsets is not None and (
        offsets.numel() != lengths.numel() + 1 or not torch.equal(offsets.diff(), lengths.to(offsets))
    ):
        raise _contradiction(value, "its lengths and its offsets differ")
    places = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths.long())
    return JaggedInput(rows, places, units, value._lengths)


def _contradiction(value: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"forward() was given a {type(value).__name__} that contradicts itself: {why}, so that it is not known whose each value "
        "is. Make it in collate_fn of each example's own values."
    )


# ---------------------------------------------------------------------- jagged tensors of a batch, as objects


def jagged_units(value: Any) -> int:
    """How many units a jagged tensor of a batch has; raises if its features do not have equally many."""
    lengths, features = _lengths_of(value), _features_of(value)
    if lengths is None or lengths.ndim != 1 or not features or lengths.numel() % features or _varies(value):
        raise _uncut(value, "its features do not have a length for each unit")
    return lengths.numel() // features


def take_of_jagged(value: Any, units: Sequence[int]) -> Any:
    """A jagged tensor of some units of another, in the given order, a unit as often as it is named."""
    count, lengths = jagged_units(value), _lengths_of(value)
    assert lengths is not None
    if next(jagged_inputs(value, count), None) is None:
        raise _uncut(value, "its lengths are not understood")
    wanted = (torch.arange(_features_of(value))[:, None] * count + torch.tensor(units, dtype=torch.int64)).reshape(-1)
    begin = lengths.long().cumsum(0) - lengths
    rows = torch.cat([torch.arange(int(begin[i]), int(begin[i] + lengths[i])) for i in wanted] or [wanted])
    weights = None if value._weights is None else value._weights[rows]
    return _made_again(value, value._values[rows], weights, lengths[wanted])


def change_jagged(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A jagged tensor of changed values and weights; itself if these do not change, or if another cannot be made."""
    values, weights = change(value._values), None if value._weights is None else change(value._weights)
    lengths = _lengths_of(value)
    if lengths is None or (values is value._values and weights is value._weights):
        return value
    try:
        return _made_again(value, values, weights, lengths)
    except UnsupportedError:
        return value


def _made_again(value: Any, values: Tensor, weights: Tensor | None, lengths: Tensor) -> Any:
    """By the constructor: an object keeps more than its fields, such as how many values each feature has."""
    if is_dataclass(value):
        made: Any = copy.copy(value)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        for field, tensor in (("_values", values), ("_weights", weights), ("_lengths", lengths), ("_offsets", offsets)):
            if getattr(value, field) is not None:
                object.__setattr__(made, field, tensor)
        return made
    keys = {} if getattr(value, "_keys", None) is None else {"keys": list(value._keys)}
    try:
        return type(value)(**keys, values=values, weights=weights, lengths=lengths)
    except TypeError as error:
        raise _uncut(value, f"it is not made of values, weights and lengths ({error})") from error


def _lengths_of(value: Any) -> Tensor | None:
    offsets: Tensor | None = value._offsets
    return value._lengths if value._lengths is not None or offsets is None else offsets.diff()


def _features_of(value: Any) -> int:
    keys = getattr(value, "_keys", None)
    return 1 if keys is None else len(keys)


def _varies(value: Any) -> bool:
    varies = getattr(value, "variable_stride_per_key", None)
    return callable(varies) and bool(varies())


def _uncut(value: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"Units cannot be taken out of the batch's {type(value).__name__}: {why}. Give data_loader=, whose collate function "
        "then makes batches of other units, or take=, a function of the batch and a list of unit indices that returns the "
        "smaller batch."
    )
