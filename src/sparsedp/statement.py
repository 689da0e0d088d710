"""The statement: what may be promised about a trained model, in words and numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from sparsedp.plan import PrivacyPlan


@dataclass(frozen=True)
class PrivacyStatement:
    """A promise and everything that it rests on. `str()` gives it as text."""

    epsilon: float
    delta: float
    steps: int
    unit: str
    neighbouring: str
    mechanism: str
    settings: dict[str, Any]  # of the mechanism
    guarantee: str
    noise_multiplier: float
    max_grad_norm: float
    clipping: str
    sampling: str
    accountant: str
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether there is a finite guarantee at all."""
        return math.isfinite(self.epsilon)

    @property
    def _mechanism(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items() if value is not None)
        return f"{self.mechanism}({settings})" if settings else self.mechanism

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["epsilon"] = self.epsilon if self.holds else "infinity"
        values["assumptions"] = list(self.assumptions)
        values["not_covered"] = list(self.not_covered)
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        if self.holds:
            promise = f"epsilon = {self.epsilon:.4g} at delta = {self.delta:.3g}"
        else:
            promise = "NO differential privacy guarantee (epsilon is infinite)"
        lines = [
            f"Privacy statement: {promise}",
            f"  protects:     one {self.unit}; neighbouring data sets differ by {self.neighbouring}",
            f"  mechanism:    {self._mechanism}, noise multiplier {self.noise_multiplier:.4g}, "
            f"{self.clipping} clipping at {self.max_grad_norm:.4g}",
            f"  promise:      {self.guarantee}",
            f"  sampling:     {self.sampling}",
            f"  accounting:   {self.steps} steps by the {self.accountant} accountant",
        ]
        for title, items in (("assumes", self.assumptions), ("not covered", self.not_covered)):
            lines += [f"  {title + ':':13s} {items[0]}"] + [f"{'':16s}{item}" for item in items[1:]] if items else []
        return "\n".join(lines)


def make_statement(
    plan: PrivacyPlan, *, epsilon: float, delta: float, steps: int, seeded: bool, notes: tuple[str, ...] = ()
) -> PrivacyStatement:
    """The statement for a run of `steps` steps by `plan`. `notes` are further things that are not covered."""
    rate = f"rate {plan.batch_size}/{plan.dataset_size} = {plan.sample_rate:.3g}"
    assumptions = [
        f"The size of the data set, {plan.dataset_size}, is public.",
        "Each unit's loss depends on that unit alone. Nothing but sparsedp.check verifies that for the loss function.",
    ]
    not_covered = [
        "Choices made by looking at private data: hyper-parameters, vocabularies, early stopping.",
        "Metrics and step reports, which are computed from private data without noise.",
        "Attacks on floating-point noise; noise comes from a Mersenne Twister seeded with 19,968 bits.",
        *notes,
    ]
    if plan.poisson_sampling:
        sampling = f"Poisson, {rate}"
    else:
        sampling = f"shuffled fixed-size batches, accounted as Poisson with {rate}"
        assumptions.insert(
            0, "Poisson sampling, which did NOT happen: batches were shuffled. The epsilon is not proven."
        )
    if seeded:
        not_covered.insert(0, "Seeded, do not release: whoever knows the seed can take the noise away.")
    guarantee = plan.mechanism.guarantee if plan.noise_multiplier > 0 else "none: there is no noise"
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        unit=plan.unit,
        neighbouring=f"adding or removing one {plan.unit}",
        mechanism=plan.mechanism.name,
        settings={key: value for key, value in plan.mechanism.to_dict().items() if key != "name"},
        guarantee=guarantee,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.clipping.max_norm,
        clipping=plan.clipping.style,
        sampling=sampling,
        accountant=plan.accountant.upper(),
        assumptions=tuple(assumptions),
        not_covered=tuple(not_covered),
    )
