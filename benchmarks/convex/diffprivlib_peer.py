"""diffprivlib's LogisticRegression on rows from a file, in an environment of its own; `estimators.py` starts it.

Its `fit` clips rows by a function for dense arrays; rows come clipped here, so that sparse ones go through.
"""

import json
import sys
import time
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression
from scipy.sparse import load_npz


class OnClippedRows(LogisticRegression):
    _clip_to_norm = staticmethod(lambda rows, norm: rows)


def main() -> None:
    warnings.simplefilter("ignore")
    folder, epsilon, regularisation = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    rows, test = load_npz(f"{folder}/train.npz"), load_npz(f"{folder}/test.npz")
    labels = np.load(f"{folder}/labels.npy")
    begin = time.perf_counter()
    model = OnClippedRows(epsilon=epsilon, data_norm=1.0, C=1 / (regularisation * rows.shape[0]), max_iter=1000)
    model.fit(rows, labels)
    seconds = time.perf_counter() - begin
    np.save(f"{folder}/scores.npy", np.asarray(test @ model.coef_[0]) + model.intercept_[0])
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
