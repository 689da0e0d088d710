"""Several of torch's optimizers as one: each moves its own parameters, such as one the tables and another the dense ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from sparsedp.errors import UnsupportedError

_KINDS = "optimizers"  # the key of a state_dict that several have: what they are, and what else they keep
_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class SeveralOptimizers(Optimizer):
    """What several optimizers have, under the names that one has: all parameter groups, all states, a step of each in order.

    The groups and states are the optimizers' own, so that whoever holds one of them, such as a learning-rate scheduler, sees and
    changes the same. A `state_dict` is laid out as one optimizer's with the groups of all.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        # Not super().__init__(): it would make parameter groups of its own beside the optimizers'.
        self.parts = tuple(parts)
        for hook in _HOOKS:
            setattr(self, f"_optimizer_{hook}_hooks", OrderedDict())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        raise UnsupportedError(
            "The parameter groups of several optimizers are their own: set those of one of them, or change a group in place."
        )

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return _States(self.parts)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The first one's, of those that all have: a scheduler that cycles momenta looks here whether there are any."""
        first, *others = (part.defaults for part in self.parts)
        return {key: value for key, value in first.items() if all(key in other for other in others)}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UnsupportedError("Several optimizers would each evaluate the closure: the private one does, once.")
        self._tell("step_pre", (), {})
        for part in self.parts:
            part.step()
        self._tell("step_post", (), {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self._tell("state_dict_pre")
        merged: dict[str, Any] = {"state": {}, "param_groups": [], _KINDS: []}
        first = 0  # number of the parameters of the optimizers before
        for part in self.parts:
            saved = part.state_dict()
            groups, states = saved.pop("param_groups"), saved.pop("state")
            numbered = {key: states.pop(key) for key in list(states) if isinstance(key, int)}
            merged["state"] |= {number + first: value for number, value in numbered.items()}
            merged["param_groups"] += [{**g, "params": [number + first for number in g["params"]]} for g in groups]
            kept = {"kind": type(part).__name__, "groups": len(groups), "state": states, "rest": saved}
            merged[_KINDS].append(kept)
            first += sum(len(group["params"]) for group in groups)
        for hook in self._hooks("state_dict_post"):
            merged = merged if (changed := hook(self, merged)) is None else changed
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for hook in self._hooks("load_state_dict_pre"):
            state_dict = state_dict if (changed := hook(self, state_dict)) is None else changed
        require_same_optimizers(self, state_dict)
        groups, first, own = state_dict["param_groups"], 0, []
        for kept, part in zip(state_dict[_KINDS], self.parts):
            mine, groups = groups[: kept["groups"]], groups[kept["groups"] :]
            count = sum(len(group["params"]) for group in part.param_groups)
            if [len(group["params"]) for group in mine] != [len(group["params"]) for group in part.param_groups]:
                raise ValueError(f"{kept['kind']}: the loaded state has other parameter groups.")
            numbers = range(first, first + count)
            if sorted(number for group in mine for number in group["params"]) != list(numbers):
                raise ValueError(f"{kept['kind']}: the loaded state is of other parameters than this optimizer's.")
            own.append(
                {
                    **kept["rest"],
                    "state": kept["state"] | {k - first: v for k, v in state_dict["state"].items() if k in numbers},
                    "param_groups": [{**g, "params": [number - first for number in g["params"]]} for g in mine],
                }
            )
            first += count
        for part, saved in zip(self.parts, own):
            part.load_state_dict(saved)
        self._tell("load_state_dict_post")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError("Add the parameters to one of the optimizers.")

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        return list(getattr(self, f"_optimizer_{name}_hooks").values())

    def _tell(self, name: str, *arguments: Any) -> None:
        for hook in self._hooks(name):
            if hook(self, *arguments) is not None:
                raise UnsupportedError("A hook cannot change the arguments of the step of several optimizers.")

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.parts))}]"


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers by parameter, each in the optimizer that has the parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        self._of = {parameter: part for part in parts for group in part.param_groups for parameter in group["params"]}

    def _state(self, parameter: Tensor) -> Any:
        return self._of[parameter].state

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._state(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._state(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._state(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self._parts)

    def get(self, parameter: Tensor, default: Any = None) -> Any:  # a look makes no state
        found = (part.state[parameter] for part in self._parts if parameter in part.state)
        return next(found, default)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def as_one(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """An optimizer as it is, or several as one."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, (list, tuple)) or not optimizer:
        raise TypeError(f"optimizer must be an optimizer of torch, or a list of some; got {optimizer!r}")
    for place, part in enumerate(optimizer):
        if not isinstance(part, Optimizer):
            raise TypeError(f"optimizer[{place}] must be an optimizer of torch, not {type(part).__name__}")
    return optimizer[0] if len(optimizer) == 1 else SeveralOptimizers(optimizer)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that move parameters: several, or one."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def optimizer_state_bytes(optimizer: Optimizer) -> int | None:
    """Bytes of the state that it will keep of its parameters, from a step of each kind on a small parameter of its own; None if
    an optimizer of that kind cannot be made of its groups alone."""
    total = 0.0
    for part in parts_of(optimizer):
        for group in part.param_groups:
            probe = Parameter(torch.zeros(32, 32))
            probe.grad = torch.zeros_like(probe)
            if isinstance(part, torch.optim.SparseAdam):
                probe.grad = probe.grad.to_sparse(1)
            try:
                trial = type(part)([{**group, "params": [probe]}])  # type: ignore[call-arg]
                trial.step()
            except Exception:  # of the user's own: it wants other arguments
                return None
            kept = sum(v.nbytes for v in trial.state[probe].values() if isinstance(v, Tensor) and v.dim())
            total += kept / probe.nbytes * sum(p.nbytes for p in group["params"] if p.requires_grad)
    return round(total)


def require_same_optimizers(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raises unless a state is of as many optimizers, of the same kinds and in the same order."""
    here = [type(part).__name__ for part in parts_of(optimizer)] if isinstance(optimizer, SeveralOptimizers) else None
    saved = state_dict.get(_KINDS)
    there = None if saved is None else [kept["kind"] for kept in saved]
    if here != there:
        raise ValueError(
            f"the state is of {_named(there)}, and here {_named(here)} trains: give make_private the same ones, in the same order"
        )


def kinds_in(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The part of a state_dict that says which optimizers it is of; empty for that of one."""
    return {key: value for key, value in state_dict.items() if key == _KINDS}


def _named(kinds: list[str] | None) -> str:
    return "one optimizer" if kinds is None else f"the optimizers [{', '.join(kinds)}]"
