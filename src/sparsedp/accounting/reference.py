"""dp_accounting's own PLD accountant, for those who want its word beside ours.

It knows Gaussians on all data or on Poisson samples, and Laplace noise. Its grid is fixed, and loose at small sampling
rates.
"""

import functools
from collections.abc import Mapping

from dp_accounting import ComposedDpEvent, DpEvent, NeighboringRelation, SelfComposedDpEvent, UnsupportedEventError
from dp_accounting.pld import PLDAccountant

from sparsedp.errors import UnsupportedError

_INTERVAL = 1e-4  # of dp_accounting's grid, unless told otherwise
_COARSER = (1e-2, 1e-3)


def _accountant(leaves: Mapping[DpEvent, int], interval: float = _INTERVAL) -> PLDAccountant:
    event = ComposedDpEvent([SelfComposedDpEvent(leaf, count) for leaf, count in leaves.items()])
    try:
        accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval)
        return accountant.compose(event)
    except UnsupportedEventError as error:
        raise UnsupportedError(f'dp_accounting cannot account for this run; use accountant="pld": {error}') from error


def reference_epsilon(leaves: Mapping[DpEvent, int], delta: float) -> float:
    return _epsilon(tuple(leaves.items()), delta, _INTERVAL)


@functools.lru_cache(maxsize=256)
def _epsilon(leaves: tuple[tuple[DpEvent, int], ...], delta: float, interval: float) -> float:
    return max(0.0, float(_accountant(dict(leaves), interval).get_epsilon(delta)))


def reference_above(leaves: Mapping[DpEvent, int], delta: float, bound: float) -> float | None:
    """`reference_epsilon` if it is above `bound`; None if it is not, or if dp_accounting does not know the events.

    It takes seconds where epsilon is large, and hardly ever differs there. A coarser grid, whose points are some of the finer
    one's, gives a larger epsilon in less time: where that is within the bound, so is the finer one's.
    """
    try:
        if any(_epsilon(tuple(leaves.items()), delta, interval) <= bound for interval in _COARSER):
            return None
        epsilon = reference_epsilon(leaves, delta)
    except UnsupportedError:
        return None
    return epsilon if epsilon > bound else None


def reference_delta(leaves: Mapping[DpEvent, int], epsilon: float) -> float:
    return float(_accountant(leaves).get_delta(epsilon))
