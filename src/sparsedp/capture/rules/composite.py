"""Attention, which has a path of its own, and recurrent layers, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsedp.capture.attention import attention
from sparsedp.capture.capture import Capture
from sparsedp.capture.rules.registry import names_of, rule


@rule("multi_head_attention_forward")
def _attention(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    with capture.resumed():
        return attention(*args, **kwargs)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _recurrent(capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    operands = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    names = names_of(capture, [t for t in operands if isinstance(t, Tensor)])
    raise capture.refuse(name, names, "torch's recurrent layers are fused", "use sparsedp.nn.LSTM or sparsedp.nn.GRU")
