"""Guesses from bit patterns which rows had a gradient: the rule is chosen on one half of the rows and tested on the other.

A view turns each number of a row into a category: its last bits, its trailing zeros, its remainder on a grid, whether
floating-point noise can reach it at all (Mironov 2012). For each view the categories' likelihood ratios are learned on a
quarter of the rows, and added up over a row's columns; the view that ranks another quarter best is learned again on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.floating.runs import Released, Setting
from sparsedp.grid import grid_of


@dataclass(frozen=True)
class Outcome:
    """How many guesses were right about `tested` rows, half of which had a gradient."""

    setting: Setting
    state: str
    view: str  # the best one on the rows that were learned from
    tested: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.tested

    @property
    def p_value(self) -> float:
        """How likely so many right guesses are, or more, if nothing but the exact Gaussian law tells."""
        return float(stats.binomtest(self.right, self.tested, self.setting.ideal, alternative="greater").pvalue)


def attack(released: Released) -> list[Outcome]:
    """An outcome for each state that leaves: weights, and momenta or Adagrad's sums."""
    labels = released.has_gradient
    train, validation, test = _split(labels, np.random.default_rng([released.setting.seed, 2]))
    learned_from = np.concatenate([train, validation])
    outcomes = []
    for state in released.after:
        views = dict(_views(released, state))
        areas = {
            name: _area(_scores(view, labels, train)[validation], labels[validation]) for name, view in views.items()
        }
        best = max(areas, key=areas.__getitem__)
        scores = _scores(views[best], labels, learned_from)
        threshold = _best_threshold(scores[learned_from], labels[learned_from])
        right = int(((scores[test] > threshold) == labels[test]).sum())
        outcomes.append(Outcome(released.setting, state, best, len(test), right))
    return outcomes


def _split(labels: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A quarter, a quarter and a half of the rows, with as many of either kind in each: so chance is one half."""
    quarter = min(labels.sum(), (~labels).sum()) // 4
    kinds = [random.permutation(np.flatnonzero(labels == kind))[: 4 * quarter] for kind in (False, True)]
    parts = (slice(0, quarter), slice(quarter, 2 * quarter), slice(2 * quarter, None))
    train, validation, test = (np.concatenate([kind[part] for kind in kinds]) for part in parts)
    return train, validation, test


def _scores(view: np.ndarray, labels: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Each row's sum of log likelihood ratios of its columns' categories, learned `among` some rows."""
    size = int(view.max()) + 1
    without, having = (
        np.bincount(view[among[labels[among] == kind]].ravel(), minlength=size) + 1.0 for kind in (False, True)
    )
    return (np.log(having / having.sum()) - np.log(without / without.sum()))[view].sum(1)


def _area(scores: np.ndarray, labels: np.ndarray) -> float:
    """Under the ROC curve."""
    positive = int(labels.sum())
    ranks = stats.rankdata(scores)[labels].sum()
    return float((ranks - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def _best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """The one above which rows are guessed to have a gradient with the most right guesses."""
    order = np.argsort(scores)
    ordered, has = scores[order], labels[order]
    right = np.cumsum(~has) + has.sum() - np.cumsum(has)  # with the threshold at each score
    right[:-1][ordered[:-1] == ordered[1:]] = 0  # equal scores are on one side
    return float(ordered[int(right.argmax())])


# ---------------------------------------------------------------------- views


def _views(released: Released, state: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, categories (rows, dim)) of a state and of what the attacker computes from it."""
    rate, std = released.setting.rate, released.std
    grids = {"grid of s": grid_of(std), "grid of lr s": grid_of(rate * std), "lr grid": rate * grid_of(std)}
    if state == "sum":
        grids = {"squared grid": grid_of(std) ** 2, "grid of s": grid_of(std)}
    for what, values in _computed(released, state).items():
        bits = np.ascontiguousarray(values).view(np.uint32 if values.dtype == np.float32 else np.uint64)
        yield f"{what}: last bits", (bits & 255).astype(np.int64)
        yield f"{what}: bits before", ((bits >> 8) & 255).astype(np.int64)
        yield f"{what}: trailing zeros", _trailing_zeros(bits)
        yield f"{what}: size", np.digitize(values, np.quantile(values, np.linspace(0, 1, 65)[1:-1]))
        for name, grid in grids.items():
            steps = values.astype(np.float64) / grid
            whole = np.rint(steps)
            yield f"{what}: steps of the {name}", np.mod(whole, 256).astype(np.int64)
            yield f"{what}: rest on the {name}", np.rint((steps - whole + 0.5) * 64).astype(np.int64)
            yield f"{what}: on the {name}", (steps == whole).astype(np.int64)
        if what == "sum":
            yield f"{what}: reached by (s z)^2", _is_square_reached(values, std).astype(np.int64)
        else:
            yield f"{what}: reached by s z", _is_reached(values, std).astype(np.int64)
            yield f"{what}: reached by (lr s) z", _is_reached(values, rate * std).astype(np.int64)
            yield f"{what}: reached by lr (s z)", _is_reached(values, std, rate).astype(np.int64)


def _computed(released: Released, state: str) -> dict[str, np.ndarray]:
    """A state in the direction of the gradient, its change, and what rounding left of a step with momentum."""
    after = released.after[state]
    signs = np.ones_like(released.signs) if state == "sum" else released.signs
    values = {state: after * signs.astype(after.dtype)}
    if state in released.before:
        values["change"] = (after.astype(np.float64) - released.before[state]) * signs
    if state == "momentum_buffer":  # w' = w - lr v', but for rounding
        change = released.after["weight"].astype(np.float64) - released.before["weight"]
        values["w' - w + lr v'"] = (change + released.setting.rate * after.astype(np.float64)) * signs
    return values


def _trailing_zeros(bits: np.ndarray) -> np.ndarray:
    wide = bits.astype(np.uint64) | np.uint64(1 << 63)
    return np.log2((wide & (~wide + np.uint64(1))).astype(np.float64)).astype(np.int64)


def _is_reached(values: np.ndarray, *factors: float) -> np.ndarray:
    """Whether there is a z of the values' type that they come from, multiplied by one factor after another and rounded."""
    if not factors:
        return np.ones(values.shape, bool)
    factor = values.dtype.type(factors[-1])
    reached = np.zeros(values.shape, bool)
    for z in _neighbours(values / factor):
        reached |= (factor * z == values) & _is_reached(z, *factors[:-1])
    return reached


def _is_square_reached(values: np.ndarray, factor: float) -> np.ndarray:
    """Whether they are squares, rounded, of numbers that are reached."""
    reached = np.zeros(values.shape, bool)
    for root in _neighbours(np.sqrt(values)):
        reached |= (root * root == values) & _is_reached(root, factor)
    return reached


def _neighbours(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kind = values.dtype.type
    return np.nextafter(values, kind(-np.inf)), values, np.nextafter(values, kind(np.inf))
