"""DP-AdaFEST: at every step, noise only on rows that enough units of the batch touch (DP-AdaFEST, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.accounting import split_multiplier
from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import Contribution, contribution_map, warn_of_whole_tables
from sparsedp.errors import SparseDPError
from sparsedp.mechanisms.base import Count, CountedData, Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.mechanisms.fest import FEST
from sparsedp.mechanisms.look import Look, PublicCounts, require_look
from sparsedp.mechanisms.survivors import draw_survivors, survival, survival_of_counts
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec

_OF_AUTO = ("keep", "gradient_size", "look_at", "found")


@dataclass(frozen=True)
class AdaFEST(Mechanism):
    """Selects the rows whose noisy contribution reaches `threshold` (tau).

    The map of contributions is clipped to `map_clip` (C1) per unit and has noise C1 sigma1. The gradient is masked,
    clipped to C2 and has noise C2 sigma2. sigma1 / sigma2 = `noise_ratio`, and (sigma1^-2 + sigma2^-2)^(-1/2) is the
    step's noise multiplier: both are on one sample, so a step costs what DP-SGD costs with it (section 3.3).

    With threshold="auto" it is found before the first step, as the largest with which a step is predicted to keep the share
    `keep` (0.8) of touches, pairs of a unit and a row that it uses, or as the least for a `gradient_size` in coordinates.
    `look_at` says what may be looked at for that: `PublicCounts`, the run's own "release" of frequencies (make_private's
    `frequencies`), or the "data" without noise, which the statement then says. What was found is in `found`.
    The default of 10 is no recommendation: which number suits a run depends on its batches and its data, and "auto" finds it.
    With a threshold of your own, `PublicCounts` let make_private warn where it will keep little.
    """

    name: ClassVar[str] = "adafest"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = True
    threshold_setting: ClassVar[str] = "threshold"
    threshold: float | Literal["auto"] = 10.0
    noise_ratio: float = 5.0
    map_clip: float = 1.0
    preselect: FEST | None = None  # AdaFEST+: only rows of this selection can be selected

    keep: float | None = None
    gradient_size: float | None = None
    look_at: Look | None = None
    found: float | None = None  # what threshold="auto" came to; set by the engine

    def __post_init__(self) -> None:
        if self.threshold == "auto":
            self._check_auto()
        elif isinstance(self.threshold, str) or not math.isfinite(self.threshold):
            raise ValueError(f'threshold must be a number or "auto", not {self.threshold!r}')
        else:
            for name in _OF_AUTO:
                if getattr(self, name) is not None and not isinstance(getattr(self, name), PublicCounts):
                    raise ValueError(f'{name} is for threshold="auto"; with threshold={self.threshold} leave it out')
        for name in ("noise_ratio", "map_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if self.preselect is not None and not isinstance(self.preselect, FEST):
            raise TypeError(f"preselect must be a FEST(...), not {self.preselect!r}")

    def _check_auto(self) -> None:
        require_look(self.look_at, 'threshold="auto"')
        if self.keep is not None and self.gradient_size is not None:
            raise ValueError("give keep (a share of touches) or gradient_size (coordinates), not both")
        if self.keep is not None and not 0 < self.keep < 1:
            raise ValueError(f"keep is a share of touches, between 0 and 1, not {self.keep}")
        if self.gradient_size is not None and not 0 < self.gradient_size < math.inf:
            raise ValueError(f"gradient_size must be positive and finite, not {self.gradient_size}")
        if self.look_at == "release" and self.prepares:
            raise ValueError(
                'look_at="release" together with a preselect that counts the data itself is not available: give the preselect '
                "public counts, or look at something else"
            )

    @property
    def looks_at(self) -> Look | None:  # type: ignore[override]
        return self.look_at if self.threshold == "auto" and self.found is None else None

    @property
    def public_counts(self) -> PublicCounts | None:
        return self.look_at if isinstance(self.look_at, PublicCounts) else None

    @property
    def tau(self) -> float:
        """The threshold as a number."""
        if self.threshold != "auto":
            return self.threshold
        if self.found is None:
            raise SparseDPError(
                'The threshold is "auto" and not found yet: engine.prepare() or the first step finds it.'
            )
        return self.found

    def with_threshold(self, threshold: float) -> AdaFEST:
        return replace(self, found=threshold) if self.threshold == "auto" else replace(self, threshold=threshold)

    @property
    def wanted_keep(self) -> float:  # type: ignore[override]
        return Mechanism.wanted_keep if self.keep is None else self.keep

    @property
    def assumptions(self) -> tuple[str, ...]:
        of_preselect = () if self.preselect is None else self.preselect.assumptions
        if self.threshold != "auto" or not isinstance(self.look_at, PublicCounts):
            return of_preselect
        return ("The counts of rows that the threshold was found from are public.", *of_preselect)

    @property
    def not_covered(self) -> tuple[str, ...]:
        if self.look_at != "data":
            return ()
        return ("The threshold, which was found by looking at the training data without noise.",)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if self.threshold != "auto":  # plans from before there was "auto" do not have these
            return {name: value for name, value in values.items() if name not in _OF_AUTO}
        if isinstance(self.look_at, PublicCounts):
            values["look_at"] = self.look_at.to_dict()
        return values

    @property
    def inputs(self) -> Callable[[Any], Any] | None:  # type: ignore[override]
        return None if self.preselect is None else self.preselect.inputs

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self.preselect is not None and self.preselect.prepares

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, all of them together"

    def gradient_noise(self, noise_multiplier: float) -> float:
        return split_multiplier(noise_multiplier, self.noise_ratio)[1]

    @property
    def counted_data(self) -> CountedData:
        return "all" if self.preselect is None else self.preselect.counted_data

    def prepare(
        self, tables: Mapping[str, TableSpec], count: Count, key: RandomKey, memory: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        return {} if self.preselect is None else self.preselect.prepare(tables, count, key, memory)

    def for_tables(self, rows: Mapping[str, int]) -> AdaFEST:
        return self if self.preselect is None else replace(self, preselect=self.preselect.for_tables(rows))

    def refuse_tables(self, names: Collection[str]) -> None:
        if self.preselect is not None:
            self.preselect.refuse_tables(names)

    def setup_event(self) -> dp_accounting.DpEvent | None:
        return None if self.preselect is None else self.preselect.setup_event()

    @property
    def contribution_clip(self) -> float:
        return self.map_clip

    def _map_std(self, noise_multiplier: float) -> float:
        """Deviation of the noise on the map: C1 sigma1."""
        return split_multiplier(noise_multiplier, self.noise_ratio)[0] * Contribution(self.map_clip).sensitivity

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        std = self._map_std(noise_multiplier)
        selected, kept = survival_of_counts(rows, self.tau, std)
        false = rows.absent * survival(np.zeros(1), self.tau, std)
        return Expected(rows.chosen * selected, rows.chosen * false, rows.chosen * kept)

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        if step.first:
            warn_of_whole_tables(
                batch, space, "every unit touches all of its rows: AdaFEST selects among them by noise alone"
            )
        within = None if self.preselect is None else space.join(step.prepared)
        rows, values = contribution_map(batch, space, self.map_clip, within)
        exchange = step.exchange(space, rows)
        rows, values = exchange.rows, exchange.add_up(values)
        std = self._map_std(step.noise_multiplier)
        selection = {}
        for name, start, (begin, end) in zip(space.names, space.starts, space.edges(rows)):
            table = step.tables[name]
            eligible = None if within is None else step.prepared[name].numpy()
            kept = draw_survivors(
                rows[begin:end].numpy() - start, values[begin:end].numpy(), exchange.owned(name), self.tau, std,
                step.key.child(table.index), eligible,
            )  # fmt: skip
            selection[name] = torch.from_numpy(kept)
        return selection
