"""Private logistic regression on sparse rows: `sparsedp.convex.LogisticRegression` beside diffprivlib's.

    SPARSEDP_DATA=... python -m benchmarks.convex.estimators --peer-python PATH

PATH is the python of an environment with diffprivlib (0.6.6 needs scikit-learn below 1.6: pip install diffprivlib
"scikit-learn<1.6"); without it, ours alone are run. Ours run with their defaults. diffprivlib's regularisation is the best, on
the test set, of a grid: more than anybody gets who has to choose it beforehand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from scipy.sparse import save_npz

from benchmarks.convex.linear_data import Labelled, load
from sparsedp.data.metrics import auc

PEER = Path(__file__).with_name("diffprivlib_peer.py")
PEER_GRID = (1e-2, 1.0, 100.0)  # of lambda, the regularisation of the mean loss
DELTA = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["sst2", "criteo", "generated"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 4.0])
    parser.add_argument("--methods", nargs="+", default=["output", "sgd"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-python")
    parser.add_argument("--json", help="a file for the numbers")
    arguments = parser.parse_args()
    results = []
    for name in arguments.data:
        data = load(name)
        n, d = data.train.shape
        print(f"{name}: {n:,} rows, {d:,} columns, {data.train.nnz / n:.3g} non-zeros a row")
        results.append({"data": name, "who": "not private", **_not_private(data)})
        _show(results[-1])
        for epsilon in arguments.epsilon:
            for method in arguments.methods:
                runs = [_ours(data, epsilon, method) for _ in range(arguments.repeats)]
                results.append({"data": name, "epsilon": epsilon, "who": f"sparsedp, {method}", **_middle(runs)})
                _show(results[-1])
            if arguments.peer_python:
                peers = [_peer(data, epsilon, arguments.peer_python, lam, arguments.repeats) for lam in PEER_GRID]
                best = max(peers, key=lambda one: one["auc"])
                results.append({"data": name, "epsilon": epsilon, "who": "diffprivlib, delta = 0", **best})
                _show(results[-1])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _show(result: dict) -> None:
    budget = f"epsilon {result['epsilon']:g}" if "epsilon" in result else ""
    regularisation = f", lambda {result['lambda']:g}" if "lambda" in result else ""
    print(
        f"  {result['who']:24s}{budget:12s} accuracy {result['accuracy']:.3f}  AUC {result['auc']:.3f}  "
        f"{result['seconds']:.1f} s{regularisation}",
        flush=True,
    )


def _scored(data: Labelled, scores: np.ndarray, seconds: float) -> dict[str, float]:
    accuracy = float(((scores > 0) == data.test_labels).mean())
    return {"accuracy": accuracy, "auc": auc(data.test_labels, scores), "seconds": seconds}


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(run[key] for run in runs) for key in runs[0]}


def _not_private(data: Labelled) -> dict[str, float]:
    from sklearn.linear_model import LogisticRegression

    begin = time.perf_counter()
    model = LogisticRegression(C=10.0, max_iter=300).fit(data.train, data.labels)
    return _scored(data, model.decision_function(data.test), time.perf_counter() - begin)


def _ours(data: Labelled, epsilon: float, method: str) -> dict[str, float]:
    from sparsedp.convex import LogisticRegression

    begin = time.perf_counter()
    model = LogisticRegression(epsilon=epsilon, delta=DELTA, method=method, classes=[0, 1])  # type: ignore[arg-type]
    model.fit(data.train, data.labels)
    return _scored(data, model.decision_function(data.test), time.perf_counter() - begin)


def _peer(data: Labelled, epsilon: float, python: str, regularisation: float, repeats: int) -> dict[str, float]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        save_npz(f"{folder}/train.npz", data.train)
        save_npz(f"{folder}/test.npz", data.test)
        np.save(f"{folder}/labels.npy", data.labels)
        for _ in range(repeats):
            command = [python, str(PEER), folder, str(epsilon), str(regularisation)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds = json.loads(done.stdout)["seconds"]
            runs.append(_scored(data, np.load(f"{folder}/scores.npy"), seconds))
    return _middle(runs) | {"lambda": regularisation}


if __name__ == "__main__":
    main()
