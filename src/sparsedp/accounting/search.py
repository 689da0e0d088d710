"""The cost of a search: several runs, of which the best alone is shown (Papernot and Steinke 2021, arXiv:2110.03620).

How many runs there are is random, and nobody is told: a fixed number, or the best of all settings, would cost nearly as much as
all runs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from sparsedp.accounting.events import canonical, require_number
from sparsedp.accounting.rdp import ORDERS, divergences
from sparsedp.generator import CipherGenerator


def search_epsilon(runs: Sequence[DpEvent], mean: float, delta: float) -> float:
    """An epsilon at `delta` of a search that shows the best of K runs, K ~ Poisson(`mean`), each with a setting drawn anew.

    `runs` are the costs of a run with each of the settings; each is counted as the costliest at every order. With one setting
    this is what dp_accounting's RdpAccountant says of RepeatAndSelectDpEvent(run, mean, shape=infinity).

    Theorem 6: if a run has Renyi divergence eps at order a > 1, and is (log(1 + 1 / (a - 1)), delta')-private, the search has
    eps + mean delta' + log(mean) / (a - 1) at order a.
    """
    require_number("mean", mean, low=1.0, high=math.inf, high_open=True)
    distinct = {repr(run): run for run in runs}.values()
    costs = np.max([divergences(canonical(run)) for run in distinct], axis=0)
    above = ORDERS > 1
    hats = [compute_delta(ORDERS, costs, math.log1p(1 / (order - 1)))[0] for order in ORDERS[above]]
    searched = costs[above] + mean * np.array(hats) + math.log(mean) / (ORDERS[above] - 1)
    return float(compute_epsilon(ORDERS[above], searched, delta)[0])


def draw_poisson(mean: float, random: CipherGenerator) -> int:
    """A number with the Poisson law, as the arrivals before time `mean` of which each waits an exponential time."""
    arrivals, time = 0, float(random.standard_exponential(1)[0])
    while time <= mean:
        arrivals, time = arrivals + 1, time + float(random.standard_exponential(1)[0])
    return arrivals
