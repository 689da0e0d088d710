"""DP-FEST: trains k rows that are chosen by their frequency in the data (DP-AdaFEST paper, section 3.1, appendix B.1)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.accounting import ExponentialMechanismDpEvent, calibrate
from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import Contribution, digest_of, touched_rows
from sparsedp.errors import SparseDPWarning, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.grid import grid_of, round_to
from sparsedp.mechanisms.base import Count, CountedData, Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.mechanisms.look import PublicCounts
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec


@dataclass(frozen=True)
class FEST(Mechanism):
    """Selects the `k` most frequent rows; only they are trained.

    With public `counts` (a tensor of frequencies per table) the choice is free. Otherwise it is made on the training
    data at a cost of (`epsilon`, `delta`), which enters the ledger exactly:

    - method "gaussian": one release of all frequencies with Gaussian noise, then the top k as post-processing. A unit
      adds a `Contribution` to its rows, so the l2 sensitivity is `count_clip`, and the cost does not depend on k.
    - method "gumbel": counts plus Gumbel noise, the k largest. That equals k exponential mechanisms in a row, so the
      scale is calibrated for k picks (the paper's Algorithm 2, with scale 1/epsilon, costs about sqrt(k) times its
      epsilon).

    split "global" takes the k largest of all tables together; "tables" takes k / (number of tables), rounded down, from each,
    as the paper; a table with fewer rows gives all of them. So k is the most that is ever picked, which is what "gumbel" is
    charged for, and with "tables" it must be at least the number of tables.
    `inputs(batch)` gives the arguments of the module for a batch of the loader; by default all but the last element.

    `frequencies` is for streams (section 4.3): those of "all" data, of the "first" span, or "running". Running
    frequencies are released for each span by itself, when it is reached for the first time, with fresh noise and at a
    cost of (`epsilon`, `delta`) to that span's units; the top k is then taken anew of the sum of all releases so far.
    Rows that leave the selection keep their values. A later pass over the stream releases nothing more.
    """

    name: ClassVar[str] = "fest"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = True
    k: int = 10_000
    epsilon: float = 0.1
    delta: float = 1e-7
    counts: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    method: Literal["gaussian", "gumbel"] = "gaussian"
    split: Literal["global", "tables"] = "global"
    count_clip: float = 1.0
    inputs: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)
    frequencies: CountedData = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be a whole number of at least 1, not {self.k!r}")
        if self.method not in ("gaussian", "gumbel"):
            raise ValueError(f"method must be 'gaussian' or 'gumbel', not {self.method!r}")
        if self.split not in ("global", "tables"):
            raise ValueError(f"split must be 'global' or 'tables', not {self.split!r}")
        if self.frequencies not in get_args(CountedData):
            raise ValueError(f"frequencies must be 'all', 'first' or 'running', not {self.frequencies!r}")
        if self.frequencies == "running" and self.method == "gumbel":
            raise ValueError(
                "frequencies='running' needs method='gaussian': Gumbel noise pays for the names of the k largest rows "
                "alone, not for the frequencies, which a later span's would have to be added to"
            )
        if self.frequencies != "all" and self.counts is not None:
            raise ValueError(
                f"frequencies={self.frequencies!r} are counted on the data; with public counts leave it out"
            )
        for name, low, high in (("epsilon", 0, math.inf), ("delta", 0, 1), ("count_clip", 0, math.inf)):
            if not low < getattr(self, name) < high:
                raise ValueError(f"{name} must lie between {low} and {high}, not {getattr(self, name)}")

    prepares: ClassVar[bool] = True

    @property
    def counted_data(self) -> CountedData:
        return self.frequencies

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, and for the choice of rows"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return () if self.counts is None else ("The counts that rows were selected by are public.",)

    @property
    def public_counts(self) -> PublicCounts | None:
        """Of how many units they are is not known; what share of touches is kept does not depend on it."""
        if self.counts is None:
            return None
        largest = max((float(np.max(np.asarray(counts), initial=0)) for counts in self.counts.values()), default=0.0)
        return PublicCounts(self.counts, largest or 1.0)

    def setup_event(self) -> dp_accounting.DpEvent | None:
        if self.counts is not None:
            return None
        return _selection_event(self.method, self.k, self.epsilon, self.delta)[0]

    def prepare(
        self, tables: Mapping[str, TableSpec], count: Count, key: RandomKey, memory: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        space = RowSpace.of(tables)
        if not space.names:
            return {}
        share = self._share(len(space.names))
        scores = self._scores(tables, count, key)
        if self.frequencies == "running" and memory is not None:
            for name in scores:
                if name in memory:
                    scores[name] = scores[name] + memory[name].numpy()
                memory[name] = torch.from_numpy(scores[name])
        if self.split == "tables":
            return {name: _top(score, share) for name, score in scores.items()}
        chosen = space.split(_top(np.concatenate([scores[name] for name in space.names]), self.k))
        empty = [name for name, rows in chosen.items() if rows.numel() == 0]
        if empty:
            warnings.warn(
                f"FEST selected no row of {', '.join(map(repr, empty))}: they will not be trained. Raise k, or use "
                "split='tables'.",
                SparseDPWarning,
                stacklevel=2,
            )
        return chosen

    def for_tables(self, rows: Mapping[str, int]) -> FEST:
        """Public frequencies of other tables' rows say nothing about these: all have the same."""
        counts = None if self.counts is None else {name: torch.ones(count) for name, count in rows.items()}
        return replace(self, inputs=None, counts=counts)

    def refuse_tables(self, names: Collection[str]) -> None:
        if names:
            self._share(len(names))

    def _share(self, tables: int) -> int:
        """The most rows that are taken of one table. Of all tables together it is never more than k, which is charged."""
        if self.split == "global":
            return self.k
        if self.k < tables:
            raise UnsupportedError(
                f"FEST(k={self.k}, split='tables') is to take k / (number of tables) rows of each of {tables} tables, which is "
                f"less than one. Raise k to {tables} or more, or use split='global', which takes the k most frequent rows of "
                "all tables together."
            )
        return self.k // tables

    def _scores(self, tables: Mapping[str, TableSpec], count: Count, key: RandomKey) -> dict[str, np.ndarray]:
        """Public counts, or frequencies with noise, of each row of each table.

        A row has its own noise: the number at the row's place in the sequence of its table.
        """
        if self.counts is not None:
            return {name: self._public(name, table.rows) for name, table in tables.items()}
        scale = _selection_event(self.method, self.k, self.epsilon, self.delta)[1]
        counted = count(self.count_clip if self.method == "gaussian" else None)
        draw = CipherGenerator.standard_normal if self.method == "gaussian" else CipherGenerator.gumbel
        std = scale * Contribution(self.count_clip).sensitivity if self.method == "gaussian" else scale
        # Frequencies with Gaussian noise are released: their sums so far are kept, and a checkpoint holds them. Of those with
        # Gumbel noise only the names of the largest are.
        grid = grid_of(std) if self.method == "gaussian" else 0.0
        noisy = {name: std * draw(key.generator(table.index), table.rows) for name, table in tables.items()}
        return {
            name: round_to(counted[name].numpy() + noise if name in counted else noise, grid)
            for name, noise in noisy.items()
        }

    def _public(self, name: str, size: int) -> np.ndarray:
        assert self.counts is not None
        if name not in self.counts or len(self.counts[name]) != size:
            raise ValueError(f"counts has no {size} frequencies for table '{name}'")
        counts = np.asarray(self.counts[name], dtype=np.float64)
        if np.isnan(counts).any():  # which would sort as the largest
            raise ValueError(f"counts has NaN among the frequencies for table '{name}'")
        return counts

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        return rows.all_chosen()

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        exchange = step.exchange(space, touched_rows(batch, space))
        return {name: exchange.owned_of(name, step.prepared[name]) for name in step.tables}

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["counts"] = None if self.counts is None else digest_of(self.counts)
        values.pop("inputs")
        return values


def _top(scores: np.ndarray, k: int) -> Tensor:
    if k >= len(scores):
        return torch.arange(len(scores))
    return torch.from_numpy(np.sort(np.argpartition(scores, len(scores) - k)[len(scores) - k :]))


@functools.cache
def _selection_event(method: str, k: int, epsilon: float, delta: float) -> tuple[dp_accounting.DpEvent, float]:
    """The event of a private selection that costs (epsilon, delta), and the scale of its noise."""
    if method == "gaussian":
        scale = calibrate(dp_accounting.GaussianDpEvent, epsilon, delta)
        return dp_accounting.GaussianDpEvent(scale), scale

    def picks(scale: float) -> dp_accounting.DpEvent:
        return dp_accounting.SelfComposedDpEvent(ExponentialMechanismDpEvent(1 / scale), k)

    scale = calibrate(picks, epsilon, delta)
    return picks(scale), scale
