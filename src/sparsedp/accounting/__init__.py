"""Privacy accounting: an event says what happened, a ledger what ran, an accountant what it costs."""

from sparsedp.accounting.calibration import calibrate
from sparsedp.accounting.epsilon import Accountant, delta_of, epsilon_of
from sparsedp.accounting.events import (
    ExponentialMechanismDpEvent,
    combined_multiplier,
    event_from_dict,
    event_to_dict,
    gaussian_step,
    register_event,
    split_multiplier,
)
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.training import HasPrivacyCost, get_epsilon, get_noise_multiplier, training_event

__all__ = [
    "Accountant",
    "ExponentialMechanismDpEvent",
    "HasPrivacyCost",
    "Ledger",
    "calibrate",
    "combined_multiplier",
    "delta_of",
    "epsilon_of",
    "event_from_dict",
    "event_to_dict",
    "gaussian_step",
    "get_epsilon",
    "get_noise_multiplier",
    "register_event",
    "split_multiplier",
    "training_event",
]
