"""The paper's filter beside OpenDP's: both admit the same steps.

A step that is (e, .)-DP counts as e^2 / 2 of zCDP in the filter of Whitehouse et al. (2023), and OpenDP's filter of a fully
adaptive composition adds up zCDP. A budget of rho, with rho + 2 sqrt(rho ln(4/delta)) = epsilon / 2, is the half that the paper's
Algorithm 4 fills; it takes one step more than fits, for which the other half is there. The sum of the steps' deltas, which ends a
run too, has no counterpart in OpenDP's filter and is left out here.
"""

import itertools
import math
from collections.abc import Iterator

import pytest

from sparsedp.convex.ladder import Filter, Ladder

CASES = [(300, 1.0, 1e-7), (300, 0.2, 1e-5), (500, 4.0, 1e-9)]
# What `admitted_by_opendp` returned for the cases, with opendp 0.16.0 from PyPI.
RECORDED = [95, 127, 207]


def rungs(ladder: Ladder) -> Iterator[int]:
    """Every other step has rung 0, every other one of the rest rung 1, and so on; no large ones, of which one ends a run."""
    return (min((step & -step).bit_length() - 1, ladder.top - 2) for step in itertools.count(1))


def admitted(n: int, epsilon: float, delta: float) -> int:
    ladder = Ladder(n)
    budget = Filter(ladder, epsilon, delta)
    for count, rung in enumerate(rungs(ladder)):
        if budget.spent > 0.5:
            return count
        budget.take(rung)
    raise AssertionError


def admitted_by_opendp(n: int, epsilon: float, delta: float) -> int:
    dp = pytest.importorskip("opendp.prelude", reason="opendp is not installed: the recorded numbers are compared")
    dp.enable_features("contrib")
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    root = math.sqrt(math.log(4 / delta) + epsilon / 2) - math.sqrt(math.log(4 / delta))
    odometer = dp.c.make_fully_adaptive_composition(*space, dp.zero_concentrated_divergence())
    query = dp.c.make_privacy_filter(odometer, d_in=1.0, d_out=root**2)(0.0)
    ladder = Ladder(n)
    for count, rung in enumerate(rungs(ladder)):
        try:
            query(dp.m.make_gaussian(*space, scale=1 / (epsilon * ladder.price(rung))))
        except dp.OpenDPException as refusal:
            assert "filter" in str(refusal) or "privacy" in str(refusal)
            return count
    raise AssertionError


@pytest.mark.parametrize(("case", "recorded"), list(zip(CASES, RECORDED)), ids=str)
def test_as_recorded(case, recorded) -> None:
    assert admitted(*case) == recorded + 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opendp_admits_the_same_steps(case) -> None:
    assert admitted(*case) == admitted_by_opendp(*case) + 1
