"""The noise that a privacy budget asks for."""

import math
from collections.abc import Callable

from dp_accounting import DpEvent

from sparsedp.accounting.epsilon import epsilon_of
from sparsedp.accounting.events import require_number
from sparsedp.accounting.ledger import Ledger
from sparsedp.accounting.registry import find_accountant
from sparsedp.errors import SparseDPError
from sparsedp.progress import Progress, no_progress

_MIN_SIGMA = 1e-4
_MAX_SIGMA = 1e8


def calibrate(
    make_event: Callable[[float], DpEvent | Ledger],
    target_epsilon: float,
    target_delta: float,
    accountant: str = "pld",
    *,
    tolerance: float = 1e-3,
    progress: Progress = no_progress,
) -> float:
    """The smallest noise multiplier, to a relative `tolerance`, with which `make_event` is within budget.

    More noise must not cost more. What is returned was checked: its `epsilon_of` is at most `target_epsilon`. Of a ledger
    that composes in parallel, the scope that is likely to cost most is calibrated, then any that turns out to cost more.
    `progress` is told of each noise that is tried.
    """
    target = require_number("target_epsilon", target_epsilon, low=0.0, low_open=True)
    delta = require_number("target_delta", target_delta, low=0.0, high=1.0, low_open=True, high_open=True)
    tolerance = require_number("tolerance", tolerance, low=1e-6, high=1.0)

    with progress("calibrating the noise", 0) as advance:

        def cases(sigma: float) -> list[DpEvent]:
            advance(1)
            made = make_event(sigma)
            return made.events() if isinstance(made, Ledger) else [made]

        return _calibrate_cases(cases, target, delta, accountant, tolerance)


def _calibrate_cases(
    cases: Callable[[float], list[DpEvent]], target: float, delta: float, accountant: str, tolerance: float
) -> float:
    """`calibrate`, for events of which the costliest counts."""
    if len(cases(1.0)) == 1:
        return _calibrate(lambda sigma: cases(sigma)[0], target, delta, accountant, tolerance)
    costs = [epsilon_of(case, delta, accountant, relative_error=0.1) for case in cases(1.0)]
    noise = 0.0
    while max(costs) > target or noise == 0:
        worst = costs.index(max(costs))
        enough = _calibrate(lambda sigma, worst=worst: cases(sigma)[worst], target, delta, accountant, tolerance)  # type: ignore[misc]
        noise = max(enough, noise * (1 + tolerance))
        costs = [epsilon_of(case, delta, accountant) for case in cases(noise)]
    return noise


def _calibrate(
    make_event: Callable[[float], DpEvent], target: float, delta: float, accountant: str, tolerance: float
) -> float:
    """`calibrate`, for one event."""

    def cost(sigma: float) -> float:
        return epsilon_of(make_event(sigma), delta, accountant)

    def coarse_cost(sigma: float) -> float:
        # Takes milliseconds, and is still an upper bound: it can only ask for too much noise.
        return epsilon_of(make_event(sigma), delta, accountant, relative_error=0.1)

    try:
        guess, factor = _search(coarse_cost, target, 1.0, 2.0, 0.05), 1.03
    except _OutOfReachError:
        guess, factor = 1.0, 2.0  # the target may be out of the coarse bound's reach alone
    try:
        return _search(cost, target, guess, factor, tolerance)
    except _OutOfReachError as error:
        hint = find_accountant(accountant).out_of_reach
        raise SparseDPError(
            f"target_epsilon={target:g} at target_delta={delta:g} cannot be reached: even with a noise "
            f"multiplier of {_MAX_SIGMA:g} the {accountant} accountant gives epsilon={error.epsilon:.6g}, from "
            "what that noise does not cover, such as a selection made before training, or looks at a private validation set. "
            f"Raise the target, or spend less on that. {hint}".rstrip()
        ) from None


class _OutOfReachError(Exception):
    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon


def _search(cost: Callable[[float], float], target: float, guess: float, factor: float, tolerance: float) -> float:
    """A sigma within the target, such that (unless at the lower limit) one `tolerance` below it is not."""
    passes, fails = _bracket(cost, target, guess, factor)
    for step in range(100):
        if passes[0] <= fails[0] * (1 + tolerance):
            break
        sigma = _between(passes, fails, target, tolerance, bisect=step % 3 == 2)
        value = cost(sigma)
        if value <= target:
            passes = sigma, value
        else:
            fails = sigma, value
    return passes[0]


def _bracket(
    cost: Callable[[float], float], target: float, guess: float, factor: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(sigma, cost) within the target, and (sigma, cost) above it, going from `guess` by growing factors."""
    sigma, value = guess, cost(guess)
    if value <= target:
        passes = sigma, value
        while passes[0] > _MIN_SIGMA:
            sigma = max(passes[0] / factor, _MIN_SIGMA)
            value = cost(sigma)
            if value > target:
                return passes, (sigma, value)
            passes = sigma, value
            factor **= 2
        return passes, (passes[0], math.inf)
    fails = sigma, value
    while True:
        sigma = min(fails[0] * factor, _MAX_SIGMA)
        value = cost(sigma)
        if value <= target:
            return (sigma, value), fails
        if sigma == _MAX_SIGMA:
            raise _OutOfReachError(value)
        fails = sigma, value
        factor **= 2


def _between(
    passes: tuple[float, float], fails: tuple[float, float], target: float, tolerance: float, bisect: bool
) -> float:
    """The next sigma to try: where log epsilon, as a line in log sigma, meets the target, or the middle.

    A little off the line, towards the end that is farther, so that both ends close in.
    """
    low, high = math.log(fails[0]), math.log(passes[0])
    top, bottom = fails[1], passes[1]
    if bisect or not math.isfinite(top) or bottom <= 0:
        return math.exp((low + high) / 2)
    share = math.log(top / target) / math.log(top / bottom)
    guess = low + share * (high - low)
    nudge = 0.4 * math.log1p(tolerance)
    guess += nudge if high - guess > guess - low else -nudge
    margin = 0.25 * nudge
    return math.exp(min(max(guess, low + margin), high - margin))
