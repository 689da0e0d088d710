"""torch's own LSTM, GRU and RNN layers, which run as those of `sparsedp.nn` for a while (`sparsedp.fused`).

The layer stays a torch.nn.GRU for whoever asks, but its forward pass is made of plain operations.
"""

from __future__ import annotations

from torch import nn

from sparsedp.fused import register_replacement
from sparsedp.nn.recurrent import GRU, LSTM, RNN


class ReplacedLSTM(LSTM, nn.LSTM):  # type: ignore[misc]
    @staticmethod
    def why_not(layer: nn.LSTM) -> str | None:
        if not layer.proj_size:
            return None
        return f"proj_size={layer.proj_size} is not available. Use an nn.Linear on the output instead."


class ReplacedGRU(GRU, nn.GRU):  # type: ignore[misc]
    pass


class ReplacedRNN(RNN, nn.RNN):  # type: ignore[misc]
    pass


register_replacement(nn.LSTM, ReplacedLSTM)
register_replacement(nn.GRU, ReplacedGRU)
register_replacement(nn.RNN, ReplacedRNN)
