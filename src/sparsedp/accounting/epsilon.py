"""What events cost: epsilon at a delta, or delta at an epsilon. Always an upper bound."""

import math
from typing import Literal, get_args

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from scipy.special import log_ndtr

from sparsedp.accounting.convolution import Estimate
from sparsedp.accounting.events import ExponentialMechanismDpEvent, canonical, require_number
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.pld import pld_delta, pld_epsilon
from sparsedp.accounting.rdp import rdp_delta, rdp_epsilon
from sparsedp.accounting.reference import reference_above, reference_delta, reference_epsilon
from sparsedp.errors import ConfigError, UnsupportedError

Accountant = Literal["pld", "rdp", "dp_accounting"]


def epsilon_of(
    event: DpEvent | Ledger, delta: float, accountant: Accountant = "pld", *, relative_error: float = 1e-3
) -> float:
    """An epsilon for which the event, or all that a ledger holds, is (epsilon, delta)-DP.

    0 if nothing was released, infinity if something was released without noise. "pld" is exact for Gaussians
    on all of the data, and otherwise above the exact value by about `relative_error` at most; where that
    would need too fine a grid (extreme noise), it is the better of the finest grid's answer and RDP's.
    """
    delta = require_number("delta", delta, low=0.0, high=1.0, low_open=True, high_open=True)
    relative_error = require_number("relative_error", relative_error, low=0.0, low_open=True)
    return max(_epsilon(leaves, delta, accountant, relative_error) for leaves in _leaves(event, accountant))


def _epsilon(leaves: dict[DpEvent, int], delta: float, accountant: Accountant, relative_error: float) -> float:
    if not leaves:
        return 0.0
    if NonPrivateDpEvent() in leaves:
        return math.inf
    if accountant == "rdp":
        return max(0.0, rdp_epsilon(leaves, delta))
    if accountant == "dp_accounting":
        return reference_epsilon(leaves, delta)
    first = next(iter(leaves))
    if len(leaves) == 1 and isinstance(first, GaussianDpEvent):
        # The root is found to 1e-12; up, so that it is a bound.
        exact = dp_accounting.get_epsilon_gaussian(first.noise_multiplier, delta)
        return max(0.0, float(exact) * (1 + 1e-12) + 1e-12) if exact > 0 else 0.0
    estimate = pld_epsilon(leaves, delta, relative_error)
    if _is_tight(estimate, leaves, relative_error, 1e-8):
        return estimate.value
    try:
        return min(estimate.value, max(0.0, rdp_epsilon(leaves, delta)))
    except UnsupportedError:
        return estimate.value


def delta_of(
    event: DpEvent | Ledger, epsilon: float, accountant: Accountant = "pld", *, relative_error: float = 1e-2
) -> float:
    """A delta for which the event, or all that a ledger holds, is (epsilon, delta)-DP.

    With "pld" no smaller than about 1e-20, save for Gaussians on all of the data, which are exact.
    """
    epsilon = require_number("epsilon", epsilon, low=0.0)
    relative_error = require_number("relative_error", relative_error, low=0.0, low_open=True)
    return max(_delta(leaves, epsilon, accountant, relative_error) for leaves in _leaves(event, accountant))


def _delta(leaves: dict[DpEvent, int], epsilon: float, accountant: Accountant, relative_error: float) -> float:
    if not leaves:
        return 0.0
    if NonPrivateDpEvent() in leaves:
        return 1.0
    if accountant == "rdp":
        return min(1.0, rdp_delta(leaves, epsilon))
    if accountant == "dp_accounting":
        return reference_delta(leaves, epsilon)
    first = next(iter(leaves))
    if len(leaves) == 1 and isinstance(first, GaussianDpEvent):
        return _gaussian_delta(first.noise_multiplier, epsilon)
    estimate = pld_delta(leaves, epsilon, relative_error)
    if _is_tight(estimate, leaves, relative_error, 1e-19):
        return estimate.value
    try:
        return min(estimate.value, rdp_delta(leaves, epsilon))
    except UnsupportedError:
        return estimate.value


def dp_accounting_above(event: DpEvent | Ledger, delta: float, bound: float) -> float | None:
    """The epsilon of dp_accounting's PLD accountant if it is above `bound`, in a second or two; otherwise None.

    None also if it does not know the events.
    """
    known = [leaves for leaves in _leaves(event, "dp_accounting") if leaves and NonPrivateDpEvent() not in leaves]
    found = [reference_above(leaves, delta, bound) for leaves in known]
    return max((epsilon for epsilon in found if epsilon is not None), default=None)


def _leaves(event: DpEvent | Ledger, accountant: str) -> list[dict[DpEvent, int]]:
    """The distinct cases of which the costliest counts: several for a ledger that composes in parallel."""
    if accountant not in get_args(Accountant):
        raise ConfigError(f'accountant must be "pld", "rdp" or "dp_accounting"; got {accountant!r}')
    cases = [canonical(case) for case in (event.events() if isinstance(event, Ledger) else [event])]
    return list({tuple(leaves.items()): leaves for leaves in cases}.values())


def _is_tight(estimate: Estimate, leaves: dict[DpEvent, int], relative_error: float, negligible: float) -> bool:
    """Whether RDP has nothing to add.

    It may if the grid is too coarse, and for many exponential mechanisms: PLD composes worst cases of theirs
    that do not occur together.
    """
    if any(isinstance(leaf, ExponentialMechanismDpEvent) for leaf in leaves):
        return False
    return math.isfinite(estimate.value) and estimate.error <= 2 * relative_error * estimate.value + negligible


def _gaussian_delta(sigma: float, epsilon: float) -> float:
    """Phi(1/(2 sigma) - epsilon sigma) - e^epsilon Phi(-1/(2 sigma) - epsilon sigma) (Balle & Wang 2018)."""
    p = float(log_ndtr(0.5 / sigma - epsilon * sigma))
    q = epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma))
    return math.exp(p) * -math.expm1(min(0.0, q - p))
