"""`python -m benchmarks convex`: its parts, one after another.

Errors are distances to the mean of the rows, as root mean squares over repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.convex.optimisation import Classification, find_risk_exponents, measure_optimisation
from benchmarks.convex.problem import Problem
from benchmarks.convex.rates import QUANTITIES, crossing, find_exponents, measure_rates
from benchmarks.convex.recovery import measure_recovery
from benchmarks.convex.speed import measure_speed
from benchmarks.convex.truncation import Bags, measure_truncation
from benchmarks.speed.machine import machine


def bench_convex(
    parts: Sequence[str], *, speed: Problem, recovery: Sequence[Problem], base: Problem, values: Mapping[str, Sequence[float]],
    classification: Classification, sizes: Mapping[str, Sequence[int]], bags: Sequence[Bags], thresholds: Sequence[float],
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    result: dict[str, Any] = {"machine": machine()}
    if "speed" in parts:
        result["speed"] = measure_speed(speed, repeats)
    if "recovery" in parts:
        result["recovery"] = measure_recovery(recovery)
    if "rates" in parts:
        result["base"] = asdict(base)
        result["rates"] = measure_rates(base, values, repeats)
        result["exponents"] = find_exponents(result["rates"])
        result["crossings"] = {
            quantity: {"with delta": crossing(base, quantity, False), "pure": crossing(base, quantity, True)}
            for quantity in QUANTITIES
        }
    if "risk" in parts:
        result["optimisation"] = measure_optimisation(classification, sizes, repeats)
        result["risk_exponents"] = find_risk_exponents(result["optimisation"])
    if "truncation" in parts:
        result["truncation"] = [row for one in bags for row in measure_truncation(one, thresholds, repeats)]
    return result
