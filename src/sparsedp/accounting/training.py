"""What a training run costs, and the noise it needs."""

from typing import Protocol

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from sparsedp.accounting.calibration import calibrate
from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.accounting.events import gaussian_step, require_count, require_number


class HasPrivacyCost(Protocol):
    """What accounting asks of a mechanism."""

    def step_event(self, noise_multiplier: float, sample_rate: float) -> DpEvent:
        """What one training step releases."""

    def setup_event(self) -> DpEvent | None:
        """What is released once, before training (a selection of rows, say); None if nothing is."""


def training_event(
    *, noise_multiplier: float, sample_rate: float, steps: int, mechanism: HasPrivacyCost | None = None
) -> DpEvent:
    """All that a run releases: the mechanism's setup once, and its step `steps` times. None means DP-SGD."""
    sigma = require_number("noise_multiplier", noise_multiplier, low=0.0)
    rate = require_number("sample_rate", sample_rate, low=0.0, high=1.0, low_open=True)
    steps = require_count("steps", steps, low=0)
    if mechanism is None:
        return SelfComposedDpEvent(gaussian_step(sigma, rate), steps)
    run = SelfComposedDpEvent(mechanism.step_event(sigma, rate), steps)
    setup = mechanism.setup_event()
    return run if setup is None else ComposedDpEvent([setup, run])


def get_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    mechanism: HasPrivacyCost | None = None,
    accountant: str = "pld",
) -> float:
    """The epsilon of a run of `steps` steps on Poisson samples of rate `sample_rate`."""
    event = training_event(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, mechanism=mechanism)
    return epsilon_of(event, delta, accountant)


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    mechanism: HasPrivacyCost | None = None,
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier, to 0.1 %, for which `get_epsilon` is at most `target_epsilon`."""
    require_count("steps", steps, low=1)

    def make_event(sigma: float) -> DpEvent:
        return training_event(noise_multiplier=sigma, sample_rate=sample_rate, steps=steps, mechanism=mechanism)

    return calibrate(make_event, target_epsilon, target_delta, accountant)
