"""LSTM, GRU and RNN out of plain operations, so that every use of their parameters can be captured.

torch.nn's are one fused kernel each. These have the same parameters, names, initialisation and results. Batch
is axis 0 wherever a tensor meets a parameter.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsedp.errors import UnsupportedError
from sparsedp.nn.packed import packed_like, reordered, unpacked

# h, or h and c: each [batch, hidden] inside a layer, [layers * directions, batch, hidden] outside.
State = tuple[Tensor, ...]


class Recurrent(nn.Module, ABC):
    """What the layers have in common."""

    gates: int  # blocks of `hidden_size` rows in a weight

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = f"sparsedp.nn.{type(self).__name__}"
        if proj_size:
            raise UnsupportedError(
                f"{name} does not support proj_size={proj_size}: use an nn.Linear on the output instead."
            )
        if hidden_size < 1 or num_layers < 1:
            raise ValueError(f"{name}: {hidden_size=} and {num_layers=} must be at least 1.")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{name}: dropout={dropout} must be a probability.")
        if dropout and num_layers == 1:
            warnings.warn(f"{name}: dropout={dropout} acts between layers, and there is one layer only.", stacklevel=3)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = 0
        # In torch's order, so that a seed and a state_dict mean the same for both.
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * (1 + bidirectional)
            for suffix in self._suffixes(layer):
                shapes = {
                    "weight_ih": (self.gates * hidden_size, width),
                    "weight_hh": (self.gates * hidden_size, hidden_size),
                    "bias_ih": (self.gates * hidden_size,),
                    "bias_hh": (self.gates * hidden_size,),
                }
                for kind, shape in shapes.items():
                    if bias or kind.startswith("weight"):
                        parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                        self.register_parameter(f"{kind}_{suffix}", parameter)
        self.reset_parameters()

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"] if self.bidirectional else [f"l{layer}"]

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden_size), as torch does it."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Nothing to do; here because code written for torch's layers calls it."""

    def extra_repr(self) -> str:
        shown = [str(self.input_size), str(self.hidden_size)]
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)

    @abstractmethod
    def _cell(self, from_input: Tensor, from_hidden: Tensor, state: State) -> State:
        """The next state from both projections, [batch, gates * hidden]."""

    def _run(
        self, x: Tensor | PackedSequence, initial: Sequence[Tensor] | None, states: int
    ) -> tuple[Tensor | PackedSequence, State]:
        """All layers: output in x's layout, and the final states."""
        name = f"sparsedp.nn.{type(self).__name__}"
        if isinstance(x, PackedSequence):
            padded, is_there = unpacked(x)
            if initial is not None:
                self._require_states(initial, padded.shape[0], states)
                initial = [reordered(given, x.sorted_indices) for given in initial]
            output, final = self._layers(padded, initial, states, is_there)
            final = tuple(reordered(state, x.unsorted_indices) for state in final)
            return packed_like(x, output), final
        if x.dim() != 3:
            raise UnsupportedError(
                f"{name} takes 3-D input with a batch axis, not shape {tuple(x.shape)}: the time axis of an "
                "unbatched sequence would pass for units. Add a batch axis with unsqueeze."
            )
        output, final = self._layers(x if self.batch_first else x.transpose(0, 1), initial, states)
        return (output if self.batch_first else output.transpose(0, 1)), final

    def _require_states(self, initial: Sequence[Tensor], batch: int, states: int) -> None:
        shape = (self.num_layers * (1 + self.bidirectional), batch, self.hidden_size)
        if [tuple(given.shape) for given in initial] != [shape] * states:
            name, shapes = f"sparsedp.nn.{type(self).__name__}", [tuple(given.shape) for given in initial]
            raise ValueError(f"{name}: initial state has shapes {shapes}, expected {[shape] * states}.")

    def _layers(
        self, x: Tensor, initial: Sequence[Tensor] | None, states: int, is_there: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """All layers on [batch, length, in]. `is_there`, bool [batch, length, 1], says which time steps there are; None: all."""
        name = f"sparsedp.nn.{type(self).__name__}"
        batch, length, width = x.shape
        if width != self.input_size or length == 0:
            raise ValueError(
                f"{name}: input has {width} features over {length} time steps, expected {self.input_size} "
                "features over at least one step."
            )
        shape = (self.num_layers * (1 + self.bidirectional), batch, self.hidden_size)
        if initial is None:
            initial = [x.new_zeros(shape)] * states
        self._require_states(initial, batch, states)
        initial = [given if given.requires_grad else _of_units(given, x[:, 0, :1]) for given in initial]

        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for suffix in self._suffixes(layer):
                state = tuple(given[len(finals)] for given in initial)
                output, state = self._direction(x, state, suffix, is_there)
                outputs.append(output)
                finals.append(state)
            x = torch.cat(outputs, dim=2) if self.bidirectional else outputs[0]
        return x, tuple(torch.stack(parts) for parts in zip(*finals))

    def _direction(self, x: Tensor, state: State, suffix: str, is_there: Tensor | None) -> tuple[Tensor, State]:
        """One layer in one direction, [batch, length, in] to [batch, length, hidden]."""
        weight_ih, weight_hh = getattr(self, f"weight_ih_{suffix}"), getattr(self, f"weight_hh_{suffix}")
        bias_ih = getattr(self, f"bias_ih_{suffix}") if self.bias else None
        bias_hh = getattr(self, f"bias_hh_{suffix}") if self.bias else None
        backward = suffix.endswith("_reverse")
        steps = F.linear(x, weight_ih, bias_ih).unbind(1)
        masks = [None] * len(steps) if is_there is None else is_there.unbind(1)
        outputs = []
        for from_input, mask in reversed([*zip(steps, masks)]) if backward else zip(steps, masks):
            after = self._cell(from_input, F.linear(state[0], weight_hh, bias_hh), state)
            # A sequence that is not there yet, or any more, keeps its state.
            state = after if mask is None else tuple(map(torch.where, (mask,) * len(after), after, state))
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backward else outputs, dim=1), state


