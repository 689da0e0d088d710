"""All runs of the table: every mechanism, optimizer, type, number of steps and learning rate, and the control."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.floating.attack import Outcome, attack
from benchmarks.floating.runs import PAIRS, Setting, train, without_grid

# Learning rates that are no powers of two, and whether rows begin with zeros.
STARTS = (0.1, True), (0.03, False)
# An outcome counts as a leak below this probability, divided by the number of outcomes.
SIGNIFICANCE = 0.001


def settings_of(
    steps: Sequence[int], dtypes: Sequence[str], rows: int, pairs: Sequence[tuple[str, str]] = PAIRS
) -> list[Setting]:
    """Both starts; and lazily trained rows that are touched in the last step alone, after a checkpoint."""
    settings = []
    for pair, dtype, count in itertools.product(pairs, dtypes, steps):
        for number, (rate, zeros) in enumerate(STARTS):
            settings.append(Setting(*pair, count, dtype, rate, zeros, rows=rows, seed=number))
            if pair[0].startswith("lazydp") and count > 1:
                settings.append(Setting(*pair, count, dtype, rate, zeros, only_last=True, rows=rows, seed=number))
    return settings


def control_settings(rows: int, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Setting]:
    """One step of rows that begin with zeros, where noise shows best. Pairs of LazyDP are rounded once and have no holes."""
    return [
        Setting(*pair, dtype=dtype, rows=rows)
        for pair, dtype in itertools.product(pairs, ("float32", "float64"))
        if pair != ("lazydp", "momentum")
    ]


def bench_floating(
    steps: Sequence[int] = (1, 10, 100), dtypes: Sequence[str] = ("float32", "float64"), rows: int = 4000,
    pairs: Sequence[tuple[str, str]] = PAIRS, advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """{"outcomes": of releases as they are, "control": of noise without a grid, "leaks": outcomes above chance}."""
    settings, controls = settings_of(steps, dtypes, rows, pairs), control_settings(rows, pairs)
    total, outcomes, control = len(settings) + len(controls), [], []
    for done, setting in enumerate(settings):
        advance(done, total)
        outcomes += attack(train(setting))
    for done, setting in enumerate(controls, len(settings)):
        advance(done, total)
        with without_grid():
            control += attack(train(setting))
    advance(total, total)
    return {
        "outcomes": [_plain(outcome) for outcome in outcomes],
        "control": [_plain(outcome) for outcome in control],
        "leaks": [_plain(outcome) for outcome in above_chance(outcomes)],
    }


def above_chance(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those with more right guesses than the Gaussian law explains, all of them tested together (Bonferroni)."""
    return [outcome for outcome in outcomes if outcome.p_value < SIGNIFICANCE / len(outcomes)]


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        **asdict(outcome.setting), "state": outcome.state, "view": outcome.view, "tested": outcome.tested,
        "right": outcome.right, "ideal": outcome.setting.ideal, "p_value": outcome.p_value,
    }  # fmt: skip
