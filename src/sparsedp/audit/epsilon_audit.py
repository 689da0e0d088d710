"""EpsilonAudit: a claimed epsilon and what an audit of it showed, with the statement that the claim is from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsedp.audit.bounds import WAYS, Way, fewest_canaries, largest_bound
from sparsedp.statement import PrivacyStatement


@dataclass(frozen=True)
class EpsilonAudit:
    """A lower bound on epsilon at `delta`, with confidence 1 - `significance`, beside the claimed one. `str()` is a sentence."""

    bound: float  # 0: nothing was shown
    claimed: float  # infinite: there is no guarantee
    delta: float
    significance: float
    method: str  # of sparsedp.audit.epsilon_lower_bound
    canaries: int
    canaries_in: int
    attack: str  # what the canaries are, and what the auditor sees
    rule: str  # by which they were scored and guessed
    reason: str | None  # why the bound is 0, if no scores could have shown more
    statement: PrivacyStatement  # of the audited training

    @property
    def contradicts(self) -> bool:
        """Whether the claim is refuted: the bound is above it."""
        return self.bound > self.claimed

    @property
    def share(self) -> float:
        """The bound as a share of the claim; 0 if the claim is infinite."""
        return self.bound / self.claimed if 0 < self.claimed < math.inf else 0.0

    def __str__(self) -> str:
        confidence = f"With {100 * (1 - self.significance):.6g} % confidence"
        promised = (
            f"epsilon = {self.claimed:.3g} is claimed" if math.isfinite(self.claimed) else "no epsilon is claimed"
        )
        if self.reason is not None:
            return f"Nothing is shown, and {promised}: {self.reason}"
        if self.bound == 0:
            shown = f"{confidence} nothing is shown at delta = {self.delta:g}"
        else:
            shown = f"{confidence} epsilon is at least {self.bound:.3g} at delta = {self.delta:g}"
        verdict = ": THE CLAIM IS WRONG" if self.contradicts else ""
        return f"{shown}, and {promised}{verdict} ({self.attack}, {self.canaries} canaries, {self.method})."

    def to_dict(self) -> dict[str, Any]:
        return {
            "bound": self.bound,
            "claimed": self.claimed if math.isfinite(self.claimed) else "infinity",
            "contradicts": self.contradicts,
            "delta": self.delta,
            "significance": self.significance,
            "method": self.method,
            "canaries": self.canaries,
            "canaries_in": self.canaries_in,
            "attack": self.attack,
            "rule": self.rule,
            "reason": self.reason,
            "sentence": str(self),
            "statement": self.statement.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def why_nothing(
    method: str, canaries: int, delta: float, significance: float, ways: Sequence[Way] = WAYS
) -> str | None:
    """Why so many canaries cannot show an epsilon above 0, whatever their scores are; None: they can."""
    if largest_bound(method, canaries, delta, significance, ways) > 0:
        return None
    needed = fewest_canaries(method, delta, significance, ways)
    asked = f"confidence {1 - significance:.10g} at delta = {delta:g} by {method}"
    if needed is None:
        return (
            f"no number of canaries gives {asked}. With a smaller delta, or a method for Gaussian mechanisms, some do."
        )
    return f"{canaries} canaries cannot give {asked}, however well they are told apart; {needed} can."
