"""Generated sparse rows, of several kinds, and the poster's bounds on the error of their private mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse

from sparsedp.convex import PrivateMean, private_mean
from sparsedp.convex.mean import Method

Kind = Literal["repeated", "scattered", "bags"]
KINDS: dict[Kind, str] = {
    "repeated": "half of the rows are the same row",
    "scattered": "non-zeros at random places",
    "bags": "bags of words, Zipf's law",
}


@dataclass(frozen=True)
class Problem:
    """Rows of norm 1 with `sparsity` non-zeros at most, and a budget."""

    rows: int = 1_000
    columns: int = 30_000
    sparsity: int = 8
    epsilon: float = 1.0
    delta: float = 1e-6
    kind: Kind = "repeated"

    def draw(self, seed: int) -> scipy.sparse.csr_array:
        rng = np.random.default_rng(seed)
        shape = self.rows, self.sparsity
        if self.kind == "bags":
            weights = 1 / np.arange(1, self.columns + 1)
            places = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(shape)).clip(max=self.columns - 1)
        else:
            places = rng.integers(0, self.columns, shape)
        if self.kind == "repeated":
            places[::2] = rng.choice(self.columns, self.sparsity, replace=False)
        starts = np.arange(0, places.size + 1, self.sparsity)
        X = scipy.sparse.csr_array((np.ones(places.size), places.ravel(), starts), shape=(self.rows, self.columns))
        X.sum_duplicates()
        norms = np.sqrt(X.multiply(X).sum(axis=1))
        X.data /= np.repeat(norms, np.diff(X.indptr))
        return X

    def upper_rates(self, pure: bool) -> tuple[float, float]:
        """The poster's upper bounds without constants: of the sparse and of the dense regime (Table 1)."""
        s, d, noise = self.sparsity, self.columns, self.epsilon * self.rows
        if pure:
            return math.sqrt(s * math.log(d) / noise), math.sqrt(s * d) / noise
        logarithm = math.log(1 / self.delta)
        return (s * math.log(d / s) * logarithm) ** 0.25 / math.sqrt(noise), math.sqrt(d * logarithm) / noise

    def lower_rate(self, pure: bool) -> float:
        """The poster's lower bound for the worst rows, without its constant (Table 1). Logarithms are 1 at least."""
        s, d, noise = self.sparsity, self.columns, self.epsilon * self.rows
        if pure:
            return min(1.0, math.sqrt(s * max(1.0, math.log(d / noise)) / noise), math.sqrt(s * d) / noise)
        logarithm = math.log(1 / self.delta)
        return min(1.0, (s * logarithm) ** 0.25 / math.sqrt(noise), math.sqrt(d * logarithm) / noise)

    def ask(self, X: scipy.sparse.csr_array, method: Method, pure: bool = False, **more: Any) -> PrivateMean:
        return private_mean(
            X, epsilon=self.epsilon, delta=0.0 if pure else self.delta, bound=1.0, sparsity=self.sparsity, method=method,
            neighbours="replace_one", **more,
        )  # fmt: skip

    def clipped_mean(self, X: scipy.sparse.csr_array) -> np.ndarray:
        """The mean without noise: what errors are distances to."""
        return self.ask(X, "gaussian", seed=0, noise_multiplier=0).mean
