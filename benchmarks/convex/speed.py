"""Time and memory of the projection, each run in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.convex.problem import Problem


def _run_once(problem: Problem, pure: bool) -> dict[str, Any]:
    """Seconds, those of the processor over all cores, which other programs lengthen little, and the memory that it had at most,
    rows and libraries included."""
    X = problem.draw(0)
    small = Problem(rows=10, columns=100, sparsity=2)
    small.ask(small.draw(0), "projection", pure)  # compiles
    begin, worked = time.perf_counter(), time.process_time()
    problem.ask(X, "projection", pure)
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    return {
        "seconds": seconds,
        "processor": worked,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_speed(problem: Problem, repeats: int) -> list[dict[str, Any]]:
    """Both noises take turns. Of each: best, median and largest."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(repeats):
        for pure, done in runs.items():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                done.append(pool.submit(_run_once, problem, pure).result())
    return [
        {
            **asdict(problem),
            "noise": "laplace" if pure else "gaussian",
            "repeats": repeats,
            "seconds": _spread([run["seconds"] for run in done]),
            "processor": _spread([run["processor"] for run in done]),
            "memory": max(run["memory"] for run in done),
        }
        for pure, done in runs.items()
    ]


def _spread(numbers: list[float]) -> dict[str, float]:
    return {"best": min(numbers), "median": median(numbers), "largest": max(numbers)}


def sentence(row: dict[str, Any]) -> str:
    """One line to quote."""
    times = [
        f"{row[name]['best']:.2f} s {what} (median {row[name]['median']:.2f}, largest {row[name]['largest']:.2f})"
        for name, what in (("seconds", "wall"), ("processor", "processor"))
    ]
    return (
        f"projection, {row['noise']} noise, n = {row['rows']:,}, d = {row['columns']:,}, s = {row['sparsity']}: best of "
        f"{row['repeats']}: {times[0]}, {times[1]}, peak memory {row['memory'] / 1e9:.2f} GB"
    )
