"""Inputs that say themselves whose their rows are: objects with the fields of TorchRec's JaggedTensor and KeyedJaggedTensor.

`_values` (N, ...) lie end to end, feature by feature and within a feature unit by unit. `_lengths` (features x units,) says how
many of them each unit has, or `_offsets` where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    keys = getattr(value, "_keys", None)
    features = 1 if keys is None else len(keys)
    offsets: Tensor | None = value._offsets
    lengths = value._lengths if value._lengths is not None or offsets is None else offsets.diff()
    if lengths is None or lengths.ndim != 1 or lengths.numel() != features * units:
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
