"""The accountants that SparseDP brings. Others may be registered beside them (docs/extending.md)."""

import math
from collections.abc import Mapping

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent
from scipy.special import log_ndtr

from sparsedp.accounting.convolution import Estimate
from sparsedp.accounting.events import ExponentialMechanismDpEvent
from sparsedp.accounting.pld import pld_delta, pld_epsilon
from sparsedp.accounting.rdp import rdp_delta, rdp_epsilon
from sparsedp.accounting.reference import reference_delta, reference_epsilon
from sparsedp.accounting.registry import Accountant, register_accountant
from sparsedp.errors import UnsupportedError


@register_accountant
class Pld(Accountant):
    """Privacy loss distributions, exact for Gaussians on all of the data.

    Where the error asked for would need too fine a grid (extreme noise), the better of the finest grid's answer and RDP's.
    """

    name = "pld"
    summary = "tight, the default"

    def epsilon(self, leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> float:
        gaussian = _only_gaussian(leaves)
        if gaussian is not None:
            # The root is found to 1e-12; up, so that it is a bound.
            exact = dp_accounting.get_epsilon_gaussian(gaussian.noise_multiplier, delta)
            return float(exact) * (1 + 1e-12) + 1e-12 if exact > 0 else 0.0
        estimate = pld_epsilon(leaves, delta, relative_error)
        if _is_tight(estimate, leaves, relative_error, 1e-8):
            return estimate.value
        try:
            return min(estimate.value, max(0.0, rdp_epsilon(leaves, delta)))
        except UnsupportedError:
            return estimate.value

    def delta(self, leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> float:
        gaussian = _only_gaussian(leaves)
        if gaussian is not None:
            return _gaussian_delta(gaussian.noise_multiplier, epsilon)
        estimate = pld_delta(leaves, epsilon, relative_error)
        if _is_tight(estimate, leaves, relative_error, 1e-19):
            return estimate.value
        try:
            return min(estimate.value, rdp_delta(leaves, epsilon))
        except UnsupportedError:
            return estimate.value


@register_accountant
class Rdp(Accountant):
    """Renyi divergences by dp_accounting: looser, but it knows zCDP events. Its orders are fixed, whatever the error."""

    name = "rdp"
    summary = "Renyi divergences, looser"
    compared_with_dp_accounting = False
    out_of_reach = '"rdp" cannot show an epsilon far below 0.02 at all; "pld" can.'

    def epsilon(self, leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> float:
        return rdp_epsilon(leaves, delta)

    def delta(self, leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> float:
        return rdp_delta(leaves, epsilon)


@register_accountant
class DpAccounting(Accountant):
    """dp_accounting's own PLD accountant. Its grid is fixed, whatever the error."""

    name = "dp_accounting"
    summary = "that library's own PLD"
    compared_with_dp_accounting = False

    def epsilon(self, leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> float:
        return reference_epsilon(leaves, delta)

    def delta(self, leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> float:
        return reference_delta(leaves, epsilon)


def _only_gaussian(leaves: Mapping[DpEvent, int]) -> GaussianDpEvent | None:
    """The only leaf, if it is a Gaussian on all of the data: `canonical` has made all of these one."""
    first = next(iter(leaves))
    return first if len(leaves) == 1 and isinstance(first, GaussianDpEvent) else None


def _is_tight(estimate: Estimate, leaves: Mapping[DpEvent, int], relative_error: float, negligible: float) -> bool:
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
