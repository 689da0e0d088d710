"""Layers that stand in for stock ones whose fused kernels hide uses, or which do not go with sparse mechanisms."""

from sparsedp.nn.candidates import CandidateSampler, candidate_loss, candidate_scores
from sparsedp.nn.fallback import FallbackEmbedding, FallbackEmbeddingBag
from sparsedp.nn.recurrent import GRU, LSTM

__all__ = [
    "GRU",
    "LSTM",
    "CandidateSampler",
    "FallbackEmbedding",
    "FallbackEmbeddingBag",
    "candidate_loss",
    "candidate_scores",
]
