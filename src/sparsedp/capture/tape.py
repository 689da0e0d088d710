"""The tape: uses of parameters that wait for the gradients of their outputs.

It holds detached inputs and gradients alone, and of the graph only the nodes at which it listens, until the step: a use that
refers to the graph would make a cycle that only the garbage collector frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsedp._torch import current_backward, will_run, without_functions
from sparsedp.capture.captured import Captured, Kept
from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.forward_pass import ForwardPass, HasUnits
from sparsedp.capture.functions import APPLY
from sparsedp.capture.marked_shapes import marked_shape
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.places import Origin, place_in_code
from sparsedp.capture.precision import refuse_rounding
from sparsedp.capture.refused import located_refusal
from sparsedp.capture.terms import PublicTerm
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.uses import Use, add_use
from sparsedp.errors import SparseDPError, UnitsMixedError, UnsupportedError

# Forward passes over one batch that a backward pass may come by at once, and that are looked at then.
_PASSES = 64


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

    def release(self) -> None:
        """Lets go of inputs and gradient: whoever still has the loss has its graph, which has this record."""
        self.finish, self.kept, self.grad = _refuse_again, [], None


def _refuse_again(grad: Tensor) -> Placed:
    raise SparseDPError(
        "A backward pass came by a forward pass whose gradients an earlier step() took already, or refused. Call the module "
        "again for every step. Nothing was written."
    )


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


def mixing_loss(shape: tuple[int, ...], units: str, is_unseen: bool, origin: Origin | None) -> SparseDPError:
    """The error for a loss that depends on a tensor of this shape, in which units may be mixed."""
    why = "was made where capture does not see it" if is_unseen else "has them in a place that is not known"
    since = "" if origin is None else f", since operation '{origin.operation}'"
    error = UnitsMixedError(
        f"The loss depends on a tensor of shape {shape}, made in forward(), that may mix the {units} of the batch: "
        f"it {why}{since}. A mean over what a mask picks from all units, say, divides by everybody's number. Keep the batch on "
        "an axis of its own, and let the loss be a mean or sum over units of something that each unit decides alone."
    )
    if origin is None or origin.place is None:
        return error
    return located_refusal(error, origin.operation, marked_shape(shape), origin.place)


class Tape:
    """Records uses in the forward passes over a batch, and collects them after the backward passes.

    `current` is the forward pass that runs, `current_batch` gives the batch that the loop works on, None if there is none
    yet, `state` is told when a backward pass runs, and `memory` asked whether it finds activations as they were.
    """

    def __init__(
        self,
        current: ForwardPass,
        current_batch: Callable[[], HasUnits | None],
        state: ModuleState,
        memory: UnitMemory,
    ) -> None:
        self._current, self._current_batch, self._state, self._memory = current, current_batch, state, memory
        self._arrived: list[Record] = []  # whose gradients arrived
        self._terms: list[PublicTerm] = []  # whose gradients arrived
        # The uses that wait for a backward pass: number of the forward pass, the node that made the output, the record.
        self.awaited: list[tuple[int, Any, Record]] = []
        self.expected: list[Record] = []  # those that a backward pass comes by
        self.use: tuple[str, list[Expression]] = ("", [])  # that runs now
        self.records = 0  # how many there were, ever
        self.forward_only: Placed | None = None  # the uses of a pass that no backward pass follows; None: one may
        self._kept: list[Kept] = []  # for the next record
        self._passes = 0  # how many forward passes there were that a backward pass may follow
        self._collected: HasUnits | None = None  # the last batch whose uses were collected
        self._backward_pass = -1  # torch's number of the last one
        self.has_foreign_leaf = False  # whether a tensor that is not private asks for its gradient in this forward pass
        self._anchor = torch.zeros((), requires_grad=True)
        # The node that only a backward pass over the whole graph runs, not torch.autograd.grad for some inputs.
        with torch.enable_grad():
            self._anchor_node: Any = self._anchor.view_as(self._anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._weak = weakref.ref(self)

    # ------------------------------------------------------------------ forward

    def begin(self, batch: HasUnits) -> None:
        """Before a forward pass. What waits for backward holds on to its graph: not for long, if backward never comes."""
        self._kept = []
        if torch.is_grad_enabled():
            self._passes += 1
            oldest = self._passes - _PASSES if batch is self._current.batch else self._passes
            self.awaited = [entry for entry in self.awaited if entry[0] > oldest]

    def keep(self, tensor: Tensor, operation: str, names: str) -> Kept:
        """For what a rule needs after backward: before it calls `record`."""
        kept = Kept(tensor, operation, names, self._current.where())
        self._kept.append(kept)
        return kept

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed]) -> Tensor:
        """Returns `out` such that its gradient, when it arrives, is kept with `finish`."""
        if self.forward_only is not None:
            self.forward_only += finish(out.detach().new_zeros(()).expand(out.shape))
        batch = self._current.batch
        record, self._kept = Record(finish, batch, self._kept, self.use), []
        whole, fits = out, True
        if out._is_view():
            # What changes a view in place goes on in the history of its base, which the view itself does not hear of.
            base = out._base
            assert base is not None
            fits = (
                base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous() and base.dtype == out.dtype
            )
            whole = base
        if out.requires_grad and fits and not self.has_foreign_leaf:
            node: Any = whole.grad_fn
            node.register_prehook(self._receiver(record, whole.output_nr, None if whole is out else out.shape))
        else:
            before = out if out.requires_grad else None
            alone = out if before is None and whole is out else out.detach()
            out = _Source.apply(self._anchor, before, self._receiver(record), [alone])
            node = out.grad_fn
        self.records += 1
        if batch is not self._collected:  # as in evaluation after a step, which nobody will collect
            self.awaited.append((self._passes, node, record))
        return out

    def listen(self, expression: Expression, sign: int, operation: str) -> Tensor:
        """A term of the loss that depends on parameters alone, such that the gradient that arrives at it is kept, and goes no
        further."""
        # A copy: the tensor may be changed in place afterwards.
        copied = Expression(expression.tensor.clone(), expression.parameters)
        term, reference = PublicTerm(copied, sign, self._current.batch, operation, place=place_in_code()), self._weak

        def receive(grads: Sequence[Tensor | None]) -> None:
            tape, grad = reference(), grads[0]
            if tape is not None and grad is not None:
                tape._receive_term(term, sign * grad)

        return _Source.apply(self._anchor, None, receive, [expression.tensor.detach()])

    def _receiver(
        self, record: Record, number: int = 0, shape: torch.Size | None = None
    ) -> Callable[[Sequence[Tensor | None]], None]:
        """Takes the gradients of a node's outputs; that of `record` has this number, and this shape if it comes in another.

        It does not hold on to the tape, which holds on to nodes until the step.
        """
        reference = self._weak

        def receive(grads: Sequence[Tensor | None]) -> None:
            tape, grad = reference(), grads[number]
            if tape is not None:
                tape._receive(record, grad if grad is None or shape is None else grad.reshape(shape))

        return receive

    def refuse_in_loss(self, tensor: Tensor, is_unseen: bool = False, origin: Origin | None = None) -> None:
        """Units may be mixed in `tensor`, as it is not known where they are since `origin`: no loss may depend on it."""
        with without_functions():
            node: Any = tensor.grad_fn if tensor.requires_grad and self._current.units > 1 else None
        if node is not None:
            node.register_prehook(self._refuser(tuple(tensor.shape), is_unseen, origin))

    def _refuser(self, shape: tuple[int, ...], is_unseen: bool, origin: Origin | None) -> Callable[[Any], None]:
        """Raises in a backward pass over the whole graph, not where torch.autograd.grad asks for some inputs' gradients."""
        anchor, units = self._anchor_node, self._current.counted()

        def refuse(grads: Any) -> None:
            if not will_run(anchor):
                return
            raise mixing_loss(shape, units, is_unseen, origin)

        return refuse

    # ------------------------------------------------------------------ backward

    def _is_backward_pass(self) -> bool:
        """Whether gradients come from a backward pass over the whole graph."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) and gradient penalties differentiate through gradients, which is not "
                "captured. Call backward() without create_graph."
            )
        return will_run(self._anchor_node)  # torch.autograd.grad asks for that of something else, such as the input

    def _receive_term(self, term: PublicTerm, grad: Tensor) -> None:
        if not self._is_backward_pass():
            return
        self._require_current(term.batch)
        if term.factor is None:
            self._terms.append(term)
        term.factor = grad.detach().clone() if term.factor is None else term.factor + grad.detach()

    def _receive(self, record: Record, grad: Tensor | None) -> None:
        if not self._is_backward_pass():
            return
        if current_backward() != self._backward_pass:
            self._note_backward_pass()
        expected = self._require_current(record.batch)
        if self._arrived:
            first = self._arrived[0].batch
            if first is not record.batch and expected is not None:
                raise SparseDPError(
                    "Forward passes over two batches met in one step. Call zero_grad() before each batch."
                )
            if first.examples != record.batch.examples:
                raise SparseDPError(
                    f"Forward passes over {first.examples} and {record.batch.examples} examples met in one step. "
                    "All forward passes of a step must be over the same examples."
                )
        record.arrived = True
        if grad is None:
            return  # what comes after the use has no derivative
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)  # with memory of its own
        if record.grad is None:
            record.grad = grad.detach()
            self._arrived.append(record)
        else:
            record.grad = record.grad + grad.detach()
        record.version = record.grad._version

    def _note_backward_pass(self) -> None:
        """At the first gradient of a backward pass: which of the uses it will come by, whether or not they hear of it."""
        refuse_rounding()
        self._memory.require_unchanged()
        self._backward_pass, self._state.went_back = current_backward(), True
        self.expected += [record for _, node, record in self.awaited if will_run(node)]

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

    # ------------------------------------------------------------------ after backward

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass left gradients that nobody collected."""
        return bool(self._arrived)

    def collect(self) -> Captured | None:
        """The uses of the backward passes since the last call; None if there were none."""
        arrived, self._arrived = self._arrived, []
        try:
            return self._captured(arrived)
        finally:
            for record in arrived:  # if that failed: what is left of them must not join other gradients
                record.release()

    def _captured(self, arrived: list[Record]) -> Captured | None:
        terms, self._terms = self._terms, []
        self._require_gradients()
        for term in terms:
            term.require_plain()
        if not arrived:
            return None
        batch = self._collected = arrived[0].batch
        self._require_current(batch)  # again: the loader may have gone on since backward
        uses: dict[str, list[Use]] = {}
        kept: list[Kept] = []
        for record in arrived:
            for name, use in record.finish(record.final_grad()):
                add_use(uses.setdefault(name, []), use)
            kept += record.kept
            record.release()
        return Captured.of(batch, uses, kept, terms)

    def _require_gradients(self) -> None:
        """A use whose output took part in the loss has a gradient; without one, its parameter would not train."""
        expected, self.expected, self.awaited = self.expected, [], []
        for record in expected:
            if not record.arrived:
                operation, expressions = record.use
                raise SparseDPError(
                    f"Operation '{operation}' on parameter {', '.join(e.names for e in expressions)} took part in the loss, but "
                    "its gradient never arrived, so the parameter would not train. Nothing was written. Please report this model."
                )

    def clear(self) -> None:
        """Forgets the uses whose gradients arrived."""
        for record in self._arrived:
            record.grad = None
        self._arrived.clear()
        self._terms.clear()
        self.expected.clear()
        self.awaited = [entry for entry in self.awaited if not entry[2].arrived]  # backward may be yet to come
