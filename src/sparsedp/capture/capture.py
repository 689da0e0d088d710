"""Watches a module's forward passes and collects every use of its private parameters.

While the module runs, a `TorchFunctionMode` sees every torch operation. Each tensor is one of: computed from the batch
(`UnitData`), computed from private parameters alone (`Expression`), or constant. An operation in which the
first two meet is a use: it runs with the parameter detached, so that autograd never forms a weight gradient,
and its output's gradient is kept with its input. An operation without a rule is refused. A use that is not seen
leaves an ordinary gradient at the parameter, which raises.

`Capture` decides what an operation is. Its parts do the rest: `tensors.py` knows what each tensor is, `tape.py` keeps the
uses, `results.py` and `writes.py` run operations that are none, `owned_rows.py` follows rows without an axis of units,
`module_state.py` and `unit_memory.py` watch what may be written where, `marking.py` tells the inputs of a pass apart, and
`ops/` has the rules of each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsedp._torch import function_mode_at, function_mode_count, functorch_interpreter, saved_tensor_hooks
from sparsedp.capture.captured import Captured
from sparsedp.capture.compiled import WithoutCompilation
from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.forward_pass import ForwardPass, HasUnits, UnannouncedBatch
from sparsedp.capture.functions import Functions
from sparsedp.capture.global_generators import GlobalGenerators, refuse_moved
from sparsedp.capture.history import HiddenHistory
from sparsedp.capture.hooks import (
    LISTENING,
    Mode,
    attach_hooks,
    refuse_backward_hooks,
    refuse_compilation,
    refuse_surroundings,
    saved_tensor_hooks_refused,
)
from sparsedp.capture.inputs import PublicInputs
from sparsedp.capture.marking import InputMarks, batch_of
from sparsedp.capture.module_state import ModuleState, Storages
from sparsedp.capture.names import (
    all_tensors,
    is_foreach_in_place,
    is_in_place,
    operands_of,
    operation_name,
    slice_bounds,
    written_tensor,
)
from sparsedp.capture.ops import absent, run_use
from sparsedp.capture.ops.normalisation import BATCH_STATISTICS, takes_batch_statistics
from sparsedp.capture.ops.registry import AXIS_RULES, plain_name
from sparsedp.capture.ops.shape import SHAPE_ONLY
from sparsedp.capture.owned_rows import chosen_mask, index_by_numbered
from sparsedp.capture.places import Origins
from sparsedp.capture.precision import LOW_PRECISION, low_precision_refused, refuse_autocast, refuse_rounding
from sparsedp.capture.randomness import COUNTING, TRAINING, WITHOUT_GRADIENT, Draws, draws_nothing, may_draw
from sparsedp.capture.refused import Refusals
from sparsedp.capture.results import Results
from sparsedp.capture.row_uses import by_rows
from sparsedp.capture.scripted import ScriptedFunctions
from sparsedp.capture.tape import Tape
from sparsedp.capture.tensors import CONSTANT, SHARED, Constant, Derived, KnownTensors
from sparsedp.capture.terms import require_public, sign_of_term
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.units import Mixed, UnitAxis, UnitData
from sparsedp.capture.uses import Use
from sparsedp.capture.writes import Writes
from sparsedp.errors import SparseDPError, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

# What may do something to gradients, parameters and buffers that is not seen.
_UNSEEN_EFFECTS = LISTENING | {"numpy", "array"}
# What gives its memory to others.
_HANDING_OUT_MEMORY = {"untyped_storage", "storage", "_typed_storage", "dlpack", "numpy", "array", "share_memory_"}
# What makes Python numbers, texts and arrays of a tensor.
_TAKING_OUT = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__format__, Tensor.__repr__,
}  # fmt: skip
# What makes True or False of tensors, for `if` and `while`.
_DECIDING = {
    Tensor.__bool__, Tensor.is_nonzero, Tensor.equal, Tensor.allclose, torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip


# What gives memory as it is, with whatever was there before.
_LEAVING_UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def _with_zeros(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A tensor that has nothing in it yet: zeros, which are the same for all units, instead of what others left there."""
    return func(*args, **kwargs).zero_()


