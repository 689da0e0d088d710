"""Composition of events by Rényi differential privacy: looser than PLD, but it knows zCDP events."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from dp_accounting import DpEvent, UnsupportedEventError
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_delta, compute_epsilon
from numpy.typing import NDArray

from sparsedp.accounting.events import ExponentialMechanismDpEvent
from sparsedp.errors import UnsupportedError

ORDERS = np.array(DEFAULT_RDP_ORDERS, dtype=np.float64)
# dp_accounting's divergence of a step has a rounding error of up to this, and it takes a negative one for no
# cost; adding it keeps the bound a bound.
_ROUNDING = 1e-15


def rdp_epsilon(leaves: Mapping[DpEvent, int], delta: float) -> float:
    """An epsilon at `delta` of composed events, as `canonical` gives them."""
    return float(compute_epsilon(ORDERS, divergences(leaves), delta)[0])


def rdp_delta(leaves: Mapping[DpEvent, int], epsilon: float) -> float:
    """A delta at `epsilon` of composed events, as `canonical` gives them."""
    return float(compute_delta(ORDERS, divergences(leaves), epsilon)[0])


def divergences(leaves: Mapping[DpEvent, int]) -> NDArray[np.float64]:
    """The Rényi divergence of the composition at each order."""
    return np.sum([count * (_of_one(leaf) + _ROUNDING) for leaf, count in leaves.items()], axis=0)


def _of_one(event: DpEvent) -> NDArray[np.float64]:
    if isinstance(event, ExponentialMechanismDpEvent):
        # A loss of range epsilon is epsilon^2/8-zCDP (Cesar & Rogers 2021), and at most epsilon.
        return np.minimum(ORDERS * event.epsilon**2 / 8, event.epsilon)
    try:
        with _quiet():
            return RdpAccountant(ORDERS).compose(event).rdp
    except UnsupportedEventError:
        raise UnsupportedError(
            f'the "rdp" accountant has no bound for {event!r}; accountant="pld" may know it'
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without dp_accounting's warning for each order that does not converge; it leaves the order out."""
    logger = logging.getLogger("absl")

    def drop(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
