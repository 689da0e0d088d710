"""torch's layers that are one fused operation, and classes of plain operations that they run as for a while.

`sparsedp.nn` registers its LSTM, GRU and RNN here. The layer stays the same object, with its parameters, hooks and state_dict:
only its class is another.
"""

from __future__ import annotations

from torch import nn

from sparsedp.errors import UnsupportedError

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # of torch's own, and of plain operations


def register_replacement(fused: type[nn.Module], plain: type[nn.Module]) -> None:
    """Layers of class `fused` may run as `plain`, a subclass; its `why_not(layer)`, if it has one, tells which cannot."""
    _CLASSES[fused] = plain


def is_replaced(layer: nn.Module) -> bool:
    return type(layer) in _CLASSES.values()


def replace_fused(module: nn.Module) -> list[nn.Module]:
    """Lets fused layers in `module` run as plain ones; returns those that it changed."""
    layers = [(name, part) for name, part in module.named_modules() if type(part) in _CLASSES]
    for name, layer in layers:
        reason = getattr(_CLASSES[type(layer)], "why_not", lambda layer: None)(layer)
        if reason is not None:
            raise UnsupportedError(f"Module '{name}' ({type(layer).__name__}): {reason}")
    for _, layer in layers:
        layer.__class__ = _CLASSES[type(layer)]
    return [layer for _, layer in layers]


def restore_fused(layers: list[nn.Module]) -> None:
    """Makes them torch's own again."""
    classes = {plain: fused for fused, plain in _CLASSES.items()}
    for layer in layers:
        if type(layer) in classes:
            layer.__class__ = classes[type(layer)]
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()
