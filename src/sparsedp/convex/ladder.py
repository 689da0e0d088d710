"""The coins of bias-reduced SGD, and what they cost: Algorithms 3 and 4 of the paper, by two accountings.

A step draws a rung N with P[N = k] proportional to 2^-k, k = 0 .. M, and uses about 2^(N+1) rows. The coins do not depend on the
data, so all rungs of a run are drawn before it begins, and what it costs is known then.

"composition", ours: B is a Poisson sample of rate 2^(N+1)/n, each member of it goes to O or E by a fair coin, and the sums over
B, O and E get noise of deviation sigma L. A row of B moves B and one of O and E, so the three are one Gaussian of multiplier
sigma / sqrt(2): whichever half a row goes to, the shift has that length, and a mixture of the two is no worse (divergences are
convex). Given the coins the run is a composition of Poisson-sampled Gaussians. O under N = k has the law of B under N = k - 1, so
the estimate telescopes exactly.

"filter", the paper's: B has exactly 2^(N+1) rows, each of the four means is (epsilon/32, delta/16)-DP by the classical Gaussian
mechanism, sampling amplifies a step's cost to a_t (epsilon, delta) with a_t = (3 2^(N+1) + 1) / (16 n), and steps are taken until
the filter of Whitehouse et al. (2023) is half full; the last step fits into the other half.

delta = 0, by composition: the sums get Laplace noise of scale b times their l1 sensitivity. B and one of O and E move, so that
the triplet is (2/b)-DP and the single row (1/b)-DP; a Poisson sample of rate q makes ln(1 + q (e^epsilon - 1)) of epsilon, and
the steps add up.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.optimize
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sparsedp.accounting import Ledger, calibrate
from sparsedp.errors import ConfigError
from sparsedp.generator import CipherGenerator

Accounting = Literal["composition", "filter"]
_DRAWN = 1 << 12  # rungs that are drawn at a time
_AMPLIFIED = 10.0  # the largest epsilon for which sampling amplifies (3/32) epsilon by no more than twice the rate


@dataclass(frozen=True)
class Ladder:
    """Batch sizes 2, 4, .. 2^(M+1) <= n, and how often each is drawn."""

    rows: int  # n

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise ConfigError(f"Bias-reduced SGD needs at least two rows, not {self.rows}.")

    @property
    def top(self) -> int:
        """M."""
        return self.rows.bit_length() - 2

    @property
    def probabilities(self) -> np.ndarray:
        """p_k, (M + 1,)."""
        weights = 0.5 ** np.arange(self.top + 1)
        return weights / weights.sum()

    def size(self, rung: int) -> int:
        """2^(N+1), what |B| is, or is expected to be."""
        return 2 ** (rung + 1)

    def draw(self, generator: CipherGenerator, count: int) -> np.ndarray:
        """Rungs, int64 (count,)."""
        return np.minimum(
            np.searchsorted(np.cumsum(self.probabilities), generator.random(count), side="right"), self.top
        )

    def price(self, rung: int) -> float:
        """a_t of the paper's filter."""
        return (3 * self.size(rung) + 1) / (16 * self.rows)


def composition_ledger(ladder: Ladder, rungs: np.ndarray, noise_multiplier: float) -> Ledger:
    """What a run with these rungs releases: for each step the triplet of B, O and E, and the row that stands alone."""
    ledger = Ledger()
    for rung, count in sorted(Counter(rungs.tolist()).items()):
        ledger.record(triplet_event(ladder, rung, noise_multiplier), count)
    ledger.record(single_event(ladder, noise_multiplier), len(rungs))
    return ledger


def triplet_event(ladder: Ladder, rung: int, noise_multiplier: float) -> PoissonSampledDpEvent:
    """B, O and E together."""
    return PoissonSampledDpEvent(ladder.size(rung) / ladder.rows, GaussianDpEvent(noise_multiplier / math.sqrt(2)))


