"""What the steps of a training say about each canary: scores by several rules, of which one is chosen on another training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# likelihood: of the changes of the canary's own weights.
# against others: likewise, less the changes of weights that no canary moves, at the same places of another parameter.
# rehearsed batches: likewise, in those steps alone in whose batches the canary was in a rehearsal.
RULES = ("likelihood", "against others", "rehearsed batches")
_BINS = 32  # of counts of changes


@dataclass(frozen=True)
class Noise:
    """What a step does to the sum of a canary's clipped gradient, by the plan."""

    std: float  # of the noise
    shift: float  # what a canary that is in the batch adds: the clipping norm
    sample_rate: float  # how likely it is in the batch


class Evidence:
    """Adds up, over the steps of a training, what the changes of each canary's weights say, (canaries,) float64."""

    def __init__(self, canaries: int, noise: Noise, rehearsed: Sequence[np.ndarray] | None = None) -> None:
        """`rehearsed` holds for each step the canaries that were in its batch in a rehearsal; None: there was none."""
        self._noise = noise
        self._rehearsed = rehearsed
        self._logs = {rule: np.zeros(canaries) for rule in RULES}
        self.changes = np.zeros(canaries, np.int64)  # how many of the canary's rows changed, in all steps together
        self.steps = 0

    def add(self, moved: np.ndarray, others: np.ndarray) -> None:
        """The changes of one step, (canaries, rows), towards where a canary's gradient goes.

        A canary's gradient on those of its rows that were selected is clipped, so that together they move by `shift` along
        their diagonal, whichever of them they are.
        """
        changed = moved != 0
        count = changed.sum(1)
        along = moved.sum(1) / np.sqrt(np.maximum(count, 1))
        beside = along - others.sum(1) / np.sqrt(others.shape[1])
        at = count > 0
        self._logs["likelihood"] += np.where(at, self._log_ratio(along, 1.0, self._noise.sample_rate), 0.0)
        self._logs["against others"] += np.where(at, self._log_ratio(beside, 2.0, self._noise.sample_rate), 0.0)
        if self._rehearsed is not None:
            in_batch = np.zeros(len(at), bool)
            in_batch[self._rehearsed[self.steps]] = True
            self._logs["rehearsed batches"] += np.where(at & in_batch, self._log_ratio(along, 1.0, 1.0), 0.0)
        self.changes += count
        self.steps += 1

    def _log_ratio(self, along: np.ndarray, noises: float, sample_rate: float) -> np.ndarray:
        """ln((1 - q) + q N(along; shift, std^2) / N(along; 0, std^2)), with the variance of so many noises."""
        shift = self._noise.shift
        variance = noises * (self._noise.std or shift) ** 2
        log_ratio = shift * (along - shift / 2) / variance
        if sample_rate == 1:
            return log_ratio
        return np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + log_ratio)

    def scores(self, rule: str, changes: ChangeRates | None) -> np.ndarray:
        """Higher: more likely in."""
        return self._logs[rule] + (0.0 if changes is None else changes.log_ratios(self.changes))


class ChangeRates:
    """How much likelier each number of changes is of a canary that is in, as a rehearsal has it."""

    def __init__(self, changes: np.ndarray, is_in: np.ndarray) -> None:
        edges = np.quantile(changes, np.linspace(0, 1, _BINS + 1), method="nearest")
        self._edges = np.unique([*edges, 1])  # no change at all is a bin of its own
        counts = np.stack(
            [np.bincount(self._bins(changes[side]), minlength=len(self._edges) + 1) for side in (is_in, ~is_in)]
        )
        rates = (counts + 0.5) / (counts + 0.5).sum(1, keepdims=True)
        self._log_ratios = np.log(rates[0] / rates[1])

    def _bins(self, changes: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._edges, changes, side="right")

    def log_ratios(self, changes: np.ndarray) -> np.ndarray:
        return self._log_ratios[self._bins(changes)]
