"""Explains what private training makes of a model: the way of its units, operation by operation, and all that it refuses.

A forward pass stops at the first operation that cannot be accounted for. `explain` goes on after it, on a copy of the model that
is thrown away: it changes no weight, buffer, gradient or generator, and nothing that it returns can be trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsedp.capture import RepeatedDraws, Replaced, TracedOperation, TracingCapture
from sparsedp.capture.inputs import named_inputs
from sparsedp.capture.places import place_of
from sparsedp.check import copied_module, count_units, len_of, map_tensors
from sparsedp.counting import arguments_of
from sparsedp.errors import Refusal, SparseDPError, UnsupportedError, one_line
from sparsedp.fused import replace_fused
from sparsedp.refusals import refused_parts
from sparsedp.sampling import BatchInfo, PrivateLoader, collate_anew

_COLLATED = 4  # examples of a data loader that are looked at


@dataclass(frozen=True)
class Explanation:
    """What private training makes of a model on one batch: print it, or read its parts.

    `operations` are those on units or on parameters, in their order; `refusals` are all that a private step, or
    `sparsedp.check`, would refuse; `notes` say what is not seen here.
    """

    units: int
    operations: tuple[TracedOperation, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusals

    def to_dict(self) -> dict[str, Any]:
        """In plain values, for JSON."""
        return {
            "ok": self.ok,
            "units": self.units,
            "operations": [operation.to_dict() for operation in self.operations],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"The way of {self.units} units through {_counted(len(self.operations), 'operation')}: "
            f"{_counted(len(self.refusals), 'refusal')}.",
            "* marks the axis of units, ! an operation that is refused, whose result is then assumed.",
        ]
        lines += _way(self.operations)
        for number, refusal in enumerate(self.refusals, 1):
            lines += ["", f"Refusal {number} of {len(self.refusals)}", str(refusal)]
        if self.notes:
            lines += ["", *(f"Note: {note}" for note in self.notes)]
        if self.ok:
            lines += ["", "Nothing is refused. sparsedp.check compares gradients, and sees what is not seen here."]
        return "\n".join(lines)


def explain(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any = None,
    *,
    data_loader: DataLoader | None = None,
    replace_recurrent: bool = False,
) -> Explanation:
    """The way of the unit axis through `module` and `loss_fn`, operation by operation, and all refusals at once.

    `module`, `loss_fn`, `batch`, `data_loader` and `replace_recurrent` are as in `sparsedp.check`: a batch is what the loader
    yields, (inputs..., target) or a dict. It needs two units at least. The module is left as it is, and nothing is trained.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"explain takes a torch.nn.Module first, not {type(module).__name__}.")
    originals = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not originals:
        raise SparseDPError("The module has no parameter that requires a gradient: there is nothing to explain.")
    batch, units = _batch_of(batch, data_loader)
    with _kept_generators(), _kept_state(loss_fn), torch.enable_grad():
        copied = copied_module(module).cpu()
        if replace_recurrent:
            replace_fused(copied)
        parameters = {name: p for name, p in copied.named_parameters() if p.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None
        draws = RepeatedDraws()
        draws.together(units)
        capture = TracingCapture(copied, parameters, BatchInfo(units, units, True, True, 0), draws, originals)
        for part in refused_parts(copied):
            capture.add(part.error)
        _run(capture, copied, loss_fn, _on_cpu(batch), draws, units)
    return Explanation(units, tuple(capture.operations), _joined(capture.found), tuple(capture.notes))


def _batch_of(batch: Any, data_loader: DataLoader | None) -> tuple[Any, int]:
    """A batch and the number of its units."""
    if batch is None:
        if data_loader is None:
            raise SparseDPError("There is nothing to explain on: give explain a batch, or data_loader=.")
        count = max(2, min(_COLLATED, data_loader.batch_size or _COLLATED))
        batch, units, _ = collate_anew(data_loader, count, examined=isinstance(data_loader, PrivateLoader))
    else:
        is_sequence = isinstance(batch, (tuple, list)) and len(batch) >= 2
        if not (is_sequence or (isinstance(batch, Mapping) and batch) or is_dataclass(batch)):
            raise SparseDPError(
                "A batch is what the loader yields: (inputs..., target), for loss_fn(module(*inputs), target), a dict, for "
                "loss_fn(module(**batch), batch), or an object of a dataclass, for loss_fn(module(batch), batch); not "
                f"{type(batch).__name__}{_length(batch)}."
            )
        try:
            units = count_units(batch)
        except SparseDPError:
            units = len_of(batch)  # tensors of several lengths, such as ids of bags: the target's
    if units < 2:
        raise SparseDPError(f"A batch of at least 2 units is needed to see whether units mix; this one has {units}.")
    return batch, units


def _length(batch: Any) -> str:
    return f" of length {len(batch)}" if isinstance(batch, (Mapping, tuple, list)) else ""


def _on_cpu(batch: Any) -> Any:
    """A copy of a batch: forward() may write to it."""
    return map_tensors(batch, lambda tensor: tensor.detach().cpu().clone())


def _run(
    capture: TracingCapture, module: nn.Module, loss_fn: Callable, batch: Any, draws: RepeatedDraws, units: int
) -> None:
    """A forward pass and a loss, and a backward pass if nothing was refused before."""
    args, kwargs, target = arguments_of(batch)
    _note_inputs(capture, module, args, kwargs, units)
    try:
        capture.attach()
    except UnsupportedError as error:  # of hooks on the module: nothing can be followed beside them
        capture.add(error)
        return
    try:
        out = module(*args, **kwargs)
        with Replaced(draws), capture.following_loss(target):
            loss = loss_fn(out, target)
        _require_loss(loss)
        capture.judge_loss(loss)
        if not capture.found:
            _go_back(capture, loss)
    except SparseDPError as error:
        place = place_of(error)
        if not capture.found and not error.is_located and place is None:
            raise
        capture.add(error if place is None else capture.locate(error, "", place))
        capture.notes.append("The pass ended at the last refusal: what would come after it is not seen.")
    except Exception as error:
        if not capture.found:
            raise
        capture.notes.append(f"After the refusals the pass ended: {one_line(error)}")
    finally:
        capture.detach()


def _note_inputs(
    capture: TracingCapture, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], units: int
) -> None:
    """Inputs without an axis of units, which are let pass."""
    for named in named_inputs(module, args, dict(kwargs)):
        value = named.value
        if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != units):
            capture.notes.append(
                f"Input '{named.path}' of shape {tuple(value.shape)} has no axis of {units} units first. A step takes it if it "
                "is the same in every batch, or declared: public_inputs of make_private."
            )


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise SparseDPError(f"The loss is {type(loss).__name__}. It must be a tensor, the mean or the sum over units.")
    if loss.dim() != 0:
        raise SparseDPError(
            f"The loss has shape {tuple(loss.shape)}. It must be one number, the mean or the sum over units."
        )
    if not loss.requires_grad:
        raise SparseDPError("The loss does not depend on any trained parameter of the module.")


