"""The plan: everything about a private run that is fixed before training."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import dp_accounting
from torch import Tensor

from sparsedp.accounting import calibrate
from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.accounting.events import require_number
from sparsedp.accounting.ledger import Ledger
from sparsedp.clipping import Clipping
from sparsedp.errors import SparseDPWarning, UnsupportedError
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import mechanism_from_dict
from sparsedp.progress import Progress, no_progress
from sparsedp.sampling import PrivateLoader, StreamPlan
from sparsedp.settings import PlannedSettings, PrivacySettings
from sparsedp.validation import PrivateValidation

LARGEST_DELTA = 0.01  # that a promise may have without being asked for by name
_SHOWN = 3  # parameters that are named when two plans differ


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(PlannedSettings):
    """Sampling, clipping, mechanism, noise and cost of a step. Frozen; its hash ties a checkpoint to it."""

    dataset_size: int  # units of the data
    batch_size: int  # the divisor of the clipped sum; the units that are expected, unless a stream has a rate
    shuffled: bool  # whether the user's own loader shuffles; without Poisson sampling its batches are used
    noise_multiplier: float  # standard deviation of the noise on the clipped sum, divided by max_norm
    clipping: Clipping
    parameters: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    accountant: str = "pld"
    steps: int | None = None  # the most that may run; None: no limit
    target_epsilon: float | None = None
    target_delta: float | None = None
    seeded: bool = False
    stream: StreamPlan | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be zero or positive, not {self.noise_multiplier}")
        super().__post_init__()

    @staticmethod
    def of(
        settings: PrivacySettings, loader: PrivateLoader, parameters: Mapping[str, Tensor], *,
        noise_multiplier: float, accountant: str, seeded: bool,
    ) -> PrivacyPlan:  # fmt: skip
        """The plan of a run with these settings, on the loader's data."""
        kept = {setting.name: getattr(settings, setting.name) for setting in fields(PlannedSettings)}
        kept["stream"] = None if settings.stream is None else settings.stream.plan(loader.span_steps, loader.span_sizes)
        return PrivacyPlan(
            **kept,
            dataset_size=loader.dataset_size,
            batch_size=loader.batch_size or 0,
            shuffled=loader.shuffled,
            noise_multiplier=float(noise_multiplier),
            clipping=settings.bound(),
            parameters=tuple((name, tuple(p.shape)) for name, p in parameters.items()),
            accountant=accountant,
            seeded=seeded,
        )

    @property
    def sample_rate(self) -> float:
        """The probability that a unit joins a batch; with a stream, the largest of its spans'."""
        return max(self.sample_rates)

    @property
    def sample_rates(self) -> tuple[float, ...]:
        """The sampling rate of each span of the stream; without one, the only rate."""
        if self.stream is None:
            return (self.batch_size / self.dataset_size,)
        if self.stream.sample_rate is not None:
            return (self.stream.sample_rate,) * len(self.stream.steps)
        return tuple(self.batch_size / size for size in self.stream.sizes)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        return self.noise_multiplier * self.clipping.max_norm

    @property
    def divisor(self) -> float:
        """What the noisy sum is divided by: a public constant, never the size of the drawn batch."""
        return float(self.batch_size) if self.loss_reduction == "mean" else 1.0

    def step_event(self, span: int | None = None) -> dp_accounting.DpEvent:
        """The event of one step, on the units of a span if there is a stream."""
        return self.mechanism.step_event(self.noise_multiplier, self.sample_rates[span or 0])

    def setup_scope(self, span: int | None) -> int | None:
        """The span whose data the mechanism counts when training comes to `span`; None: all data."""
        return {"all": None, "first": 0, "running": span}[self.mechanism.counted_data]

    def examples_counted(self, scope: int | None) -> int:
        """How many times a unit may be counted among those that are counted together.

        Sequential composition says that a unit may have one example in every span, so all data hold as many as there are spans.
        A user is known, and counted once with all of their examples.
        """
        if scope is not None or self.stream is None or self.stream.composition != "sequential" or self.unit == "user":
            return 1
        return len(self.stream.steps)

    def steps_on(self, span: int | None) -> int | None:
        """The most steps that may run on a span (None: all data, without a stream); None: no limit."""
        if self.steps is None or self.stream is None or span is None:
            return self.steps
        return self.stream.taken(self.steps)[span]

    def ledger(self, steps: int) -> Ledger:
        """What the ledger holds after `steps` steps."""
        if self.stream is None:
            spans: dict[int | None, int] = {None: steps}
            ledger = Ledger()
        else:
            spans = dict(enumerate(self.stream.taken(steps)))
            ledger = Ledger(composition=self.stream.composition)
        setup = self.mechanism.setup_event()
        if self.frequencies is not None:
            ledger.record(self.frequencies.event, setup=True)
        if isinstance(self.validation, PrivateValidation):
            ledger.record(self.validation.event, self.validation.looks, setup=True)
        for at, (span, taken) in enumerate(spans.items()):
            scope = self.setup_scope(span)
            if setup is not None and (at == 0 or taken > 0) and not ledger.setups(scope, setup):
                ledger.record(setup, setup=True, scope=scope)
            ledger.record(self.step_event(span), taken, scope=span)
        return ledger

    def epsilon(self, steps: int, delta: float) -> float:
        return epsilon_of(self.ledger(steps), delta, self.accountant)

    def calibrated(
        self, *, target_epsilon: float, target_delta: float, steps: int, progress: Progress = no_progress
    ) -> PrivacyPlan:
        """This plan with the smallest noise whose epsilon after `steps` steps does not exceed the target."""
        if isinstance(self.mechanism.step_event(1.0, 1.0), dp_accounting.NonPrivateDpEvent):
            raise UnsupportedError(
                f"The mechanism '{self.mechanism.name}' has no (epsilon, delta) guarantee: with any noise its epsilon is "
                "infinite, so no target can be met. Give noise_multiplier=... instead of a target epsilon (make_private), or "
                "choose a mechanism with a guarantee, such as AdaFEST."
            )
        noise = calibrate(
            lambda sigma: replace(self, noise_multiplier=sigma).ledger(steps),
            target_epsilon,
            target_delta,
            self.accountant,
            progress=progress,
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
        values["public_inputs"] = list(self.public_inputs)
        if self.stream is None:
            del values["stream"]
        else:
            values["stream"] = self.stream.to_dict()
        if self.max_examples_per_user is None:  # plans from before there were users do not have it
            del values["max_examples_per_user"]
        if self.frequencies is None:
            del values["frequencies"]
        else:
            values["frequencies"] = self.frequencies.to_dict()
        if self.validation is None:
            del values["validation"]
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> PrivacyPlan:
        values = dict(values)
        values["clipping"] = Clipping(**values["clipping"])
        values["mechanism"] = mechanism_from_dict(values["mechanism"])
        values["parameters"] = tuple((name, tuple(shape)) for name, shape in values["parameters"])
        values["public_inputs"] = tuple(values["public_inputs"])
        if "stream" in values:
            values["stream"] = StreamPlan.from_dict(values["stream"])
        if "frequencies" in values:
            values["frequencies"] = FrequencyRelease(**values["frequencies"])
        if isinstance(values.get("validation"), dict):
            values["validation"] = PrivateValidation(**values["validation"])
        return PrivacyPlan(**values)

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def with_threshold_of(self, other: dict[str, Any]) -> PrivacyPlan:
        """This plan, with the threshold that another one, as a dict, found on the release that both make.

        The same if it has found one itself, or looks at something else.
        """
        found = (other.get("mechanism") or {}).get("found")
        if self.mechanism.looks_at != "release" or not isinstance(found, float):
            return self
        return replace(self, mechanism=self.mechanism.with_threshold(found))

    def differences(self, other: dict[str, Any]) -> list[str]:
        """How another plan, as a dict, differs from this one: one line per setting."""
        mine = self.to_dict()
        keys = sorted(mine.keys() | other.keys())
        return [
            _different_parameters(other.get(key) or [], mine[key])
            if key == "parameters"
            else f"{key}: {other.get(key)!r} there, {mine.get(key)!r} here"
            for key in keys
            if mine.get(key) != other.get(key)
        ]


def _different_parameters(there: list, here: list) -> str:
    """The first few parameters, as [name, shape], that two plans do not have in common."""
    theirs, mine = dict(there), dict(here)
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    shown = [f"'{n}' is {theirs.get(n, 'missing')} there, {mine.get(n, 'missing')} here" for n in names[:_SHOWN]]
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return f"parameters: {', '.join([*shown, *more]) or 'in another order'}"


def default_delta(units: int) -> float:
    """0.1 / N, rounded down to one digit, and at most 0.01."""
    wanted = min(0.1 / units, LARGEST_DELTA)
    exponent = math.floor(math.log10(wanted) + 1e-12)
    return float(f"{math.floor(wanted / 10**exponent + 1e-12)}e{exponent}")


def require_delta(delta: float, units: int | None, allow_large: bool) -> float:
    """`delta`, if a promise to `units` units (None: it is not known how many) may rest on it.

    A mechanism that publishes each unit's data with probability delta is (0, delta)-differentially private, and is expected
    to publish delta x N units. So a delta above 1 / N is warned of, and one above 0.01 refused unless `allow_large`.
    """
    delta = require_number("delta", delta, low=0.0, high=1.0, low_open=True, high_open=True)
    if delta > LARGEST_DELTA and not allow_large:
        raise UnsupportedError(
            f"delta={delta:g} is above {LARGEST_DELTA:g}: such a promise holds even for publishing each unit's data with that "
            "probability. Take a delta well below 1 / N, N the number of units; to have this one all the same, say "
            "allow_large_delta (PrivacyEngine(allow_large_delta=True), privacy.allow_large_delta in a configuration, "
            "--allow-large-delta of `sparsedp account`)."
        )
    if units is not None and delta * units > 1 + 1e-9:
        warnings.warn(
            f"delta={delta:g} is above 1 / N = {1 / units:.3g}: delta x N = {delta * units:.3g} units may be left without "
            f"protection. Take one well below it; the default is {default_delta(units):g}.",
            SparseDPWarning,
            stacklevel=3,
        )
    return delta
