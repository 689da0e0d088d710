"""Watches a module's forward passes and collects every use of its private parameters.

While the module runs, a `TorchFunctionMode` sees every torch operation. Each tensor is one of: computed from the batch
(`UnitData`), computed from private parameters alone (`Expression`), or constant. An operation in which the
first two meet is a use: it runs with the parameter detached, so that autograd never forms a weight gradient,
and its output's gradient is kept with its input. An operation without a rule is refused. A use that is not seen
leaves an ordinary gradient at the parameter, which raises.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.modules.module as _module_hooks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.functions import APPLY, Functions
from sparsedp.capture.inputs import (
    NamedInput,
    PlainInputs,
    PublicInputs,
    advice,
    has_units_first,
    named_inputs,
    slots_of,
)
from sparsedp.capture.owners import Grouping
from sparsedp.capture.randomness import (
    COUNTING,
    TRAINING,
    WITHOUT_GRADIENT,
    Draws,
    GlobalGenerators,
    draws_nothing,
    may_draw,
    refuse_moved,
)
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.scripted import ScriptedFunctions
from sparsedp.capture.tracking import (
    POINTWISE,
    SAME_SHAPE_IN_PLACE,
    SHAPE_IN_PLACE,
    Info,
    Mixed,
    UnitAxis,
    UnitData,
    WholeBatch,
    follow,
    is_followed,
    plain_name,
    written_axis,
)
from sparsedp.capture.uses import ParameterUses, RowNorms, Use
from sparsedp.errors import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

# Operations that normalise over the batch, and the argument that says whether they do.
_BATCH_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
# Forward passes over one batch that a backward pass may come by at once, and that are looked at then.
_PASSES = 64
# Those that have the name of a function in torch.nn.functional, and their arguments in another order.
_OTHER_ORDER = {torch.embedding, torch.embedding_bag}
# Operations that take from a batch tensor only its shape, type or device.
_SHAPE_ONLY = {"expand_as", "view_as", "reshape_as", "type_as", "to", "is_same_size"}


class HasUnits(Protocol):
    """A batch that the loop works on; two batches are the same if they are the same object."""

    @property
    def units(self) -> int: ...

    @property
    def examples(self) -> int: ...

    @property
    def owners(self) -> Tensor | None: ...

    @property
    def offsets(self) -> tuple[Tensor, ...]: ...  # tensors with an entry for each example, which other examples decide

    @property
    def constants(self) -> tuple[Tensor, ...]: ...  # tensors that are the same in every batch

    @property
    def unit_axes(self) -> tuple[tuple[Tensor, int | None], ...]: ...  # tensors of the batch, and where their units are


@dataclass(frozen=True, eq=False)
class _Unnumbered:
    """A batch that no loader announced: its units are its examples."""

    units: int
    owners: Tensor | None = None
    offsets: tuple[Tensor, ...] = ()
    constants: tuple[Tensor, ...] = ()
    unit_axes: tuple[tuple[Tensor, int | None], ...] = ()

    @property
    def examples(self) -> int:
        return self.units


@dataclass(eq=False)
class Record:
    """A use whose output gradient arrives during backward. `finish` turns the gradient into uses of parameters."""

    finish: Callable[[Tensor], Placed]
    batch: HasUnits
    kept: list[Kept]  # what `finish` makes uses of
    use: tuple[str, list[Expression]]  # the operation, and what it uses of parameters
    grad: Tensor | None = None
    version: int = 0  # of `grad` as it arrived
    arrived: bool = False  # a backward pass came by, maybe with no gradient at all

    def final_grad(self) -> Tensor:
        assert self.grad is not None
        if self.grad._version != self.version:
            operation, expressions = self.use
            raise UnsupportedError(
                f"The gradient of operation '{operation}' on parameter {', '.join(e.names for e in expressions)} was modified in "
                "place after it had arrived, by a hook or in the backward() of a custom function outside of forward(). Other "
                "operations may have the same gradient: change a copy, grad.clone(). Nothing was written."
            )
        return self.grad


class Surroundings(NamedTuple):
    """Of an operation in a forward pass, for what belongs to it in the backward pass."""

    batch: HasUnits
    storages: dict[int, list[tuple[str, Tensor]]]  # the module's parameters and buffers by their memory
    stack: list[str]  # the names of the modules that run


class _TensorInfo:
    """What is known of a tensor, until it dies. By identity: tensors compare element by element."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        entry = self._known.get(id(tensor))
        return None if entry is None else entry[1]

    def __getitem__(self, tensor: Tensor) -> Any:
        return self._known[id(tensor)][1]

    def tensors(self) -> list[Tensor]:
        return [tensor for reference, _ in list(self._known.values()) if (tensor := reference()) is not None]

    def __setitem__(self, tensor: Tensor, info: Any) -> None:
        known, key = self._known, id(tensor)

        def forget(dead: weakref.ref) -> None:
            if key in known and known[key][0] is dead:
                del known[key]

        known[key] = (weakref.ref(tensor, forget), info)

    def forget(self, tensor: Tensor) -> None:
        self._known.pop(id(tensor), None)


class Kept:
    """A tensor that a use needs after backward; changing it in place meanwhile is an error."""

    def __init__(self, tensor: Tensor, operation: str, names: str, where: str) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version
        self._operation, self._names, self._where = operation, names, where

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise UnsupportedError(
                f"The input of operation '{self._operation}' on parameter {self._names}{self._where} was modified in place "
                "before step(), or before the last physical batch's step() where a selection waits for it, so its gradient "
                "cannot be formed. Use the operation that returns a new tensor, and a new tensor for every batch."
            )
        return self._tensor


class _Source(torch.autograd.Function):
    """Makes a tensor the start of a history, or the next in that of `before`, so that its gradient can be seen.

    The tensor comes in a list, so that it is no input of the function: torch would give back a view of an input.
    """

    apply = APPLY  # without what torch does for others' functions, and without `Functions`

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, before: Tensor | None, receive: Callable[[Sequence[Tensor]], None], box: list[Tensor]
    ) -> Tensor:
        ctx.receive, ctx.goes_on = receive, before is not None
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        ctx.receive(grads)
        return None, grads[0] if ctx.goes_on else None, None, None


