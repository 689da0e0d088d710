"""One private step: its lines are the stages that a batch goes through.

    touched rows, selection, clip, sum, sum over ranks, noise, public terms, ledger, update

A batch may come in physical parts. A part is clipped and summed as soon as the selection is known: at once where all rows may
change, and with the last part where the mechanism selects rows, because it looks at the whole batch. Noise is added to the sums
of all parts, and rounded together with them. The ledger is written before the update: if that is interrupted, the budget counts
as spent.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._torch import without_subclasses
from sparsedp.accounting.ledger import Ledger
from sparsedp.capture import Captured, PublicTerm, RowNorms, RowSpace, RowSparse, TouchedRows, join_digests
from sparsedp.contribution import touched_counts, touched_rows
from sparsedp.errors import NonFiniteGradientError, SparseDPError, SparseDPWarning
from sparsedp.gradient import NoisyGradient
from sparsedp.kernels.loops import LARGEST
from sparsedp.mechanisms.base import Step
from sparsedp.movement import Movement
from sparsedp.noise import SELECTION, GaussianNoise
from sparsedp.plan import PrivacyPlan
from sparsedp.preparation import Preparation
from sparsedp.progress import Progress, no_progress
from sparsedp.sampling import BatchInfo
from sparsedp.several_optimizers import parts_of
from sparsedp.step_report import StepReport, StepTally, report_of
from sparsedp.tables import OneRank, Ownership, Ranks, RowExchange, TableSpec
from sparsedp.tables.local import watched

_NONE = torch.empty(0, dtype=torch.long)

_FEW_UNITS = 5  # whose own data may be wrong; where it is so of many, weights may well be the cause
_DIVERGED = 1e10  # weights of a model that learns are nowhere near it


class PrivateStep:
    """Takes the private steps of a run."""

    def __init__(
        self,
        plan: PrivacyPlan,
        parameters: Mapping[str, nn.Parameter],
        tables: Mapping[str, TableSpec],
        inner: Optimizer,
        noise: GaussianNoise,
        ledger: Ledger,
        preparation: Preparation,
        ranks: Ranks | None = None,
        held: Mapping[str, nn.Parameter] | None = None,
        movement: Movement | None = None,
    ) -> None:
        """`parameters` are the private ones by name, `tables` the tables among them, `inner` the user's own optimizer.

        `ranks` are the processes that train together; None: this one trains alone. `held` are the parameters as this process
        has them in memory and `inner` knows them: of a table that is divided among the ranks a shard, or nothing. `movement`
        looks at the first updates.
        """
        self._movement = Movement({}, inner) if movement is None else movement
        self.ranks: Ranks = OneRank() if ranks is None else ranks
        self._held = dict(parameters if held is None else held)
        self.plan, self.inner, self.noise, self.ledger, self.preparation = plan, inner, noise, ledger, preparation
        self.tables = tables
        # Entered around each stage of a step; benchmarks put a stopwatch here.
        self.stage: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.progress: Progress = no_progress  # told of the settling of a large table
        self.counts_touches = False  # whether the report of a step has them, and `used` is kept
        self.used: set[str] = set()  # parameters that gradients of units came to
        self._parameters = dict(parameters)
        self._buffers: dict[str, Tensor] = {}  # of gradients, from step to step
        self._digests: tuple[str, ...] | None = None  # of the terms that each physical batch has; None before the first
        self._last: StepReport | Callable[[], StepReport] | None = None
        # The deviation of the noise on the averaged gradient: the sums that are added up are divided, too.
        self.std = plan.mechanism.gradient_noise(plan.noise_multiplier) * plan.clipping.max_norm / plan.divisor
        self.owner = plan.mechanism.owner(
            Ownership(
                tables={name: table for name, table in tables.items() if self.ranks.owns(name)},
                parameters={name: self._held[name] for name in tables if self.ranks.owns(name)},
                shards=self.ranks.shards,
                optimizer=inner,
                key=lambda: self.noise.key,
                std=self.std,
                steps=lambda: self.ledger.steps,
                stage=lambda name: self.stage(name),
                progress=lambda title, total: self.progress(title, total),
            )
        )
        self.forget()

    def forget(self) -> None:
        """Drops the parts of an unfinished batch."""
        self._waiting: list[Captured] = []  # parts that are not clipped yet
        self._gradient: NoisyGradient | None = None
        self._selection: Mapping[str, Tensor] | None = None  # of the rows that are owned here; None: all
        self._exchange: RowExchange | None = None
        self._tally = StepTally()

    def take(self, batch: BatchInfo, captured: Captured) -> None:
        """One part of a batch; with its last part, the step is taken."""
        terms, captured.terms = captured.terms, []
        self._require_same_terms(terms)
        self._hold(captured, batch)
        if (self.plan.mechanism.selects or self.ranks.several) and not batch.last:
            return
        if batch.last:
            self.ranks.meet(self.ledger.steps, batch.step, self._options(), self._dense())
            self.preparation.prepare(batch.span)
        with unguarded():
            tables = self.trained_tables()
            if batch.last:
                self.owner.begin(tables)
            gradient = self._gradient = self._gradient or self.begin(self._select(tables))  # touched rows, selection
            self._add_waiting(gradient)  # clip, sum
            if not batch.last:
                return
            step, tally = self.ledger.steps, self._tally
            if self.ranks.several:
                # Before the last message: if some rank gets as far as the update, all have counted the step.
                self._record(batch)
            gradient = self._add_up(gradient)  # sum over ranks
            self.add_noise(gradient, step)  # noise
            self._add_terms(terms, gradient)  # public terms, once a step
            exchange, selection = self._exchange, self._selection
        self.forget()
        if not self.ranks.several:
            self._record(batch)  # ledger
        self._update(gradient)  # update
        with unguarded():
            selection = None if self.owner.adds_noise else selection  # noise that waits changes all rows
            touched = tally.touched if exchange is None or not self.ranks.several else exchange.rows
            make = functools.partial(self._make_report, tally, step, gradient.space, touched, selection)
            # What several processes add up is added up now: later, one might ask alone.
            self._last = make() if self.ranks.several else make

    def _make_report(
        self, tally: StepTally, step: int, space: RowSpace, touched: Tensor, selection: Mapping[str, Tensor] | None
    ) -> StepReport:
        numbers = tally.numbers(space, touched, selection, self.plan.clipping.max_norm, self.ranks.counts)
        self.ranks.add_up_dense([numbers])
        return report_of(numbers, step, space, self.tables, selection is not None, tally.touches)

    # ------------------------------------------------------------------ the stages

    def _hold(self, captured: Captured, batch: BatchInfo) -> None:
        """Keeps a part until the selection is known."""
        with unguarded():
            if (self.plan.mechanism.selects or self.ranks.several) and not (batch.first and batch.last):
                captured.hold()
            else:
                captured.kept.clear()  # nothing can change their memory before the uses are added up
        self._waiting.append(captured)

    def _select(self, tables: Mapping[str, TableSpec]) -> Mapping[str, Tensor] | None:
        """The rows that may change by this process's units; None: all. Of all units together, `_selection` has them."""
        self._selection, self._exchange = None, None
        if not self.plan.mechanism.selects and not self.ranks.several:
            return None
        for captured in self._waiting:
            captured.require_unchanged()  # since its own step(): a loop may use one tensor for all physical batches
        with self.stage("selection"):
            if not self.plan.mechanism.selects:
                space = RowSpace.of(tables)
                rows = touched_rows(self._waiting, space)
                self._exchange = self.ranks.exchange(space, rows)
                return space.split(rows)
            self._selection = self.plan.mechanism.select(self._waiting, self.context(self.ledger.steps, tables))
            if self._selection is None or self._exchange is None:  # a mechanism that asks no other process
                return self._selection
            return self._exchange.of_own_units(self._selection)

    def _exchanged(self, space: RowSpace, rows: Tensor) -> RowExchange:
        self._exchange = self.ranks.exchange(space, rows)
        return self._exchange

    def context(self, step: int, tables: Mapping[str, TableSpec]) -> Step:
        """What a selection may look at, besides the batch."""
        return Step(
            tables=tables,
            noise_multiplier=self.plan.noise_multiplier,
            clipping=self.plan.clipping,
            scale=self._scale,
            key=self.noise.key.child(step, SELECTION),
            prepared=self.preparation.state.rows or {},
            exchange=self._exchanged,
            first=self._last is None,
        )

    def begin(self, selection: Mapping[str, Tensor] | None) -> NoisyGradient:
        """The gradient of this step, on the selection, before anything was added to it."""
        return NoisyGradient(
            self._parameters,
            RowSpace.of(self.trained_tables()),
            selection,
            {} if self.ranks.several else self._kept_buffers(),
            noise_on_rows=not self.owner.adds_noise,
        )

    def _kept_buffers(self) -> dict[str, Tensor]:
        """The memory of the last step's gradients, to be used again."""
        # Whoever keeps a gradient of an earlier step would find sums without noise in it, if its memory were used again.
        parts = parts_of(self.inner)
        keeps = watched(self.inner) or not all(type(part).__module__.startswith("torch.optim.") for part in parts)
        return {} if keeps else self._buffers

    def _add_waiting(self, gradient: NoisyGradient) -> None:
        """Clips and adds the parts that wait; raises on all ranks if that is not possible on one of them."""
        failed = None
        try:
            while self._waiting:
                self.add(self._waiting.pop(0), gradient)
        except NonFiniteGradientError as error:
            failed = error
        self.ranks.agree(failed)

    def _add_up(self, gradient: NoisyGradient) -> NoisyGradient:
        """The sums over all ranks of what this process is to move: its dense parameters, and the rows that it owns."""
        if not self.ranks.several:
            return gradient
        assert self._exchange is not None
        tables = self.trained_tables()
        chosen = self._selection
        if chosen is None:  # all rows of the tables that are owned here
            chosen = {name: _NONE for name in tables if not self.ranks.owns(name)}
        with self.stage("ranks"):
            total = NoisyGradient(
                self._held, gradient.space, chosen, self._kept_buffers(), not self.owner.adds_noise,
                self.ranks.shards, {name: table.dim for name, table in tables.items()},
            )  # fmt: skip
            rows = gradient.selection or {}
            sums = {name: RowSparse(rows[name], gradient.values[name]) for name in tables}
            for name, owned in self._exchange.add_up_rows(sums).items():
                total.put_rows(name, owned)
            dense = {name: gradient.whole(name) for name in self._parameters if name in gradient and name not in tables}
            self.ranks.add_up_dense(list(dense.values()))
            for name, values in dense.items():
                total.put(name, values)
        return total

    def add(self, captured: Captured, gradient: NoisyGradient) -> None:
        """Clips the units of one part, on the selection, and adds them to the gradient."""
        if not captured.uses:  # an empty batch
            return
        selection = gradient.selection
        touched = captured.touched(gradient.space)
        slots = None if selection is None else touched.slots(selection)
        with self.stage("norms"):
            norms = self._norms(captured, touched, slots, selection)
        self._tally.add(captured.units, captured.examples, touched_rows([captured], gradient.space), norms)
        if self.counts_touches:
            self._tally.add_touches(touched_counts(captured, gradient.space))
            self.used |= captured.uses.keys()
        weights = self.plan.clipping.factors(norms) * (self._scale(captured) / self.plan.divisor)
        with self.stage("sums"):
            gradient.add(captured, touched, slots, captured.each(weights))

    def _scale(self, captured: Captured) -> float:
        """What a captured gradient is multiplied by to be that of the unit's own loss.

        A unit's loss is the sum of its examples' losses. With "mean" the loop's loss is the mean over the examples of the
        physical batch, whoever's they are, so what it divided by is their number; with "sum" nothing was divided.
        """
        return float(captured.examples) if self.plan.loss_reduction == "mean" else 1.0

    def _norms(
        self, captured: Captured, touched: TouchedRows, slots: Tensor | None, selection: Mapping[str, Tensor] | None
    ) -> Tensor:
        """The norm of each unit's gradient over all parameters together, on the selection, (B,), float64.

        Restricts the uses of the tables to the selection.
        """
        norms_of_rows = RowNorms()
        squares: dict[str, Tensor] = {}
        squared_scale = self._scale(captured) ** 2  # of the parts of a batch, which may have other numbers of examples
        looked_up = touched.squared_norms(slots, norms_of_rows)
        if looked_up is not None:
            self._tally.add_mass(looked_up.every * squared_scale, looked_up.selected * squared_scale)
            squares.update(zip(looked_up.names, looked_up.selected))
        for name, uses in captured.uses.items():
            if name in squares:
                continue
            square = captured.squared_norms(uses, norms_of_rows).double()
            if selection is not None and name in selection:
                every = square
                if len(selection[name]) < len(self._parameters[name]):
                    uses = captured.uses[name] = uses.restricted(selection[name], self._parameters[name][0].numel())
                    square = captured.squared_norms(uses, norms_of_rows).double()
                self._tally.add_mass(every * squared_scale, square * squared_scale)
            squares[name] = square
        total = torch.stack(list(squares.values())).sum(0)
        # Beyond this, a clip factor would be too small a number to be exact in float32.
        if not (total < LARGEST**2).all():
            infinite = [name for name, square in squares.items() if not (square < LARGEST**2).all()]
            why = self._why_infinite(total, captured)
            raise NonFiniteGradientError(
                f"The gradient of parameter '{(infinite or list(squares))[0]}', or an input that it is made of, is NaN or "
                f"infinite, or larger than {LARGEST:g}, for some unit. The step was not taken. {why}"
            )
        return total.sqrt() * self._scale(captured)

    def _why_infinite(self, squared_norms: Tensor, captured: Captured) -> str:
        """What a gradient that is not finite comes from: weights that have diverged, or the data of some units (B,)."""
        for name, parameter in self._held.items():
            weights = parameter.detach().as_subclass(Tensor)
            if weights.numel() and not weights.abs().max() < _DIVERGED:
                what = f"Parameter '{name}' holds NaN, or weights above {_DIVERGED:g}"
                return f"{what}: training has diverged. Lower the learning rate."
        units = (~(squared_norms < LARGEST**2)).nonzero().flatten().tolist()
        if len(units) == len(squared_norms):
            return "It is so for every unit of the batch: lower the learning rate, or look at the loss function."
        named = ", ".join(map(str, units[:5])) + (", ..." if len(units) > 5 else "")
        where = ""
        if captured.owners is None and captured.places is not None and len(captured.places) == captured.units:
            rows = ", ".join(str(captured.places[unit]) for unit in units[:5])
            where = f" (in the data set: row(s) {rows}{', ...' if len(units) > 5 else ''})"
        many = len(units) > max(_FEW_UNITS, len(squared_norms) // 10)
        return (
            f"It is so for {len(units)} of the batch's {len(squared_norms)} units, at place(s) {named}: "
            f"{'lower the learning rate, if weights grow from step to step; otherwise ' if many else ''}"
            f"look for NaN, or for very large numbers, in their inputs and labels{where}."
        )

    def add_noise(self, gradient: NoisyGradient, step: int) -> None:
        """To the sums of the whole batch of a step, with which it is rounded."""
        with self.stage("noise"):
            for part in self.owner.noise_parts(gradient.sums):
                self.noise.add(part, self.std, step)

    def _record(self, batch: BatchInfo) -> None:
        self.ledger.record(self.plan.step_event(batch.span), scope=batch.span)

    def _require_same_terms(self, terms: list[PublicTerm]) -> None:
        """Terms without units are not clipped: no unit may decide whether they are there, or what they are."""
        digests = join_digests(terms)
        if self._digests is None:
            self._digests = digests
            self._warn_of_tables(terms)
        elif self._digests != digests:
            names = ", ".join(dict.fromkeys(term.expression.names for term in terms)) or "the parameters"
            raise SparseDPError(
                f"The terms of the loss that depend on {names} alone are not the same as in the first step. Nothing clips them, "
                "so every batch must have them, also an empty one, as the same function of the parameters: without the number of "
                "examples, a value of the batch, or a factor that changes. Nothing was written."
            )

    def _warn_of_tables(self, terms: list[PublicTerm]) -> None:
        """Before the first step with terms: on a table, their gradients are as large as the table."""
        used = {name for term in terms for name, _ in term.expression.parameters if name in self.tables}
        if used and self.plan.mechanism.selects:
            name = min(used, key=str)
            warnings.warn(
                f"The loss has a term that depends on table '{name}' alone (a penalty?). Its gradient is public and as large as "
                f"the table, so that each step costs what all {self.tables[name].rows} rows cost, and changes all of them. "
                "weight_decay of the optimizer is such a penalty on the squares of the weights, which LazyDP settles lazily.",
                SparseDPWarning,
                stacklevel=5,
            )

    def _add_terms(self, terms: list[PublicTerm], gradient: NoisyGradient) -> None:
        """The gradients of the terms of the loss that depend on parameters alone, as they are in the loop's own loss."""
        for term in terms:
            for name, grad in term.gradients().items():
                if name not in gradient:  # frozen since forward
                    continue
                if name in (gradient.selection or {}):
                    gradient.public[name] = gradient.public[name] + grad if name in gradient.public else grad.clone()
                else:
                    gradient.values[name].add_(grad)

    def _update(self, gradient: NoisyGradient) -> None:
        """Lets the owner of the tables and the user's optimizer move the parameters."""
        try:
            with self.stage("update"):
                with unguarded():
                    sparse = self.hand_over(gradient)
                    seen = self._movement.before()
                    given = {name: parameter.grad for name, parameter in self._held.items()} if seen else {}
                with _without_warnings() if sparse else nullcontext():
                    self.inner.step()  # guarded: somebody's hooks may read the weights
                with unguarded():
                    self._movement.after(seen, given)
        finally:
            self.drop_gradients()

    def hand_over(self, gradient: NoisyGradient) -> bool:
        """Gives selected rows their gradients through their owner, and the user's optimizer all others.

        Returns whether some of the gradients are sparse.
        """
        rows = gradient.selection or {}
        self.owner.settle_all(gradient.public)  # what the terms are made of was read, so that this is done already
        self.owner.advance()  # first: if the update is interrupted, its noise is owed all the same
        for name, parameter in self._held.items():
            if name in rows and not self.ranks.owns(name):
                continue
            if name in gradient.public:
                total = gradient.public[name].index_add_(0, rows[name], gradient.values[name])
                self.owner.apply(name, torch.arange(len(total), device=total.device), total)
            elif name in rows:
                self.owner.apply(name, rows[name], gradient.values[name])
            elif parameter.requires_grad:
                parameter.grad = gradient.values[name]
        return any(p.grad is not None and p.grad.is_sparse for p in self._held.values())

    def drop_gradients(self) -> None:
        with unguarded():
            for parameter in self._held.values():
                parameter.grad = None

    # ------------------------------------------------------------------ what others ask for

    def _options(self) -> Iterator[tuple[str, bool, str | None]]:
        """Of each parameter, whether it is trained, and the optimizer's options for it; None if nothing of it is here."""
        options: dict[int, str] = {}
        for part in parts_of(self.inner):
            for group in part.param_groups:
                values = {key: _plain(value) for key, value in group.items() if key != "params"}
                options |= dict.fromkeys(map(id, group["params"]), f"{type(part).__name__} {values}")
        for name, parameter in self._parameters.items():
            is_here = name not in self.tables or self.ranks.owns(name)
            yield name, parameter.requires_grad, options[id(self._held[name])] if is_here else None

    def _dense(self) -> Iterator[Tensor]:
        """What ranks compare at every step: trained ones.

        Frozen ones are those that rank 0 sent at the start, no step moves them, and no bound rests on what they are. To read a
        large frozen model at every step would cost more than the rest of the step.
        """
        trained = (name for name in self._held if name not in self.tables and self._parameters[name].requires_grad)
        return (self._held[name] for name in trained)

    def trained_tables(self) -> dict[str, TableSpec]:
        return {name: table for name, table in self.tables.items() if self._parameters[name].requires_grad}

    @property
    def report(self) -> StepReport | None:
        """What the last step did, which is worked out when somebody asks; None before the first."""
        if callable(self._last):
            with unguarded():
                self._last = self._last()
        return self._last


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def unguarded() -> AbstractContextManager[Any]:
    """Within it lazy tables are as they are: their guards would settle what is about to be updated."""
    return without_subclasses()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch's own optimizers make sparse tensors in a way that torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        yield
