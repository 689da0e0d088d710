"""An owner whose rows are owed noise until they are read (LazyDP, Algorithm 1): which are, and settling them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._torch import preserved_version, without_subclasses
from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.grid import grid_of, round_to
from sparsedp.kernels import loops
from sparsedp.kernels.threads import on_all_cores, split
from sparsedp.noise import WAITING, RandomKey, add_row_normals, move_row_pairs, move_rows_by_noise, row_normals
from sparsedp.progress import no_progress
from sparsedp.tables.guard import guard, guarded_alias, settle_before, unguard
from sparsedp.tables.owner import Owner, Ownership
from sparsedp.tables.pending import Coefficients, PendingSteps

# Elements of a table that are settled together, and from how many on the progress is told.
_CHUNK, _LONG = 1 << 21, 1 << 27
# Threads share the rows of a lookup only if these are so many times what is worth a thread elsewhere. (Measured.)
_SHARED = 16
# The finest grid of weights: a schedule may end at learning rates of which float32 could not hold a step anyway.
_FINEST = 2.0**-100
# How much finer the grid of weights may become from one step to the next, without momentum: the noise of the step is
# then still several times the old grid, and nobody sees which rows had been rounded to it.
_REFINED = 2.0**-8
# Purposes of a table's key: the noise of one step, the noise of several in one draw, its part for the momentum, and the
# noise of one step on the rows that it touches.
STEP, _AGGREGATED, _MOMENTUM, _TOUCHED = 0, 1, 2, 3


@dataclass
class _Table:
    name: str
    index: int  # in the noise's key
    parameter: nn.Parameter  # all rows, also those of other owners, or a shard
    owned: range
    since: Tensor  # int32 (rows,): the pending step of its group up to which an owned row is settled
    width: int  # elements of a row
    columns: range | None = None  # those that the parameter has; None: all
    settled: int = 0  # the latest pending step at which all rows were
    trained: bool = True  # frozen tables get no noise

    def owned_rows_of(self, tensor: Tensor) -> Tensor:
        """The owned rows of the parameter, or of its momentum."""
        return tensor if len(self.owned) == len(tensor) else tensor[self.owned.start : self.owned.stop]

    def numbers_of(self, places: Tensor) -> Tensor | None:
        """The numbers in the whole table of rows at some places among the owned ones; None: they are the same."""
        return places + self.owned.start if self.owned.start else None

    @contextmanager
    def in_whole_rows(self, places: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, Tensor | None, list[Tensor]]]:
        """Gives places, the rows' numbers, and tensors in which noise for whole rows of the table can be added there.

        These are `tensors`, or, where they have some columns alone, copies of the rows as wide as the table.
        """
        if self.columns is None:
            yield places, self.numbers_of(places), list(tensors)
            return
        copies = [self.widened(tensor[places]) for tensor in tensors]
        yield torch.arange(len(places)), places + self.owned.start, copies
        for tensor, copy in zip(tensors, copies):
            tensor[places] = copy[:, self.columns.start : self.columns.stop]

    def widened(self, rows: Tensor) -> Tensor:
        """Rows as wide as the table, with zeros in the columns that are not here."""
        if self.columns is None:
            return rows
        wide = rows.new_zeros(len(rows), self.width)
        wide[:, self.columns.start : self.columns.stop] = rows
        return wide


@dataclass
class _Group:
    """Tables of one parameter group of the optimizer, which moves all of their rows alike."""

    optimizer: Optimizer
    index: int  # of the parameter group, which is one of SGD
    tables: dict[str, _Table]
    first: int  # the run's step at which the pending ones began
    pending: PendingSteps = field(default_factory=PendingSteps)
    steps: list[Coefficients] = field(default_factory=list)  # of the pending ones

    @property
    def coefficients(self) -> Coefficients:
        """Those of the present step: a schedule, or the user, may have changed the learning rate."""
        options = self.optimizer.param_groups[self.index]  # load_state_dict makes new ones
        return Coefficients.of(
            float(options["lr"]),
            float(options["momentum"]),
            float(options["weight_decay"]),
            options["nesterov"],
            options["maximize"],
        )


class LazyOwner(Owner):
    """Settles rows before they are read, and lets them take their gradients.

    With `aggregate` a row's pending noise is one draw, otherwise the sum of what eager DP-SGD would have drawn step by step.
    """

    adds_noise = True

    def __init__(self, ownership: Ownership, aggregate: bool = True) -> None:
        super().__init__(ownership)
        self.broken = False  # whether rows were claimed that did not get their noise
        self._lock, self._process = threading.RLock(), os.getpid()
        optimizer = self._optimizer = ownership.optimizer
        self._std, self._aggregate, self._steps = ownership.std, aggregate, ownership.steps
        self._keys: tuple[RandomKey, RandomKey] | None = None
        self._guard: Owner | None = None  # who settles what the guards see; None: there are none
        tables = {}
        for name, spec in ownership.tables.items():
            owned = ownership.owned(name)
            since = torch.zeros(len(owned), dtype=torch.int32)
            tables[name] = _Table(
                name, spec.index, ownership.parameters[name], owned, since, spec.dim, ownership.columns(name)
            )
        self._groups = []
        for index, settings in enumerate(optimizer.param_groups):
            held = {id(parameter) for parameter in settings["params"]}
            mine = {name: table for name, table in tables.items() if id(table.parameter) in held}
            if mine:  # others may be of another optimizer than SGD, which is refused for tables
                self._groups.append(_Group(optimizer, index, mine, ownership.steps()))
        self._group_of = {name: group for group in self._groups for name in group.tables}

    def _key(self) -> RandomKey:
        """The key of the noise that rows wait for. It is kept, as every lookup asks for it, until a run is resumed."""
        if self._keys is None or self._keys[0] is not self.run.key():
            self._keys = self.run.key(), self.run.key().child(WAITING)
        return self._keys[1]

    def attach(self, settler: Owner | None = None) -> Callable[[Callable, tuple, dict], None]:
        self._guard = settler or self
        for name, parameter in self.run.parameters.items():
            guard(parameter, self._guard, name)
        return settle_before

    def detach(self) -> None:
        self.settle_all()
        for parameter in self.run.parameters.values():
            unguard(parameter)

    # ------------------------------------------------------------------ before a read

    def before_read(self, name: str, rows: Tensor | None) -> None:
        """Gives rows the noise that they are owed. Repeated ones are settled once.

        All rows if some number is negative, which counts from the end, or too large, which is torch's to refuse.
        """
        if rows is None:
            self.settle_all([name])
            return
        with self.run.stage("settling"):
            self._settle(name, rows)

    def _settle(self, name: str, ids: Tensor) -> None:
        self._require_intact()
        group = self._group_of[name]
        table = group.tables[name]
        if table.settled >= group.pending.steps or not table.trained:
            return
        flat = ids.reshape(-1)
        flat.cpu().numpy()  # ids without memory, such as torch.vmap's, fail here: later, rows would be claimed without noise
        flat = flat - table.owned.start if table.owned.start else flat
        with self._settling(table):
            claimed = loops.claim(table.since, flat, group.pending.steps)
            if claimed is not None:
                self._make_momentum(group, table)
                rows, since = claimed
                pieces = split(len(rows), table.width // _SHARED)
                on_all_cores(lambda part: self._move(group, table, rows[part], since[part]), pieces)
        if claimed is None:
            self._settle_table(name, group, table)

    def settle_all(self, names: Collection[str] | None = None) -> None:
        """Settles all rows of some tables, or of all."""
        with self.run.stage("settling"):
            self._require_intact()
            for name, group in self._group_of.items():
                table = group.tables[name]
                if (names is None or name in names) and table.trained and table.settled < group.pending.steps:
                    self._settle_table(name, group, table)

    def pending(self) -> dict[str, int]:
        """How many rows of each table are owed noise."""
        return {
            name: int((group.tables[name].since < group.pending.steps).sum()) if group.tables[name].trained else 0
            for name, group in self._group_of.items()
        }

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Within it all weights are replaced; afterwards all rows are settled. If that fails, it is as before."""
        broken = self.broken
        if not broken:
            self.settle_all()
        self._restart_all()
        try:
            yield
        except BaseException:
            self.broken = broken
            raise
        self._restart_all()

    def _restart_all(self) -> None:
        for group in self._groups:
            self._restart(group)
        self.broken = False

    def _settle_table(self, name: str, group: _Group, table: _Table) -> None:
        rows, width = len(table.since), table.width
        size = max(1, _CHUNK // max(1, width))
        self._make_momentum(group, table)
        told = threading.Lock()  # the chunks are settled by several threads
        progress = self.run.progress if rows * width > _LONG else no_progress
        with progress(f"settling {name}", rows) as advance, self._settling(table):

            def settle(first: int) -> None:
                ids = torch.arange(first, min(first + size, rows))
                claimed = loops.claim(table.since, ids, group.pending.steps)
                assert claimed is not None
                self._move(group, table, *claimed)
                with told:
                    advance(len(ids))

            on_all_cores(settle, range(0, rows, size))
        table.settled = group.pending.steps

    def _restart(self, group: _Group) -> None:
        group.pending.restart()
        group.steps.clear()
        group.first = self._steps()
        for table in group.tables.values():
            table.since.zero_()
            table.settled = 0

    # ------------------------------------------------------------------ settling rows

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Around claiming rows and moving them: if that is interrupted, nothing can be read any more."""
        with self._lock:
            self.broken = True
            yield
            self.broken = False

    @contextmanager
    def _settling(self, table: _Table) -> Iterator[None]:
        """Settling is no change of the weights: to whoever reads them, they always had this noise."""
        with without_subclasses():
            weight = table.parameter.detach()
        with preserved_version(weight), self._moving():
            yield

    def _require_intact(self) -> None:
        with self._lock:  # another thread may be settling
            if self.broken:
                raise SparseDPError(
                    "Settling was interrupted: some rows lack noise that they are owed, and which is not known. Load a "
                    "checkpoint, or start again."
                )
        if os.getpid() != self._process:
            raise SparseDPError(
                "This process was forked from the one that trains: both would give the same rows different noise. Call "
                "engine.settle() before, and engine.close() to hand the weights on."
            )

    def _move(self, group: _Group, table: _Table, rows: Tensor, since: Tensor) -> None:
        """Takes rows that are settled up to the steps `since` to the present."""
        if rows.numel() == 0:
            return
        before = since.numpy()
        with without_subclasses():
            weight, momentum = self._tensors(group, table)
            if not self._aggregate:
                self._settle_by_step(group, table, weight, momentum, rows, before)
            elif self._std == 0:
                if group.pending.drifts:
                    _drift(group.pending.transition(before), weight, momentum, rows)
            else:
                self._settle_at_once(group, table, weight, momentum, rows, before)

    def _settle_at_once(
        self, group: _Group, table: _Table, weight: Tensor, momentum: Tensor | None, rows: Tensor, since: np.ndarray
    ) -> None:
        """One draw with the variance, or covariance, of all steps that are pending; the result is rounded to a grid."""
        now, grids, pending = group.first + group.pending.steps, self._grids(group), group.pending
        key = self._key().child(_AGGREGATED, table.index, now)
        if momentum is not None:
            momentum_key = self._key().child(_MOMENTUM, table.index, now)
            drift, std = pending.transition(since), self._std * pending.deviation(since)
            with table.in_whole_rows(rows, weight, momentum) as (places, numbers, (w, v)):
                move_row_pairs((key, momentum_key), w, v, places, drift, std, grids, None, numbers)
        elif grids[0]:  # otherwise the learning rate was 0
            factor = pending.transition(since)[0] if pending.drifts else None
            std = self._std * pending.deviation_of_weights(since)
            with table.in_whole_rows(rows, weight) as (places, numbers, (w,)):
                add_row_normals(key, w, places, std, grids[0], factor, numbers)

    def _grids(self, group: _Group) -> tuple[float, float]:
        """The grids of settled weights and momenta, by the noise of one step: all that is pending has at least as much.

        They depend on the present alone. If they depended on how long a row waited, they would tell when it was touched.
        """
        weight, momentum = (grid_of(self._std * reach) for reach in group.pending.reach)
        return weight and max(weight, _FINEST), momentum and max(momentum, _FINEST)

    def _refines(self, group: _Group, step: Coefficients) -> bool:
        """Whether a step's grid of weights is so much finer than the one before that rows on the old one would stand out.

        The rows on the old grid are those that were read for this step. So that they do not stand out, all rows have to be
        on it. With momentum w' + lr v' is w from before the step, without its noise: no difference is too small to see.
        """
        before, after = self._grids(group)[0], grid_of(self._std * abs(step.gw))
        if not self._aggregate or not before or not after:
            return False
        return max(after, _FINEST) < before * (1.0 if step.has_momentum else _REFINED)

    def _settle_by_step(
        self, group: _Group, table: _Table, weight: Tensor, momentum: Tensor | None, rows: Tensor, since: np.ndarray
    ) -> None:
        """The noise of each pending step, as eager DP-SGD would have drawn it."""
        for step in range(int(since.min()), group.pending.steps):
            mine = rows[torch.from_numpy(since <= step)]
            self._take_step(group, table, weight, momentum, mine, step, None)

    def _take_step(
        self, group: _Group, table: _Table, weight: Tensor, momentum: Tensor | None, rows: Tensor, step: int,
        sums: Tensor | None,
    ) -> None:  # fmt: skip
        """Moves rows by one of the pending steps, with its noise and the sums of their gradients, rounded together."""
        total = torch.zeros_like(weight[rows]) if sums is None else sums
        if self._std > 0:
            key = self._key().child(STEP, table.index, group.first + step)
            like = weight if table.columns is None else weight.new_empty(0, table.width)
            noise = row_normals(key, rows + table.owned.start, like)
            if table.columns is not None:
                noise = noise[:, table.columns.start : table.columns.stop]
            total = round_to(self._std * noise.double() + total, grid_of(self._std)).to(weight)
        moved = group.steps[step].take(weight[rows], None if momentum is None else momentum[rows], total)
        for state, values in zip((weight, momentum), moved):
            if state is not None and values is not None:
                state[rows] = values

    def _make_momentum(self, group: _Group, table: _Table) -> None:
        """Makes the momentum, if there is one, before several threads would each make it."""
        if group.pending.has_momentum:
            self._momentum(table)

    def _tensors(self, group: _Group, table: _Table) -> tuple[Tensor, Tensor | None]:
        """The owned rows of a table, and of its momentum if there is one. Call with torch functions of subclasses disabled.

        They are ordinary tensors: subclasses are disabled in this thread alone, and in others a guarded momentum would wait
        for the lock of whoever settles.
        """
        momentum = table.owned_rows_of(self._momentum(table).detach()) if group.pending.has_momentum else None
        return table.owned_rows_of(table.parameter.detach()), momentum

    def _momentum(self, table: _Table) -> Tensor:
        """torch's momentum buffer of a table, which it would make at the first step."""
        state = self._optimizer.state[table.parameter]
        with without_subclasses():
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = torch.zeros_like(table.parameter.detach(), memory_format=torch.contiguous_format)
            if type(buffer) in (Tensor, nn.Parameter):  # new, or loaded
                buffer = buffer.as_subclass(Tensor)
                if self._guard is not None:
                    buffer = guarded_alias(buffer, self._guard, table.name)
                state["momentum_buffer"] = buffer
        return buffer

    # ------------------------------------------------------------------ a step

    def begin(self, trained: Collection[str]) -> None:
        """Before a step: checks that it can be taken lazily, and settles what has to be settled for it.

        `trained` names the tables that are not frozen. One that was frozen since is owed nothing for that time.
        """
        for group in self._groups:
            step = group.coefficients
            if any(name in trained for name in group.tables) and not step.has_momentum and step.pull_back() is None:
                raise UnsupportedError(
                    "LazyDP cannot take a step without momentum and with a learning rate times weight decay close to 1. "
                    "Change one of them."
                )
            frozen = [name for name, table in group.tables.items() if table.trained and name not in trained]
            self.settle_all(frozen)
            # Waiting rows would have to carry their momentum from before.
            starts = step.has_momentum and not group.pending.has_momentum
            if group.pending.full or (starts and group.pending.steps):
                self.settle_all(group.tables)
                self._restart(group)
            elif self._refines(group, step):
                self.settle_all(group.tables)
            for name, table in group.tables.items():
                if name in trained and not table.trained:
                    table.since.fill_(group.pending.steps)
                    table.settled = group.pending.steps
                table.trained = name in trained

    def apply(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Lets rows that were settled before this step take its gradients, without noise where rounding allows that.

        With momentum they take its noise, too: w and v would otherwise be rounded apart while they wait, by as much as
        their sums decide, and after one step w tells v but for rounding.
        """
        group = self._group_of[name]
        table = group.tables[name]
        assert table.trained
        rows = rows - table.owned.start if table.owned.start else rows
        with torch.no_grad(), without_subclasses():
            weight, momentum = self._tensors(group, table)
            if self._aggregate and not group.pending.has_momentum:
                if group.coefficients.gw:
                    self._take_gradients(group, table, weight, rows, values)
                return
            step, sums = group.pending.steps - 1, values.reshape(len(rows), *weight.shape[1:])
            with self._moving():
                claimed = loops.claim(table.since, rows, group.pending.steps)
                assert claimed is not None and bool((claimed[1] == step).all()), "rows must be settled before a step"
                if momentum is None or not self._aggregate or self._std == 0:
                    self._take_step(group, table, weight, momentum, rows, step, sums)
                else:
                    pieces = split(len(rows), table.width // _SHARED)
                    on_all_cores(
                        lambda part: self._take_pairs(group, table, weight, momentum, rows[part], sums[part]), pieces
                    )

    def _take_gradients(self, group: _Group, table: _Table, weight: Tensor, rows: Tensor, values: Tensor) -> None:
        """One step of touched rows without momentum: their gradients now, and the noise when they are read again.

        Between the two, w + lr S is rounded to the numbers of w's type. Where these lie farther apart than the points of the
        grid, a unit could move it by several times lr C: such rows take gradient and noise together. Who does is decided by w
        from before the step, which has its noise.
        """
        pulled = group.coefficients.pull_back()
        assert pulled is not None  # `begin` refuses it
        if self._std == 0:
            loops.move_rows(weight, rows, values, pulled)
            return
        grid = self._grids(group)[0]
        # Of a shard, its columns alone decide: a row may take its noise now in some columns and later in others, by other
        # keys than in the whole table. Columns are independent, so the law is the same.
        beyond = loops.move_rows_within(weight, rows, values, pulled, 2 * grid / torch.finfo(weight.dtype).eps)
        if len(beyond) == len(rows):  # mostly all rows of a table are alike: no copies of their gradients
            self._take_together(group, table, weight, rows, values, grid)
        elif len(beyond):
            chosen, sums = rows.index_select(0, beyond), values.index_select(0, beyond)
            self._take_together(group, table, weight, chosen, sums, grid)

    def _take_together(
        self, group: _Group, table: _Table, weight: Tensor, rows: Tensor, sums: Tensor, grid: float
    ) -> None:
        """One step of touched rows without momentum: their gradients and its noise, rounded together."""
        step, now = group.coefficients, group.first + group.pending.steps
        with self._moving():
            claimed = loops.claim(table.since, rows, group.pending.steps)
            assert claimed is not None and len(claimed[0]) == len(rows), "rows must be settled before a step"
            # Of a row that waited longer, the noise from before would be lost.
            assert bool((claimed[1] == group.pending.steps - 1).all()), "rows must be settled before a step"
            key, std = self._key().child(_TOUCHED, table.index, now), self._std * step.gw

            def move(part: slice) -> None:
                with table.in_whole_rows(rows[part], weight) as (places, numbers, (w,)):
                    added = table.widened(sums[part])
                    move_rows_by_noise(key, w, places, step.ww, std, added, step.gw, grid, numbers)

            on_all_cores(move, split(len(rows), table.width // _SHARED))

    def _take_pairs(
        self, group: _Group, table: _Table, weight: Tensor, momentum: Tensor, rows: Tensor, sums: Tensor
    ) -> None:
        """One step of touched rows and their momenta."""
        coefficients, now = group.coefficients, group.first + group.pending.steps
        drift = np.tile(
            np.array([[coefficients.ww], [coefficients.wv], [coefficients.vw], [coefficients.vv]]), len(rows)
        )
        std = np.tile(self._std * np.array([[coefficients.gw], [coefficients.gv], [0.0]]), len(rows))
        key = self._key().child(_TOUCHED, table.index, now)
        shift = table.widened(sums / self._std)
        with table.in_whole_rows(rows, weight, momentum) as (places, numbers, (w, v)):
            move_row_pairs((key, key), w, v, places, drift, std, self._grids(group), shift, numbers)

    def advance(self) -> None:
        """Takes a step: all rows are owed its noise."""
        for group in self._groups:
            step = group.coefficients
            group.steps.append(step)
            group.pending.advance(step)


def _drift(phi: np.ndarray, weight: Tensor, momentum: Tensor | None, rows: Tensor) -> None:
    """What weight decay and momentum do to rows while nothing touches them: x = Phi x."""
    shape = (-1, *[1] * (weight.ndim - 1))
    if momentum is None:
        weight[rows] *= _scale(phi[0], weight).view(shape)
        return
    w, v = weight[rows], momentum[rows]
    ww, wv, vw, vv = (_scale(part, weight).view(shape) for part in phi)
    weight[rows] = ww * w + wv * v
    momentum[rows] = vw * w + vv * v


def _scale(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.dtype)
