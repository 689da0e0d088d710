"""l1 recovery: what it takes, where it ends, and its error beside its bound and the projection."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.convex.problem import Problem
from sparsedp.errors import SparseDPWarning


def measure_recovery(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """With the default m and clip, and with the printed ones."""
    rows = []
    for problem in problems:
        X = problem.draw(0)
        true = problem.clipped_mean(X)
        projected = problem.ask(X, "projection")
        for calibration in ("analytic", "paper"):
            begin, worked = time.perf_counter(), time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SparseDPWarning)  # an unfinished solve is in the table
                answer = problem.ask(X, "l1_recovery", calibration=calibration)
            rows.append(
                {
                    **asdict(problem),
                    "constants": "ours" if calibration == "analytic" else "printed",
                    "seconds": time.perf_counter() - begin,
                    "processor": time.process_time() - worked,
                    "clip": answer.statement.settings["measurement_clip"],
                    "error": float(np.linalg.norm(answer.mean - true)),
                    "bound": answer.bounds.get("l1_recovery"),
                    "projection": float(np.linalg.norm(projected.mean - true)),
                    "projection_bound": projected.error_bound,
                    "recovery": None if answer.recovery is None else asdict(answer.recovery),
                }
            )
    return rows
