"""What may be looked at to find a threshold, or to choose a mechanism, before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sparsedp.contribution import digest_of


@dataclass(frozen=True)
class PublicCounts:
    """Counts that nobody has to protect: of `units` units, `counts[table][row]` touch the row. Shares will do, of 1 unit."""

    counts: Mapping[str, Any] = field(compare=False, repr=False)
    units: float

    def to_dict(self) -> dict[str, Any]:
        return {"counts": digest_of(self.counts), "units": self.units}


# "release": the frequencies that the run releases once with noise (`frequencies=FrequencyRelease(...)`), which its budget pays
# for. "data": the training data, without noise; no epsilon covers that, and the statement says so.
Look: TypeAlias = PublicCounts | Literal["release", "data"]
WHAT_MAY_BE_LOOKED_AT = (
    'look_at="data" (the training data without noise, which the statement then says), look_at="release" (frequencies that are '
    "released with noise and paid for: frequencies=sparsedp.FrequencyRelease(...)), or "
    "look_at=sparsedp.PublicCounts(counts, units)"
)


def require_look(look: Any, what: str) -> Look:
    if isinstance(look, PublicCounts) or look in ("release", "data"):
        return look
    raise ValueError(f"{what} has to know what may be looked at: {WHAT_MAY_BE_LOOKED_AT}; not {look!r}")
