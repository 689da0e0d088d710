"""Rows and targets of linear models for the tests of `sparsedp.convex`."""

import numpy as np
from scipy.sparse import csr_matrix, random_array


def sparse_rows(n: int, d: int, nonzeros: int, seed: int = 0) -> csr_matrix:
    """(n, d), about so many non-zeros a row, of l2 norm at most 1."""
    rng = np.random.default_rng(seed)
    rows = csr_matrix(random_array((n, d), density=min(1.0, nonzeros / d), rng=rng, data_sampler=rng.standard_normal))
    norms = np.sqrt(rows.multiply(rows).sum(axis=1))
    return csr_matrix(rows.multiply(1 / np.maximum(np.asarray(norms).reshape(-1, 1), 1.0)))


def planted_labels(rows: csr_matrix, seed: int = 1) -> np.ndarray:
    """-1 and 1 by a random plane, a tenth of them the other way."""
    rng = np.random.default_rng(seed)
    labels = np.sign(rows @ rng.standard_normal(rows.shape[1]) + 1e-9)
    return np.where(rng.random(rows.shape[0]) < 0.1, -labels, labels)
