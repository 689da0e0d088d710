"""Private logistic regression on sparse rows: `sparsedp.convex.LogisticRegression` beside diffprivlib's.

    SPARSEDP_DATA=... python -m benchmarks.convex.estimators --peer-python PATH --json results.json
    python -m benchmarks.convex.estimators --page results.json

PATH is the python of an environment with diffprivlib (0.6.6 needs scikit-learn below 1.6: pip install diffprivlib
"scikit-learn<1.6"); without it, ours alone are run. Both get the same rows, of norm 1 at most, and the same epsilon. Both run
with their defaults, and with the one setting that matters most to each: C of diffprivlib, `model_norm` of ours. It is chosen by
the same rule, the best mean AUC of all runs on rows that are taken to be public; what the choice would cost otherwise is counted
for neither. diffprivlib has delta = 0, so ours run with that, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.sparse import save_npz

from benchmarks.convex.linear_data import Labelled, load
from sparsedp.data.metrics import auc

PEER = Path(__file__).with_name("diffprivlib_peer.py")
PEER_GRID, PEER_DEFAULT = ("1.0", "0.001", "0.00001", "0.0000001"), "1.0"  # of C: lambda is 1 / (C n)
GRID, DEFAULT = (5.0, 20.0, 80.0), 20.0  # of model_norm
DELTA = 1e-6
SPARSITY = {"sst2": 30, "criteo": 39, "generated": 10}  # for delta = 0: the l1 norm of rows is cut at its root

Run = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks.convex.estimators --data generated --epsilon 1 --repeats 3",
    )
    parser.add_argument("--data", nargs="+", default=["sst2", "criteo", "generated"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[0.5, 1.0, 4.0])
    parser.add_argument(
        "--methods", nargs="*", default=["not_private", "sgd", "output", "pure"], help="pure: delta = 0"
    )
    parser.add_argument("--norms", nargs="+", type=float, default=GRID, help="values of model_norm, 20 among them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-python")
    parser.add_argument(
        "--peer-c", nargs="+", default=PEER_GRID, help="values of diffprivlib's C, of which 1.0 is its default"
    )
    parser.add_argument("--json", help="a file for the numbers")
    parser.add_argument("--page", help="a file with numbers, to be shown as a table")
    arguments = parser.parse_args()
    if arguments.page:
        print(table(json.loads(Path(arguments.page).read_text(encoding="utf-8"))))
        return
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        _show(result)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for name in arguments.data:
        data = load(name)
        n, d = data.train.shape
        print(f"{name}: {n:,} rows, {d:,} columns, {data.train.nnz / n:.3g} non-zeros a row")
        if "not_private" in arguments.methods:
            keep({"data": name, "who": "not private", **_summary([_not_private(data)])})
        for epsilon in arguments.epsilon:
            for method in [method for method in arguments.methods if method != "not_private"]:
                repeats = range(arguments.repeats)
                runs = {c: [_ours(name, data, epsilon, method, c) for _ in repeats] for c in arguments.norms}
                for result in _chosen(runs, DEFAULT):
                    keep({"data": name, "epsilon": epsilon, "who": f"sparsedp, {method}", **result})
            if arguments.peer_python:
                peers = _peer(data, epsilon, arguments.peer_python, arguments.peer_c, arguments.repeats)
                for result in _chosen(peers, PEER_DEFAULT):
                    keep({"data": name, "epsilon": epsilon, "who": "diffprivlib", **result})


def _chosen(runs: dict[Any, list[Run]], default: Any) -> list[dict[str, Any]]:
    """The default's numbers, if it was run, and those of the setting with the best mean AUC on the public rows."""
    best = max(runs, key=lambda setting: mean(run["valid_auc"] for run in runs[setting]))
    settings = ([("default", default)] if default in runs else []) + [("chosen", best)]
    return [{"setting": kind, "value": float(value), **_summary(runs[value])} for kind, value in settings]


