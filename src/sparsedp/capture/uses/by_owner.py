"""Uses by rows as uses by the units that own the rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparsedp.capture.lengths import places_of
from sparsedp.capture.uses.base import Use
from sparsedp.capture.uses.built import Built
from sparsedp.capture.uses.carried import Carried, Part
from sparsedp.capture.uses.linear import Linear
from sparsedp.capture.uses.lookup import Lookup
from sparsedp.errors import SparseDPError


def of_owners(use: Use, owners: Tensor, units: int) -> Use:
    """`use` with a row for a unit, as a use of `units` units; `owners`, int64 (rows,), has the unit of each row."""
    owners = owners.to(use.like.device)
    if isinstance(use, Lookup):
        return use.of_owners(owners)
    if isinstance(use, Built) and len(use.values) == len(owners):
        return use.of_owners(owners, units)
    if isinstance(use, Linear) and len(use.inputs) == len(owners):
        return _linear(use, owners, units)
    if isinstance(use, Carried) and len(use.places) == len(owners):
        places = torch.arange(units, device=owners.device)[:, None]
        return replace(use, parts=[_carried(part, owners, units) for part in use.parts], places=places)
    raise SparseDPError(
        f"A use of the kind {type(use).__name__} by rows that units have in different numbers is not available."
    )


def _linear(use: Linear, owners: Tensor, units: int) -> Linear:
    """(rows, P, .) as (units, c P, .), where c is the number of rows that a unit has at most."""
    lengths, places = places_of(owners, units)
    most = int(lengths.max()) if len(owners) else 0
    if most == 1 and len(owners) == units:
        return Linear(use.inputs[places], use.grad[places], use.offset)
    whose = owners[places]
    at = torch.arange(len(places), device=owners.device) - (lengths.cumsum(0) - lengths)[whose]

    def padded(values: Tensor) -> Tensor:
        out = values.new_zeros(units, most, *values.shape[1:])
        out[whose, at] = values[places]
        return out.flatten(1, 2)

    return Linear(padded(use.inputs), padded(use.grad), use.offset)


def _carried(part: Part, owners: Tensor, units: int) -> Part:
    """The gradients of a unit's rows on the copy are added up before they are carried on."""
    lengths, places = places_of(owners, units)
    rows_of = places.split(lengths.tolist())

    def gradient(examples: slice) -> Tensor:
        totals = []
        for rows in rows_of[examples]:
            total = torch.zeros_like(part.gradient(slice(0, 1)))
            for row in rows.tolist():
                total += part.gradient(slice(row, row + 1))
            totals.append(total)
        return torch.cat(totals)

    return Part(gradient, part.carry, part.memory)
