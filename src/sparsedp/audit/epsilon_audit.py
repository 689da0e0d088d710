"""EpsilonAudit: a claimed epsilon and what an audit of it showed, with the statement that the claim is from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsedp.audit.bounds import WAYS, Way, epsilon_lower_bound, fewest_canaries, largest_bound
from sparsedp.audit.numbers import finite_vector
from sparsedp.statement import PrivacyStatement


@dataclass(frozen=True)
class EpsilonAudit:
    """A lower bound on epsilon, with confidence 1 - `significance`, beside the claimed one. `str()` is a sentence."""

    bound: float  # 0: nothing was shown
    significance: float
    method: str  # of sparsedp.audit.epsilon_lower_bound
    attack: str  # what the canaries are, and what the auditor sees
    rule: str  # by which they were scored and guessed
    reason: str | None  # why the bound is 0, if no scores could have shown more
    statement: PrivacyStatement  # of the audited training
    in_scores: np.ndarray = field(compare=False, repr=False)  # of the canaries that were in; higher: more likely in
    out_scores: np.ndarray = field(compare=False, repr=False)

    @property
    def claimed(self) -> float:
        """Infinite: there is no guarantee."""
        return self.statement.epsilon

    @property
    def delta(self) -> float:
        return self.statement.delta

    @property
    def canaries(self) -> int:
        return len(self.in_scores) + len(self.out_scores)

    @property
    def contradicts(self) -> bool:
        """Whether the claim is refuted: the bound is above it."""
        return self.bound > self.claimed

    @property
    def share(self) -> float:
        """The bound as a share of the claim; 0 if the claim is infinite."""
        return self.bound / self.claimed if 0 < self.claimed < math.inf else 0.0

    def __str__(self) -> str:
        claimed = f"epsilon = {self.claimed:.3g} is claimed" if math.isfinite(self.claimed) else "no epsilon is claimed"
        if self.reason is not None:
            return f"Nothing is shown, and {claimed}: {self.reason}"
        shown = f"epsilon is at least {self.bound:.3g}" if self.bound > 0 else "nothing is shown"
        verdict = ": THE CLAIM IS WRONG" if self.contradicts else ""
        return (
            f"With {100 * (1 - self.significance):.6g} % confidence {shown} at delta = {self.delta:g}, and {claimed}{verdict} "
            f"({self.attack}; {self.canaries} canaries, method {self.method})."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "bound": self.bound,
            "claimed": self.claimed if math.isfinite(self.claimed) else "infinity",
            "contradicts": self.contradicts,
            "delta": self.delta,
            "significance": self.significance,
            "method": self.method,
            "canaries": self.canaries,
            "canaries_in": len(self.in_scores),
            "attack": self.attack,
            "rule": self.rule,
            "reason": self.reason,
            "sentence": str(self),
            "statement": self.statement.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def audit_scores(
    in_scores: Any, out_scores: Any, *, statement: PrivacyStatement, attack: str = "scores of canaries",
    significance: float = 0.05, method: str = "one_run",
) -> EpsilonAudit:  # fmt: skip
    """The audit of a training with this statement by scores of its canaries, as `epsilon_lower_bound` takes them."""
    inside, outside = finite_vector("in_scores", in_scores), finite_vector("out_scores", out_scores)
    bound = epsilon_lower_bound(
        inside, outside, delta=statement.delta, significance=significance, method=method
    )  # fmt: skip
    reason = why_nothing(method, len(inside) + len(outside), statement.delta, significance)
    return EpsilonAudit(
        bound, significance, method, attack, "the scores as they are", reason, statement, inside, outside
    )


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
