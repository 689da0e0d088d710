"""SGD with a bias-reduced estimate of sparse gradients: Algorithms 3 and 4 of the paper.

With the projection, the private mean of a batch of sparse gradients has a bias that falls with the batch's size. One step's
estimate has the bias of a batch of half of all rows at the cost of a few rows on average:

    G = (G_B - (G_O + G_E) / 2) / p_N + G_0,

where B has about 2^(N+1) rows, O and E are its halves and G_0 is the mean of about one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_array, hstack
from torch import Tensor

from sparsedp.accounting import Ledger
from sparsedp.accounting.events import require_count, require_number
from sparsedp.convex.feasible import FeasibleSet, WholeSpace
from sparsedp.convex.inner_means import InnerMean, NoisyMean, recovery_of
from sparsedp.convex.ladder import (
    Accounting,
    Ladder,
    composition_ledger,
    composition_multiplier,
    filter_multiplier,
    filter_rungs,
    pure_epsilon,
    pure_multiplier,
)
from sparsedp.convex.losses import Loss
from sparsedp.convex.module_gradients import ModuleGradients
from sparsedp.convex.projections import project
from sparsedp.convex.release import Neighbours, Releases, require_choice
from sparsedp.convex.rows import RowBounds
from sparsedp.convex.statement import ReleaseStatement, make_statement
from sparsedp.errors import ConfigError, DataError, NonFiniteGradientError, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey
from sparsedp.plan import require_delta

# Of (weights (d,), row numbers (b,)): each row's gradient, (b, d). It must depend on that row alone.
RowGradients = Callable[[np.ndarray, np.ndarray], csr_array]
Mean = Literal["projection", "gaussian", "laplace", "l1_recovery"]
Iterate = Literal["mean", "uniform"]
# Purposes of keys: rungs, who takes part, noise, which iterate is kept, the matrices of l1 recovery.
_COINS, _SAMPLES, _NOISE, _KEPT, _MATRICES = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class BiasReducedResult:
    """What a run releases."""

    weights: np.ndarray  # (d,)
    statement: ReleaseStatement
    steps: int
    rungs: np.ndarray  # N of each step: coins that do not depend on the data
    noise_multiplier: (
        float  # noise on a sum of gradients over its sensitivity: a deviation, or of Laplace noise the scale
    )


@dataclass(frozen=True, kw_only=True)
class BiasReducedSGD:
    """Private SGD for losses whose gradients are sparse: of l2 norm at most `bound` (L), and l1 norm L sqrt(`sparsity`).

    Gradients beyond that are scaled down, each by itself. `columns` is d, `rows` n, which is public.

    step_size: of the update w <- P(w - step_size G); None: model_norm / (nu sqrt(T)), nu^2 a bound on G's second moment.
    steps: T. None: about n / ln(2 / delta), the paper's order, with 1 / n^2 for a delta of 0. With accounting="filter" the filter
        decides, and T is random.
    feasible: the set that each iterate is projected onto.
    iterate: "mean" of all iterates, for convex losses; "uniform", a random one, for others.
    mean: how the mean of a sample is made (`inner_means.py`): "projection" onto the l1 ball of radius L sqrt(s) after the noise;
        "gaussian", the noise alone; "l1_recovery", with the projection for the single row. delta = 0 has Laplace noise, for
        "projection" and "laplace", the noise alone.
    accounting: "composition", or "filter" (the paper's); see `ladder.py`. They protect one row that is added or removed, and one
        that is replaced.
    seed: for tests; the statement then says that nothing may be released.
    """

    epsilon: float
    delta: float
    bound: float
    sparsity: float
    rows: int
    columns: int
    steps: int | None = None
    step_size: float | None = None
    model_norm: float = 10.0
    feasible: FeasibleSet = WholeSpace()  # noqa: RUF009 (frozen)
    iterate: Iterate = "mean"
    mean: Mean = "projection"
    accounting: Accounting = "composition"
    seed: int | None = None

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, low=0.0, low_open=True)
        require_number("bound", self.bound, low=1e-100, high=1e100)
        require_number("sparsity", self.sparsity, low=1.0)
        require_number("model_norm", self.model_norm, low=0.0, low_open=True)
        require_count("rows", self.rows, low=2)
        require_count("columns", self.columns, low=1)
        if self.delta != 0:
            require_delta(self.delta, self.rows, allow_large=False)
        for name, kind in (("iterate", Iterate), ("mean", Mean), ("accounting", Accounting)):
            require_choice(name, getattr(self, name), kind)
        if (self.mean == "laplace" and self.delta > 0) or (self.mean in ("gaussian", "l1_recovery") and self.pure):
            raise ConfigError(
                f"mean={self.mean!r} does not go with delta={self.delta:g}: Laplace noise is for delta=0, Gaussian noise for one "
                "above. mean='projection' takes either."
            )
        if self.pure and self.accounting == "filter":
            raise ConfigError("accounting='filter' needs a delta above 0.")
        if self.step_size is not None:
            require_number("step_size", self.step_size, low=0.0, low_open=True)
        if self.steps is not None:
            require_count("steps", self.steps, low=1)
            if self.accounting == "filter":
                raise ConfigError(
                    "With accounting='filter' the filter decides on the number of steps: leave out steps=."
                )

    # ------------------------------------------------------------------ before the data

    @property
    def pure(self) -> bool:
        """Whether all noise is Laplace's."""
        return self.delta == 0

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.rows)

    @property
    def neighbours(self) -> Neighbours:
        return "add_remove" if self.accounting == "composition" else "replace_one"

    def _new_key(self, purpose: int) -> RandomKey:
        """A key that is another one at every call, unless there is a seed: two runs must not share noise or samples."""
        return RandomKey.from_os() if self.seed is None else RandomKey.from_seed(self.seed).child(purpose)

    @cached_property
    def rungs(self) -> np.ndarray:
        """N of every step, (T,): drawn once, for the noise is chosen for them."""
        generator = self._new_key(_COINS).generator()
        if self.accounting == "filter":
            return filter_rungs(self.ladder, self.epsilon, self.delta, generator)
        steps = self.steps or math.ceil(self.rows / math.log(2 / (self.delta or self.rows**-2)))
        return self.ladder.draw(generator, steps)

    @cached_property
    def noise_multiplier(self) -> float:
        """The noise on a sum over its sensitivity, the same for B, O, E and the single row."""
        if self.accounting == "filter":
            return 2 * filter_multiplier(self.epsilon, self.delta)
        if self.pure:
            return pure_multiplier(self.ladder, self.rungs, self.epsilon)
        return composition_multiplier(self.ladder, self.rungs, self.epsilon, self.delta)

    @cached_property
    def _means(self) -> dict[int, InnerMean]:
        """The mean of a sample of each expected size: 1, and 2 to that of the top rung."""
        sizes = [1 << k for k in range(self.ladder.top + 2)]
        if self.mean == "l1_recovery":
            # Public, and the same in all steps: O under N = k then has the law of B under N = k - 1.
            key = self._new_key(_MATRICES)
            return {k: recovery_of(k, self._bounds, self.columns, self.noise_multiplier, key) for k in sizes}
        noisy = NoisyMean(self._bounds, self.columns, self.noise_multiplier, self.pure, self.mean == "projection")
        return dict.fromkeys(sizes, noisy)

    @property
    def second_moment(self) -> float:
        """A bound on E |G|^2, up to a small factor: 2 |G_0|^2 and, for each rung, 2 |bracket|^2 / p_k.

        The mean of k expected rows is off by L / sqrt(k) for the sample, and for the noise by what `squared_error` says.
        """

        def error(size: int) -> float:
            return self.bound**2 / size + self._means[size].squared_error(size)

        sizes = [self.ladder.size(k) for k in range(self.ladder.top + 1)]
        return 2 * (self.bound**2 + error(1)) + sum(4 * (error(size) + error(size // 2) / 2) for size in sizes)

    @property
    def _step_size(self) -> float:
        if self.step_size is not None:
            return self.step_size
        return self.model_norm / math.sqrt(self.second_moment * len(self.rungs))

    # ------------------------------------------------------------------ the run

    def minimise(self, gradients: RowGradients | ModuleGradients, start: np.ndarray | None = None) -> BiasReducedResult:
        """A private, approximate minimiser of the mean loss whose rows' gradients are given.

        `start` is public; None: 0, or the weights that a module has.
        """
        if isinstance(gradients, ModuleGradients):
            if self.pure or self.mean == "l1_recovery":
                raise UnsupportedError(
                    "Of a module's rows only the l2 norms of gradients are known: Laplace noise would need their l1 norms, and "
                    "l1 recovery measures each. Give a delta above 0 and mean='projection' or 'gaussian'."
                )
            if (gradients.rows, gradients.columns) != (self.rows, self.columns):
                raise ConfigError(f"The module has {gradients.rows} rows of data and {gradients.columns} weights.")
            start = gradients.start if start is None else start
        samples = self._new_key(_SAMPLES).generator()
        noise = Releases(self._new_key(_NOISE))
        w = np.zeros(self.columns) if start is None else np.array(start, np.float64)
        if w.shape != (self.columns,) or not np.isfinite(w).all():
            raise ConfigError(f"start must be {self.columns} finite numbers.")
        w = project(w, self.feasible, norm="l2")
        kept = int(self._new_key(_KEPT).generator().integers(len(self.rungs), 1)[0])
        total, uniform = np.zeros(self.columns), w
        for step, rung in enumerate(self.rungs.tolist()):
            total += w
            if step == kept:
                uniform = w
            estimate = self._estimate(gradients, w, rung, samples, noise)
            w = project(w - self._step_size * estimate, self.feasible, norm="l2")
        weights = total / len(self.rungs) if self.iterate == "mean" else uniform
        return BiasReducedResult(weights, self._statement(), len(self.rungs), self.rungs, self.noise_multiplier)

    def _estimate(
        self,
        gradients: RowGradients | ModuleGradients,
        w: np.ndarray,
        rung: int,
        samples: CipherGenerator,
        noise: Releases,
    ) -> np.ndarray:
        """G at w (Algorithm 3)."""
        size = self.ladder.size(rung)
        batch, first = self._batch(size, samples)
        groups = [(np.ones(len(batch), bool), size), (first, size // 2), (~first, size // 2)]
        whole, one, other = self._private_means(gradients, w, batch, groups, noise)
        single = self._batch(1, samples)[0]
        (alone,) = self._private_means(gradients, w, single, [(np.ones(len(single), bool), 1)], noise)
        return (whole - (one + other) / 2) / self.ladder.probabilities[rung] + alone

    def _private_means(
        self,
        gradients: RowGradients | ModuleGradients,
        w: np.ndarray,
        batch: np.ndarray,
        groups: list[tuple[np.ndarray, int]],
        noise: Releases,
    ) -> list[np.ndarray]:
        """The means over some of the batch's rows each: `groups` are which, bool (b,), and how many are expected."""
        if isinstance(gradients, ModuleGradients):
            # Of a captured row only the l2 norm is known; Gaussian noise needs no more, and the projection follows it.
            totals = gradients.clipped_sums(w, batch, [group for group, _ in groups], self.bound)
            return [self._means[size].release(total, size, noise) for total, (_, size) in zip(totals, groups)]
        clipped = self._clipped(gradients(w, batch), len(batch))
        return [(mean := self._means[size]).release(mean.total(clipped[group]), size, noise) for group, size in groups]

    def _batch(self, size: int, samples: CipherGenerator) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers, ascending, and which of them are in the first half."""
        if self.accounting == "filter":
            batch = samples.choice(self.rows, size)
            first = np.zeros(size, bool)
            first[samples.choice(size, size // 2)] = True
            return batch, first
        batch = samples.ones(self.rows, math.log(size / self.rows))
        return batch, samples.integers(2, len(batch)) == 1

    def _clipped(self, rows: csr_array, count: int) -> csr_array:
        rows = csr_array(rows, dtype=np.float64, copy=True)
        if rows.shape != (count, self.columns):
            raise ConfigError(f"The gradients of {count} rows are ({count}, {self.columns}), not {rows.shape}.")
        if not np.isfinite(rows.data).all():
            raise NonFiniteGradientError(
                "A row's gradient is NaN or infinite: the run ends here, and nothing is released."
            )
        rows.sum_duplicates()
        self._bounds.clip(rows)
        return rows

    @property
    def _bounds(self) -> RowBounds:
        return RowBounds(self.bound, self.bound * math.sqrt(self.sparsity))

    def _statement(self) -> ReleaseStatement:
        size = len(self.rungs)
        noise = "discrete Laplace, its scale" if self.pure else "Gaussian, its deviation"
        settings: dict[str, Any] = {
            "accounting": self.accounting,
            "bound": self.bound,
            "sparsity": self.sparsity,
            "steps": size,
            "mean": self.mean,
            "iterate": self.iterate,
        }
        ledger = Ledger()
        if self.accounting == "composition" and not self.pure:
            ledger = composition_ledger(self.ladder, self.rungs, self.noise_multiplier)
        statement = make_statement(
            Releases(self._new_key(_NOISE), ledger=ledger),
            target_epsilon=self.epsilon,
            delta=self.delta,
            neighbours=self.neighbours,
            mechanism="BiasReducedSGD",
            settings=settings,
            released="every iterate, and all estimates of gradients",
            noise=f"{noise} {self.noise_multiplier:.4g} times the sensitivity, on sums over the sample and its halves",
            assumptions=(
                f"The number of rows, {self.rows}, and of columns, {self.columns}, are public.",
                "Each row is one unit, and its gradient depends on that row alone.",
                *(["The matrices of l1 recovery may be public."] if self.mean == "l1_recovery" else []),
            ),
            not_covered=("That a gradient was NaN or infinite, if one was: an error is raised then.",),
        )
        if self.pure:
            by = "basic composition of Poisson-sampled pure releases"
            return self._accounted(statement, pure_epsilon(self.ladder, self.rungs, self.noise_multiplier), by)
        if self.accounting == "filter":
            return self._accounted(statement, self.epsilon, "the paper's filter (Whitehouse et al. 2023)")
        return statement

    def _accounted(self, statement: ReleaseStatement, epsilon: float, by: str) -> ReleaseStatement:
        """The statement with what was not accounted by the ledger."""
        return replace(
            statement,
            epsilon=epsilon,
            delta=self.delta,
            guarantee="every iterate, and all estimates of gradients",
            accountant=f"{len(self.rungs)} steps by {by}",
        )


def linear_gradients(loss: Loss, rows: csr_array, targets: np.ndarray) -> RowGradients:
    """Gradients of a linear model's loss: phi'(<x, w>, y) x, as sparse as the rows.

    Targets (n, k) are those of k models, whose weights follow one another in w (k d,), as their gradients do.
    """
    rows, targets = csr_array(rows), np.asarray(targets, np.float64)
    if targets.ndim not in (1, 2) or len(targets) != rows.shape[0]:
        raise DataError(f"There are {rows.shape[0]} rows: targets must be (n,) or (n, k), not {targets.shape}.")
    targets = targets.reshape(len(targets), -1)
    models = targets.shape[1]

    def gradients(w: np.ndarray, batch: np.ndarray) -> csr_array:
        part = rows[batch]
        slopes = loss.slope(part @ w.reshape(models, -1).T, targets[batch])
        sizes = np.diff(part.indptr)
        parts = [
            csr_array((part.data * np.repeat(one, sizes), part.indices, part.indptr), part.shape) for one in slopes.T
        ]
        return parts[0] if models == 1 else csr_array(hstack(parts, format="csr"))

    return gradients


def function_gradients(loss: Callable[[Tensor, Any], Tensor], data: Any) -> RowGradients:
    """Gradients of any differentiable function of (parameters (d,), one row of the data), by torch, in float64.

    `data` is a tensor (n, ...) or a tuple of such; `loss` gets one row's part of each. It is differentiated row by row
    (torch.func.vmap), so that one row's gradient cannot depend on another.
    """
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))

    def gradients(w: np.ndarray, batch: np.ndarray) -> csr_array:
        if len(batch) == 0:
            return csr_array((0, len(w)))
        chosen = torch.from_numpy(batch)
        part = tuple(one[chosen] for one in data) if isinstance(data, tuple) else data[chosen]
        return csr_array(each(torch.from_numpy(np.array(w)), part).detach().numpy())

    return gradients
