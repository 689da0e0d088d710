"""torch's recurrent layers, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp.capture.ops.helpers import names_of
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import use_rule


@use_rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _recurrent(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    operands = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    names = names_of(capture, [t for t in operands if isinstance(t, Tensor)])
    raise capture.refuse(name, names, "torch's recurrent layers are fused", "use sparsedp.nn.LSTM or sparsedp.nn.GRU")
