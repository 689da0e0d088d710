"""A private linear classifier on sparse rows: which of 20,000 words a text has, and whether it is liked.

Run: python examples/private_classifier.py
"""

import numpy as np
import scipy.sparse

from sparsedp.convex import LogisticRegression

TEXTS, WORDS, LENGTH = 40_000, 20_000, 12


def main() -> None:
    rng = np.random.default_rng(0)
    # Some words are far more common than others, and each speaks for or against.
    words = (WORDS * rng.random((TEXTS, LENGTH)) ** 6).astype(int)
    texts = scipy.sparse.csr_array(
        (np.ones(words.size), words.ravel(), np.arange(0, words.size + 1, LENGTH)), shape=(TEXTS, WORDS)
    )
    opinions = rng.standard_normal(WORDS)
    liked = (opinions[words].sum(axis=1) > 0).astype(int)
    train, test = slice(0, TEXTS * 3 // 4), slice(TEXTS * 3 // 4, None)

    # Rows are scaled down to norm 1. Which classes there are is public: it is said, not taken from the labels.
    for epsilon in (0.25, 1.0, 4.0):
        model = LogisticRegression(epsilon=epsilon, delta=1e-6, bound=1.0, sparsity=LENGTH, classes=[0, 1])
        model.fit(texts[train], liked[train])
        print(
            f"epsilon = {epsilon:g}: {model.score(texts[test], liked[test]):.3f} are right, by method {model.method_!r}"
        )
    print(model.statement_)


if __name__ == "__main__":
    main()
