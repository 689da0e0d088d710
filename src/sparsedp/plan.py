"""The plan: everything about a private run that is fixed before training."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import dp_accounting

from sparsedp.accounting import calibrate, training_event
from sparsedp.accounting.epsilon import Accountant, epsilon_of
from sparsedp.clipping import Clipping
from sparsedp.mechanisms import Mechanism, mechanism_from_dict

Unit = Literal["example"]
LossReduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class PrivacyPlan:
    """Sampling, clipping, mechanism, noise and cost of a step. Frozen; its hash ties a checkpoint to it."""

    dataset_size: int
    batch_size: int  # expected; the divisor of the clipped sum
    poisson_sampling: bool
    shuffled: bool  # whether the user's own loader shuffles; without Poisson sampling its batches are used
    noise_multiplier: float  # standard deviation of the noise on the clipped sum, divided by max_norm
    clipping: Clipping
    mechanism: Mechanism
    parameters: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    accountant: Accountant = "pld"
    unit: Unit = "example"
    loss_reduction: LossReduction = "mean"
    steps: int | None = None  # the most that may run; None: no limit
    target_epsilon: float | None = None
    target_delta: float | None = None
    seeded: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be zero or positive, not {self.noise_multiplier}")
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {self.loss_reduction!r}")
        if self.unit != "example":
            raise ValueError(f"unit must be 'example', not {self.unit!r}")

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.dataset_size

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        return self.noise_multiplier * self.clipping.max_norm

    @property
    def divisor(self) -> float:
        """What the noisy sum is divided by: a public constant, never the size of the drawn batch."""
        return float(self.batch_size) if self.loss_reduction == "mean" else 1.0

    def step_event(self) -> dp_accounting.DpEvent:
        return self.mechanism.step_event(self.noise_multiplier, self.sample_rate)

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """The privacy event of a run of `steps` steps."""
        return self._event(self.noise_multiplier, steps)

    def _event(self, noise_multiplier: float, steps: int) -> dp_accounting.DpEvent:
        return training_event(
            noise_multiplier=noise_multiplier, sample_rate=self.sample_rate, steps=steps, mechanism=self.mechanism
        )

    def epsilon(self, steps: int, delta: float) -> float:
        return epsilon_of(self.event(steps), delta, self.accountant)

    def calibrated(self, *, target_epsilon: float, target_delta: float, steps: int) -> PrivacyPlan:
        """This plan with the smallest noise whose epsilon after `steps` steps does not exceed the target."""
        noise = calibrate(
            lambda sigma: self._event(sigma, steps),
            target_epsilon,
            target_delta,
            self.accountant,
        )
        return replace(
            self,
            noise_multiplier=noise,
            steps=steps,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["clipping"] = self.clipping.to_dict()
        values["mechanism"] = self.mechanism.to_dict()
        values["parameters"] = [[name, list(shape)] for name, shape in self.parameters]
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> PrivacyPlan:
        values = dict(values)
        values["clipping"] = Clipping(**values["clipping"])
        values["mechanism"] = mechanism_from_dict(values["mechanism"])
        values["parameters"] = tuple((name, tuple(shape)) for name, shape in values["parameters"])
        return PrivacyPlan(**values)

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: dict[str, Any]) -> list[str]:
        """How another plan, as a dict, differs from this one: one line per setting."""
        mine = self.to_dict()
        keys = sorted(mine.keys() | other.keys())
        return [
            f"{key}: {other.get(key)!r} there, {mine.get(key)!r} here"
            for key in keys
            if mine.get(key) != other.get(key)
        ]


def default_delta(size: int) -> float:
    """1 / N, as in the DP-AdaFEST paper (section 4), rounded down to one digit."""
    exponent = math.floor(math.log10(1 / size))
    return float(f"{math.floor(1 / size / 10**exponent + 1e-9)}e{exponent}")
