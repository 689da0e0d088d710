"""What events cost: epsilon at a delta, or delta at an epsilon. Always an upper bound."""

import math

from dp_accounting import DpEvent, NonPrivateDpEvent

from sparsedp.accounting.events import canonical, require_number
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.reference import reference_above
from sparsedp.accounting.registry import Accountant, find_accountant
from sparsedp.errors import SparseDPError


def epsilon_of(
    event: DpEvent | Ledger, delta: float, accountant: str = "pld", *, relative_error: float = 1e-3
) -> float:
    """An epsilon for which the event, or all that a ledger holds, is (epsilon, delta)-DP.

    0 if nothing was released, infinity if something was released without noise. "pld" is exact for Gaussians
    on all of the data, and otherwise above the exact value by about `relative_error` at most; where that
    would need too fine a grid (extreme noise), it is the better of the finest grid's answer and RDP's.
    """
    asked = find_accountant(accountant)
    delta = require_number("delta", delta, low=0.0, high=1.0, low_open=True, high_open=True)
    relative_error = require_number("relative_error", relative_error, low=0.0, low_open=True)
    return max(_epsilon(leaves, delta, asked, relative_error) for leaves in _leaves(event))


def _epsilon(leaves: dict[DpEvent, int], delta: float, accountant: Accountant, relative_error: float) -> float:
    if not leaves:
        return 0.0
    if NonPrivateDpEvent() in leaves:
        return math.inf
    return max(0.0, _a_number(accountant, accountant.epsilon(leaves, delta, relative_error)))


def delta_of(
    event: DpEvent | Ledger, epsilon: float, accountant: str = "pld", *, relative_error: float = 1e-2
) -> float:
    """A delta for which the event, or all that a ledger holds, is (epsilon, delta)-DP.

    With "pld" no smaller than about 1e-20, save for Gaussians on all of the data, which are exact.
    """
    asked = find_accountant(accountant)
    epsilon = require_number("epsilon", epsilon, low=0.0)
    relative_error = require_number("relative_error", relative_error, low=0.0, low_open=True)
    return max(_delta(leaves, epsilon, asked, relative_error) for leaves in _leaves(event))


def _delta(leaves: dict[DpEvent, int], epsilon: float, accountant: Accountant, relative_error: float) -> float:
    if not leaves:
        return 0.0
    if NonPrivateDpEvent() in leaves:
        return 1.0
    return min(1.0, max(0.0, _a_number(accountant, accountant.delta(leaves, epsilon, relative_error))))


def dp_accounting_above(event: DpEvent | Ledger, delta: float, bound: float) -> float | None:
    """The epsilon of dp_accounting's PLD accountant if it is above `bound`, in a second or two; otherwise None.

    None also if it does not know the events.
    """
    charged = [leaves for leaves in _leaves(event) if leaves and NonPrivateDpEvent() not in leaves]
    epsilons = [reference_above(leaves, delta, bound) for leaves in charged]
    return max((epsilon for epsilon in epsilons if epsilon is not None), default=None)


def _leaves(event: DpEvent | Ledger) -> list[dict[DpEvent, int]]:
    """The distinct cases of which the costliest counts: several for a ledger that composes in parallel."""
    cases = [canonical(case) for case in (event.events() if isinstance(event, Ledger) else [event])]
    return list({tuple(leaves.items()): leaves for leaves in cases}.values())


def _a_number(accountant: Accountant, answer: float) -> float:
    """The answer as a float. NaN is refused: every comparison with it is false, so that it could pass for any cost."""
    if math.isnan(answer):
        raise SparseDPError(f"the {accountant.name} accountant gives NaN: it says nothing about this run")
    return float(answer)
