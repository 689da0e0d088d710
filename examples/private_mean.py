"""The private mean of sparse rows: what people bought, one row each, and how often each item is in a basket.

Run: python examples/private_mean.py
"""

import numpy as np
import scipy.sparse

from sparsedp.convex import private_mean

PEOPLE, ITEMS, BASKET = 20_000, 200_000, 10


def main() -> None:
    rng = np.random.default_rng(0)
    # Everybody has ten items, and some items are far more common than others.
    items = (ITEMS * rng.random((PEOPLE, BASKET)) ** 8).astype(int)
    baskets = scipy.sparse.csr_array(
        (np.ones(items.size), items.ravel(), np.arange(0, items.size + 1, BASKET)), shape=(PEOPLE, ITEMS)
    )
    baskets.sum_duplicates()
    baskets.data[:] = 1.0

    # A basket of ten ones has norm sqrt(10). Nothing here is computed from the data.
    bound = np.sqrt(BASKET)
    true = baskets.mean(axis=0)
    for method in ("gaussian", "projection", "auto"):
        answer = private_mean(baskets, epsilon=1.0, delta=1e-6, bound=bound, sparsity=BASKET, method=method)
        error = np.linalg.norm(answer.mean - true)
        print(f"{method}: an error of {error:.3f}, where at most {answer.error_bound:.3f} is expected")
    print(f"auto took {answer.method} with {answer.noise} noise: {answer.reason}")
    for item in np.argsort(-answer.mean)[:5]:
        print(f"item {item}: {answer.mean[item]:.3f} of baskets (in truth {true[item]:.3f})")
    print(answer.statement)


if __name__ == "__main__":
    main()
