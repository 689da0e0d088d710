"""Layers that stand in for stock ones whose fused kernels hide uses, or which do not go with sparse mechanisms."""

import sparsedp.nn.replaced  # noqa: F401  # registers what torch's recurrent layers run as
from sparsedp.nn.candidates import CandidateSampler, binary_candidate_loss, candidate_loss, candidate_scores
from sparsedp.nn.fallback import FallbackEmbedding, FallbackEmbeddingBag
from sparsedp.nn.recurrent import GRU, LSTM, RNN
from sparsedp.nn.softmax import sequence_loss, table_softmax_loss

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "CandidateSampler",
    "FallbackEmbedding",
    "FallbackEmbeddingBag",
    "binary_candidate_loss",
    "candidate_loss",
    "candidate_scores",
    "sequence_loss",
    "table_softmax_loss",
]
