"""Privacy accounting: an event says what happened, a ledger what ran, an accountant what it costs."""

from sparsedp.accounting.accountants import DpAccounting, Pld, Rdp
from sparsedp.accounting.calibration import calibrate
from sparsedp.accounting.epsilon import delta_of, epsilon_of
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
from sparsedp.accounting.registry import Accountant, accountant_names, find_accountant, register_accountant
from sparsedp.accounting.training import HasPrivacyCost, get_epsilon, get_noise_multiplier, training_event

__all__ = [
    "Accountant",
    "DpAccounting",
    "ExponentialMechanismDpEvent",
    "HasPrivacyCost",
    "Ledger",
    "Pld",
    "Rdp",
    "accountant_names",
    "calibrate",
    "combined_multiplier",
    "delta_of",
    "epsilon_of",
    "event_from_dict",
    "event_to_dict",
    "find_accountant",
    "gaussian_step",
    "get_epsilon",
    "get_noise_multiplier",
    "register_accountant",
    "register_event",
    "split_multiplier",
    "training_event",
]
