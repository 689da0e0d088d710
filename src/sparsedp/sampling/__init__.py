"""Which units meet in a batch: Poisson or shuffled sampling, micro-batches, empty batches."""

from sparsedp.sampling.draws import BatchInfo
from sparsedp.sampling.loader import PrivateLoader, private_loader
from sparsedp.sampling.poisson import poisson_indices

__all__ = ["BatchInfo", "PrivateLoader", "poisson_indices", "private_loader"]
