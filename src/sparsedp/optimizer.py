"""The private optimizer: clips, sums and noises what capture collected, then lets the user's own optimizer update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.accounting.ledger import Ledger
from sparsedp.capture import Capture, Captured, RowNorms, RowSparse
from sparsedp.capture.uses import sum_rows
from sparsedp.errors import NonFiniteGradientError, SparseDPError, UnsupportedError
from sparsedp.mechanisms.base import Count, Step
from sparsedp.noise import PREPARATION, SELECTION, GaussianNoise
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import BatchInfo


@dataclass(frozen=True)
class TableStep:
    """What one step did to one table."""

    rows: int
    dim: int
    rows_touched: int
    rows_selected: int
    rows_false: int  # selected, but not touched

    @property
    def gradient_size(self) -> int:
        """Coordinates of the table's gradient that may differ from zero."""
        return self.rows_selected * self.dim


@dataclass(frozen=True)
class StepReport:
    """What the last step did. Derived from private data without noise: for the developer, not for release."""

    step: int
    units: int
    clipped_share: float
    mean_norm: float
    kept_mass: float  # share of the tables' squared gradient norms that the selection left
    tables: dict[str, TableStep] = field(default_factory=dict)

    @property
    def rows_touched(self) -> int:
        return sum(table.rows_touched for table in self.tables.values())

    @property
    def gradient_size(self) -> int:
        """Coordinates of the tables' gradients that may differ from zero."""
        return sum(table.gradient_size for table in self.tables.values())

    @property
    def reduction(self) -> float:
        """How many times smaller the tables' gradient is than a dense one."""
        return self.dense_size / max(self.gradient_size, 1)

    @property
    def dense_size(self) -> int:
        """Gradient size of a step in which every row of every table changes."""
        return sum(table.rows * table.dim for table in self.tables.values())


