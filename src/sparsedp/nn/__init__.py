"""Layers that stand in for stock ones whose fused kernels hide the uses of their parameters."""

from sparsedp.nn.recurrent import GRU, LSTM

__all__ = ["GRU", "LSTM"]