def _go_back(capture: TracingCapture, loss: Tensor) -> None:
    """What a private step would refuse in the backward pass, or after it."""
    try:
        loss.backward()
        collected = capture.collect()
    except SparseDPError as error:
        if not error.is_located:
            error.locate(Refusal(type(error).__name__, error.message))
        raise
    if collected is None:
        raise SparseDPError("The loss does not depend on any trained parameter of the module.")
    for names in dict.fromkeys(term.expression.names for term in collected.terms):
        capture.notes.append(
            f"The loss has a term that depends on {names} alone. It joins the update after the noise. On a table it is as large "
            "as the table, and mechanisms that change some rows refuse it: weight_decay of the optimizer does not cost that."
        )


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Leaves the generators that everybody shares where they are."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _kept_state(loss_fn: Any) -> Iterator[None]:
    """Leaves the buffers and gradients of a loss that is a module as they are."""
    tensors = [*loss_fn.parameters(), *loss_fn.buffers()] if isinstance(loss_fn, nn.Module) else []
    values, grads = [tensor.detach().clone() for tensor in tensors], [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, grad in zip(tensors, values, grads):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
                tensor.grad = grad


def _joined(refusals: list[Refusal]) -> tuple[Refusal, ...]:
    """Refusals of a layer as a whole, together with the line that an operation of the same layer was refused in."""
    by_layer = {refusal.module: refusal for refusal in refusals if not refusal.operation and refusal.module}
    joined: list[Refusal] = []
    for refusal in refusals:
        layer = by_layer.get(refusal.module)
        if layer is None or refusal is layer:
            joined.append(refusal)
        else:
            at = next(place for place, other in enumerate(joined) if other.module == layer.module)
            joined[at] = replace(
                layer, operation=refusal.operation, operands=refusal.operands, file=refusal.file, line=refusal.line,
                function=refusal.function, source=refusal.source,
            )  # fmt: skip
    return tuple(joined)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _way(operations: tuple[TracedOperation, ...]) -> Iterator[str]:
    """A line for each operation, under the file that it is in."""
    file = None
    for operation in operations:
        if operation.file != file:
            file = operation.file
            yield ""
            yield f'File "{file}"' if file else "Not in a file of the model's"
        mark = "!" if operation.refused else " "
        line = str(operation.line) if operation.line else ""
        module = f"   [{operation.module}]" if operation.module else ""
        outputs = ", ".join(operation.outputs) or "nothing"
        yield f"{mark}{line:>5}  {operation.operation}: {', '.join(operation.inputs)} -> {outputs}{module}"
