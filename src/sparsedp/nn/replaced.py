"""torch's own LSTM, GRU and RNN layers, which run as those of `sparsedp.nn` for a while.

The layer stays the same object, with its parameters, hooks and state_dict, and stays a torch.nn.GRU for whoever asks: only its
class is another, whose forward pass is made of plain operations.
"""

from __future__ import annotations

from torch import nn

from sparsedp.errors import UnsupportedError
from sparsedp.nn.recurrent import GRU, LSTM, RNN


class ReplacedLSTM(LSTM, nn.LSTM):  # type: ignore[misc]
    pass


class ReplacedGRU(GRU, nn.GRU):  # type: ignore[misc]
    pass


class ReplacedRNN(RNN, nn.RNN):  # type: ignore[misc]
    pass


_CLASSES: dict[type[nn.RNNBase], type[nn.RNNBase]] = {
    nn.LSTM: ReplacedLSTM,
    nn.GRU: ReplacedGRU,
    nn.RNN: ReplacedRNN,
}


def replace_recurrent(module: nn.Module) -> list[nn.RNNBase]:
    """Lets torch's recurrent layers in `module` run as ours; returns those that it changed."""
    layers = [(name, part) for name, part in module.named_modules() if type(part) in _CLASSES]
    for name, layer in layers:
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            raise UnsupportedError(
                f"Module '{name}' (LSTM): proj_size={layer.proj_size} is not available. Use an nn.Linear on the output instead."
            )
    for _, layer in layers:
        layer.__class__ = _CLASSES[type(layer)]
    return [layer for _, layer in layers if isinstance(layer, nn.RNNBase)]


def restore_recurrent(layers: list[nn.RNNBase]) -> None:
    """Makes them torch's own again."""
    classes = {ours: theirs for theirs, ours in _CLASSES.items()}
    for layer in layers:
        if type(layer) in classes:
            layer.__class__ = classes[type(layer)]
            layer.flatten_parameters()
