"""Whether the optimizer moves what it is to move, and nothing else: looked at in the first updates of a run.

Where adapters are merged, groups of an optimizer are filtered, or weights are written by somebody else's rule, a run goes on for
hours and trains nothing, or too much. A parameter's version counter tells that it was written, without looking at a weight; an
optimizer that writes behind it (`p.data`) is told by a few of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.errors import SparseDPError

PATIENCE = (
    10  # updates in a row that may leave a parameter with a gradient as it is: some optimizers write now and then
)
_MOST = 100  # updates that are looked at
_SAMPLED = 16  # weights of a parameter that are looked at


class _Seen(NamedTuple):
    """A parameter before an update."""

    version: int
    sample: Tensor
    expected: bool  # whether the update should write it


class Movement:
    """Looks at updates until every trained parameter has moved once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        """`parameters` are all of the module, also those that the optimizer does not have."""
        self._parameters, self._optimizer = dict(parameters), optimizer
        self._missed = dict.fromkeys(self._parameters, 0)  # of those that were not seen moving
        self._left = _MOST  # updates to look at

    def before(self) -> dict[str, _Seen]:
        """What is there when the gradients are in their places; nothing once all is well."""
        if not self._left:
            return {}
        rates = {id(p): group.get("lr") for group in self._optimizer.param_groups for p in group["params"]}
        return {name: self._look(p, rates.get(id(p))) for name, p in self._parameters.items() if not p.is_meta}

    def _look(self, parameter: nn.Parameter, rate: Any) -> _Seen:
        weights, gradient = parameter.detach(), parameter.grad
        if gradient is None:
            return _Seen(parameter._version, _sample(weights), False)
        if gradient.is_sparse:
            rows = gradient._indices()[0, :1]
            expected, sample = bool(len(rows)), weights[rows]
        else:
            expected, sample = bool(_sample(gradient).any()), _sample(weights)
        return _Seen(parameter._version, sample, expected and rate is not None and bool(rate != 0))

    def after(self, seen: Mapping[str, _Seen], gradients: Mapping[str, Tensor | None]) -> None:
        """Compares with what `before` gave. `gradients` are those that the update was given."""
        if not seen:
            return
        with_gradients = {
            _memory(self._parameters[name]) for name, gradient in gradients.items() if gradient is not None
        }
        for name, (version, sample, expected) in seen.items():
            parameter, gradient = self._parameters[name], gradients.get(name)
            rows = gradient._indices()[0, :1] if gradient is not None and gradient.is_sparse else None
            weights = parameter.detach()
            now = _sample(weights) if rows is None else weights[rows]
            moved = parameter._version != version or not torch.equal(now, sample)
            if gradient is None and _memory(parameter) in with_gradients:
                continue  # another name of the memory of one that is trained
            if moved and gradient is None:
                raise SparseDPError(
                    f"The optimizer wrote to parameter '{name}', which has no gradient in this step: it is frozen, or its rows "
                    "are moved without the optimizer. Only what is clipped and noised may move. Is there a hook on "
                    "optimizer.step(), or a rule of its own (weight decay, averaging), that takes all parameters?"
                )
            if moved:
                self._missed.pop(name, None)
            elif expected and name in self._missed:
                self._missed[name] += 1
                if self._missed[name] == PATIENCE:
                    raise SparseDPError(
                        f"Parameter '{name}' is to be trained, and {type(self._optimizer).__name__} was given its gradient in "
                        f"{PATIENCE} steps, but it has not moved. Does the optimizer leave it out, or a hook? If it is not to be "
                        "trained, freeze it with requires_grad_(False)."
                    )
        waits = any(gradient is not None and name in self._missed for name, gradient in gradients.items())
        self._left = self._left - 1 if waits else 0


def _memory(parameter: Tensor) -> int:
    return parameter.untyped_storage().data_ptr()


def _sample(values: Tensor) -> Tensor:
    """Some of the values, from all over; of a tensor of any size in the same time."""
    flat = values.reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()