class Surroundings(NamedTuple):
    """Of an operation in a forward pass, for what belongs to it in the backward pass."""

    batch: HasUnits
    storages: Storages
    modules: list[str]  # the names of the modules that run


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
        self._module, self._current_batch = module, current_batch
        self._pass = ForwardPass()
        self._known = KnownTensors(parameters, self._pass)
        self._state = ModuleState(module, self._known.private, self._pass.where)
        self._memory = UnitMemory(self._known, self._state, self._pass)
        self._history = HiddenHistory(self._pass.where)
        self._tape = Tape(self._pass, current_batch, self._state, self._memory)
        origins = Origins(self._known)
        self._results = Results(self._pass, self._known, self._memory, self._history, self._tape, origins, self._state)
        self._refusals = Refusals(self._pass, self._known, origins)
        self._writes = Writes(
            self._pass, self._known, self._state, self._memory, self._history, self._results, self._run_use
        )
        self._marks = InputMarks(self._pass, self._known, self._state, public)
        self._mode = Mode(self)
        self._handles: list[Any] = []
        self._functions = Functions(self, generator)
        self._scripted = ScriptedFunctions(self, self._functions.halves)
        self._uncompiled = WithoutCompilation()
        self._forward_only_batch: HasUnits | None = None
        self.draws = Draws(RandomKey.from_os()) if draws is None else draws
        self._generators = GlobalGenerators()
        self._has_absent = any(parameter.is_meta for parameter in parameters.values())
        # Where the global generators were as the forward pass began; None where it may use them.
        self._generators_before: dict[str, Any] | None = None
        # Called with each operation of a forward pass: settles the rows of lazy tables that it reads.
        self.before_read: Callable[[Callable, tuple, dict], None] | None = None
        # What rules (`ops/protocol.py`) and custom functions ask, answered by the part that knows.
        self.expression, self.is_data, self.info = self._known.expression, self._known.is_data, self._known.info
        self.axis, self.known_axis, self.place = self._known.axis, self._known.known_axis, self._known.place
        self.is_end_to_end, self.rows = self._known.is_end_to_end, self._known.rows
        self.place_rows, self.place_parts = self._known.place_rows, self._known.place_parts
        self.keep, self.refuse, self.where = self._tape.keep, self._pass.refuse, self._pass.where
        self.lose, self.whose_memory = self._memory.lose, self._state.whose_memory
        self.private_memory, self.forget_history = self._state.private_memory, self._history.clear
        self.refused, self.locate = self._refusals.of_operation, self._refusals.locate
        self.require_unwritten, self.replacing = self._state.require_unwritten, self._state.replacing

    @property
    def units(self) -> int:
        """How many places the unit axis has in the forward pass that runs now, or ran last: one for each example.

        Where the units are users, their examples are still kept apart here, and added up afterwards (`Captured`).
        """
        return self._pass.units

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Starts to watch the module; changes nothing if that is refused."""
        self._handles = attach_hooks(self._module, self)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()
        self._tape.awaited.clear()

    def clear(self) -> None:
        """Forgets collected uses, and leaves a forward pass that was interrupted."""
        self._tape.clear()
        while self._pass.modules:
            self._leave()

    # ------------------------------------------------------------------ a forward pass

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Module `name` is about to run: the whole forward pass, or a part of it."""
        refuse_compilation()
        if module._backward_hooks or module._backward_pre_hooks:
            self._require(refuse_backward_hooks, name, module)
        if self._pass.modules and torch.is_grad_enabled():
            self._require(refuse_autocast)  # in which a part of forward() runs
        if not self._pass.modules:
            self._begin(name, args, kwargs)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._functions.begin()
            self._scripted.begin()
            self._uncompiled.__enter__()
        self._pass.modules.append(name)

    def _begin(self, name: str, args: tuple, kwargs: dict) -> None:
        """A forward pass, in which module `name` is called first."""
        if torch.is_grad_enabled():
            self._require(refuse_surroundings)
        self._begin_draws()
        self._memory.begin()
        self._state.begin()
        inputs = all_tensors((args, kwargs), objects=True)
        is_training = not self.forward_only
        expected = self._current_batch() if is_training else self._forward_only_batch
        batch = batch_of(inputs, expected, (args, kwargs))
        self._pass.announced = None if expected is None or batch is expected else expected.examples
        self._tape.begin(batch)
        if batch is not self._pass.batch and not isinstance(batch, UnannouncedBatch):
            self._marks.part_with_earlier_batches(inputs)
        self._pass.be_over(batch)
        self._tape.has_foreign_leaf = any(tensor.requires_grad and tensor.is_leaf for tensor in inputs)
        self._require(self._marks.mark, self._module, name, args, kwargs, inputs)

    def _require(self, check: Callable[..., None], *values: Any) -> None:
        """`check` raises if something must not be trained on. Whoever wants to see all of it goes on from here."""
        check(*values)

    def refuse_function(self, error: SparseDPError, function: type, run: Callable[[], Any]) -> Any:
        """A custom function was refused; `run` would run it unseen."""
        raise self.locate(error, function.__name__)

    def _begin_draws(self) -> None:
        """Whatever a pass draws that may reach a gradient comes from the key; evaluation draws as the user has it."""
        if not (torch.is_grad_enabled() or self._module.training):
            self._generators_before = None
            return
        self._generators_before = self._generators.places()
        kind = TRAINING if torch.is_grad_enabled() else WITHOUT_GRADIENT
        self.draws.begin(COUNTING if self.forward_only else kind)

    def leave(self, output: Any = None) -> None:
        """The module that was entered last has run, and made `output`."""
        if not self._pass.modules:
            return
        self._leave()
        if not self._pass.modules:
            if torch.is_grad_enabled():
                self._watch_outputs(output)
            changed = self._state.changed(lambda tensor: self._known.get(tensor) is CONSTANT)
            self._require(self._memory.end)
            self._state.storages = {}
            self._require(self.require_history)
            for name in changed:
                self._require(self._state.require_no_write, name)
            if self._generators_before is not None:
                self._require(refuse_moved, self._generators_before, self._generators.places())

    def _leave(self) -> None:
        self._pass.modules.pop()
        if not self._pass.modules:
            self._uncompiled.__exit__(None, None, None)
            self._functions.end()
            self._scripted.end()
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _watch_outputs(self, output: Any) -> None:
        """A loss may not depend on an output that capture did not see being made."""
        for tensor in all_tensors(output, objects=True):
            info = self._known.get(tensor)
            if tensor.dtype in LOW_PRECISION and tensor.requires_grad:
                raise low_precision_refused(tensor, "An output of forward()", "")
            if not isinstance(info, (Mixed, Derived)) and self._known.known_axis(tensor) is None:
                self._tape.refuse_in_loss(tensor, is_unseen=info is None)

    def capture_forward_only(self, run: Callable[[], Any], batch: HasUnits | None = None) -> Captured:
        """The uses of one forward pass, `run()`, without a backward pass: their gradients are zero.

        It is over `batch`; None: over the examples that its first input has.
        """
        placed: Placed = []
        self._tape.forward_only, self._forward_only_batch = placed, batch
        try:
            with torch.enable_grad():
                run()
            uses: dict[str, list[Use]] = {}
            for name, use in placed:
                uses.setdefault(name, []).append(use)
            if batch is not None and self._pass.batch is not batch:
                raise UnsupportedError(
                    f"The module was run on {self.units} examples instead of the {batch.examples} that were read, so it is not "
                    "known whose they are. collate_fn, and `inputs` of the mechanism, must neither drop nor repeat examples."
                )
            return Captured.of(self._pass.batch, uses, [])
        finally:
            self._tape.forward_only, self._forward_only_batch = None, None

    @property
    def forward_only(self) -> bool:
        return self._tape.forward_only is not None

    # ------------------------------------------------------------------ after backward

    def collect(self, tensors: list[tuple[str, Tensor]] | None = None) -> Captured | None:
        """The uses of the backward passes since the last call; None if there were none.

        `tensors` are the module's `named_tensors`, where the caller has them already.
        """
        refuse_rounding()  # in what is to be made of the uses
        self._known.require_plain_parameters()
        self._state.require_unwritten(tensors)
        self._state.went_back = False
        self._memory.clear()
        return self._tape.collect()

    @property
    def has_uncollected(self) -> bool:
        """Whether a backward pass left gradients that nobody collected."""
        return self._tape.has_gradients

    # ------------------------------------------------------------------ one operation

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """One torch operation of the forward pass."""
        name = operation_name(func)
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled:
            if self._history.hidden:
                self.require_history()
            if saved_tensor_hooks(True) is not None:
                raise saved_tensor_hooks_refused()
        known = self._known
        expressions: list[Expression] = []
        data: list[Tensor] = []
        shared = drawn = False
        for tensor in operands_of(args, kwargs):
            if self._memory.handed_out:
                self._memory.require_unchanged(tensor)
            key = id(tensor)
            entry = known.entries.get(key)
            if entry is not None:
                info = entry[1]
            elif key in known.private and tensor.requires_grad:
                if grad_enabled:
                    expressions.append(known.private[key])
                continue
            else:
                info = known[tensor] if self._memory.is_shared_by(tensor) else None
            if isinstance(info, (UnitData, Mixed)):
                data.append(tensor)
                if tensor.dtype in LOW_PRECISION and (tensor.requires_grad or self._functions.is_running):
                    raise low_precision_refused(tensor, f"An operand of operation '{name}'", self.where())
            elif info is SHARED:
                shared = True
            elif isinstance(info, Constant):
                drawn = drawn or info.drawn
            elif grad_enabled and tensor.requires_grad:
                expression = self._require_expression(tensor, name)
                if expression is not None:
                    expressions.append(expression)
        if name in _UNSEEN_EFFECTS or is_foreach_in_place(name):
            self._refuse_unseen_effects(name, args, data, expressions)
        if self._generators_before is not None and may_draw(name) and not draws_nothing(name, args, kwargs):
            first = known[data[0]] if data else None
            func, drawn = self.draws.replacing(name, func, first.axis if isinstance(first, UnitData) else None), True
        if name == "getitem" and data and (taken := index_by_numbered(args, known.get)) is not None:
            self._state.taken_out = name
            out = func(*taken, **kwargs)
            known[out] = chosen_mask(self._results.follow(name, taken, kwargs, [taken[0]], out))
            return out
        if expressions and data and not shared:
            joined = sign_of_term(name, args, kwargs, map(known.get, data), expressions)
            if joined is not None:
                return self._run_with_term(name, func, args, kwargs, expressions[0], *joined)
        if kwargs or is_in_place(name):
            target = written_tensor(name, args, kwargs)
            if target is not None:
                out = self._writes.run(name, func, args, kwargs, target, data, expressions, shared, drawn)
                if self._memory.aliases and grad_enabled and known.known_axis(target) is None:
                    self._memory.refuse_unheard_write(target, name)
                if self._memory.handed_out:
                    self._memory.note_write(target)
                return out
        if expressions and data and name in SHAPE_ONLY:
            # Only the first operand's values count.
            expressions, data = ([], data) if self.is_data(args[0]) else (expressions, [])
        if not expressions:
            return self._run_without_parameters(name, func, args, kwargs, data, shared, drawn)
        if self._has_absent and name not in SHAPE_ONLY:
            self._refuse_absent(name, func, expressions)
        if data or (shared and name == "embedding_bag"):  # whose offsets may say whose an id is
            return self._run_use(name, func, args, kwargs, expressions)
        return self._results.run_on_parameters(name, func, args, kwargs, expressions, shared, drawn)

    def _refuse_absent(self, name: str, func: Callable, expressions: list[Expression]) -> None:
        """Of a table whose rows are in other processes, there is nothing here to compute with."""
        if absent.is_absent(func):
            return
        for expression in expressions:
            if expression.tensor.is_meta:
                raise self.refuse(
                    name, expression.names, "it uses the whole table, whose rows are divided among several processes",
                    "look rows up (a loss over sampled candidates), or leave the table whole on every process",
                )  # fmt: skip

    def _require_expression(self, tensor: Tensor, operation: str) -> Expression | None:
        """What is known of an operand that asks for its gradient; None if it is somebody else's, and not private."""
        expression = self.expression(tensor)
        if tensor.dtype in LOW_PRECISION:
            raise low_precision_refused(tensor, f"An operand of operation '{operation}'", self.where())
        if expression is None and tensor.is_leaf:
            self._tape.has_foreign_leaf = True
        elif expression is None:
            raise UnsupportedError(
                f"Operation '{operation}'{self.where()}: an operand carries a gradient, but capture did not see where it "
                "comes from (a thread, numpy, or a custom function?). Compute it with torch operations in forward()."
            )
        return expression

    def _refuse_unseen_effects(self, name: str, args: tuple, data: list[Tensor], expressions: list[Expression]) -> None:
        """Of operations whose effects on gradients, parameters and buffers would not be seen."""
        if name in LISTENING and (expressions or any(tensor.requires_grad for tensor in data)) and args[1:] != (None,):
            raise UnsupportedError(
                f"'{name}' of an activation or a private parameter{self.where()}: a hook may do anything to gradients, also mix "
                "those of different units. Remove it, or change the activations themselves."
            )
        if name in ("numpy", "array") and self.whose_memory(args[0]) is not None:
            raise UnsupportedError(
                f"A parameter or buffer was turned into a numpy array during forward{self.where()}, where changes to it "
                "cannot be seen. Use torch operations."
            )
        if data and is_foreach_in_place(name):
            self._writes.refuse_many(args[0])

    def _run_without_parameters(
        self, name: str, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], shared: bool, drawn: bool
    ) -> Any:
        """An operation on activations `data`, if there are any, on constants and, if `shared`, inputs that all units share."""
        if name in _LEAVING_UNSET:
            func = partial(_with_zeros, func)
        if not data:
            out = func(*args, **kwargs)
            if shared:
                self._results.note(name, func, args, kwargs, data, out)
            else:
                self._results.note_constants(name, args, kwargs, out, drawn)
            return out
        if name in BATCH_STATISTICS and takes_batch_statistics(name, args, kwargs):
            raise UnsupportedError(
                f"Operation '{name}'{self.where()} uses or stores statistics of the batch, which mix its units. "
                "Use GroupNorm or LayerNorm, or put the layer in eval()."
            )
        if func in _TAKING_OUT:
            self._state.taken_out = name
        if func in _DECIDING:
            self._state.decided = name
        if name in _HANDING_OUT_MEMORY:
            for tensor in data:
                self._memory.hand_out(tensor, name)
        if plain_name(name) not in AXIS_RULES:
            return self._results.run_unfollowed(name, func, args, kwargs, data)
        out = func(*args, **kwargs)
        if name == "iter":  # `for row in x`
            rows = list(out)
            self._results.note(name, func, args, kwargs, data, rows)
            return iter(rows)
        self._results.note(name, func, args, kwargs, data, out)
        if name == "data":
            self._memory.add_alias(out)
        if kwargs and kwargs.get("out") is not None:  # several of them
            for tensor in all_tensors(kwargs["out"]):
                self._memory.lose_aliases(tensor)
        return out

    def _run_use(self, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]) -> Any:
        """An operation in which data and parameters meet."""
        if functorch_interpreter() is not None:
            raise self.refuse(
                name, expressions[0].names, "it runs inside of torch.vmap or another transform of torch.func",
                "apply the parameter to the whole batch, outside of the transform",
            )  # fmt: skip
        if name == "getitem" and any(map(self.is_data, slice_bounds(args[1]))):
            raise self.refuse(
                name, expressions[0].names, "which rows it takes depends on the whole batch", "take a fixed part"
            )
        if name != "embedding" and any(tensor.is_nested for tensor in operands_of(args, kwargs)):
            raise self.refuse(
                name, expressions[0].names, "it takes a nested tensor",
                "use x.values(), whose rows are followed, or x.to_padded_tensor(0) and mask what is padded",
            )  # fmt: skip
        self._tape.use, before = (name, expressions), self._tape.records
        seen = by_rows(self, self._known, name, args, kwargs)
        out = run_use(self if seen is None else seen, name, func, args, kwargs, expressions)
        if isinstance(out, Tensor):
            self._results.require_used_alike(name, args, kwargs, out)
        if self._tape.records == before:
            raise self.refuse(
                name, ", ".join(e.names for e in expressions), "its rule keeps no use of the parameter", "report it"
            )
        return out

    def _run_with_term(
        self, name: str, func: Callable, args: tuple, kwargs: dict, expression: Expression, place: int, sign: int
    ) -> Any:
        """An operation that adds `expression`, which is `args[place]`, to a value that was summed over the units."""
        require_public(expression, name, self._state.taken_out or self._state.decided, self.where)
        if place == 0 and is_in_place(name):
            raise self.refuse(
                name, expression.names, "it changes a copy of the parameter in place", "write loss + penalty"
            )
        term = self._tape.listen(expression, sign, name)
        total = args[1 - place]
        out = func(*((term, total) if place == 0 else (total, term)), **kwargs)
        self._known[out] = self._known[total]
        return out

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed], axis: UnitAxis | None) -> Tensor:
        """Returns `out` such that its gradient, when it arrives, is kept with `finish`."""
        out = self._tape.record(out, finish)
        self._known[out] = UnitData(axis)
        return out

    def resumed(self) -> TorchFunctionMode:
        """The mode, for a rule that is itself written with captured operations."""
        return self._mode

    # ------------------------------------------------------------------ custom functions

    def is_watching(self) -> bool:
        """Whether the code that runs now is the module's, and not a rule's."""
        return any(function_mode_at(n) is self._mode for n in range(function_mode_count()))

    def require_history(self) -> None:
        """Raises if a custom function was applied unseen."""
        if not self._functions.is_running:
            self._history.require_unchanged()

    def surroundings(self) -> Surroundings:
        return Surroundings(self._pass.batch, self._state.storages, list(self._pass.modules))

    @contextmanager
    def going_back(self, surroundings: Surroundings) -> Iterator[None]:
        """Follows code that runs in a backward pass, as if it ran where the function that it belongs to was applied."""
        current, state = self._pass, self._state
        before = current.batch, state.storages, current.modules
        current.be_over(surroundings.batch)
        state.storages, current.modules = surroundings.storages, list(surroundings.modules)
        state.went_back = True
        self._scripted.begin()
        try:
            with self._mode, self._uncompiled:
                yield
        finally:
            self._scripted.end()
            current.be_over(before[0])
            state.storages, current.modules = before[1:]
