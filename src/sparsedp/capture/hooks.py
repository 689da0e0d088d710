"""Where capture listens: the mode that sees operations, the hooks on modules and parameters, and what may not be beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsedp._torch import (
    compiler_callback,
    current_backward,
    is_tracing,
    module_backward_hooks,
    module_backward_pre_hooks,
    without_subclasses,
)
from sparsedp.capture.precision import refuse_rounding
from sparsedp.errors import SparseDPError, UnsupportedError

# Methods and attributes through which gradients can be read or changed.
LISTENING = {"register_hook", "register_post_accumulate_grad_hook", "grad_fn", "set__backward_hooks"}


class Listener(Protocol):
    """What the mode and the hooks report to."""

    # Called with each operation of a forward pass before it runs.
    before_read: Callable[[Callable, tuple, dict], None] | None

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """One torch operation of the forward pass."""

    def refused(self, error: Exception, func: Callable, args: tuple, kwargs: dict) -> Exception:
        """The error to raise for one that came up when an operation ran, with the line that it comes from."""

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Module `name` is about to run."""

    def leave(self, output: Any = None) -> None:
        """The module that was entered last has run."""


class Mode(TorchFunctionMode):
    """Hands every torch operation to the listener."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        listener, kwargs = self.listener, kwargs or {}
        try:
            if listener.before_read is None:
                return listener.run(func, args, kwargs)
            listener.before_read(func, args, kwargs)
            with without_subclasses():  # the tables' own guards: they were asked already
                return listener.run(func, args, kwargs)
        except Exception as error:
            refused = listener.refused(error, func, args, kwargs)
            if refused is error:
                raise
            raise refused from error


def _inactive(*_: Any) -> None:
    """Stands for a hook in a copy or a pickle of the module, which is not private any more."""


def _return_inactive() -> Callable:
    return _inactive


class _Unnamed:
    """A hook that refuses torch.jit.script, which shows itself only by asking for the name of the hook."""

    @property
    def __name__(self) -> str:
        raise _compilation()


class _Before(_Unnamed):
    """Forward pre-hook; a class because a copied or pickled module must not carry the capture along."""

    def __init__(self, listener: Listener, name: str) -> None:
        self.listener, self.name = listener, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.listener.enter(self.name, module, args, kwargs)

    def __reduce__(self) -> Any:
        return _return_inactive, ()


class _After(_Unnamed):
    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.listener.leave(output)

    def __reduce__(self) -> Any:
        return _return_inactive, ()


def is_own_hook(hook: Any) -> bool:
    """Whether capture registered a hook of a module, or a copy has it from there."""
    return hook is _inactive or isinstance(hook, (_Before, _After))


def attach_hooks(root: nn.Module, listener: Listener) -> list[Any]:
    """Hooks on all modules and trained parameters, as handles to remove them by; registers none if that is refused."""
    for module in root.modules():
        if any(isinstance(hook, _Before) for hook in module._forward_pre_hooks.values()):
            raise UnsupportedError("The module is private already, under another engine: call that engine's close().")
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks:
            raise UnsupportedError(
                f"Parameter '{name}' has a gradient hook, which would see no gradient. Remove it; to train a part of a "
                "parameter, make that part a parameter of its own."
            )
    for name, module in root.named_modules():
        refuse_backward_hooks(name, module)
    handles: list[Any] = []
    for name, module in root.named_modules():
        handles.append(module.register_forward_pre_hook(_Before(listener, name), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(_After(listener), always_call=True))
    for name, parameter in root.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_ordinary_gradient_hook(name)))
    return handles


def _ordinary_gradient_hook(name: str) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise SparseDPError(
            f"An ordinary gradient arrived at private parameter '{name}': it was used where capture does not see it "
            "(in the loss or elsewhere outside of the module's forward, in compiled or custom code, or as a "
            "penalty on the "
            "weight itself). Move the use into forward(), use weight_decay for penalties, or freeze the parameter with "
            "requires_grad_(False). Nothing was written. sparsedp.explain names the line if it is in the loss."
        )

    return refuse


def refuse_backward_hooks(name: str, module: nn.Module) -> None:
    if module._backward_hooks or module._backward_pre_hooks:
        raise UnsupportedError(
            f"Module '{name}' ({type(module).__name__}) has a backward hook, which may do anything to gradients, also mix those "
            "of different units. Remove it."
        )


def saved_tensor_hooks_refused() -> UnsupportedError:
    return UnsupportedError(
        "torch.autograd.graph.saved_tensors_hooks (gradient checkpointing, save_on_cpu) may change what gradients are made "
        "of. Train without it; max_physical_batch bounds memory instead."
    )


def refuse_compilation() -> None:
    """torch.compile and torch.export call hooks while they trace, or with their callback in place where they gave up."""
    callback = compiler_callback()
    if torch.compiler.is_compiling() or is_tracing() or callback not in (None, False):
        raise _compilation()


def _compilation() -> UnsupportedError:
    return UnsupportedError(
        "torch.compile, torch.export and torch.jit hide the operations of a forward pass and take the weights along as "
        "they are, so they do not work on a private module. engine.close() makes it an ordinary one, for which they do."
    )


def refuse_surroundings() -> None:
    """What would change gradients, or run uses twice, around a forward pass with gradients on."""
    refuse_rounding()
    if module_backward_hooks or module_backward_pre_hooks:
        raise UnsupportedError(
            "A backward hook for all modules is registered, which may do anything to gradients, also mix those of different "
            "units. Remove it."
        )
    if current_backward() != -1:
        raise UnsupportedError(
            "The module ran inside of backward (gradient checkpointing?), where its uses would be counted twice. "
            "Train without checkpointing; max_physical_batch bounds memory instead."
        )