@dataclass
class Captured:
    """The uses of every private parameter by the units of one physical batch.

    `uses` keep the examples of the batch apart. A unit's gradient is the sum of its examples' gradients: `owners`, int64
    (examples,), says which unit each of them belongs to; None: example i is unit i.
    """

    units: int
    uses: dict[str, ParameterUses]
    _touched: TouchedRows | None = None
    owners: Tensor | None = None
    kept: list[Kept] = field(default_factory=list)  # tensors that the uses share their memory with
    _grouped: Grouping | None = None

    @property
    def examples(self) -> int:
        return self.units if self.owners is None else len(self.owners)

    def hold(self) -> None:
        """Before other batches come: what no use shares its memory with need not stay."""
        uses = [use for own in self.uses.values() for use in (*own.lookups, *own.linears, *own.builts, *own.softmaxes)]
        tensors = [value for use in uses for value in vars(use).values() if isinstance(value, Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.kept = [kept for kept in self.kept if kept.get().untyped_storage().data_ptr() in memory]

    def require_unchanged(self) -> None:
        """Raises if the memory of uses was changed since."""
        for kept in self.kept:
            kept.get()

    def touched(self, space: RowSpace) -> TouchedRows:
        """The lookups grouped by row, which is done once."""
        if self._touched is None or self._touched.space != space:
            self._touched = TouchedRows(self.uses, space, self.units, self.owners)
        return self._touched

    def squared_norms(self, uses: ParameterUses, known: RowNorms | None = None) -> Tensor:
        """Squared norm of each unit's gradient, (units,), by `uses` of one parameter; see `ParameterUses`."""
        if self.owners is None:
            return uses.squared_norms(self.units, known)
        if self._grouped is None:
            self._grouped = Grouping(self.owners, self.units)
        return self._grouped.squared_norms(uses)

    def each(self, factors: Tensor) -> Tensor:
        """A factor for each unit as one for each example, (examples,): what the weighted sums of `uses` take."""
        return factors if self.owners is None else factors[self.owners]


class Capture:
    """Collects the uses of `parameters` (by name) in the forward passes of `module`.

    `current_batch` gives the batch that the loop works on; None if there is none yet. The random numbers of the forward
    passes come from `draws`; None: from a key of their own. `public` says which inputs without an axis of units may meet
    units, and the others are refused where they do; None: all may, which `sparsedp.check` compares. `generator` picks when
    custom functions are tried (`Functions`).
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        current_batch: Callable[[], HasUnits | None] = lambda: None,
        draws: Draws | None = None,
        public: PublicInputs | None = None,
        generator: CipherGenerator | None = None,
    ) -> None:
        from sparsedp.capture.rules import public_ids, run_use  # which are written with this class

        self._run_use, self._public_ids = run_use, public_ids
        self._module = module
        self._own = {
            id(parameter): Expression(parameter, ((name, parameter),)) for name, parameter in parameters.items()
        }
        self._current_batch = current_batch
        self._public, self._plain_inputs = public, PlainInputs()
        self._tape: list[Record] = []
        self._info = _TensorInfo()
        self._mode = _Mode(self)
        self._stack: list[str] = []
        self._anchor = torch.zeros((), requires_grad=True)
        # The node that only a backward pass over the whole graph runs, not torch.autograd.grad for some inputs.
        with torch.enable_grad():
            self._anchor_node: Any = self._anchor.view_as(self._anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._handles: list[Any] = []
        # What a forward pass must not change: identity and version of the module's tensors as it began, and their memory.
        # Later, another tensor may stand in for one.
        self._kept: dict[str, tuple[int, int]] = {}
        self._storages: dict[int, list[tuple[str, Tensor]]] = {}
        self._went_back = False  # whether a backward pass ran since then that nobody collected
        # Numbers that a forward pass changes without looking at the batch, before it did, and by how much the first one did.
        self._before: dict[str, Tensor] = {}
        self._increments: dict[str, Tensor] = {}
        self._keeping: list[Kept] = []  # for the next record
        self._written: dict[int, Tensor] = {}  # memory that units were written to in this forward pass
        self._held: dict[
            int, tuple[StorageWeakRef, HasUnits]
        ] = {}  # in earlier ones, as long as it lives; of which batch
        self._taken_out = ""  # the operation that made a Python number or an array of units in this pass
        self._functions = Functions(self, generator)
        self._scripted = ScriptedFunctions(self, self._functions.halves)
        # What was made or changed with gradients off, since they were last on, and what it came from then.
        self._hidden: list[tuple[weakref.ref[Tensor], Any]] = []
        self._weak = weakref.ref(self)
        self._use: tuple[str, list[Expression]] = ("", [])  # that runs now
        # The uses that wait for a backward pass: number of the forward pass, the node that made the output, the record.
        self._awaited: list[tuple[int, Any, Record]] = []
        self._expected: list[Record] = []  # those that a backward pass comes by
        self._passes = self._records = 0  # how many there were
        self._collected: HasUnits | None = None  # the last batch whose uses were collected
        self._task = -1  # the last backward pass
        self._foreign = False  # whether a tensor that is not private asks for its gradient in this forward pass
        self._glanced: Placed | None = None
        self._glanced_at: HasUnits | None = None
        self._batch: HasUnits = _Unnumbered(0)
        self.draws = Draws(RandomKey.from_os()) if draws is None else draws
        self._generators = GlobalGenerators()
        self._places: dict[str, Any] | None = None  # of them as a forward pass began; None where it may use them
        # Called with each operation of a forward pass: settles the rows of lazy tables that it reads.
        self.before_read: Callable[[Callable, tuple, dict], None] | None = None

    @property
    def units(self) -> int:
        """How many places the unit axis has in the forward pass that runs now, or ran last: one for each example.

        Where the units are users, their examples are still kept apart here, and added up afterwards (`Captured`).
        """
        return self._batch.examples

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Starts to watch the module; changes nothing if that is refused."""
        for module in self._module.modules():
            if any(isinstance(hook, _Before) for hook in module._forward_pre_hooks.values()):
                raise UnsupportedError(
                    "The module is private already, under another engine: call that engine's close()."
                )
        for name, parameter in self._module.named_parameters():
            if parameter._backward_hooks:
                raise UnsupportedError(
                    f"Parameter '{name}' has a gradient hook, which would see no gradient. Remove it; to train a part of a "
                    "parameter, make that part a parameter of its own."
                )
        for name, module in self._module.named_modules():
            _refuse_backward_hooks(name, module)
        for name, module in self._module.named_modules():
            self._handles.append(module.register_forward_pre_hook(_Before(self, name), with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(_After(self), always_call=True))
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(_ordinary_gradient_hook(name))
                self._handles.append(hook)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()
        self._awaited.clear()

    def clear(self) -> None:
        """Forgets collected uses, and leaves a forward pass that was interrupted."""
        for record in self._tape:
            record.grad = None
        self._tape.clear()
        self._expected.clear()
        self._awaited = [entry for entry in self._awaited if not entry[2].arrived]  # backward may be yet to come
        while self._stack:
            self._leave()

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        _refuse_compilation()
        _refuse_backward_hooks(name, module)
        if not self._stack:
            self._begin(name, args, kwargs)
            self._mode.__enter__()
            self._functions.begin()
            self._scripted.begin()
        self._stack.append(name)

    def leave(self, output: Any = None) -> None:
        if not self._stack:
            return
        self._leave()
        if not self._stack:
            if torch.is_grad_enabled():
                self._watch_outputs(output)
            with torch._C.DisableTorchFunctionSubclass():
                tensors = named_tensors(self._module)
                versions = _versions(tensors)
                if self._before:
                    self._require_same_increments(dict(tensors))
            changed = [name for name, version in versions.items() if self._kept.get(name) != version]
            for memory, tensor in self._written.items():
                self._held[memory] = StorageWeakRef(tensor.untyped_storage()), self._batch
            self._storages, self._written = {}, {}
            self.require_history()
            if changed:
                raise self._refuse_write(changed[0])
            if self._places is not None:
                refuse_moved(self._places, self._generators.places())

    def _watch_outputs(self, output: Any) -> None:
        """A loss may not depend on an output that capture did not see being made."""
        for tensor in _all_tensors(output, objects=True):
            known = self._info.get(tensor)
            if not isinstance(known, (Mixed, _Derived)) and self.known_axis(tensor) is None:
                self._refuse_in_loss(tensor, is_unseen=known is None)

    def _refuse_in_loss(self, tensor: Tensor, is_unseen: bool = False) -> None:
        """Units may be mixed in `tensor`, as it is not known where they are: no loss may depend on it."""
        with torch._C.DisableTorchFunction():
            node: Any = tensor.grad_fn if tensor.requires_grad and self.units > 1 else None
        if node is not None:
            node.register_prehook(self._refuser(tuple(tensor.shape), is_unseen))

    def _refuser(self, shape: tuple[int, ...], is_unseen: bool) -> Callable[[Any], None]:
        """Raises in a backward pass over the whole graph, not where torch.autograd.grad asks for some inputs' gradients."""
        anchor, units = self._anchor_node, self.units

        def refuse(grads: Any) -> None:
            if not torch._C._will_engine_execute_node(anchor):
                return
            why = "was made where capture does not see it" if is_unseen else "has them in a place that is not known"
            raise UnitsMixedError(
                f"The loss depends on a tensor of shape {shape}, made in forward(), that may mix the {units} units of the batch: "
                f"it {why}. A mean over what a mask picks from all units, say, divides by everybody's number. Keep the batch on "
                "an axis of its own, and let the loss be a mean or sum over units of something that each unit decides alone."
            )

        return refuse

    def _leave(self) -> None:
        self._stack.pop()
        if not self._stack:
            self._functions.end()
            self._scripted.end()
            self._mode.__exit__(None, None, None)

    def _require_same_increments(self, tensors: Mapping[str, Tensor]) -> None:
        """A counter may count forward passes, but not what is in them: Python numbers, such as len(x), are not followed."""
        for name, before in self._before.items():
            now = tensors.get(name, before).detach()
            increment = now != before if before.dtype == torch.bool else now - before
            if increment.any() and not torch.equal(self._increments.setdefault(name, increment), increment):
                raise self._refuse_write(name)

    def _refuse_write(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"'{name}' was changed during forward{self._where()}. What a buffer or a parameter keeps of private data reaches "
            "the state_dict without noise. Keep such state outside of the module, or freeze the layer with eval()."
        )

    def _begin(self, called: str, args: tuple, kwargs: dict) -> None:
        """Marks the inputs of a forward pass as data of its units."""
        if torch.is_grad_enabled():
            _refuse_surroundings()
        self._begin_draws()
        self._taken_out = ""
        self._held = {memory: held for memory, held in self._held.items() if not held[0].expired()}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = named_tensors(self._module)
            self.require_unwritten(tensors)
            self._kept, self._storages, self._keeping = _versions(tensors), {}, []
            self._went_back = False
            self._before, self._written = {}, {}
            for name, tensor in tensors:
                if tensor.layout != torch.strided:
                    raise UnsupportedError(
                        f"'{name}' is a sparse tensor. What it does to the units of a batch cannot be followed. Use a dense "
                        "one, or look rows up by their ids."
                    )
                self._storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        inputs = list(_all_tensors((args, kwargs), objects=True))
        batch = self._find_batch(inputs)
        self._await_anew(batch)
        if batch is not self._batch and not isinstance(batch, _Unnumbered):
            self._part_with_earlier_batches(inputs)
        self._batch = batch
        self._foreign = any(tensor.requires_grad and tensor.is_leaf for tensor in inputs)
        apart = not self._batch.offsets and not self._batch.constants  # whether every input has the units on axis 0
        for tensor in inputs:
            known = self._info.get(tensor)
            if isinstance(known, (UnitData, Mixed)) and known is not _EARLIER:
                continue
            if not tensor.is_leaf and tensor.requires_grad:
                raise UnsupportedError(
                    "A module was called with a tensor that other operations made of private activations outside of "
                    "forward(), so its units cannot be followed. Make these operations part of the module's forward()."
                )
            fits = tensor.ndim > 0 and tensor.shape[0] == self.units and has_units_first(tensor, batch.unit_axes)
            if (tensor.requires_grad or not fits) and self._whose_memory(tensor) is not None:
                continue  # the module's own: one of its parts was called with it
            self._info[tensor] = UnitData(UnitAxis(0)) if fits else _SHARED
            apart = apart and fits
        if self._public is not None:
            if torch.is_grad_enabled():
                self._public.refuse_divisors(kwargs)
            if not apart or self._public.names or not all(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
                self._judge_inputs(self._public, list(named_inputs(self._module.get_submodule(called), args, kwargs)))

    def _part_with_earlier_batches(self, inputs: list[Tensor]) -> None:
        """What a module kept of another batch is not this batch's: none of its units may meet it."""
        for tensor in self._info.tensors():
            if isinstance(self._info.get(tensor), (UnitData, Mixed)):
                self._info[tensor] = _EARLIER
        for tensor in inputs:
            if tensor.is_leaf or not tensor.requires_grad:
                self._info.forget(tensor)

    def _judge_inputs(self, public: PublicInputs, inputs: list[NamedInput]) -> None:
        """Tells inputs that are the same whoever is in the batch, which count as constants, from those that may not be."""
        if torch.is_grad_enabled():
            self._plain_inputs.refuse(inputs, public, self.units)
        for named in inputs:
            tensor = named.value
            if not isinstance(tensor, Tensor):
                continue
            known = self._info.get(tensor)
            if public.declares(named) or _is_among(tensor, self._batch.constants):
                self._info.forget(tensor)
            elif _is_among(tensor, self._batch.offsets):
                self._info[tensor] = WholeBatch(named.path)
            elif known is _SHARED:
                if public.holds(tensor):
                    self._info.forget(tensor)
                else:
                    self._info[tensor] = WholeBatch(named.path)

    def _await_anew(self, batch: HasUnits) -> None:
        """What waits for backward holds on to the graph of its forward pass: not for long, if backward never comes."""
        if torch.is_grad_enabled():
            self._passes += 1
            oldest = self._passes - _PASSES if batch is self._batch else self._passes
            self._awaited = [entry for entry in self._awaited if entry[0] > oldest]

    def _begin_draws(self) -> None:
        """Whatever a pass draws that may reach a gradient comes from the key; evaluation draws as the user has it."""
        if not (torch.is_grad_enabled() or self._module.training):
            self._places = None
            return
        self._places = self._generators.places()
        kind = TRAINING if torch.is_grad_enabled() else WITHOUT_GRADIENT
        self.draws.begin(kind if self._glanced is None else COUNTING)

    def _find_batch(self, inputs: list[Tensor]) -> HasUnits:
        sizes = [tensor.shape[0] for tensor in inputs if tensor.ndim > 0]
        expected = self._current_batch() if self._glanced is None else self._glanced_at
        if expected is not None and (expected.examples in sizes or len(set(sizes)) != 1):
            return expected
        if not sizes:
            raise UnsupportedError(
                "The module was called without any tensor, so its units cannot be told apart. "
                "Pass the batch to forward() as tensors (or tuples, lists, dicts or dataclasses of them)."
            )
        return _Unnumbered(sizes[0])

    # ------------------------------------------------------------------ after backward

    def collect(self, tensors: list[tuple[str, Tensor]] | None = None) -> Captured | None:
        """The uses of the backward passes since the last call; None if there were none.

        `tensors` are the module's `named_tensors`, where the caller has them already.
        """
        self.require_unwritten(tensors)
        tape, self._tape, self._went_back, self._written = self._tape, [], False, {}
        self._require_gradients()
        if not tape:
            return None
        batch = self._collected = tape[0].batch
        self._require_current(batch)  # again: the loader may have gone on since backward
        uses: dict[str, list[Use]] = {}
        for record in tape:
            for name, use in record.finish(record.final_grad()):
                uses.setdefault(name, []).append(use)
            record.grad = None
        return _captured(batch, uses, [kept for record in tape for kept in record.kept])

    def require_unwritten(self, tensors: list[tuple[str, Tensor]] | None = None) -> None:
        """Raises if a backward pass, or what came after it, changed a parameter or a buffer."""
        if not self._went_back:
            return
        with torch._C.DisableTorchFunctionSubclass():
            kept, now = self._kept, named_tensors(self._module) if tensors is None else tensors
            changed = [name for name, tensor in now if kept.get(name) != (id(tensor), tensor._version)]
        if changed:
            raise UnsupportedError(
                f"'{changed[0]}' was changed between forward() and step(), in backward() or after it (by a custom function, a "
                "hook, or the loop?). What a buffer or a parameter keeps of gradients reaches the state_dict without noise, so "
                "it must not leave: begin anew, or load a checkpoint. Keep such state outside of the module. What does not "
                "depend on the batch may be changed after step()."
            )

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While a checkpoint brings other parameters and buffers: what was changed before is gone, unless that fails."""
        went_back, self._went_back = self._went_back, False
        try:
            yield
        except BaseException:
            self._went_back = went_back
            raise

    @property
    def has_collected(self) -> bool:
        """Whether a backward pass left gradients that nobody collected."""
        return bool(self._tape)

    def glance(self, run: Callable[[], Any], batch: HasUnits | None = None) -> Captured:
        """The uses of one forward pass, `run()`, without a backward pass: their gradients are zero.

        It is over `batch`; None: over the examples that its first input has.
        """
        self._glanced, self._glanced_at = [], batch
        try:
            with torch.enable_grad():
                run()
            uses: dict[str, list[Use]] = {}
            for name, use in self._glanced:
                uses.setdefault(name, []).append(use)
            if batch is not None and self._batch is not batch:
                raise UnsupportedError(
                    f"The module was run on {self.units} examples instead of the {batch.examples} that were read, so it is not "
                    "known whose they are. collate_fn, and `inputs` of the mechanism, must neither drop nor repeat examples."
                )
            return _captured(self._batch, uses)
        finally:
            self._glanced, self._glanced_at = None, None

    def _require_current(self, batch: HasUnits) -> HasUnits | None:
        expected = self._current_batch()
        if expected is not None and batch is not expected:
            raise SparseDPError(
                f"The loss comes from a forward pass over {batch.examples} examples that are not the loader's current "
                f"batch of {expected.examples}. Iterate over the loader that make_private returned, not over the old one. All "
                "units of a batch must pass through the module exactly once per forward call: do "
                "not concatenate, repeat, cut or accumulate batches (for micro-batches use max_physical_batch), and "
                "evaluate other data under torch.no_grad()."
            )
        return expected

    def _receive(self, record: Record, grad: Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) and gradient penalties differentiate through gradients, which is not "
                "captured. Call backward() without create_graph."
            )
        if not torch._C._will_engine_execute_node(self._anchor_node):
            return  # torch.autograd.grad asks for the gradient of something else, such as the input
        self._note_pass()
        expected = self._require_current(record.batch)
        if self._tape and self._tape[0].batch is not record.batch and expected is not None:
            raise SparseDPError("Forward passes over two batches met in one step. Call zero_grad() before each batch.")
        if self._tape and self._tape[0].batch.examples != record.batch.examples:
            raise SparseDPError(
                f"Forward passes over {self._tape[0].batch.examples} and {record.batch.examples} examples met in one step. "
                "All forward passes of a step must be over the same examples."
            )
        record.arrived = True
        if grad is None:
            return  # what comes after the use has no derivative
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)  # with memory of its own
        if record.grad is None:
            record.grad = grad.detach()
            self._tape.append(record)
        else:
            record.grad = record.grad + grad.detach()
        record.version = record.grad._version

    def _note_pass(self) -> None:
        """At the first gradient of a backward pass: which of the uses it will come by, whether or not they hear of it."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task, self._went_back = task, True
        self._expected += [record for _, node, record in self._awaited if torch._C._will_engine_execute_node(node)]

    def _require_gradients(self) -> None:
        """A use whose output took part in the loss has a gradient; without one, its parameter would not train."""
        expected, self._expected, self._awaited = self._expected, [], []
        for record in expected:
            if not record.arrived:
                operation, expressions = record.use
                raise SparseDPError(
                    f"Operation '{operation}' on parameter {', '.join(e.names for e in expressions)} took part in the loss, but "
                    "its gradient never arrived, so the parameter would not train. Nothing was written. Please report this model."
                )

    # ------------------------------------------------------------------ during forward

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed], axis: UnitAxis | None) -> Tensor:
        """Returns `out` such that its gradient, when it arrives, is kept with `finish`."""
        if self._glanced is not None:
            self._glanced += finish(out.detach().new_zeros(()).expand(out.shape))
        record, self._keeping = Record(finish, self._batch, self._keeping, self._use), []
        whole, fits = out, True
        if out._is_view():
            # What changes a view in place goes on in the history of its base, which the view itself does not hear of.
            base = out._base
            assert base is not None
            fits = (
                base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous() and base.dtype == out.dtype
            )
            whole = base
        if out.requires_grad and fits and not self._foreign:
            node: Any = whole.grad_fn
            node.register_prehook(self._receiver(record, whole.output_nr, None if whole is out else out.shape))
        else:
            before = out if out.requires_grad else None
            alone = out if before is None and whole is out else out.detach()
            out = _Source.apply(self._anchor, before, self._receiver(record), [alone])
            node = out.grad_fn
        self._records += 1
        if self._batch is not self._collected:  # as in evaluation after a step, which nobody will collect
            self._awaited.append((self._passes, node, record))
        self._info[out] = UnitData(axis)
        return out

    def _receiver(
        self, record: Record, number: int = 0, shape: torch.Size | None = None
    ) -> Callable[[Sequence[Tensor | None]], None]:
        """Takes the gradients of a node's outputs; that of `record` has this number, and this shape if it comes in another.

        It does not hold on to the capture, which holds on to nodes until the step.
        """
        whose = self._weak

        def receive(grads: Sequence[Tensor | None]) -> None:
            capture, grad = whose(), grads[number]
            if capture is not None:
                capture._receive(record, grad if grad is None or shape is None else grad.reshape(shape))

        return receive

    def place(self, out: Tensor, axis: UnitAxis | None) -> Tensor:
        """Notes where the units are in a tensor that a rule made."""
        self._info[out] = UnitData(axis)
        return out

    def keep(self, tensor: Tensor, operation: str, names: str) -> Kept:
        """For what a rule needs after backward: before it calls `record`."""
        kept = Kept(tensor, operation, names, self._where())
        self._keeping.append(kept)
        return kept

    def expression(self, tensor: Any) -> Expression | None:
        """What is known of a tensor that depends on private parameters alone; None for any other."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        own = self._own.get(id(tensor))
        if own is not None:
            return own
        known = self._info.get(tensor)
        if isinstance(known, _Derived):
            return Expression(tensor, known.parameters, known.ids, known.drawn)
        return None

    def info(self, tensor: Tensor) -> Any:
        """What is known of a tensor; None for a constant, and for one that capture did not see."""
        known = self._info.get(tensor)
        return None if isinstance(known, _Constant) else known

    def known_axis(self, tensor: Tensor) -> UnitAxis | None:
        known = self._info.get(tensor)
        fits = isinstance(known, UnitData) and known.axis is not None and known.axis.fits(tensor.shape, self.units)
        return known.axis if fits else None

    def is_end_to_end(self, tensor: Tensor) -> bool:
        """Whether its values lie end to end, as those of bags with offsets do, or in an order that is not known."""
        known = self._info.get(tensor)
        return known.in_order if isinstance(known, WholeBatch) else known == UnitData(None)

    def is_data(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and isinstance(self._info.get(tensor), (UnitData, Mixed))

    def axis(self, tensor: Tensor, operation: str, names: str) -> UnitAxis:
        """The unit axis of an activation that meets a parameter, or an error."""
        found = self.known_axis(tensor)
        if found is not None:
            return found
        known = self._info.get(tensor)
        if isinstance(known, WholeBatch):
            raise UnsupportedError(
                f"Operation '{operation}' on parameter {names}{self._where()}: its input is '{known.operation}', or made of it, "
                "which does not have the units on axis 0, so that all of them may decide it. Ids of bags may lie end to end "
                f"only in nn.EmbeddingBag with offsets. {advice(known.operation)}"
            )
        if isinstance(known, Mixed):
            raise self.refuse(
                operation, names, f"its input was reduced over the units of the batch by '{known.operation}'",
                "compute losses and statistics of a batch outside of the module, after the last parameter",
            )  # fmt: skip
        raise self.refuse(
            operation, names,
            f"the position of the {self.units} units in its input of shape {tuple(tensor.shape)} is not known",
            "keep the batch on an axis of its own, first if possible, and index it only as a whole",
        )  # fmt: skip

    def refuse(self, operation: str, names: str, reason: str, instead: str) -> UnsupportedError:
        return UnsupportedError(
            f"Operation '{operation}' on parameter {names}{self._where()}: {reason}. Instead: {instead}."
        )

    def resumed(self) -> TorchFunctionMode:
        """The mode, for a rule that is itself written with captured operations."""
        return self._mode

    def surroundings(self) -> Surroundings:
        return Surroundings(self._batch, self._storages, list(self._stack))

    @contextmanager
    def going_back(self, surroundings: Surroundings) -> Iterator[None]:
        """Follows code that runs in a backward pass, as if it ran where the function that it belongs to was applied."""
        before = self._batch, self._storages, self._stack
        self._batch, self._storages, self._stack = surroundings.batch, surroundings.storages, list(surroundings.stack)
        self._went_back = True
        self._scripted.begin()
        try:
            with self._mode:
                yield
        finally:
            self._scripted.end()
            self._batch, self._storages, self._stack = before

    def targets(self, func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
        """The tensors that an operation would write to."""
        name = _name(func)
        written, many = _written(name, args, kwargs), name.startswith("_foreach_") and name.endswith("_")
        return [*([] if written is None else [written]), *_all_tensors(kwargs.get("out")), *(args[0] if many else ())]

    def memory(self, tensor: Tensor) -> int:
        return _memory(tensor)

    def private_memory(self, tensor: Tensor) -> str | None:
        """The private parameter whose memory a tensor has, if any."""
        if not tensor.numel():
            return None
        return next((name for name, own in self._storages.get(_memory(tensor), ()) if id(own) in self._own), None)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """One torch operation of the forward pass."""
        name = _name(func)
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled:
            if self._hidden:
                self.require_history()
            if _saved_tensor_hooks(True) is not None:
                raise _refuse_saved_tensor_hooks()
        expressions: list[Expression] = []
        data: list[Tensor] = []
        shared = drawn = False
        for tensor in _operands(args, kwargs):
            known = self._info.get(tensor)
            if known is None and self._shares_memory_with_data(tensor):
                known = self._info[tensor]
            if isinstance(known, (UnitData, Mixed)):
                data.append(tensor)
            elif known is _SHARED:
                shared = True
            elif isinstance(known, _Constant):
                drawn = drawn or known.drawn
            elif grad_enabled:
                found = self._require_expression(tensor, name)
                if found is not None:
                    expressions.append(found)
        if name in _LISTENING and (expressions or any(tensor.requires_grad for tensor in data)) and args[1:] != (None,):
            raise UnsupportedError(
                f"'{name}' of an activation or a private parameter{self._where()}: a hook may do anything to gradients, also mix "
                "those of different units. Remove it, or change the activations themselves."
            )
        if name in ("numpy", "array") and self._whose_memory(args[0]) is not None:
            raise UnsupportedError(
                f"A parameter or buffer was turned into a numpy array during forward{self._where()}, where changes to it "
                "cannot be seen. Use torch operations."
            )
        if data and name.startswith("_foreach_") and name.endswith("_"):
            self._refuse_foreach(args[0])
        if self._places is not None and may_draw(name) and not draws_nothing(name, args, kwargs):
            first = self._info[data[0]] if data else None
            func, drawn = self.draws.replacing(name, func, first.axis if isinstance(first, UnitData) else None), True
        target = _written(name, args, kwargs)
        if target is not None:
            return self._write(name, func, args, kwargs, target, data, expressions, shared)
        if expressions and data and name in _SHAPE_ONLY:
            # Only the first operand's values count.
            expressions, data = ([], data) if self.is_data(args[0]) else (expressions, [])
        if not expressions:
            if data and name in _BATCH_STATISTICS:
                self._refuse_batch_statistics(name, args, kwargs)
            if data and func in _TAKING_OUT:
                self._taken_out = name
            if data and name in _HANDING_OUT_MEMORY:
                self._written |= {_memory(tensor): tensor.detach() for tensor in data}
            if data and not is_followed(name):
                return self._run_unfollowed(name, func, args, kwargs, data)
            out = func(*args, **kwargs)
            if not (data or shared):
                for tensor in (out,) if isinstance(out, Tensor) else _all_tensors(out):
                    if self._info.get(tensor) is None and id(tensor) not in self._own:
                        self._info[tensor] = _DRAWN if drawn else _CONSTANT
            else:
                self._mark(name if func not in _OTHER_ORDER else f"torch.{name}", data, args, kwargs, out)
            if data and kwargs.get("out") is not None:  # several of them
                for tensor in _all_tensors(kwargs["out"]):
                    self._lose_aliases(tensor)
            return out
        if data or (shared and name == "embedding_bag"):  # whose offsets may say whose an id is
            return self._run_rule(name, func, args, kwargs, expressions)
        return self._derive(name, func, args, kwargs, expressions, shared, drawn)

    def _run_rule(self, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]) -> Any:
        """An operation in which data and parameters meet."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise self.refuse(
                name, expressions[0].names, "it runs inside of torch.vmap or another transform of torch.func",
                "apply the parameter to the whole batch, outside of the transform",
            )  # fmt: skip
        if name == "getitem" and any(map(self.is_data, _bounds(args[1]))):
            raise self.refuse(
                name, expressions[0].names, "which rows it takes depends on the whole batch", "take a fixed part"
            )
        self._use, before = (name, expressions), self._records
        out = self._run_use(self, name, func, args, kwargs, expressions)
        if self._records == before:
            raise self.refuse(
                name, ", ".join(e.names for e in expressions), "its rule keeps no use of the parameter", "report it"
            )
        return out

    def _whose_memory(self, tensor: Tensor) -> str | None:
        """The parameter or buffer that had the tensor's memory when the forward pass began, if any."""
        found = self._storages.get(_memory(tensor))
        return found[0][0] if found else None

    def _refuse_foreach(self, targets: Any) -> None:
        """An operation that changes many tensors in place, some of it by data of the batch."""
        for tensor in targets:
            protected = self._whose_memory(tensor)
            if protected is not None:
                raise self._refuse_write(protected)
            self.lose(tensor)

    def lose(self, tensor: Tensor) -> None:
        """Units may have been written anywhere into a tensor."""
        self._info[tensor] = UnitData(None)
        self._lose_aliases(tensor)

    def require_history(self) -> None:
        """What is computed with gradients off gets no history. If it has a new one, it is that of a custom function."""
        if self._functions.is_running:
            return
        hidden, self._hidden = self._hidden, []
        for reference, before in hidden:
            tensor = reference()
            with torch._C.DisableTorchFunction():
                now = None if tensor is None else tensor.grad_fn
            function = getattr(type(now), "_forward_cls", None)
            if function is not None and now is not before:
                raise UnsupportedError(
                    f"torch.autograd.Function '{function.__name__}'{self._where()} was applied in a way that capture does not "
                    "see, so it cannot be tried. Call its apply() in forward()."
                )

    def forget_history(self) -> None:
        """For a custom function that was seen."""
        self._hidden.clear()

    def is_watching(self) -> bool:
        """Whether the code that runs now is the module's, and not a rule's."""
        return any(
            torch._C._get_function_stack_at(n) is self._mode for n in range(torch._C._len_torch_function_stack())
        )

    def _require_expression(self, tensor: Tensor, operation: str) -> Expression | None:
        found = self.expression(tensor)
        if found is None and tensor.requires_grad and tensor.is_leaf:
            self._foreign = True
        elif found is None and tensor.requires_grad:
            raise UnsupportedError(
                f"Operation '{operation}'{self._where()}: an operand carries a gradient, but capture did not see where it "
                "comes from (a thread, numpy, or a custom function?). Compute it with torch operations in forward()."
            )
        return found

    def _write(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        target: Tensor,
        data: list[Tensor],
        made: list[Expression],
        shared: bool,
    ) -> Any:
        """An operation that changes `target` in place."""
        protected = self._whose_memory(target)
        if protected is not None:
            if data or shared:
                raise self._refuse_write(protected)
            if self._taken_out:
                raise UnsupportedError(
                    f"'{protected}' was changed during forward{self._where()}, after '{self._taken_out}' had made a Python value "
                    "of the batch in the same pass. If the one comes from the other, private data reach the state_dict without "
                    "noise. Set such state before training, from public data, or keep it outside of the module."
                )
            memory = target.untyped_storage().data_ptr()
            for own, tensor in self._storages[memory]:
                counts = not tensor.requires_grad and (tensor.numel() == 1 or not tensor.is_floating_point())
                if counts and own not in self._before:
                    self._before[own] = tensor.detach().clone()
            out = func(*args, **kwargs)
            # Changed without looking at the batch, such as spectral_norm's vectors. Only these: elsewhere, something else
            # may have happened.
            self._kept |= _versions(self._storages[memory])
            return out
        if made and any(expression.tensor is target for expression in made):
            instead = "use the form that returns a new tensor"
            raise self.refuse(name, made[0].names, "it changes a copy of the parameter in place", instead)
        if made and (not data or kwargs.get("out") is not None):
            instead = "use the form that returns a new tensor"
            raise self.refuse(name, made[0].names, "it writes into a tensor that is there already", instead)
        if made:
            return self._run_rule(name, func, args, kwargs, made)
        before = self._info.get(target)
        before = None if isinstance(before, _Constant) else before
        if plain_name(name) in SHAPE_IN_PLACE and isinstance(before, UnitData):
            return self._change_shape(name, func, args, kwargs, target, before)
        out = func(*args, **kwargs)
        if data:
            after = self._info[target] = self._after_write(name, args, kwargs, target, before, data)
            if after != before or (not _is_placed(after) and not self._writes_constants(name, target, data)):
                self._lose_aliases(target)
            if not torch.is_grad_enabled():
                self._hidden.append((weakref.ref(target), target.grad_fn))
        return out

    def _change_shape(
        self, name: str, func: Callable, args: tuple, kwargs: dict, target: Tensor, before: UnitData
    ) -> Any:
        """`transpose_` and the like: the same memory in another shape, followed from a view that keeps the one before."""
        view = target.detach()
        self._info[view] = before
        out = func(*args, **kwargs)
        self._info[target] = self._follow(plain_name(name), (view, *args[1:]), kwargs, [view], target)
        return out

    def _writes_constants(self, name: str, target: Tensor, data: list[Tensor]) -> bool:
        alone = all(tensor is target for tensor in data)
        return alone and (name == "setitem" or plain_name(name) in SAME_SHAPE_IN_PLACE)

    def _lose_aliases(self, target: Tensor) -> None:
        """After units were written where they were not: in other tensors with the same memory, their place is not known."""
        memory = _memory(target)
        self._written[memory] = target.detach()  # which keeps the memory from being given to another tensor
        for tensor in self._info.tensors():
            if tensor is not target and _memory(tensor) == memory:
                self._info[tensor] = UnitData(None)

    def _shares_memory_with_data(self, tensor: Tensor) -> bool:
        """Whether a tensor of unknown origin has memory that units were written to, or that one of their tensors has.

        `torch.Tensor(t)`, `nn.Parameter(t)` and the like make such tensors unseen. If it does not, it is a constant.
        """
        if tensor.requires_grad or id(tensor) in self._own:
            return False
        memory = _memory(tensor)
        if tensor.is_nested:
            self._info[tensor] = UnitData(None)  # made of a list of tensors where that is not seen
            return True
        if memory in self._storages or memory <= 0:
            return False
        held = self._held.get(memory)
        if held is not None and not held[0].expired():
            self._info[tensor] = _EARLIER if held[1] is not self._batch else UnitData(None)
        elif memory in self._written or any(
            _memory(other) == memory for other in self._info.tensors() if self.is_data(other)
        ):
            self._info[tensor] = UnitData(None)
        else:
            self._info[tensor] = _CONSTANT
            return False
        return True

    def _run_unfollowed(self, name: str, func: Callable, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        """An operation on units without a rule, which may change its operands although its name does not say so."""
        operands = _operands(args, kwargs)
        versions = [tensor._version for tensor in operands]
        out = func(*args, **kwargs)
        for tensor, version in zip(operands, versions):
            if tensor._version != version:
                self.lose(tensor)
        self._mark(name, data, args, kwargs, out)
        return out

    def _after_write(
        self, name: str, args: tuple, kwargs: dict, target: Tensor, before: Any, data: list[Tensor]
    ) -> Info:
        written = [tensor for tensor in data if tensor is not target]
        if name != "setitem" and plain_name(name) not in SAME_SHAPE_IN_PLACE:
            return UnitData(None)  # resize_, set_ and the like
        if isinstance(before, UnitData) and not written and (name == "setitem" or plain_name(name) in POINTWISE):
            return before  # a constant was written
        if name == "setitem" and len(written) == 1 and self._is_mask_of(written[0], args[1], before):
            return before  # a constant was written where a mask of the same units says
        if name == "setitem" and len(written) == 1 and isinstance(args[2], Tensor) and args[2] is written[0]:
            info = self._info[written[0]]
            if isinstance(info, Mixed) or info.axis is None:
                return UnitData(None)
            axis = written_axis(target, args[1], info.axis, written[0], self.units)
            fits = before is None or (isinstance(before, UnitData) and before.axis == axis)
            return UnitData(axis if fits else None)
        return self._follow(plain_name(name), args, kwargs, data, target)

    def _is_mask_of(self, tensor: Tensor, index: Any, before: Any) -> bool:
        """Whether it is the first part of an index, a mask, with its units where those of the indexed tensor are."""
        first = index[0] if isinstance(index, tuple) and index else index
        return tensor is first and tensor.dtype == torch.bool and self._info.get(tensor) == before

    def _follow(self, name: str, args: tuple, kwargs: dict, data: list[Tensor], out: Tensor) -> Info:
        known: list[tuple[Tensor, Info]] = [(tensor, self._info[tensor]) for tensor in data]
        try:
            return follow(name, args, kwargs, known, out, self.units, self._where)
        except UnitsMixedError:
            if torch.is_grad_enabled():
                raise
            return UnitData(None)  # evaluation may mix units; training refuses what comes of it

    def _refuse_batch_statistics(self, name: str, args: tuple, kwargs: dict) -> None:
        """Normalisation over the batch, or with running statistics, also where its own weights are frozen."""
        position = 5  # of `training` or `use_input_stats`
        uses_batch = kwargs.get(
            _BATCH_STATISTICS[name], args[position] if len(args) > position else name != "batch_norm"
        )
        stored = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
        if uses_batch and (name == "batch_norm" or stored is not None):
            raise UnsupportedError(
                f"Operation '{name}'{self._where()} uses or stores statistics of the batch, which mix its units. "
                "Use GroupNorm or LayerNorm, or put the layer in eval()."
            )

    def _derive(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        expressions: list[Expression],
        shared: bool,
        drawn: bool,
    ) -> Any:
        out = func(*args, **kwargs)
        ids = None
        if len(expressions) == 1 and expressions[0].tensor is expressions[0].parameters[0][1]:
            ids = self._public_ids(name, args, kwargs)
        if shared and (ids is not None or name in ("embedding", "getitem", "index_select")):
            raise self.refuse(
                name, expressions[0].names, "its ids come from an input that does not have the units on axis 0",
                "give every unit its own ids, (batch, ...), or make ids that all units share inside of forward()",
            )  # fmt: skip
        parameters = tuple(dict(pair for e in expressions for pair in e.parameters).items())
        for tensor in _all_tensors(out):
            if tensor.requires_grad and id(tensor) not in self._own:
                self._info[tensor] = _Derived(parameters, ids, drawn or any(e.drawn for e in expressions))
        return out

    def _mark(self, name: str, data: list[Tensor], args: tuple, kwargs: dict, out: Any) -> None:
        """Notes where the units are in the result of an operation on activations."""
        made = [out] if isinstance(out, Tensor) else _all_tensors(out)
        outputs = [tensor for tensor in made if id(tensor) not in self._own]
        if not outputs:
            return
        if name.startswith("new_"):  # which takes from its first operand nothing but type and device
            data = [tensor for tensor in data if tensor is not args[0]]
            if not data:
                return
        if name in _SHAPE_ONLY and not self.is_data(args[0]) and self._info.get(args[0]) is not _SHARED:
            return  # a constant in the shape of an activation
        if name in _SHAPE_ONLY:
            data = [args[0]] if self.is_data(args[0]) else []
        if not data:
            for tensor in outputs:  # made of shared inputs and constants alone
                self._info[tensor] = _SHARED
            return
        for tensor in outputs:
            info = self._info[tensor] = self._follow(name, args, kwargs, data, tensor)
            if isinstance(info, UnitData) and info.axis is None:
                self._refuse_in_loss(tensor)
        if not torch.is_grad_enabled():
            self._hidden += [(weakref.ref(tensor), None) for tensor in outputs]

    def _where(self) -> str:
        where = next((name for name in reversed(self._stack) if name), "")
        return f" in module '{where}'" if where else ""

    where, whose_memory = _where, _whose_memory  # for what is written with this class


def _memory(tensor: Tensor) -> int:
    """What tensors have in common that are views of one another; -1 for a sparse one, and inside of torch.func's transforms."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return -1
        return tensor.untyped_storage().data_ptr()


def _is_placed(info: Info) -> bool:
    return isinstance(info, UnitData) and info.axis is not None


def _is_among(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether it is one of them, or shares the memory of one of its shape."""
    return any(
        tensor is other
        or (tensor.shape == other.shape and tensor.numel() > 0 and tensor.data_ptr() == other.data_ptr())
        for other in tensors
    )


def _versions(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in tensors}


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers: torch's own generators take ten times as long."""
    tensors: list[tuple[str, Tensor]] = []
    left, seen = [("", module)], set()
    while left:
        prefix, part = left.pop()
        if part in seen:
            continue
        seen.add(part)
        for kind in (part._parameters, part._buffers):
            if kind:
                tensors += [(prefix + name, tensor) for name, tensor in kind.items() if tensor is not None]
        if part._modules:
            left += [(f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None]
    return tensors


def _captured(batch: HasUnits, uses: dict[str, list[Use]], kept: list[Kept] | None = None) -> Captured:
    merged = {name: ParameterUses.of(found).written_out() for name, found in uses.items()}
    return Captured(batch.units, merged, owners=batch.owners, kept=kept or [])


@dataclass(frozen=True)
class _Derived:
    """A tensor computed from parameters alone."""

    parameters: tuple[tuple[str, Tensor], ...]
    ids: Tensor | None
    drawn: bool  # whether numbers from the key have a part in it


_EARLIER = Mixed("data of an earlier batch")  # until forward() is given it again, as in an evaluation after every step


class _Shared:
    """An input that does not have the units on axis 0, where none is refused: as good as constant, but not for ids."""


_SHARED = _Shared()


@dataclass(frozen=True)
class _Constant:
    """A tensor that no unit decides, as far as operations are seen. One that is `drawn` has numbers from the key."""

    drawn: bool = False


_CONSTANT, _DRAWN = _Constant(), _Constant(drawn=True)
# What gives its memory to others.
_HANDING_OUT_MEMORY = {"untyped_storage", "storage", "_typed_storage", "dlpack", "numpy", "array", "share_memory_"}
# What makes Python numbers, texts and arrays of a tensor.
_TAKING_OUT = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__format__, Tensor.__repr__,
}  # fmt: skip


class _Mode(TorchFunctionMode):
    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        capture, kwargs = self.capture, kwargs or {}
        if capture.before_read is None:
            return capture.run(func, args, kwargs)
        capture.before_read(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # the tables' own guards: they were asked already
            return capture.run(func, args, kwargs)


def _inactive(*_: Any) -> None:
    """Stands for a hook in a copy or a pickle of the module, which is not private any more."""


class _Unnamed:
    """A hook. torch.jit.script asks for its name, and for nothing else that it could be told by."""

    @property
    def __name__(self) -> str:
        raise _compilation()


class _Before(_Unnamed):
    """Forward pre-hook; a class because a copied or pickled module must not carry the capture along."""

    def __init__(self, capture: Capture, name: str) -> None:
        self.capture, self.name = capture, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.capture.enter(self.name, module, args, kwargs)

    def __reduce__(self) -> Any:
        return _return_inactive, ()


class _After(_Unnamed):
    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.capture.leave(output)

    def __reduce__(self) -> Any:
        return _return_inactive, ()


def is_own_hook(hook: Any) -> bool:
    """Whether capture registered a hook of a module, or a copy has it from there."""
    return hook is _inactive or isinstance(hook, (_Before, _After))


def _return_inactive() -> Callable:
    return _inactive


def _ordinary_gradient_hook(name: str) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise SparseDPError(
            f"An ordinary gradient arrived at private parameter '{name}': it was used where capture does not see it "
            "(in the loss or elsewhere outside of the module's forward, in compiled or custom code, or as a "
            "penalty on the "
            "weight itself). Move the use into forward(), use weight_decay for penalties, or freeze the parameter with "
            "requires_grad_(False). Nothing was written."
        )

    return refuse


# What hands out a place to listen at gradients, and to change them.
_LISTENING = {"register_hook", "register_post_accumulate_grad_hook", "grad_fn", "set__backward_hooks"}
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _refuse_backward_hooks(name: str, module: nn.Module) -> None:
    if module._backward_hooks or module._backward_pre_hooks:
        raise UnsupportedError(
            f"Module '{name}' ({type(module).__name__}) has a backward hook, which may do anything to gradients, also mix those "
            "of different units. Remove it."
        )


def _refuse_saved_tensor_hooks() -> UnsupportedError:
    return UnsupportedError(
        "torch.autograd.graph.saved_tensors_hooks (gradient checkpointing, save_on_cpu) may change what gradients are made "
        "of. Train without it; max_physical_batch bounds memory instead."
    )


def _refuse_compilation() -> None:
    """torch.compile and torch.export call hooks while they trace, or with their callback in place where they gave up."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    if torch.compiler.is_compiling() or torch._C._is_tracing() or callback not in (None, False):
        raise _compilation()


def _compilation() -> UnsupportedError:
    return UnsupportedError(
        "torch.compile, torch.export and torch.jit hide the operations of a forward pass and take the weights along as "
        "they are, so they do not work on a private module. engine.close() makes it an ordinary one, for which they do."
    )


def _refuse_surroundings() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UnsupportedError(
            "torch.autocast rounds per-unit gradients before they are clipped. Train without autocast."
        )
    if torch.get_float32_matmul_precision() != "highest":
        raise UnsupportedError(
            "torch.set_float32_matmul_precision rounds the sums of clipped gradients by more than their norms allow for. Train "
            "with 'highest', which is torch's default."
        )
    if np.float32(1e-40) * np.float32(1) == 0:
        raise UnsupportedError(
            "torch.set_flush_denormal(True) lets small gradients vanish from norms that are not small any more when they are "
            "added up. Train without it."
        )
    if _module_hooks._global_backward_hooks or _module_hooks._global_backward_pre_hooks:
        raise UnsupportedError(
            "A backward hook for all modules is registered, which may do anything to gradients, also mix those of different "
            "units. Remove it."
        )
    if torch._C._current_graph_task_id() != -1:
        raise UnsupportedError(
            "The module ran inside of backward (gradient checkpointing?), where its uses would be counted twice. "
            "Train without checkpointing; max_physical_batch bounds memory instead."
        )


@functools.lru_cache(maxsize=1024)
def _name(func: Callable) -> str:
    """'matmul' for torch.matmul, Tensor.matmul, Tensor.__matmul__; 'T' for the property.

    Others' operations that are called like one of torch's have their full name, so that none passes for it.
    """
    name = getattr(func, "__name__", str(func))
    whose = getattr(func, "namespace", None) or getattr(func, "_qualified_op_name", "::").split("::")[0]
    whose = whose or getattr(func, "__module__", None) or "torch"
    is_torchs = whose.split(".")[0] in ("aten", "prims", "prim", "torch", "sparsedp")
    if not is_torchs and any(hasattr(place, name) for place in (torch, Tensor, nn.functional)):
        return f"{whose}::{name}"
    if name == "__set__":
        return "set_" + str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.strip("_") if name.startswith("__") else name


def _written(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """The tensor that an operation changes in place, if any."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    return args[0] if _is_in_place(name) and args and isinstance(args[0], Tensor) else None


@functools.lru_cache(maxsize=1024)
def _is_in_place(name: str) -> bool:
    if name in ("setitem", "set_data") or (name.endswith("_") and name != "requires_grad_"):
        return True
    return name.startswith("i") and name[1:] in _IN_PLACE_OPERATORS


_IN_PLACE_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift"}


def _operands(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors among an operation's arguments, also inside of lists, index tuples and slices."""
    found = []
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict, slice)):
            found += _inside(value)
    return found


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _inside(item)
    elif isinstance(value, dict):
        yield from _inside(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _inside((value.start, value.stop, value.step))


def _bounds(index: Any) -> Iterator[Tensor]:
    """The tensors that slices begin or end with."""
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, slice):
            yield from (bound for bound in (item.start, item.stop, item.step) if isinstance(bound, Tensor))


def _all_tensors(value: Any, objects: bool = False) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings and, with `objects`, in the attributes of any object."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _all_tensors(item, objects)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _all_tensors(item, objects)
    elif objects and isinstance(value, (deque, Set)):
        for item in value:
            yield from _all_tensors(item, objects)
    elif objects and not isinstance(value, (type, nn.Module)):
        for slot in slots_of(value):
            yield from _all_tensors(getattr(value, slot, None), objects)
        if hasattr(value, "__dict__"):
            yield from _all_tensors(vars(value), objects)
