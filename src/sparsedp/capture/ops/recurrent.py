"""torch's recurrent layers. Their cells come apart into linear maps and gates; whole layers are fused, and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.capture.ops.helpers import names_of
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import use_rule


@use_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    operands = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    names = names_of(capture, [t for t in operands if isinstance(t, Tensor)])
    raise capture.refuse(
        name, names, "torch's recurrent layers are fused",
        "pass replace_recurrent=True, or use sparsedp.nn.LSTM, sparsedp.nn.GRU or sparsedp.nn.RNN",
    )  # fmt: skip


@use_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Of (batch, features), in operations that are captured one by one."""
    with capture.resumed():
        return _run_cell(capture, name, *args, **kwargs)


def _run_cell(
    capture: CaptureForRules, name: str, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:  # fmt: skip
    if input.dim() != 2:
        names = names_of(capture, [w_ih, w_hh])
        raise capture.refuse(name, names, "its input has no axis of units", "give it a batch, (batch, features)")
    hidden, *rest = hx if isinstance(hx, (tuple, list)) else (hx,)
    if not hidden.requires_grad and not capture.is_data(hidden):
        # A constant, such as the zeros of a first step, as something that the units have: its product with a weight would be
        # computed from parameters alone.
        hidden = torch.where(torch.zeros((), dtype=torch.bool, device=input.device), input[:, :1].detach(), hidden)
    from_input, from_hidden = F.linear(input, w_ih, b_ih), F.linear(hidden, w_hh, b_hh)
    if name == "lstm_cell":
        i, f, g, o = (from_input + from_hidden).chunk(4, dim=1)
        c = torch.sigmoid(f) * rest[0] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if name == "gru_cell":
        input_r, input_z, input_n = from_input.chunk(3, dim=1)
        hidden_r, hidden_z, hidden_n = from_hidden.chunk(3, dim=1)
        z = torch.sigmoid(input_z + hidden_z)
        n = torch.tanh(input_n + torch.sigmoid(input_r + hidden_r) * hidden_n)
        return (1 - z) * n + z * hidden
    total = from_input + from_hidden
    return torch.tanh(total) if name == "rnn_tanh_cell" else torch.relu(total)