def _summary(runs: list[Run]) -> dict[str, Any]:
    keys = ("accuracy", "auc", "seconds")
    spread = {f"{key}_std": stdev(run[key] for run in runs) if len(runs) > 1 else 0.0 for key in keys}
    return {key: mean(run[key] for run in runs) for key in keys} | spread | {"runs": len(runs)}


def _show(result: dict[str, Any]) -> None:
    budget = f"epsilon {result['epsilon']:g}" if "epsilon" in result else ""
    setting = f"{result['setting']} {result['value']:g}" if "setting" in result else ""
    print(
        f"  {result['who']:18s}{budget:12s}{setting:16s} accuracy {result['accuracy']:.3f} +- {result['accuracy_std']:.3f}  "
        f"AUC {result['auc']:.3f} +- {result['auc_std']:.3f}  {result['seconds']:.1f} s",
        flush=True,
    )


def table(results: list[dict[str, Any]]) -> str:
    """The numbers as a table of Markdown: a line for each data set and epsilon, "accuracy / AUC" for everybody."""
    columns = [
        (who, kind) for who in ("sparsedp, sgd", "sparsedp, pure", "diffprivlib") for kind in ("default", "chosen")
    ]
    names = {"sparsedp, sgd": "ours", "sparsedp, pure": "ours, delta = 0", "diffprivlib": "diffprivlib, delta = 0"}
    lines = ["| data | epsilon | " + " | ".join(f"{names[who]}, {kind}" for who, kind in columns) + " |"]
    lines.append("|" + " --- |" * (len(columns) + 2))
    found = {(one["data"], one.get("epsilon"), one["who"], one.get("setting")): one for one in results}
    for name, epsilon in dict.fromkeys((one["data"], one["epsilon"]) for one in results if "epsilon" in one):
        cells = []
        for who, kind in columns:
            one = found.get((name, epsilon, who, kind))
            cells.append("" if one is None else f"{one['accuracy']:.3f} / {one['auc']:.3f} ± {one['auc_std']:.3f}")
        lines.append(f"| {name} | {epsilon:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _scored(data: Labelled, scores: Callable[[Any], np.ndarray], seconds: float) -> Run:
    return _run(data, scores(data.valid), scores(data.test), seconds)


def _run(data: Labelled, valid: np.ndarray, test: np.ndarray, seconds: float) -> Run:
    return {
        "accuracy": float(((test > 0) == data.test_labels).mean()),
        "auc": auc(data.test_labels, test),
        "valid_auc": auc(data.valid_labels, valid),
        "seconds": seconds,
    }


def _not_private(data: Labelled) -> Run:
    from sklearn.linear_model import LogisticRegression

    begin = time.perf_counter()
    model = LogisticRegression(C=10.0, max_iter=300).fit(data.train, data.labels)
    return _scored(data, model.decision_function, time.perf_counter() - begin)


def _ours(name: str, data: Labelled, epsilon: float, method: str, model_norm: float) -> Run:
    from sparsedp.convex import LogisticRegression

    pure = {"delta": 0.0, "method": "auto", "sparsity": SPARSITY[name]}
    settings: dict[str, Any] = pure if method == "pure" else {"delta": DELTA, "method": method}
    begin = time.perf_counter()
    model = LogisticRegression(epsilon=epsilon, model_norm=model_norm, classes=[0, 1], **settings)
    model.fit(data.train, data.labels)
    return _scored(data, model.decision_function, time.perf_counter() - begin)


def _peer(data: Labelled, epsilon: float, python: str, grid: list[str], repeats: int) -> dict[str, list[Run]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("train", data.train), ("valid", data.valid), ("test", data.test)):
            save_npz(f"{folder}/{name}.npz", rows)
        np.save(f"{folder}/labels.npy", data.labels)
        command = [python, str(PEER), folder, str(epsilon), str(repeats), *grid]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = iter(json.loads(done.stdout))

        def run(c: str, repeat: int) -> Run:
            valid, test = (np.load(f"{folder}/{part}-{c}-{repeat}.npy") for part in ("valid", "test"))
            return _run(data, valid, test, next(seconds))

        return {c: [run(c, repeat) for repeat in range(repeats)] for c in grid}


if __name__ == "__main__":
    main()