class _Accumulated:
    """The clipped sums of the physical batches of one logical batch, and what is reported of them."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor | RowSparse] = {}
        self.touched: dict[str, Tensor] = {}
        self.units = 0
        self.clipped = 0
        self.norms = 0.0
        self.mass = 0.0  # of the tables' gradients, and what the selection left of it
        self.kept = 0.0

    def add(self, name: str, part: Tensor | RowSparse) -> None:
        known = self.totals.get(name)
        if known is None:
            self.totals[name] = part
        elif isinstance(known, RowSparse) and isinstance(part, RowSparse) and known.rows is part.rows:
            self.totals[name] = RowSparse(known.rows, known.values + part.values)
        elif isinstance(known, RowSparse) and isinstance(part, RowSparse):
            ids, values = torch.cat([known.rows, part.rows]), torch.cat([known.values, part.values])
            self.totals[name] = sum_rows(ids, values)
        else:
            dense, other = (known, part) if isinstance(known, Tensor) else (part, known)
            assert isinstance(dense, Tensor)
            _add(dense, other)
            self.totals[name] = dense

    def touch(self, name: str, rows: Tensor) -> None:
        known = self.touched.get(name)
        self.touched[name] = rows if known is None else torch.unique(torch.cat([known, rows]))


class PrivateOptimizer(Optimizer):
    """Stands where the user's optimizer stood: `step()` makes one private step with it.

    Schedulers, `param_groups`, `state_dict` and everything else act on the wrapped optimizer.
    """

    def __init__(
        self,
        inner: Optimizer,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        tables: frozenset[str],
        plan: PrivacyPlan,
        capture: Capture,
        noise: GaussianNoise,
        ledger: Ledger,
        current_batch: Callable[[], BatchInfo | None],
        count: Count,
    ) -> None:
        # Not super().__init__(): it would make parameter groups of its own beside the wrapped optimizer's.
        self.inner = inner
        self.plan = plan
        self.ledger = ledger
        self.noise = noise
        self.last_step: StepReport | None = None
        # Entered around each stage of a step; benchmarks put a stopwatch here.
        self.stage: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._parameters = dict(parameters)
        self._module = module
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._tables = set(tables)
        self._capture = capture
        self._current_batch = current_batch
        self._count = count
        self.prepared: dict[str, Tensor] | None = None  # what the mechanism decided before its first step
        self._stepped: BatchInfo | None = None
        self._accumulated = _Accumulated()
        self._held: list[Captured] = []  # physical batches whose selection is not known yet
        self._buffers: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ torch.optim's surface

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError(
            "Parameters cannot join a private optimizer after make_private, because its plan names those it protects. "
            "Build the optimizer with all of them, frozen ones included, before make_private."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what backward collected since the last step. Finished micro-batches stay."""
        self._capture.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def forget(self) -> None:
        """Drops everything of an unfinished step."""
        self._capture.clear()
        self._accumulated, self._held, self._stepped = _Accumulated(), [], None

    def __getattr__(self, name: str) -> Any:
        """Whatever torch.optim adds to an optimizer is the wrapped one's, such as its step hooks."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A private optimizer cannot be copied or pickled: a copy would draw the same noise again.")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.inner!r})"

    # ------------------------------------------------------------------ the private step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One private step; for all but the last physical batch of a logical one, only its clipped sum is kept."""
        if closure is not None:
            raise UnsupportedError("A closure would evaluate the loss several times in one step. Call step() without.")
        batch = self._next_batch()
        self._refuse_ordinary_gradients()
        with self.stage("collect"):
            captured = self._capture.collect()
        if captured is None:
            if batch.units > 0:
                raise SparseDPError("step() was called without a backward() on the current batch before it.")
            captured = Captured(0, {})
        elif captured.units != batch.units:
            raise SparseDPError(f"The loss is over {captured.units} units, the current batch has {batch.units}.")
        self._stepped = batch
        if self.plan.mechanism.selects:
            self._held.append(captured)
        else:
            self._accumulate(captured, None)
        if batch.last:
            self._release()

    def _next_batch(self) -> BatchInfo:
        batch = self._current_batch()
        if batch is None:
            raise SparseDPError(
                "No batch was drawn from the private loader yet. Iterate over the loader that make_private returned, "
                "not over the one that was passed to it."
            )
        if batch is self._stepped:
            raise SparseDPError(
                "The current batch already had its step. A second step on the same sample would cost more "
                "privacy than the "
                "ledger shows: draw a new batch from the loader for every step."
            )
        fresh = self._stepped is None or self._stepped.last
        if fresh != batch.first or (not fresh and self._stepped is not None and self._stepped.step != batch.step):
            self._accumulated, self._held = _Accumulated(), []
            if not batch.first:
                raise SparseDPError("The physical batches of a logical batch must all be stepped, in order.")
        taken = self.ledger.steps + self.ledger.abandoned
        if batch.last and self.plan.steps is not None and taken >= self.plan.steps:
            raise SparseDPError(
                f"The plan's {self.plan.steps} steps were taken and its privacy budget (epsilon {self.plan.target_epsilon}) "
                "is spent. Train longer by planning for more epochs from the start."
            )
        return batch

    def _refuse_ordinary_gradients(self) -> None:
        ordinary = [name for name, parameter in self._module.named_parameters() if parameter.grad is not None]
        if ordinary:
            self._module.zero_grad()
            raise SparseDPError(
                f"Parameter '{ordinary[0]}' has an ordinary gradient, which no clipping bounds. Leave .grad alone; "
                "backward() and step() do all that is needed. A parameter that is to be trained later must be in the "
                "optimizer, frozen, when make_private is called."
            )
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if held != self._names.keys():
            raise UnsupportedError(
                "The optimizer's parameters are not those that make_private saw. Build it with all of them, frozen ones "
                "included, before make_private."
            )

    def prepare(self) -> None:
        """Lets the mechanism decide what it decides once, such as FEST its rows, and charges it."""
        if self.prepared is not None:
            return
        mechanism = self.plan.mechanism
        if not mechanism.prepares:
            self.prepared = {}
            return
        prepared = mechanism.prepare(self._trained_tables(), self._count, self.noise.key.child(PREPARATION))
        event = mechanism.setup_event()
        if event is not None:
            self.ledger.record(event, setup=True)
        self.prepared = prepared

    def _trained_tables(self) -> dict[str, Tensor]:
        return {n: self._parameters[n].detach() for n in sorted(self._tables) if self._parameters[n].requires_grad}

    def _accumulate(self, captured: Captured, selection: Mapping[str, Tensor] | None) -> None:
        """Clips the units of one physical batch, on the selection, and adds them up."""
        mine = self._accumulated
        known = RowNorms()
        chosen = {} if selection is None else {n: rows for n, rows in selection.items() if n in captured.uses}
        for name, rows in chosen.items():
            uses = captured.uses[name]
            mine.touch(name, uses.touched_rows(len(self._parameters[name])))
            mine.mass += float(uses.squared_norms(captured.units, known).sum())
            captured.uses[name] = uses.restricted(rows, self._parameters[name][0].numel())
            mine.kept += float(captured.uses[name].squared_norms(captured.units, known).sum())
        with self.stage("norms"):
            norms = self._norms(captured, known)
        if norms is None:
            return
        factors = self.plan.clipping.factors(norms)
        mine.units += captured.units
        mine.clipped += int((norms > self.plan.clipping.max_norm).sum())
        mine.norms += float(norms.sum())
        with self.stage("sums"):
            for name, uses in captured.uses.items():
                parameter = self._parameters[name]
                weights = (factors * self._scale(captured)).to(parameter.dtype)
                total = uses.weighted_sum(weights, parameter.shape, chosen.get(name))
                if name in self._tables and name not in chosen:
                    mine.touch(name, total.rows if isinstance(total, RowSparse) else uses.touched_rows(len(parameter)))
                mine.add(name, total)

    def _scale(self, captured: Captured) -> float:
        """What a captured gradient is multiplied by to be that of the unit's own loss."""
        return float(captured.units) if self.plan.loss_reduction == "mean" else 1.0

    def _norms(self, captured: Captured, known: RowNorms) -> Tensor | None:
        """The norm of each unit's gradient over all parameters together, (B,), float64."""
        squares: Tensor | None = None
        for name, uses in captured.uses.items():
            own = uses.squared_norms(captured.units, known)
            if not torch.isfinite(own).all():
                raise NonFiniteGradientError(
                    f"The gradient of parameter '{name}' is NaN or infinite for some unit. The step was not taken."
                )
            squares = own.double() if squares is None else squares + own.double()
        return None if squares is None else squares.sqrt() * self._scale(captured)

    def _release(self) -> None:
        """Selects rows, adds the noise, lets the wrapped optimizer update, and writes the step into the ledger."""
        step = self.ledger.steps
        mechanism, tables = self.plan.mechanism, self._trained_tables()
        self.prepare()
        with self.stage("selection"):
            selection = mechanism.select(self._held, self._step_context(step, tables))
        for captured in self._held:
            self._accumulate(captured, selection)
        done, self._accumulated, self._held = self._accumulated, _Accumulated(), []

        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        noisy: dict[int, Tensor] = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            if name in trained:
                rows = None if selection is None else selection.get(name)
                noisy[index] = self._buffer(name, parameter, rows)
        # The noise on the sum has this deviation times the divisor: dividing now saves a pass over the gradients.
        divisor = self.plan.divisor
        std = mechanism.gradient_noise(self.plan.noise_multiplier) * self.plan.clipping.max_norm / divisor
        with self.stage("noise"):
            self.noise.fill(noisy, std, step)
        for (name, parameter), gradient in zip(trained.items(), noisy.values()):
            rows = None if selection is None else selection.get(name)
            total = done.totals.get(name)
            if total is not None:
                _add(gradient, total, rows, 1 / divisor)
            parameter.grad = gradient if rows is None else _sparse(rows, gradient, parameter.shape)
        # Written first: if the update is interrupted, the budget counts as spent.
        self.ledger.record(self.plan.step_event())
        try:
            with self.stage("update"), warnings.catch_warnings():
                # torch's own optimizers make sparse tensors in a way that torch warns about.
                warnings.filterwarnings("ignore", "Sparse invariant checks")
                self.inner.step()
        finally:
            for parameter in trained.values():
                parameter.grad = None
        self.last_step = self._report(step, done, tables, selection)

    def _step_context(self, step: int, tables: Mapping[str, Tensor]) -> Step:
        return Step(
            tables=tables,
            noise_multiplier=self.plan.noise_multiplier,
            clipping=self.plan.clipping,
            scale=self._scale,
            key=self.noise.key.child(step, SELECTION),
            prepared=self.prepared or {},
        )

    def _report(
        self, step: int, done: _Accumulated, tables: Mapping[str, Tensor], selection: Mapping[str, Tensor] | None
    ) -> StepReport:
        reports = {}
        for name, table in tables.items():
            rows, dim = table.shape[0], table[0].numel() if table.shape[0] else 0
            touched = done.touched.get(name, torch.empty(0, dtype=torch.long))
            chosen = None if selection is None else selection.get(name)
            if chosen is None:
                reports[name] = TableStep(rows, dim, touched.numel(), rows, rows - touched.numel())
            else:
                hits = int(torch.isin(touched, chosen, assume_unique=True).sum())
                reports[name] = TableStep(rows, dim, touched.numel(), chosen.numel(), chosen.numel() - hits)
        units = max(done.units, 1)
        kept = done.kept / done.mass if done.mass > 0 else 1.0
        return StepReport(step, done.units, done.clipped / units, done.norms / units, kept, reports)

    def _buffer(self, name: str, parameter: Tensor, rows: Tensor | None) -> Tensor:
        """Where a parameter's noisy gradient goes: kept from step to step for dense ones."""
        if rows is not None:
            return torch.empty(rows.numel(), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        known = self._buffers.get(name)
        if known is None or known.shape != parameter.shape or known.device != parameter.device:
            known = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            self._buffers[name] = known
        return known


def _add(gradient: Tensor, part: Tensor | RowSparse, rows: Tensor | None = None, alpha: float = 1.0) -> None:
    """Adds alpha times a clipped sum to a gradient of all rows, or of the selected `rows`."""
    if isinstance(part, Tensor):
        gradient.add_(part.view_as(gradient) if rows is None else part[rows], alpha=alpha)
        return
    if part.rows is rows:
        gradient.add_(part.values.view_as(gradient), alpha=alpha)
        return
    at = part.rows if rows is None else torch.searchsorted(rows, part.rows)
    gradient.index_add_(0, at, part.values.view(-1, *gradient.shape[1:]), alpha=alpha)


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
