"""Custom `torch.autograd.Function`s in forward. What they do on the way back is their own code.

It is followed as forward is: gradients of outputs have their units where the outputs have them, and what comes of them must have
them where the inputs have them. It may not take values out of tensors, nor write to parameters and buffers.

Code that torch does not show cannot be followed. So functions are tried as well: a half of the units stays as it is, the others
are exchanged, their inputs and the gradients of their outputs alike. If that changes the output or the input gradient of one
that stays, the function mixes units and is refused. They are tried in forward with random gradients, and in backward with the
ones that arrive.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsedp._torch import (
    BackwardCFunction,
    FunctionBase,
    SingleLevelFunction,
    functorch_interpreter,
    without_functions,
)
from sparsedp.capture.names import written_tensors
from sparsedp.capture.tensors import memory_of
from sparsedp.capture.trials import (
    Outcome,
    Trial,
    copied,
    exchanged,
    joined,
    tensors_in,
    unchanged,
    unchanged_units,
    with_tensors,
)
from sparsedp.capture.units import Mixed, UnitAxis, UnitData
from sparsedp.errors import UnitsMixedError, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

if TYPE_CHECKING:
    from sparsedp.capture.capture import Capture, Surroundings

# `Function.apply` ends in this one, also where a model keeps `apply` under a name of its own.
APPLY = FunctionBase.__dict__["apply"]
_AGAIN = 1 / 32  # the share of later uses that are tried


class Functions:
    """Stands before every custom function that a forward pass applies, from `begin` to `end`.

    A function is tried at its first use in each module, and at the later ones that `generator` picks; without one, at all.
    """

    def __init__(self, capture: Capture, generator: CipherGenerator | None) -> None:
        self.capture, self._always = capture, generator is None
        self._generator = RandomKey.from_os().generator() if generator is None else generator
        self._seen: set[tuple[type, str]] = set()
        self._outer: list[Any] = []  # what `begin` replaced, several where private modules call one another
        self._followed: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()
        self.is_running = False  # whether a function is in its forward() or backward()
        self.starting: _Use | None = None  # whose context is about to be made

    def begin(self) -> None:
        thread = threading.get_ident()

        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            def run(*values: Any, form: type = function) -> Any:
                return APPLY.__get__(None, form)(*values, **kwargs)

            if threading.get_ident() == thread and torch.is_grad_enabled() and self.capture.is_watching():
                return self._apply(function, run, args)
            return run(*args)

        self._outer.append(SingleLevelFunction.__dict__.get("apply"))
        SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]

    def end(self) -> None:
        outer = self._outer.pop()
        if outer is None:
            del SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:
            SingleLevelFunction.apply = outer  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ forward

    def _apply(self, function: type, run: Callable, args: tuple) -> Any:
        inputs = list(tensors_in(args))
        with without_functions():
            axes = self._input_axes(function, inputs)
            is_first = axes is not None and self._is_first(function)
            is_due = axes is not None and self._is_due(is_first)
            copies = [copied(tensor, tensor.requires_grad) for tensor in inputs] if is_due else None
        use = _Use(weakref.ref(self), function, self.capture.surroundings(), self._axes_of(args))
        outer, self.is_running = self.is_running, True
        self.starting = use
        try:
            out = run(*args, form=self._followed_form(function))
        finally:
            self.is_running, self.starting = outer, None
        with without_functions():
            outputs = list(tensors_in(out))
            if axes is not None:
                self._follow(function, inputs, axes, outputs)
            use.outputs = [_Output.of(value, self.capture) for value in (out if isinstance(out, tuple) else (out,))]
        if axes is not None and copies is not None:
            output_axes = [self.capture.known_axis(tensor) for tensor in outputs]
            given = with_tensors(args, iter(copies))
            trial = Trial(run, given, copies, axes, output_axes, self.capture.units, is_first)
            with without_functions(), torch.random.fork_rng(devices=[]):
                self._try(function, trial, outputs)
            use.trial = trial
        return out

    def _followed_form(self, function: Any) -> type:
        """The function with a context that tells when it goes back. torch calls `apply` of the context then."""
        reference = self._followed.get(function)
        form = None if reference is None else reference()
        if form is None:
            functions = weakref.ref(self)  # nodes of the graph refer to it, and capture refers to them

            def start(context: Any) -> None:
                current = functions()
                if current is not None:
                    context._use_in_forward, current.starting = current.starting, None

            made: Any = types.new_class(function.__name__, (function,))
            context = function._backward_cls
            made._backward_cls = type(context.__name__, (_Context, context), {"__init__": start})
            form = made
            self._followed[function] = weakref.ref(made)
        return form

    def _axes_of(self, args: tuple) -> list[UnitAxis | None]:
        """Where the units are in each argument; None for one that gets no gradient, as tensors in lists do not."""
        return [self.capture.known_axis(value) if isinstance(value, Tensor) else None for value in args]

    def _input_axes(self, function: type, inputs: list[Tensor]) -> list[UnitAxis | None] | None:
        """Where the units are in each input, None in constants; None where no gradient of a unit passes."""
        capture = self.capture
        capture.require_history()
        if function.__module__ == "torch.utils.checkpoint":
            raise UnsupportedError(
                "Gradient checkpointing runs a part of the module again inside of backward, where its uses would be counted "
                "twice. Train without checkpointing; max_physical_batch bounds memory instead."
            )
        for parameter in map(capture.expression, inputs):
            if parameter is not None:
                reason = f"it takes private parameter {parameter.names}, at which it would leave an ordinary gradient"
                raise self.refuse(function, reason)
        if not any(tensor.requires_grad for tensor in inputs):
            return None
        for owner in map(capture.private_memory, inputs):
            if owner is not None:
                reason = f"it takes a tensor with the memory of private parameter '{owner}', which its backward() could change"
                raise self.refuse(function, reason)
        if not any(map(capture.is_data, inputs)):
            return None
        axes = [capture.known_axis(tensor) for tensor in inputs]
        if any(axis is None and capture.is_data(tensor) for tensor, axis in zip(inputs, axes)):
            raise self.refuse(function, "where the units are in its inputs is not known")
        return axes

    def _follow(self, function: type, inputs: list[Tensor], axes: list[UnitAxis | None], outputs: list[Tensor]) -> None:
        """Capture followed what forward() did, one operation after another. It knows where the units are, or they mix."""
        capture = self.capture
        capture.forget_history()
        for tensor in outputs:
            if not capture.is_data(tensor):  # an input that is given back as it is becomes another tensor
                same = [axis for given, axis in zip(inputs, axes) if axis is not None and _is_same(tensor, given)]
                capture.place(tensor, same[0] if same else None)
            if tensor.requires_grad and capture.known_axis(tensor) is None:
                raise self.refuse(function, "its forward() does not keep units apart in a way that can be followed")

    def _is_first(self, function: type) -> bool:
        use = (function, self.capture.where())
        is_first = use not in self._seen and self.capture.units > 1
        if is_first:
            self._seen.add(use)
        return is_first

    def _is_due(self, is_first: bool) -> bool:
        if self.capture.units < 2:
            return False  # there is no other unit to exchange it for
        return is_first or self._always or float(self._generator.random(1)[0]) < _AGAIN

    # ------------------------------------------------------------------ backward

    def go_back(self, use: _Use, backward: Callable, grads: tuple) -> Any:
        """What `backward` makes of copies of the gradients: others may need them as they are."""
        capture = self.capture
        with without_functions():
            given = [None if grad is None else grad.clone() for grad in grads]
            for grad, output in zip(given, use.outputs):
                if grad is not None:
                    capture.place(grad, output.axis)
        outer, self.is_running = self.is_running, True
        try:
            with capture.going_back(use.surroundings):
                with _Backward(self, use.function, given):
                    out = backward(*given)
                results = list(out) if isinstance(out, tuple) else [out]
                with without_functions():
                    self._judge(use, results)
                trial, use.trial = use.trial, None
                if trial is not None:
                    arrived = [grad for grad, output in zip(grads, use.outputs) if output.place is not None]
                    with without_functions(), torch.random.fork_rng(devices=[]):
                        self._try_real(use.function, trial, arrived, results)
        finally:
            self.is_running = outer
            capture.forget_history()
        return out

    def _judge(self, use: _Use, results: list[Any]) -> None:
        """The gradients of inputs have their units where the inputs have them."""
        if self.capture.units < 2:
            return
        for axis, grad in zip(use.input_axes, results):
            if axis is None or not isinstance(grad, Tensor):
                continue
            grad_axis, info = self.capture.known_axis(grad), self.capture.info(grad)
            if info is None and not grad.any():
                continue  # zeros that were made without looking at the batch
            if isinstance(info, Mixed) or (grad_axis is not None and grad_axis != axis):
                raise self._mixes(use.function, "backward")
            if grad_axis is None:
                raise self.refuse(
                    use.function, "its backward() does not keep units apart in a way that can be followed"
                )

    def recognize(self, use: _Use, tensors: tuple) -> None:
        """Tells where the units are in outputs that come back as other tensors."""
        with without_functions():
            for tensor in tensors:
                if tensor is not None and self.capture.info(tensor) is None:
                    same = [output for output in use.outputs if output.place == _place(tensor)]
                    if same:
                        self.capture.place(tensor, same[0].axis)

    # ------------------------------------------------------------------ trials

    def halves(self, units: int, parting: bool = False) -> list[Tensor]:
        """Random halves of the units, and what each leaves, (units,) of bool: one, or so many that they part every pair."""
        labels = torch.from_numpy(self._generator.permutation(units))
        bits = (units - 1).bit_length() if parting else 1
        halves = [(labels >> bit) & 1 == 1 for bit in range(bits)]
        return [kept for half in halves for kept in (half, ~half)]

    def _try(self, function: type, trial: Trial, outputs: list[Tensor]) -> None:
        """Raises if some units' outputs or input gradients change with the others'."""
        grads = [self._normal(tensor) if tensor.requires_grad else None for tensor in outputs]
        first, second = trial.run(trial.inputs, grads), trial.run(trial.inputs, grads)
        if not all(map(unchanged, first.outputs + first.grads, second.outputs + second.grads)):
            raise self._changes(function)
        others = [None if grad is None else self._normal(grad) for grad in grads]
        self._exchange(function, trial, first, grads, others)

    def _try_real(self, function: type, trial: Trial, grads: list[Tensor | None], results: list[Any]) -> None:
        """The same with the gradients that arrived, of which `results` were made."""
        first = trial.run(trial.inputs, grads)
        again = iter(first.grads)
        for value, made in zip(trial.args, results):
            for tensor, grad in zip(tensors_in(value), again):
                if tensor is not value or grad is None or not isinstance(made, Tensor) or grad.shape != made.shape:
                    continue  # torch drops this gradient, or adds it up to the shape of the input
                if not unchanged(made.to(grad.dtype), grad):
                    raise self._changes(function)
        self._exchange(function, trial, first, grads, grads)

    def _exchange(
        self,
        function: type,
        trial: Trial,
        first: Outcome,
        grads: list[Tensor | None],
        others: list[Tensor | None],
    ) -> None:
        """Exchanged units get the inputs of one that stays, and three times its part of `others` as gradients."""
        units = trial.units
        for kept in self.halves(units, parting=trial.is_first):
            staying = kept.nonzero().squeeze(1)
            chosen = staying[int(self._generator.integers(len(staying), 1)[0])]
            source = torch.where(kept, torch.arange(units), chosen)
            inputs = [exchanged(value, axis, source) for value, axis in zip(trial.inputs, trial.input_axes)]
            other_grads = [
                None
                if grad is None or other is None or axis is None
                else joined(grad, 3 * exchanged(other, axis, source), axis, kept)
                for grad, other, axis in zip(grads, others, trial.output_axes)
            ]
            other = trial.run(inputs, other_grads)
            for part, axes in (("outputs", trial.output_axes), ("grads", trial.input_axes)):
                for was, now, axis in zip(getattr(first, part), getattr(other, part), axes):
                    if axis is not None and not unchanged_units(was, now, axis, kept):
                        raise self._mixes(function, "forward" if part == "outputs" else "backward")

    def _normal(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(tuple(like.shape))).to(like)

    def _changes(self, function: type) -> UnsupportedError:
        return self.refuse(function, "the same inputs gave something else the second time (is it random?)")

    def _mixes(self, function: type, where: str) -> UnitsMixedError:
        return UnitsMixedError(
            f"torch.autograd.Function '{function.__name__}'{self.capture.where()} mixes units in its {where}(): what it gives "
            "to one unit changes with the others. Let it treat each unit by itself."
        )

    def refuse(self, function: type, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"torch.autograd.Function '{function.__name__}'{self.capture.where()}: {reason}. Write it with torch operations, or "
            "let it take activations alone, with the batch on an axis of its own, and treat each unit by itself."
        )


class _Output(NamedTuple):
    """What a context keeps of an output in place of the output itself: if it referred to that, it would never be freed."""

    axis: UnitAxis | None
    place: tuple | None

    @staticmethod
    def of(value: Any, capture: Capture) -> _Output:
        if not isinstance(value, Tensor):
            return _Output(None, None)
        return _Output(capture.known_axis(value), _place(value))


@dataclass(eq=False)
class _Use:
    """One use of a function in a forward pass, kept for its backward pass."""

    functions: weakref.ref[Functions]
    function: type
    surroundings: Surroundings
    input_axes: list[UnitAxis | None]  # of each argument
    outputs: list[_Output] = field(default_factory=list)
    trial: Trial | None = None  # which is due once more, with the gradients that arrive


class _Context:
    """Comes before the context class of a function. It is the node of the graph, whose `apply` torch calls in backward."""

    _use_in_forward: _Use | None = None

    def apply(self, *grads: Any) -> Any:
        use = self._use_in_forward
        functions = None if use is None else use.functions()
        if use is None or functions is None:
            return super().apply(*grads)  # type: ignore[misc]
        return functions.go_back(use, super().apply, grads)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple:
        """Inputs come as they were. Outputs come as other tensors with the same memory, each time anew."""
        tensors, use = super().saved_tensors, self._use_in_forward  # type: ignore[misc]
        functions = None if use is None else use.functions()
        if use is not None and functions is not None:
            functions.recognize(use, tensors)
        return tensors


class _Backward(TorchFunctionMode):
    """Refuses what capture would not see, or only after it is done, in the backward() of a function."""

    def __init__(self, functions: Functions, function: type, grads: list[Tensor | None]) -> None:
        super().__init__()
        self._functions, self._function, self._capture = functions, function, functions.capture
        # The memory of what it was given, or has made.
        self._made = {memory_of(grad) for grad in grads if grad is not None}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        self._before(func, args, kwargs, given)
        out = func(*args, **kwargs)
        with without_functions():
            self._after(getattr(func, "__name__", ""), given, out)
            if func is torch.autograd.grad:
                self._place_gradients(out, *args, **kwargs)
        return out

    def _before(self, func: Callable, args: tuple, kwargs: dict, given: list[Tensor]) -> None:
        if functorch_interpreter() is not None:
            raise self._refuse("uses torch.vmap or another transform of torch.func, which hides what it does")
        with without_functions():
            for tensor in written_tensors(func, args, kwargs):
                if memory_of(tensor) not in self._made:
                    owner = self._capture.whose_memory(tensor)
                    what = "a tensor that it did not make" if owner is None else f"'{owner}'"
                    raise self._refuse(f"writes to {what}, where gradients would stay without noise")
            if torch.is_grad_enabled():
                for expression in map(self._capture.expression, given):
                    if expression is not None:
                        raise self._refuse(
                            f"differentiates a use of private parameter {expression.names}, unseen by capture"
                        )

    def _after(self, name: str, given: list[Tensor], out: Any) -> None:
        """Values of a batch may become tensors, which are followed, but no Python numbers."""
        if _are_tensors(out):
            before = {memory_of(tensor) for tensor in given}
            self._made |= {memory_of(tensor) for tensor in tensors_in(out)} - before
            return
        hidden = [tensor for tensor in given if self._capture.is_data(tensor)]
        if name in _ABOUT_SHAPES:  # the data decide a shape where a mask picked elements
            is_number = isinstance(out, (int, tuple))
            infos = [(tensor, self._capture.info(tensor)) for tensor in hidden if is_number]
            hidden = [tensor for tensor, info in infos if isinstance(info, UnitData) and info.axis is None]
        if hidden:
            name = name.strip("_") if name != "__get__" else "shape"
            raise self._refuse(f"takes values out of a tensor by '{name}', where they cannot be followed")

    def _place_gradients(
        self, grads: tuple, outputs: Any, inputs: Any, grad_outputs: Any = None, *_: Any, **options: Any
    ) -> None:
        """Operations that were followed keep units apart in their backward pass, too: notes where the gradients have them."""
        capture = self._capture
        axes = [capture.known_axis(tensor) for tensor in tensors_in(outputs)]
        if _has_functions(outputs, inputs):
            return  # nothing is known of what custom functions do in backward
        if None not in axes and axes == [capture.known_axis(tensor) for tensor in tensors_in(grad_outputs)]:
            for grad, tensor in zip(grads, tensors_in(inputs)):
                if grad is not None:
                    capture.place(grad, capture.known_axis(tensor))

    def _refuse(self, reason: str) -> UnsupportedError:
        return self._functions.refuse(self._function, f"its backward() {reason}")


# Operations that tell something of a tensor, but nothing of its values.
_ABOUT_SHAPES = {
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset",
    "element_size", "get_device", "data_ptr", "type", "sparse_dim", "dense_dim", "result_type", "promote_types", "can_cast",
    "is_tensor", "is_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "is_inference", "is_same_size", "is_shared", "is_pinned", "is_set_to", "is_coalesced", "_is_view", "has_names",
}  # fmt: skip


def _are_tensors(out: Any) -> bool:
    if isinstance(out, (tuple, list)):
        return len(out) > 0 and all(map(_are_tensors, out))
    return out is None or isinstance(out, Tensor)


def _has_functions(outputs: Any, inputs: Any) -> bool:
    """Whether there are custom functions in the graph between them."""
    seen: set[Any] = {tensor.grad_fn for tensor in tensors_in(inputs)}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


def _place(tensor: Tensor) -> tuple:
    """The same for tensors that are the same elements of the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return _place(tensor) == _place(other)
