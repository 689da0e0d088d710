"""A capture that tells the whole way of the unit axis, and goes on after what it refuses: for `sparsedp.explain`.

After a refusal, the units of the result are assumed to be where they would be without it, or the result to be a constant. So
one cause is told once, and what comes after it is seen, too. Nothing that such a pass makes may be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp._torch import without_functions
from sparsedp.capture.capture import Capture
from sparsedp.capture.constants_by_place import BY_PLACE
from sparsedp.capture.following import UNCERTAIN
from sparsedp.capture.forward_pass import HasUnits
from sparsedp.capture.global_generators import refuse_moved
from sparsedp.capture.marked_shapes import described, marked_shape
from sparsedp.capture.module_state import named_tensors
from sparsedp.capture.names import all_tensors, operands_of, operation_name, written_tensors
from sparsedp.capture.places import Place, place_in_code
from sparsedp.capture.randomness import Draws
from sparsedp.capture.tape import mixing_loss
from sparsedp.capture.tensors import CONSTANT, SHARED
from sparsedp.capture.units import Mixed, UnitAxis, UnitData
from sparsedp.errors import Refusal, SparseDPError

_LOSS = "the loss"


@dataclass(frozen=True)
class TracedOperation:
    """One operation on units or parameters: what it was given and what it made, with the axis of units marked."""

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str
    file: str
    line: int
    refused: bool = False  # `outputs` are then what is assumed of them

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "inputs": list(self.inputs), "outputs": list(self.outputs)}


class TracingCapture(Capture):
    """Follows one forward pass and one loss. `originals` are the user's own parameters, by name, which the loss may use."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        batch: HasUnits,
        draws: Draws,
        originals: Mapping[str, Tensor],
    ) -> None:
        super().__init__(module, parameters, lambda: batch, draws)
        self.operations: list[TracedOperation] = []
        self.found: list[Refusal] = []
        self.notes: list[str] = []
        self._in_loss = False
        self._outside = {id(tensor): name for values in (originals, parameters) for name, tensor in values.items()}
        # Tensors in which it is not known where the units are: no loss may depend on them.
        self._unplaced: dict[int, tuple[Tensor, bool]] = {}
        self._assumed: dict[int, Tensor] = {}  # of which it is assumed where the units are
        self._made_at: dict[int, tuple[Any, Place | None]] = {}  # where tensors were made, or last written to
        self._last: Place | None = None  # of the last operation
        self._drawn_at: tuple[Place | None, Place | None] | None = (
            None  # the operations between which numbers were drawn
        )

    # ------------------------------------------------------------------ refusals

    def add(self, error: SparseDPError) -> None:
        """Notes a refusal, each once; of losses, what is not followed is not refused either, but noted."""
        refusal = error.refusal or Refusal(type(error).__name__, error.message)
        if self._in_loss and any(words in refusal.reason for words in UNCERTAIN):
            where = f" {refusal.location}" if refusal.file else ""
            note = f"Operation '{refusal.operation}' of the loss{where} is not followed: sparsedp.check compares what it does."
            self.notes += [] if note in self.notes else [note]
            return
        same = [(r.operation, r.file, r.line) for r in self.found]
        of_layer = any(
            r.module == refusal.module and not r.operation for r in self.found
        )  # which its place is joined to
        if of_layer or not refusal.file or (refusal.operation, refusal.file, refusal.line) not in same:
            self.found.append(refusal)

    def _require(self, check: Callable[..., None], *values: Any) -> None:
        try:
            check(*values)
        except SparseDPError as error:
            if check is refuse_moved and self._drawn_at is not None:
                before, place = self._drawn_at
                after = "" if before is None or before == place else f", or after {before.file}:{before.line}"
                self.locate(error, "random numbers", place, (f"The numbers were drawn in this line{after}.",))
            elif check == self._state.require_no_write:
                place = self._place_of_write(values[0])
                if place is not None:
                    self.locate(error, "a write to the module", place)
            self.add(error)

    def _place_of_write(self, name: str) -> Place | None:
        """Where what is now in a parameter or buffer was made, or written."""
        tensor = dict(named_tensors(self._module)).get(name)
        made, place = self._made_at.get(id(tensor), (None, None))
        return place if made is tensor else None

    def refuse_function(self, error: SparseDPError, function: type, run: Callable[[], Any]) -> Any:
        self.add(self.locate(error, function.__name__))
        out = run()
        self.forget_history()
        with without_functions():
            self._assume(all_tensors(out), [])
        return out

    # ------------------------------------------------------------------ one operation

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        name, operands = operation_name(func), operands_of(args, kwargs)
        inputs = tuple(self._described(tensor) for tensor in operands)
        versions = [tensor._version for tensor in written_tensors(func, args, kwargs)]
        error: SparseDPError | None = None
        try:
            if self._in_loss:
                self._require_no_parameter(name, operands)
            out = super().run(func, args, kwargs)
        except Exception as raised:
            refused = self.refused(raised, func, args, kwargs)
            if not isinstance(refused, SparseDPError):
                raise
            error = refused
            is_assumed = any(id(tensor) in self._assumed for tensor in operands)
            if BY_PLACE not in refused.message or not is_assumed:  # such as targets of in-batch negatives, arange(B)
                self.add(refused)
            out = self._go_on(func, args, kwargs, operands, versions)
        with without_functions():
            self._note_places(func, args, kwargs, out)
            self._note_unplaced(out)
            self._trace(name, operands, inputs, out, error is not None)
        return out

    def _require_no_parameter(self, name: str, operands: list[Tensor]) -> None:
        for tensor in operands:
            parameter = self._outside.get(id(tensor))
            if parameter is not None and tensor.requires_grad:
                raise SparseDPError(
                    f"Operation '{name}' of the loss uses parameter '{parameter}' itself, outside of the module's forward (a "
                    "penalty?), where it cannot be captured. Use weight_decay for penalties, or move the use into forward()."
                )

    def _go_on(self, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor], versions: list[int]) -> Any:
        """The result of an operation that was refused, as if it had been followed."""
        written = written_tensors(func, args, kwargs)
        if written and [tensor._version for tensor in written] != versions:  # it ran before it was refused
            out: Any = None if operation_name(func) == "setitem" else args[0]
        else:
            with torch.random.fork_rng(devices=[]):
                out = func(*args, **kwargs)
        with without_functions():
            outputs = [tensor for tensor in all_tensors(out) if id(tensor) not in self._known.private]
            self._assume([*outputs, *written], operands)
            lost = [tensor for tensor in operands if self.is_data(tensor) and self.known_axis(tensor) is None]
            self._assume(lost, operands)
        return out

    def _assume(self, tensors: list[Tensor], operands: list[Tensor]) -> None:
        """That the units of `tensors`, which were refused, are where those of an operand are, or else on the first axis that
        is as long as there are units. Where there is none, they are taken for constants."""
        axes = [axis for axis in map(self.known_axis, operands) if axis is not None]
        for tensor in tensors:
            shape, units = () if tensor.is_nested else tuple(tensor.shape), self.units
            merged = UnitAxis(0, shape[0] // units) if shape and units and shape[0] % units == 0 else None
            guesses = [
                *(axis for axis in axes if axis.fits(shape, units)),
                *(UnitAxis(dim) for dim, size in enumerate(shape) if size == units),
                *([merged] if merged is not None and merged.fits(shape, units) else []),
            ]
            self._known[tensor] = UnitData(guesses[0]) if guesses else CONSTANT
            self._assumed[id(tensor)] = tensor
            self._unplaced.pop(id(tensor), None)

    # ------------------------------------------------------------------ what is told of it

    def _described(self, tensor: Tensor) -> str:
        name = self._outside.get(id(tensor)) if self._in_loss else None
        return f"'{name}' {marked_shape(tensor.shape)}" if name is not None else described(tensor, self._known)

    def _trace(self, name: str, operands: list[Tensor], inputs: tuple[str, ...], out: Any, refused: bool) -> None:
        followed = [tensor for tensor in operands if self.is_data(tensor) or self.expression(tensor) is not None]
        outputs = all_tensors(out)
        if not (followed and outputs) and not refused:
            return
        place = self._last
        module = _LOSS if self._in_loss else next((part for part in reversed(self._pass.modules) if part), "")
        made = tuple(described(tensor, self._known) for tensor in outputs)
        file, line = ("", 0) if place is None else (place.file, place.line)
        self.operations.append(TracedOperation(name, inputs, made, module, file, line, refused))

    def _note_places(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """Where tensors are made and written to, and whether random numbers were drawn since the last operation."""
        place = place_in_code()
        for tensor in (*all_tensors(out), *written_tensors(func, args, kwargs)):
            self._made_at[id(tensor)] = tensor, place
        before = self._generators_before
        if self._drawn_at is None and before is not None and before != self._generators.places():
            self._drawn_at = self._last, place
        self._last = place

    def _note_unplaced(self, out: Any) -> None:
        for tensor in all_tensors(out):
            if tensor.requires_grad and self._known.get(tensor) == UnitData(None):
                self._unplaced[id(tensor)] = tensor, False

    def _watch_outputs(self, output: Any) -> None:
        for tensor in all_tensors(output, objects=True):
            if tensor.requires_grad and self._known.get(tensor) is None and id(tensor) not in self._known.private:
                self._unplaced[id(tensor)] = tensor, True
        super()._watch_outputs(output)

    # ------------------------------------------------------------------ the loss

    @contextmanager
    def following_loss(self, targets: Any) -> Iterator[None]:
        """Follows what the loss makes of outputs and `targets`, which have the units on axis 0."""
        for tensor in all_tensors(targets, objects=True):
            if self._known.get(tensor) is None:
                first = tensor.ndim > 0 and tensor.shape[0] == self.units
                self._known[tensor] = UnitData(UnitAxis(0)) if first else SHARED
        self._in_loss = True
        try:
            with self._mode:
                yield
        finally:
            self._in_loss = False

    def judge_loss(self, loss: Tensor) -> None:
        """Refuses what a backward pass would: a loss that depends on tensors in which units may be mixed."""
        reached = _nodes(loss.grad_fn)
        told = {refusal.origin for refusal in self.found}
        for tensor, is_unseen in self._unplaced.values():
            origin = self._results.origins.of(tensor)
            if tensor.grad_fn in reached and (origin is None or str(origin) not in told):
                told.add(str(origin))
                self.add(mixing_loss(tuple(tensor.shape), self._pass.counted(), is_unseen, origin))
        info = self._known.get(loss)
        if isinstance(info, UnitData) and self.known_axis(loss) is None and not self.found:
            self.notes.append("It is not known what the loss makes of the units: sparsedp.check compares.")
        elif isinstance(info, Mixed) and info.operation not in ("sum", "mean"):
            self.notes.append(f"The loss is '{info.operation}' over the units, not a sum or mean: see sparsedp.check.")


def _nodes(node: Any) -> set[Any]:
    """A node of the graph and all that come before it."""
    seen: set[Any] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current is not None and current not in seen:
            seen.add(current)
            waiting += [before for before, _ in current.next_functions]
    return seen
