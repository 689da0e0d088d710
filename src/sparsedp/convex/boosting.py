"""Boosting bias-reduced SGD from constant to high probability: Algorithm 5 of the paper.

The solver runs again and again, each run's model gets a private score, after each run a coin with probability gamma ends it, and
the model with the best score is returned. Every run has the same rungs, so that all are runs of one mechanism. What that costs is
bounded in two ways, and the one that needs less noise is taken:

- "rdp": the number of runs is geometric, which `RepeatAndSelectDpEvent` knows (Papernot & Steinke 2022).
- "paper": Liu & Talwar 2019, theorem 3.4. If a run with its score is (e, d)-DP and there are at most K = ln(2/delta) / gamma
  runs, the whole is (3 e + 3 sqrt(2 d), sqrt(2 d) K + delta/2)-DP; d = (delta / (4 K))^2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, LaplaceDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from sparsedp.accounting import calibrate, register_event
from sparsedp.accounting.events import require_number
from sparsedp.convex.bias_reduced import BiasReducedResult, BiasReducedSGD, RowGradients
from sparsedp.convex.ladder import composition_ledger, composition_multiplier
from sparsedp.convex.module_gradients import ModuleGradients
from sparsedp.convex.release import Releases
from sparsedp.errors import ConfigError, DataError, SparseDPError
from sparsedp.noise import RandomKey

register_event(RepeatAndSelectDpEvent, {"event": "event", "mean": "amount", "shape": "amount"})

RowLosses = Callable[[np.ndarray], np.ndarray]  # of weights (d,): every row's loss, (n,), or of its gradient's norm
_SCORE_SHARE = 1 / 12  # of epsilon that one score has, as in the paper
_STOP, _SCORE = 11, 12  # purposes of keys


@dataclass(frozen=True)
class BoostPlan:
    """How often runs repeat and the noise of each."""

    bound: Literal["rdp", "paper"]
    noise_multiplier: float
    stop: float  # gamma
    most_runs: int | None  # K; None: no limit
    score_epsilon: float


def plan_boost(solver: BiasReducedSGD, failure: float = 0.05) -> BoostPlan:
    """Noise for repeated runs of the solver within its budget; all fail with probability `failure` at most (beta)."""
    if solver.accounting != "composition" or solver.pure:
        raise ConfigError(
            "Boosting needs accounting='composition', so that all runs have the same rungs, and a delta above 0."
        )
    beta = require_number("failure", failure, low=0.0, high=1.0, low_open=True, high_open=True)
    stop = min(0.5, 0.75 * beta)
    epsilon, delta = solver.epsilon, solver.delta
    score = epsilon * _SCORE_SHARE
    most = math.ceil(math.log(2 / delta) / stop)
    own_delta = (delta / (4 * most)) ** 2
    run_epsilon = epsilon / 3 - math.sqrt(2 * own_delta) - score
    plans = []
    try:
        sigma = composition_multiplier(solver.ladder, solver.rungs, run_epsilon, own_delta)
        plans.append(BoostPlan("paper", sigma, stop, most, score))
    except SparseDPError:  # out of the accountant's reach
        pass
    try:
        sigma = calibrate(lambda sigma: boosted_event(solver, sigma, stop, score), epsilon, delta, "rdp")
        plans.append(BoostPlan("rdp", sigma, stop, None, score))
    except SparseDPError:
        pass
    if not plans:
        raise SparseDPError(
            f"epsilon={epsilon:g} cannot be reached by repeated runs: raise it, or the failure probability."
        )
    return min(plans, key=lambda plan: plan.noise_multiplier)


def boosted_event(solver: BiasReducedSGD, noise_multiplier: float, stop: float, score_epsilon: float) -> DpEvent:
    """Runs with scores, repeated a geometric number of times, of which the best is released."""
    ledger = composition_ledger(solver.ladder, solver.rungs, noise_multiplier)
    steps = tuple(SelfComposedDpEvent(entry.event, entry.count) for entry in ledger.entries)
    return RepeatAndSelectDpEvent(ComposedDpEvent((*steps, LaplaceDpEvent(1 / score_epsilon))), 1 / stop, 1.0)


def boost(
    solver: BiasReducedSGD,
    gradients: RowGradients | ModuleGradients,
    losses: RowLosses,
    *,
    loss_bound: float,
    failure: float = 0.05,
) -> BiasReducedResult:
    """The best of several runs by the mean of the rows' losses, each clipped to [0, loss_bound], with Laplace noise."""
    bound = require_number("loss_bound", loss_bound, low=0.0, low_open=True)
    plan = plan_boost(solver, failure)
    assert len(solver.rungs) > 0  # drawn by now, so that the copy has them: every run is a run of one mechanism
    one = copy.copy(solver)
    one.__dict__["noise_multiplier"] = plan.noise_multiplier  # in place of that of a single run
    one.__dict__.pop("_means", None)  # which would keep it, if the solver has run before
    seeded = solver.seed is not None
    key = RandomKey.from_seed(solver.seed).child(_STOP) if solver.seed is not None else RandomKey.from_os()
    scores, coins = Releases(key.child(_SCORE)), key.generator()
    best: tuple[float, BiasReducedResult] | None = None
    runs = 0
    while plan.most_runs is None or runs < plan.most_runs:
        if seeded:  # every run has noise of its own, from the seed too
            one.__dict__["seed"] = int(key.child(runs).generator().integers(2**62, 1)[0])
        result = one.minimise(gradients)
        rows = np.clip(np.asarray(losses(result.weights), np.float64), 0.0, bound)
        if rows.shape != (solver.rows,) or np.isnan(rows).any():
            raise DataError(f"losses must give a number for each of the {solver.rows} rows: nothing was released.")
        # One row more or less moves the sum by the bound at most.
        score = float(scores.laplace(np.array([rows.sum()]), bound, plan.score_epsilon)[0])
        runs += 1
        if best is None or score < best[0]:
            best = score, result
        if coins.random(1)[0] < plan.stop:
            break
    assert best is not None
    how = {"rdp": "RDP of repeated selection", "paper": "the bound of Liu & Talwar (2019)"}[plan.bound]
    statement = replace(
        best[1].statement,
        epsilon=solver.epsilon,
        delta=solver.delta,
        target_epsilon=solver.epsilon,
        mechanism="BoostedBiasReducedSGD",
        guarantee="the model with the best of the noisy scores, and that score; not the number of runs, nor the other models",
        accountant=f"{len(one.rungs)} steps a run, the number of runs random, by {how}",
    )
    return replace(best[1], statement=statement)
