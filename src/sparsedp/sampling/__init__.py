"""Which units meet in a batch: Poisson or shuffled sampling, micro-batches, empty batches, streams by period, shares of ranks."""

from sparsedp.sampling.collate import collate_anew, is_repeatable
from sparsedp.sampling.columns import rows_reader
from sparsedp.sampling.draws import BatchInfo
from sparsedp.sampling.loader import PrivateLoader
from sparsedp.sampling.periods import period_name
from sparsedp.sampling.poisson import poisson_indices
from sparsedp.sampling.share import Share
from sparsedp.sampling.stream import Stream, StreamPlan
from sparsedp.sampling.users import Users, owners_of, users_of, whole_users

__all__ = [
    "BatchInfo",
    "PrivateLoader",
    "Share",
    "Stream",
    "StreamPlan",
    "Users",
    "collate_anew",
    "is_repeatable",
    "owners_of",
    "period_name",
    "poisson_indices",
    "rows_reader",
    "users_of",
    "whole_users",
]
