"""What may be promised about a release that is no training: in words and numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from sparsedp.convex.release import NEIGHBOURING, Neighbours, Releases

SEEDED = "Seeded, do not release: whoever knows the seed can take the noise away."
ROUNDING = "sum and noise are rounded together to a fixed power-of-two grid, so that bits do not tell what was added"


@dataclass(frozen=True)
class ReleaseStatement:
    """A promise and everything that it rests on. `str()` gives it as text."""

    epsilon: float  # by the ledger; infinity without noise
    delta: float  # 0 if all noise is Laplace's
    target_epsilon: float  # what was asked for
    unit: str
    neighbouring: str
    mechanism: str
    settings: dict[str, Any]
    guarantee: str
    noise: str
    accountant: str
    rounding: str | None
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether there is a finite guarantee at all."""
        return math.isfinite(self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["epsilon"] = self.epsilon if self.holds else "infinity"
        values["assumptions"] = list(self.assumptions)
        values["not_covered"] = list(self.not_covered)
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        promise = "NO differential privacy guarantee (epsilon is infinite)"
        if self.holds:
            promise = f"epsilon = {self.epsilon:.4g} at delta = {self.delta:.3g}"
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self.settings.items() if value is not None)
        lines = [
            f"Privacy statement: {promise}",
            f"  protects:     one {self.unit}; neighbouring data sets differ by {self.neighbouring}",
            f"  mechanism:    {self.mechanism}({settings})",
            f"  promise:      {self.guarantee}",
            f"  noise:        {self.noise}",
            f"  accounting:   {self.accountant}",
            *([] if self.rounding is None else [f"  rounding:     {self.rounding}"]),
        ]
        for title, items in (("assumes", self.assumptions), ("not covered", self.not_covered)):
            lines += [f"  {title + ':':13s} {items[0]}"] + [f"{'':16s}{item}" for item in items[1:]] if items else []
        return "\n".join(lines)


def make_statement(
    releases: Releases, *, target_epsilon: float, delta: float, neighbours: Neighbours, mechanism: str,
    settings: dict[str, Any], released: str, noise: str, assumptions: tuple[str, ...] = (),
    not_covered: tuple[str, ...] = (),
) -> ReleaseStatement:  # fmt: skip
    """The statement about what `releases` has released so far: `released` says what that is, `noise` which noise it has."""
    epsilon = releases.epsilon(delta)
    promised = released if math.isfinite(epsilon) else "none: there is no noise"
    if releases.key.seeded:
        not_covered = (SEEDED, *not_covered)
    pure = releases.is_pure
    count = sum(entry.count for entry in releases.ledger.entries)
    by = "the sum of the releases' epsilons" if pure else "the PLD accountant, exact for Gaussians"
    return ReleaseStatement(
        epsilon=epsilon,
        delta=0.0 if pure else delta,
        target_epsilon=target_epsilon,
        unit="row",
        neighbouring=NEIGHBOURING[neighbours],
        mechanism=mechanism,
        settings=settings,
        guarantee=promised,
        noise="none" if releases.noiseless else noise,
        accountant=f"{count} release{'' if count == 1 else 's'} by {by}",
        rounding=None if releases.noiseless else ROUNDING,
        assumptions=assumptions,
        not_covered=(*not_covered, "Choices made by looking at the data: bound, sparsity, method, columns."),
    )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
