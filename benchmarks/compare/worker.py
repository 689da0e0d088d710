"""`python -m benchmarks.compare.worker PROBLEM`: takes steps on request, with whichever package is in its path.

Its input is lines of a variant and a number of steps; it answers each with a line of JSON: the seconds of every step, and of
the processor over all of them. The models are those of the benchmarks beside this file, which use the public surface alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import sparsedp
from benchmarks.compare.problem import PLAIN, Problem
from benchmarks.speed.steps import Workload, plain_step, private_run
from benchmarks.speed.timing import Stopwatch

Step = Callable[[], None]


def make_steps(problem: Problem) -> dict[str, Step]:
    """The variants' steps, on models and batches that are the same in every process."""
    return {name: _make(problem, name) for name in problem.variants}


def _make(problem: Problem, name: str) -> Step:
    torch.manual_seed(0)
    if problem.part == "tied":
        from benchmarks.speed.tied.measure import Setting, draw_batch, make_variant

        setting = Setting(problem.rows, problem.length, problem.batch)
        batch = draw_batch(setting)
        return make_variant(name, setting, lambda: batch).step
    work, mechanisms = _step_part(problem) if problem.part == "step" else _vocabulary_part(problem)
    sparse = problem.part == "vocabulary"
    if name == PLAIN:
        return plain_step(work)
    run = private_run(work, Stopwatch(), mechanisms[name](), sparse)
    run.optimizer.stage = (
        nullcontext  # packages differ in how many stages they have, and each costs the stopwatch's time
    )
    return run.step


def _step_part(problem: Problem) -> tuple[Workload, dict[str, Callable[[], Any]]]:
    from benchmarks.speed.step.measure import pctr

    mechanisms = {
        "dpsgd": sparsedp.DPSGD,
        "adafest": lambda: sparsedp.AdaFEST(threshold=10.0, noise_ratio=5.0),
        "eana": sparsedp.EANA,
        "lazydp": sparsedp.LazyDP,
    }
    return pctr(problem.batch, problem.scale), mechanisms


def _vocabulary_part(problem: Problem) -> tuple[Workload, dict[str, Callable[[], Any]]]:
    from benchmarks.speed.vocabulary.measure import mechanisms, workload

    return workload(problem.rows, problem.batch), {**mechanisms(problem.rows), "lazydp": sparsedp.LazyDP}


def answer(steps: dict[str, Step], request: str) -> dict[str, Any]:
    name, count = request.split()
    seconds, busy = [], time.process_time()
    for _ in range(int(count)):
        start = time.perf_counter()
        steps[name]()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "processor": time.process_time() - busy}


def main() -> None:
    steps = make_steps(Problem(**json.loads(sys.argv[1])))
    print(json.dumps({"package": str(Path(sparsedp.__file__).parent)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(steps, line)), flush=True)


if __name__ == "__main__":
    main()