def _of_units(state: Tensor, x: Tensor) -> Tensor:
    """`state`, a constant (..., batch, hidden), as something that the units of x (batch, 1) have.

    A product of a weight with a constant would be computed from parameters alone: a copy of the weight's size for each unit.
    """
    never = torch.zeros((), dtype=torch.bool, device=state.device)
    return torch.where(never, x.detach(), state)


_DEFAULTS = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}


class LSTM(Recurrent):
    """torch.nn.LSTM for private training; takes its state_dict.

    i, f, g, o = W_ih x + b_ih + W_hh h + b_hh
    c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(c')
    """

    gates = 4

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Output and (h_n, c_n), in the shapes of torch.nn.LSTM."""
        return self._run(input, hx, states=2)

    def _cell(self, from_input: Tensor, from_hidden: Tensor, state: State) -> State:
        i, f, g, o = (from_input + from_hidden).chunk(4, dim=1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GRU(Recurrent):
    """torch.nn.GRU for private training; takes its state_dict.

    r, z = sigmoid(W_i x + b_i + W_h h + b_h)
    n = tanh(W_in x + b_in + r (W_hn h + b_hn));  h' = (1 - z) n + z h
    """

    gates = 3

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output and h_n, in the shapes of torch.nn.GRU."""
        output, (hidden,) = self._run(input, None if hx is None else (hx,), states=1)
        return output, hidden

    def _cell(self, from_input: Tensor, from_hidden: Tensor, state: State) -> State:
        input_r, input_z, input_n = from_input.chunk(3, dim=1)
        hidden_r, hidden_z, hidden_n = from_hidden.chunk(3, dim=1)
        z = torch.sigmoid(input_z + hidden_z)
        n = torch.tanh(input_n + torch.sigmoid(input_r + hidden_r) * hidden_n)
        return ((1 - z) * n + z * state[0],)


class RNN(Recurrent):
    """torch.nn.RNN for private training; takes its state_dict.

    h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu with nonlinearity="relu"
    """

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"sparsedp.nn.RNN: nonlinearity must be 'tanh' or 'relu', not {nonlinearity!r}.")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype
        )
        self.nonlinearity = nonlinearity

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output and h_n, in the shapes of torch.nn.RNN."""
        output, (hidden,) = self._run(input, None if hx is None else (hx,), states=1)
        return output, hidden

    def _cell(self, from_input: Tensor, from_hidden: Tensor, state: State) -> State:
        total = from_input + from_hidden
        return (torch.tanh(total) if self.nonlinearity == "tanh" else torch.relu(total),)
