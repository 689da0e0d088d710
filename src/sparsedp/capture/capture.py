"""Watches a module's forward passes and collects every use of its private parameters.

While the module runs, a `TorchFunctionMode` sees every torch operation. Each tensor is one of: computed from the batch
(`UnitData`), computed from private parameters alone (`Expression`), or constant. An operation in which the
first two meet is a use: it runs with the parameter detached, so that autograd never forms a weight gradient,
and its output's gradient is kept with its input. An operation without a rule is refused. A use that is not seen
leaves an ordinary gradient at the parameter, which raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from sparsedp.capture.expressions import Expression, Placed
from sparsedp.capture.tracking import Mixed, UnitAxis, UnitData, find_axis, output_axis, reduces_units
from sparsedp.capture.uses import ParameterUses, Use
from sparsedp.errors import SparseDPError, UnitsMixedError, UnsupportedError

# Operations of two operands in which units on different axes meet every other unit.
_ALIGNING = {
    "add",
    "sub",
    "mul",
    "div",
    "truediv",
    "matmul",
    "mm",
    "bmm",
    "where",
    "maximum",
    "minimum",
    "rsub",
}
# Operations that normalise over the batch, and the argument that says whether they do.
_BATCH_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
# Operations that take from a batch tensor only its shape, type or device.
_SHAPE_ONLY = {"expand_as", "view_as", "reshape_as", "type_as", "to", "is_same_size"}


@dataclass(eq=False)
class Record:
    """A use whose output gradient arrives during backward. `finish` turns the gradient into uses of parameters."""

    finish: Callable[[Tensor], Placed]
    units: int
    grad: Tensor | None = None


class Kept:
    """A tensor that a use needs after backward; changing it in place meanwhile is an error."""

    def __init__(self, tensor: Tensor, what: str) -> None:
        self._tensor, self._version, self._what = tensor.detach(), tensor._version, what

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise UnsupportedError(
                f"The input of {self._what} was modified in place before step(), so its gradient cannot be formed. "
                "Use the operation that returns a new tensor."
            )
        return self._tensor


class _Source(torch.autograd.Function):
    """Makes a tensor that has no history the start of one, so that its gradient can be seen."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, receive: Callable[[Tensor], None], box: list[Tensor]) -> Tensor:
        ctx.receive = receive
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.receive(grads[0])
        return None, None, None


@dataclass
class Captured:
    """The uses of every private parameter by the units of one physical batch."""

    units: int
    uses: dict[str, ParameterUses]