def single_event(ladder: Ladder, noise_multiplier: float) -> PoissonSampledDpEvent:
    """The sample of one expected row."""
    return PoissonSampledDpEvent(1 / ladder.rows, GaussianDpEvent(noise_multiplier))


def composition_multiplier(ladder: Ladder, rungs: np.ndarray, epsilon: float, delta: float) -> float:
    """The least sigma, to 0.1 %, with which these rungs are within budget: noise on sums has deviation sigma L."""
    return calibrate(lambda sigma: composition_ledger(ladder, rungs, sigma), epsilon, delta)


def pure_epsilon(ladder: Ladder, rungs: np.ndarray, noise_multiplier: float) -> float:
    """The epsilon of a run with these rungs at delta = 0; `noise_multiplier` is b, the scale over the l1 sensitivity."""

    def sampled(size: int, epsilon: float) -> float:
        rate = size / ladder.rows
        if epsilon > 30:  # e^epsilon may overflow
            return epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))
        return math.log1p(rate * math.expm1(epsilon))

    triplets = (count * sampled(ladder.size(k), 2 / noise_multiplier) for k, count in Counter(rungs.tolist()).items())
    return sum(triplets) + len(rungs) * sampled(1, 1 / noise_multiplier)


def pure_multiplier(ladder: Ladder, rungs: np.ndarray, epsilon: float) -> float:
    """The least b, to a millionth, with which these rungs are epsilon-DP."""
    # Sampling makes no epsilon larger: b = 3 T / epsilon is always enough. Below 2 / (epsilon + ln n) one triplet costs too much.
    low, high = 2 / (epsilon + math.log(ladder.rows)), 3.01 * len(rungs) / epsilon
    least = scipy.optimize.brentq(lambda b: pure_epsilon(ladder, rungs, b) - epsilon, low, max(high, 2 * low))
    return float(least) * (1 + 1e-6)


@dataclass
class Filter:
    """How full the paper's filter is: theorem A.4 (Whitehouse et al. 2023) with delta / 4 for its two parts each.

    The steps' epsilons a_t epsilon cost sqrt(2 ln(4/delta) sum (a_t epsilon)^2) + sum (a_t epsilon)^2 / 2 together: what zCDP of
    sum (a_t epsilon)^2 / 2 is at delta / 4.
    """

    ladder: Ladder
    epsilon: float
    delta: float
    linear: float = 0.0  # the sum of a_t, of delta
    squares: float = 0.0  # that of a_t^2

    @property
    def spent(self) -> float:
        """The share of epsilon that is spent."""
        return math.sqrt(2 * math.log(4 / self.delta) * self.squares) + self.epsilon / 2 * self.squares

    @property
    def admits_a_step(self) -> bool:
        """Whether it is at most half full: whatever the next step costs then fits into the other half."""
        return self.spent <= 0.5 and self.linear <= 0.25

    def take(self, rung: int) -> None:
        price = self.ladder.price(rung)
        self.linear, self.squares = self.linear + price, self.squares + price**2


def filter_rungs(ladder: Ladder, epsilon: float, delta: float, generator: CipherGenerator) -> np.ndarray:
    """The rungs of a run by the paper's filter, int64 (T,): steps are taken while it is at most half full before them."""
    if epsilon > _AMPLIFIED:
        raise ConfigError(f"accounting='filter' holds for epsilon up to {_AMPLIFIED:g}, not for {epsilon:g}.")
    rungs: list[int] = []
    budget = Filter(ladder, epsilon, delta)
    while True:
        for rung in ladder.draw(generator, _DRAWN).tolist():
            if not budget.admits_a_step:
                return np.array(rungs, np.int64)
            rungs.append(rung)
            budget.take(rung)


def filter_multiplier(epsilon: float, delta: float) -> float:
    """Noise over sensitivity of each mean, for (epsilon/32, delta/16): the sensitivity is 2 L over the batch's size."""
    return math.sqrt(2 * math.log(1.25 * 16 / delta)) * 32 / epsilon
