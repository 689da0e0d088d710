"""diffprivlib's LogisticRegression on rows from a file, in an environment of its own; `estimators.py` starts it.

    python diffprivlib_peer.py FOLDER EPSILON REPEATS C [C ...]

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
    folder, epsilon, repeats = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    rows, valid, test = (load_npz(f"{folder}/{part}.npz") for part in ("train", "valid", "test"))
    labels = np.load(f"{folder}/labels.npy")
    seconds = []
    for c in sys.argv[4:]:
        for repeat in range(repeats):
            begin = time.perf_counter()
            model = OnClippedRows(epsilon=epsilon, data_norm=1.0, C=float(c), max_iter=1000).fit(rows, labels)
            seconds.append(time.perf_counter() - begin)
            for name, part in (("valid", valid), ("test", test)):
                scores = np.asarray(part @ model.coef_[0]) + model.intercept_[0]
                np.save(f"{folder}/{name}-{c}-{repeat}.npy", scores)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