class Capture:
    """Collects the uses of `parameters` (by name) in the forward passes of `module`.

    `current_units` says how many units the batch that the loop works on has; None if that is not known.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        current_units: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._module = module
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)
        self._current_units = current_units
        self._tape: list[Record] = []
        self._info: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._mode = _Mode(self)
        self._stack: list[str] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._handles: list[Any] = []
        self._buffers: dict[str, tuple[int, int]] = {}
        self._glanced: Placed | None = None
        self.units = 0

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        for name, module in self._module.named_modules():
            self._handles.append(module.register_forward_pre_hook(_Before(self, name), with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(_After(self), always_call=True))
        for name, parameter in self._module.named_parameters():
            hook = _ordinary_gradient_hook(name)
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(hook) if parameter.requires_grad else None
            )
        self._handles = [handle for handle in self._handles if handle is not None]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        """Forgets collected uses, and leaves a forward pass that was interrupted."""
        self._tape.clear()
        while self._stack:
            self._leave()

    def enter(self, name: str, args: tuple, kwargs: dict) -> None:
        if not self._stack:
            self._begin(args, kwargs)
            self._buffers = self._buffer_versions()
            self._mode.__enter__()
        self._stack.append(name)

    def leave(self) -> None:
        if not self._stack:
            return
        self._leave()
        if not self._stack and torch.is_grad_enabled():
            changed = [name for name, version in self._buffer_versions().items() if self._buffers.get(name) != version]
            if changed:
                raise UnsupportedError(
                    f"Buffer '{changed[0]}' was changed during forward. What a buffer keeps of private data "
                    "reaches the "
                    "state_dict without noise. Keep such state outside of the module's buffers."
                )

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._module.named_buffers()}

    def _leave(self) -> None:
        self._stack.pop()
        if not self._stack:
            self._mode.__exit__(None, None, None)

    def _begin(self, args: tuple, kwargs: dict) -> None:
        """Marks the inputs of a forward pass as data of its units."""
        if torch.is_grad_enabled():
            _refuse_surroundings()
        inputs = list(_all_tensors((args, kwargs)))
        self.units = self._count_units(inputs)
        for tensor in inputs:
            known = self._info.get(tensor)
            if known is None or not isinstance(known, (UnitData, Mixed)):
                fits = tensor.ndim > 0 and tensor.shape[0] == self.units
                self._info[tensor] = UnitData(UnitAxis(0) if fits else None)

    def _count_units(self, inputs: list[Tensor]) -> int:
        sizes = [tensor.shape[0] for tensor in inputs if tensor.ndim > 0]
        expected = self._current_units() if self._glanced is None else None
        if expected is not None and (expected in sizes or len(set(sizes)) != 1):
            return expected
        if not sizes:
            raise UnsupportedError(
                "The module was called without any tensor, so its units cannot be told apart. "
                "Pass the batch to forward() as tensors (or tuples, lists, dicts or dataclasses of them)."
            )
        return sizes[0]

    # ------------------------------------------------------------------ after backward

    def collect(self) -> Captured | None:
        """The uses of the backward passes since the last call; None if there were none."""
        tape, self._tape = self._tape, []
        if not tape:
            return None
        units = tape[0].units
        uses: dict[str, list[Use]] = {}
        for record in tape:
            assert record.grad is not None
            for name, use in record.finish(record.grad):
                uses.setdefault(name, []).append(use)
            record.grad = None
        return Captured(units, {name: ParameterUses.of(found) for name, found in uses.items()})

    def glance(self, run: Callable[[], Any]) -> Captured:
        """The uses of one forward pass, `run()`, without a backward pass: their gradients are zero."""
        self._glanced = []
        try:
            with torch.enable_grad():
                run()
            uses: dict[str, list[Use]] = {}
            for name, use in self._glanced:
                uses.setdefault(name, []).append(use)
            return Captured(self.units, {name: ParameterUses.of(found) for name, found in uses.items()})
        finally:
            self._glanced = None

    def _receive(self, record: Record, grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) and gradient penalties differentiate through gradients, which is not "
                "captured. Call backward() without create_graph."
            )
        expected = self._current_units()
        if expected is not None and record.units != expected:
            raise SparseDPError(
                f"The loss comes from a forward pass over {record.units} units, but the loader's current batch has "
                f"{expected}. Every unit of a batch must pass through the module exactly once per forward call: do not "
                "concatenate, repeat or cut batches (for micro-batches use max_physical_batch), and "
                "evaluate other data under "
                "torch.no_grad()."
            )
        if self._tape and self._tape[0].units != record.units:
            raise SparseDPError(
                f"Forward passes over {self._tape[0].units} and {record.units} units met in one step. "
                "All forward passes of a step must be over the same units."
            )
        if record.grad is None:
            record.grad = grad.detach()
            self._tape.append(record)
        else:
            record.grad = record.grad + grad.detach()

    # ------------------------------------------------------------------ during forward

    def record(self, out: Tensor, finish: Callable[[Tensor], Placed], axis: UnitAxis | None) -> Tensor:
        """Returns `out` such that its gradient, when it arrives, is kept with `finish`."""
        if self._glanced is not None:
            self._glanced += finish(out.detach().new_zeros(()).expand(out.shape))
        record = Record(finish, self.units)

        def receive(grad: Tensor) -> None:
            self._receive(record, grad)

        if out.requires_grad:
            out.register_hook(receive)
        else:
            out = _Source.apply(self._anchor, receive, [out])
        self._info[out] = UnitData(axis)
        return out

    def keep(self, tensor: Tensor, operation: str, names: str) -> Kept:
        return Kept(tensor, f"operation '{operation}' on parameter {names}{self._where()}")

    def expression(self, tensor: Any) -> Expression | None:
        """What is known of a tensor that depends on private parameters alone; None for any other."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return Expression(tensor, ((name, tensor),))
        known = self._info.get(tensor)
        if isinstance(known, _Derived):
            return Expression(tensor, known.parameters, known.ids)
        return None

    def is_data(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and isinstance(self._info.get(tensor), (UnitData, Mixed))

    def axis(self, tensor: Tensor, operation: str, names: str) -> UnitAxis:
        """The unit axis of an activation that meets a parameter, or an error."""
        known = self._info.get(tensor)
        if isinstance(known, UnitData) and known.axis is not None and known.axis.fits(tensor.shape, self.units):
            return known.axis
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

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """One torch operation of the forward pass."""
        grad_enabled = torch.is_grad_enabled()
        expressions: list[Expression] = []
        data: list[Tensor] = []
        for tensor in _operands(args, kwargs):
            if self.is_data(tensor):
                data.append(tensor)
            elif grad_enabled and (found := self.expression(tensor)) is not None:
                expressions.append(found)
        if not expressions:
            if data and (name := _name(func)) in _BATCH_STATISTICS and grad_enabled:
                self._refuse_batch_statistics(name, args, kwargs)
            out = func(*args, **kwargs)
            if data:
                self._mark(_name(func), data, args, kwargs, out)
            return out
        name = _name(func)
        if data and name not in _SHAPE_ONLY:
            from sparsedp.capture.rules import run_use

            return run_use(self, name, func, args, kwargs, expressions)
        return self._derive(name, func, args, kwargs, expressions)

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

    def _derive(self, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]) -> Any:
        out = func(*args, **kwargs)
        ids = None
        if len(expressions) == 1 and expressions[0].tensor is expressions[0].parameters[0][1]:
            from sparsedp.capture.rules import public_ids

            ids = public_ids(name, args, kwargs)
        parameters = tuple(dict(pair for e in expressions for pair in e.parameters).items())
        for tensor in _all_tensors(out):
            if tensor.requires_grad and id(tensor) not in self._names:
                self._info[tensor] = _Derived(parameters, ids)
        return out

    def _mark(self, name: str, data: list[Tensor], args: tuple, kwargs: dict, out: Any) -> None:
        """Notes where the units are in the result of an operation on activations."""
        outputs = [tensor for tensor in _all_tensors(out) if id(tensor) not in self._names]
        if name == "setitem" or (name.endswith("_") and isinstance(args[0], Tensor) and not self.is_data(args[0])):
            self._info[args[0]] = UnitData(find_axis(args[0].shape, self.units))
            return
        if not outputs or name.startswith("new_") or (name in _SHAPE_ONLY and not self.is_data(args[0])):
            return
        known = [(tensor, self._info[tensor]) for tensor in data]
        mixed = next((info for _, info in known if isinstance(info, Mixed)), None)
        placed = [(t, info.axis) for t, info in known if isinstance(info, UnitData) and info.axis is not None]
        if mixed is not None:
            if placed and name not in _SHAPE_ONLY and self.units > 1:
                raise UnitsMixedError(
                    f"Operation '{name}' combines each unit with '{mixed.operation}' over the whole batch, "
                    "so one unit's "
                    f"loss depends on the others and clipping bounds nothing{self._where()}. Use per-unit statistics "
                    "(LayerNorm instead of BatchNorm), or reduce over the batch only in the loss."
                )
            info: UnitData | Mixed = mixed
            for tensor in outputs:
                self._info[tensor] = info
            return
        if not placed:
            for tensor in outputs:
                self._info[tensor] = UnitData(None)
            return
        source, axis = placed[0]
        if reduces_units(name, axis, source, args, kwargs):
            for tensor in outputs:
                self._info[tensor] = Mixed(name)
            return
        for tensor in outputs:
            if name == "einsum":
                found = [_einsum_axis(args, t, a) for t, a in placed]
            elif name in _ALIGNING:
                found = [output_axis(name, a, t, tensor, args, kwargs) for t, a in placed]
            else:
                found = [output_axis(name, axis, source, tensor, args, kwargs)]
            distinct = {a for a in found if a is not None and a.fits(tensor.shape, self.units)}
            if len(distinct) > 1 and self.units > 1:
                raise UnitsMixedError(
                    f"Operation '{name}' compares every unit of the batch with every other one (in-batch "
                    "negatives?), so "
                    f"one unit's loss depends on the others and clipping bounds nothing{self._where()}. "
                    "Draw negatives from a public distribution instead."
                )
            self._info[tensor] = UnitData(distinct.pop() if distinct else None)

    def _where(self) -> str:
        where = next((name for name in reversed(self._stack) if name), "")
        return f" in module '{where}'" if where else ""


