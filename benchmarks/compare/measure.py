"""`python -m benchmarks compare`: two processes, each with a package of its own, whose steps of the same model take turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from benchmarks.compare.problem import Problem
from benchmarks.speed.machine import machine
from benchmarks.speed.processes import ROOT
from benchmarks.speed.timing import Timing
from sparsedp.concerns import WATCHED
from sparsedp.errors import SparseDPError

_TURN, _STEPS = 0.02, 10  # seconds that a turn takes at least, if so many steps do
_WARMUP = 3  # turns that do not count
_DECIMALS = 4


def bench_compare(
    problem: Problem, base: str, *, repeats: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Times this tree's package against that of revision `base`. Returns what `--json` writes.

    In every turn each of the two takes a few steps, this tree's first in every second one. The ratio of a turn is that of the
    means of its steps, so that a slow moment of the machine, which meets both, is in no ratio.
    """
    with checked_out(base) as (folder, commit):
        packages = {"base": folder / "src", "this": ROOT / "src"}
        with ExitStack() as stack:
            say(f"starting two processes: this tree, and {commit}, whose loops are compiled anew")
            workers = {name: stack.enter_context(Worker(problem, path)) for name, path in packages.items()}
            for worker in workers.values():
                worker.require_package()
            rows = [_compare(name, workers, repeats) for name in problem.variants]
    return {
        "benchmark": "compare", "problem": asdict(problem), "title": str(problem), "base": commit, "repeats": repeats,
        "machine": machine(), "rows": rows,
    }  # fmt: skip


def _compare(variant: str, workers: dict[str, Worker], repeats: int) -> dict[str, Any]:
    # The first steps of a run, which are looked at for warnings, are not those that it consists of.
    slowest = max(min(worker.take(variant, WATCHED + 1)["seconds"]) for worker in workers.values())
    count = max(1, min(_STEPS, int(_TURN / slowest)))
    turns: list[dict[str, dict[str, Any]]] = []
    for turn in range(-_WARMUP, repeats):
        order = ("base", "this") if turn % 2 else ("this", "base")
        taken = {name: workers[name].take(variant, count) for name in order}
        if turn >= 0:
            turns.append(taken)
    timings = {name: Timing.of([s for turn in turns for s in turn[name]["seconds"]]) for name in workers}
    return {
        "variant": variant,
        "steps_in_a_turn": count,
        **{name: timing.to_dict() for name, timing in timings.items()},
        "ratio_of_best": timings["this"].best / timings["base"].best,
        "ratio": spread([sum(turn["this"]["seconds"]) / sum(turn["base"]["seconds"]) for turn in turns]),
        "processor": {name: min(turn[name]["processor"] for turn in turns) / count for name in workers},  # of a step
        "processor_ratio": spread([turn["this"]["processor"] / turn["base"]["processor"] for turn in turns]),
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of paired ratios."""
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    named = dict(zip(("lower", "median", "upper"), quartiles))
    return {name: round(value, _DECIMALS) for name, value in named.items()}


# ---------------------------------------------------------------------- the other package


@contextmanager
def checked_out(revision: str) -> Iterator[tuple[Path, str]]:
    """A temporary folder with the files of a revision, and the revision's short name. The folder goes at the end, always."""
    commit = _git("rev-parse", "--short", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="sparsedp-compare-") as temporary:
        folder = Path(temporary) / commit
        _git("worktree", "add", "--detach", str(folder), commit)
        try:
            if not (folder / "src" / "sparsedp").is_dir():
                raise SparseDPError(f"Revision {revision} has no package src/sparsedp to compare with.")
            yield folder, commit
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise SparseDPError(f"A comparison checks a revision out by git, which cannot be run: {error}") from error
    if done.returncode:
        raise SparseDPError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


# ---------------------------------------------------------------------- the processes


class Worker:
    """A process with a package of its own (`worker.py`), which takes steps when it is asked to."""

    def __init__(self, problem: Problem, package: Path) -> None:
        self._problem, self._package = problem, package

    def __enter__(self) -> Worker:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self._package), str(ROOT)])}
        command = [sys.executable, "-m", "benchmarks.compare.worker", json.dumps(asdict(self._problem))]
        self._errors: IO[str] = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def require_package(self) -> None:
        """Waits until its models are made, and raises if it does not use the package that it was given."""
        used = self._answer()["package"]
        if not Path(used).is_relative_to(self._package):
            raise SparseDPError(f"A process was to use the package in {self._package}, but it uses {used}.")

    def take(self, variant: str, count: int) -> dict[str, Any]:
        """So many steps: the seconds of each, and of the processor over all of them."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{variant} {count}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer tells why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise SparseDPError(f"The process with {self._package} failed: {self._errors.read().strip()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
