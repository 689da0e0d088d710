"""dp_accounting's own PLD accountant, for those who want its word beside ours.

It knows Gaussians on all data or on Poisson samples, and Laplace noise. Its grid is fixed, and loose at small sampling
rates.
"""

from collections.abc import Mapping

from dp_accounting import ComposedDpEvent, DpEvent, NeighboringRelation, SelfComposedDpEvent, UnsupportedEventError
from dp_accounting.pld import PLDAccountant

from sparsedp.errors import UnsupportedError


def _accountant(leaves: Mapping[DpEvent, int]) -> PLDAccountant:
    event = ComposedDpEvent([SelfComposedDpEvent(leaf, count) for leaf, count in leaves.items()])
    try:
        return PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event)
    except UnsupportedEventError as error:
        raise UnsupportedError(f'dp_accounting cannot account for this run; use accountant="pld": {error}') from error


def reference_epsilon(leaves: Mapping[DpEvent, int], delta: float) -> float:
    return max(0.0, float(_accountant(leaves).get_epsilon(delta)))


def reference_delta(leaves: Mapping[DpEvent, int], epsilon: float) -> float:
    return float(_accountant(leaves).get_delta(epsilon))