@dataclass(frozen=True)
class _Derived:
    """A tensor computed from parameters alone."""

    parameters: tuple[tuple[str, Tensor], ...]
    ids: Tensor | None


class _Mode(TorchFunctionMode):
    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.capture.run(func, args, kwargs or {})


def _inactive(*_: Any) -> None:
    """Stands for a hook in a copy or a pickle of the module, which is not private any more."""


class _Before:
    """Forward pre-hook; a class because a copied or pickled module must not carry the capture along."""

    def __init__(self, capture: Capture, name: str) -> None:
        self.capture, self.name = capture, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.capture.enter(self.name, args, kwargs)

    def __reduce__(self) -> Any:
        return _return_inactive, ()


class _After:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.capture.leave()

    def __reduce__(self) -> Any:
        return _return_inactive, ()


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


def _refuse_surroundings() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UnsupportedError(
            "torch.autocast rounds per-unit gradients before they are clipped. Train without autocast."
        )
    if torch._C._current_graph_task_id() != -1:
        raise UnsupportedError(
            "The module ran inside of backward (gradient checkpointing?), where its uses would be counted twice. "
            "Train without checkpointing; max_physical_batch bounds memory instead."
        )


def _name(func: Callable) -> str:
    """'matmul' for torch.matmul, Tensor.matmul, Tensor.__matmul__; 'T' for the property."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.strip("_") if name.startswith("__") else name


def _operands(args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, also inside of one list (torch.cat) or index tuple."""
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def _all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _all_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _all_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _all_tensors(getattr(value, field.name))


def _einsum_axis(args: tuple, operand: Tensor, axis: UnitAxis) -> UnitAxis | None:
    equation = args[0]
    operands = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    position = next(i for i, candidate in enumerate(operands) if candidate is operand)
    letter = inputs.split(",")[position][axis.dim]
    return UnitAxis(output.index(letter), axis.inner) if letter in output else None
