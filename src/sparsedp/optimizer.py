"""The private optimizer: clips, sums and noises what capture collected, then lets the user's own optimizer update."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sparsedp.accounting.ledger import Ledger
from sparsedp.capture import Capture, Captured, RowNorms, RowSpace, TouchedRows, named_tensors
from sparsedp.capture.kernels import LARGEST, find, move_rows
from sparsedp.errors import NonFiniteGradientError, SparseDPError, SparseDPWarning, UnsupportedError
from sparsedp.gradient import NoisyGradient
from sparsedp.lazy import LazyTables
from sparsedp.mechanisms.base import Step
from sparsedp.mechanisms.contribution import touched_rows
from sparsedp.nn.fallback import keep_selection
from sparsedp.noise import PREPARATION, SELECTION, WAITING, GaussianNoise, RandomKey
from sparsedp.plan import PrivacyPlan
from sparsedp.sampling import BatchInfo

_DROPPED = 3  # gradients in a row that zero_grad() may drop before somebody is told


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
    examples: int = 0  # of these units

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
    """What the physical batches of one logical batch add up to."""

    def __init__(self) -> None:
        self.gradient: NoisyGradient | None = None
        self.touched = torch.empty(0, dtype=torch.long)  # global rows
        self.units = 0
        self.examples = 0
        self.norms: list[Tensor] = []  # of the units' gradients
        self.masses: list[tuple[Tensor, Tensor]] = []  # of the tables', squared, and what the selection left of them

    def touch(self, rows: Tensor) -> None:
        self.touched = torch.unique(torch.cat([self.touched, rows])) if self.touched.numel() else rows


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch's own optimizers make sparse tensors in a way that torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        yield


def _unguarded() -> AbstractContextManager[Any]:
    """Within it lazy tables are as they are: their guards would settle what is about to be updated."""
    return torch._C.DisableTorchFunctionSubclass()


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
        count: Callable[[float | None, int | None], dict[str, Tensor]],  # of (clip, span)
    ) -> None:
        # Not super().__init__(): it would make parameter groups of its own beside the wrapped optimizer's.
        self.inner = inner
        self.plan = plan
        self.ledger = ledger
        self.noise = noise
        self._last: StepReport | Callable[[], StepReport] | None = None
        self.mixed = False  # whether weights are in part those of a checkpoint that is being loaded
        # Entered around each stage of a step; benchmarks put a stopwatch here.
        self.stage: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._parameters = dict(parameters)
        self._module = module
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._tables = set(tables)
        self._capture = capture
        self._current_batch = current_batch
        self._count = count
        self.prepared: dict[str, Tensor] | None = None  # what the mechanism decided ahead of its steps
        self.counted: list[int | None] = []  # the scopes that it decided this on
        self.memory: dict[str, Tensor] = {}  # what it keeps of them for the next one
        self._stepped: BatchInfo | None = None
        self._dropped = 0  # gradients since the last step() that zero_grad() dropped
        self._accumulated = _Accumulated()
        self._held: list[Captured] = []  # physical batches whose selection is not known yet
        self._buffers: dict[str, Tensor] = {}
        self.lazy: LazyTables | None = None  # of a mechanism whose noise waits
        self._waiting: tuple[RandomKey, RandomKey] | None = None
        if plan.mechanism.lazy:
            assert isinstance(inner, torch.optim.SGD)  # others are refused before
            own = {name: self._parameters[name] for name in sorted(self._tables)}
            self.lazy = LazyTables(
                own, inner, self._waiting_key, plan.noise_std / plan.divisor,
                getattr(plan.mechanism, "aggregate", True), lambda: self.ledger.steps,
            )  # fmt: skip

    def _waiting_key(self) -> RandomKey:
        """Of the noise that lazy tables wait for, which every lookup asks for; derived again where a run is resumed."""
        if self._waiting is None or self._waiting[0] is not self.noise.key:
            self._waiting = self.noise.key, self.noise.key.child(WAITING)
        return self._waiting[1]

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
        if self.lazy is not None:  # momentum waits for its noise as weights do
            self.lazy.settle_all()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.lazy is not None:
            self.lazy.settle_all()
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError(
            "Parameters cannot join a private optimizer after make_private, because its plan names those it protects. "
            "Build the optimizer with all of them, frozen ones included, before make_private."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what backward collected since the last step. Finished micro-batches stay."""
        if self._capture.has_collected:
            self._dropped += 1
            if self._dropped == _DROPPED:
                warnings.warn(
                    f"zero_grad() dropped the gradients of {_DROPPED} batches in a row, none of which had a step(): nothing is "
                    "trained. Call step() of the optimizer that make_private returned after each backward().",
                    SparseDPWarning,
                    stacklevel=2,
                )
        self._capture.clear()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        with _unguarded():
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
        with _unguarded():
            tensors = list(named_tensors(self._module))
        self._refuse_ordinary_gradients(tensors)
        with self.stage("collect"):
            captured = self._capture.collect(tensors)
        if captured is None:
            if batch.units > 0:
                raise SparseDPError("step() was called without a backward() on the current batch before it.")
            captured = Captured(0, {})
        elif captured.units != batch.units or captured.owners is not batch.owners:
            raise SparseDPError(
                f"The loss is over {captured.units} units with {captured.examples} examples, the current batch has "
                f"{batch.units} with {batch.examples}."
            )
        self._stepped, taken, self._dropped = batch, self.ledger.steps, 0
        try:
            self._take(batch, captured)
        except BaseException:
            # What was collected of this logical batch must not slip into the next one.
            self._accumulated, self._held = _Accumulated(), []
            if self.ledger.steps == taken:
                self._stepped = None
            raise

    def _take(self, batch: BatchInfo, captured: Captured) -> None:
        with _unguarded():
            selects = self.plan.mechanism.selects
            if selects and not (batch.first and batch.last):
                captured.hold()
            else:
                captured.kept.clear()  # nothing can change their memory before the uses are added up
            if selects:
                self._held.append(captured)
            else:
                if self._accumulated.gradient is None:
                    self._accumulated.gradient = self._begin(None)
                self._accumulate(captured, self._accumulated.gradient)
        if batch.last:
            self._release(batch.span)

    def require_whole(self) -> None:
        if self.mixed:
            raise SparseDPError(
                "Loading a checkpoint was interrupted: some weights are its own, others are those from before. Load it again."
            )

    def _next_batch(self) -> BatchInfo:
        self.require_whole()
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
        limit = self.plan.steps_on(batch.span)
        if batch.last and limit is not None and self.ledger.taken(batch.span) >= limit:
            where = "" if batch.span is None else f" on span {batch.span} of the stream"
            raise SparseDPError(
                f"The plan's {limit} steps{where} were taken and its privacy budget (epsilon {self.plan.target_epsilon}) "
                "is spent. After load_checkpoint, loop over the epochs that are left; to train longer, plan for more "
                "epochs from the start."
            )
        return batch

    def _refuse_ordinary_gradients(self, tensors: list[tuple[str, Tensor]]) -> None:
        with _unguarded():
            ordinary = [name for name, t in tensors if t.is_leaf and t.grad is not None and isinstance(t, nn.Parameter)]
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

    def prepare(self, span: int | None = None) -> None:
        """Lets the mechanism decide what it decides ahead of its steps, such as FEST its rows, and charges it.

        Once in a run; with running frequencies, once for each span of the stream, when training first comes to it.
        """
        mechanism, scope = self.plan.mechanism, self.plan.setup_scope(span)
        if not mechanism.prepares:
            self.prepared = {}
            return
        if scope in self.counted:
            return
        event = mechanism.setup_event()
        if event is not None and self.plan.steps is not None and self.ledger.setups(scope):
            raise SparseDPError(
                f"The {mechanism.name} mechanism has already counted these data, after the checkpoint that this run went "
                f"back to. Counting them again would exceed its privacy budget (epsilon {self.plan.target_epsilon}): go "
                "back to a later checkpoint, or start a new run."
            )
        share, memory = self.plan.examples_counted(scope), dict(self.memory)

        def count(clip: float | None) -> dict[str, Tensor]:
            return {name: counts / share for name, counts in self._count(clip, scope).items()}

        key = self.noise.key.child(PREPARATION, *([] if scope is None else [scope]))
        prepared = mechanism.prepare(self._trained_tables(), count, key, memory)
        if event is not None:
            self.ledger.record(event, setup=True, scope=scope)
        self.prepared, self.memory = keep_selection(self._module, prepared), memory
        self.counted.append(scope)

    def _trained_tables(self) -> dict[str, Tensor]:
        return {n: self._parameters[n].detach() for n in sorted(self._tables) if self._parameters[n].requires_grad}

    def _begin(self, selection: Mapping[str, Tensor] | None) -> NoisyGradient:
        """The gradient of this step, on the selection, before anything was added to it."""
        space = RowSpace.of(self._trained_tables())
        # Whoever keeps a gradient of an earlier step would find sums without noise in it, if its memory were used again.
        buffers = {} if self._keeps_gradients() else self._buffers
        return NoisyGradient(self._parameters, space, selection, buffers, noise_on_rows=self.lazy is None)

    def _keeps_gradients(self) -> bool:
        """Whether somebody may hold on to a gradient after its step. torch's own optimizers do not."""
        return self._watched() or not type(self.inner).__module__.startswith("torch.optim.")

    def _watched(self) -> bool:
        """Whether somebody is called at each step of the wrapped optimizer, who may look at the gradients."""
        inner = self.inner
        own = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        everybodys = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return bool("step" in vars(inner) or own or everybodys)

    def _add_noise(self, gradient: NoisyGradient) -> None:
        """To the sums of the whole logical batch, with which it is rounded."""
        # The noise on the sum has this deviation times the divisor; the sums that were added are divided, too.
        std = self.plan.mechanism.gradient_noise(self.plan.noise_multiplier) * self.plan.clipping.max_norm
        with self.stage("noise"):
            self.noise.add(gradient.sums, std / self.plan.divisor, self.ledger.steps)

    def _accumulate(self, captured: Captured, gradient: NoisyGradient) -> None:
        """Clips the units of one physical batch, on the selection, and adds them to the gradient."""
        if not captured.uses:  # an empty batch
            return
        mine, selection = self._accumulated, gradient.selection
        touched = captured.touched(gradient.space)
        slots = None if selection is None else touched.slots(selection)
        with self.stage("norms"):
            norms = self._norms(captured, touched, slots, selection)
        mine.units += captured.units
        mine.examples += captured.examples
        mine.norms.append(norms)
        mine.touch(touched_rows([captured], gradient.space))
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
        mine, known = self._accumulated, RowNorms()
        squares: dict[str, Tensor] = {}
        looked_up = touched.squared_norms(slots, known)
        if looked_up is not None:
            mine.masses.append((looked_up.every, looked_up.selected))
            squares.update(zip(looked_up.names, looked_up.selected))
        for name, uses in captured.uses.items():
            if name in squares:
                continue
            own = captured.squared_norms(uses, known).double()
            if selection is not None and name in selection:
                every = own
                if len(selection[name]) < len(self._parameters[name]):
                    uses = captured.uses[name] = uses.restricted(selection[name], self._parameters[name][0].numel())
                    own = captured.squared_norms(uses, known).double()
                mine.masses.append((every, own))
            squares[name] = own
        total = torch.stack(list(squares.values())).sum(0)
        # Beyond this, a clip factor would be too small a number to be exact in float32.
        if not (total < LARGEST**2).all():
            infinite = [name for name, own in squares.items() if not (own < LARGEST**2).all()]
            raise NonFiniteGradientError(
                f"The gradient of parameter '{(infinite or list(squares))[0]}', or an input that it is made of, is NaN or "
                f"infinite, or larger than {LARGEST:g}, for some unit. The step was not taken."
            )
        return total.sqrt() * self._scale(captured)

    def _release(self, span: int | None) -> None:
        """Selects rows, adds the noise, lets the wrapped optimizer update, and writes the step into the ledger."""
        step = self.ledger.steps
        self.prepare(span)
        with _unguarded():
            gradient = self._gradient(step)
        done, self._accumulated, self._held = self._accumulated, _Accumulated(), []
        # Written first: if the update is interrupted, the budget counts as spent.
        self.ledger.record(self.plan.step_event(span), scope=span)
        try:
            with self.stage("update"):
                with _unguarded():
                    sparse = self._hand_over(gradient)
                with _without_warnings() if sparse else nullcontext():
                    self.inner.step()  # guarded: somebody's hooks may read the weights
        finally:
            self._drop_gradients()
        with _unguarded():
            selection = None if self.lazy is not None else gradient.selection  # lazily, all rows change
            done.gradient = None
            self._last = functools.partial(self._report, step, done, gradient.space, selection)

    def _gradient(self, step: int) -> NoisyGradient:
        """The noisy gradient of the whole logical batch."""
        mechanism, tables = self.plan.mechanism, self._trained_tables()
        if self.lazy is not None:
            self.lazy.begin(tables)
        if not mechanism.selects:
            assert self._accumulated.gradient is not None
            self._add_noise(self._accumulated.gradient)
            return self._accumulated.gradient
        for captured in self._held:
            captured.require_unchanged()  # since its own step(): a loop may use one tensor for all physical batches
        with self.stage("selection"):
            selection = mechanism.select(self._held, self._step_context(step, tables))
        gradient = self._begin(selection)
        for captured in self._held:
            self._accumulate(captured, gradient)
        self._add_noise(gradient)
        return gradient

    def _hand_over(self, gradient: NoisyGradient) -> bool:
        """Gives the wrapped optimizer its gradients; rows that it would merely move are moved here.

        Returns whether some of the gradients are sparse.
        """
        rows, sparse = gradient.selection or {}, False
        plain = self._plain_rates() if rows and self.lazy is None else {}
        if self.lazy is not None:
            self.lazy.advance()  # first: if the update is interrupted, the noise is owed all the same
        for name, parameter in self._parameters.items():
            if self.lazy is not None and name in self.lazy:
                if name in rows:
                    self.lazy.apply(name, rows[name], gradient.values[name])
            elif name in rows and name in plain:
                move_rows(parameter.detach(), rows[name], gradient.values[name], -plain[name])
            elif parameter.requires_grad:
                parameter.grad = gradient.as_sparse(name)
                sparse = sparse or name in rows
        return sparse

    def _plain_rates(self) -> dict[str, float]:
        """The learning rates of the parameters that the wrapped optimizer merely moves against their gradients.

        Rows are then moved here, to the same result: torch's sparse tensors take several times as long. Not if somebody
        watches the step, who may look at the gradients.
        """
        inner = self.inner
        if type(inner) is not torch.optim.SGD or self._watched():
            return {}
        groups = [
            group for group in inner.param_groups
            if not (group["momentum"] or group["weight_decay"] or group["maximize"] or group["differentiable"])
        ]  # fmt: skip
        return {self._names[id(p)]: float(group["lr"]) for group in groups for p in group["params"]}

    def _step_context(self, step: int, tables: Mapping[str, Tensor]) -> Step:
        return Step(
            tables=tables,
            noise_multiplier=self.plan.noise_multiplier,
            clipping=self.plan.clipping,
            scale=self._scale,
            key=self.noise.key.child(step, SELECTION),
            prepared=self.prepared or {},
            first=self._last is None,
        )

    @property
    def last_step(self) -> StepReport | None:
        """What the last step did, which is worked out when somebody asks; None before the first."""
        if callable(self._last):
            with _unguarded():
                self._last = self._last()
        return self._last

    def _report(
        self, step: int, done: _Accumulated, space: RowSpace, selection: Mapping[str, Tensor] | None
    ) -> StepReport:
        touched = [end - begin for begin, end in space.edges(done.touched)]
        selected = list(space.sizes)
        hits = touched
        if selection is not None:
            chosen = space.join(selection)
            selected = [end - begin for begin, end in space.edges(chosen)]
            found = done.touched[find(chosen, done.touched) >= 0]
            hits = [end - begin for begin, end in space.edges(found)]
        reports = {}
        for name, rows, own, all_selected, hit in zip(space.names, space.sizes, touched, selected, hits):
            dim = self._parameters[name].shape[1:].numel()
            reports[name] = TableStep(rows, dim, own, all_selected, all_selected - hit)
        units = max(done.units, 1)
        clipped = sum(int((norms > self.plan.clipping.max_norm).sum()) for norms in done.norms)
        mean = sum(float(norms.sum()) for norms in done.norms) / units
        mass = sum(float(every.sum()) for every, _ in done.masses)
        kept = sum(float(selected.sum()) for _, selected in done.masses) / mass if mass > 0 else 1.0
        return StepReport(step, done.units, clipped / units, mean, kept, reports, done.examples)
