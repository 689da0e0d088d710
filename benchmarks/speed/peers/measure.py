"""`python -m benchmarks peers`: SparseDP and what a user would pick instead, on the same model, data and privacy parameters.

Every peer runs in processes of its own, a new one in each round, so that no two tables are in memory at once and a slow
moment of the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.machine import available_memory, machine
from benchmarks.speed.peers.bounds import judge
from benchmarks.speed.peers.problem import OUT_OF_MEMORY, Problem
from benchmarks.speed.timing import Timing, ratio

SLOW = 3.0  # seconds; what takes longer at some size is measured there in the first round only
_SETUP = 180.0  # seconds that a worker may take for its imports, its answers, or a table
_SHARE = 0.9  # of the memory at hand that a worker may have
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    title: str
    script: str
    variant: str = ""  # which of the script's
    own_environment: bool = False  # runs in an interpreter that the user names


PEERS = {
    "plain": Peer("PyTorch, not private", "worker_torch.py"),
    "fbgemm": Peer("FBGEMM, not private", "worker_fbgemm.py"),
    "opacus_hooks": Peer("Opacus, hooks", "worker_opacus.py", "hooks"),
    "opacus_ghost": Peer("Opacus, ghost clipping", "worker_opacus.py", "ghost"),
    "jax_privacy": Peer("JAX Privacy", "worker_jax.py"),
    "tf_dense": Peer("TF-Privacy, dense noise", "worker_tensorflow.py", "dense", own_environment=True),
    "tf_sparse": Peer("TF-Privacy, sparse noise", "worker_tensorflow.py", "sparse", own_environment=True),
    "dpsgd": Peer("SparseDP, DP-SGD", "worker_sparsedp.py", "dpsgd"),
    "lazydp": Peer("SparseDP, LazyDP", "worker_sparsedp.py", "lazydp"),
    "adafest": Peer("SparseDP, AdaFEST", "worker_sparsedp.py", "adafest"),
    "eana": Peer("SparseDP, EANA", "worker_sparsedp.py", "eana"),
}


@dataclass
class Outcome:
    """What was measured of one peer, and why there is nothing where nothing was."""

    absent: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by the table's rows
    extra: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)  # why there is no time


def bench_peers(
    sizes: Sequence[int],
    *,
    peers: Collection[str] = tuple(PEERS),
    rounds: int = 3,
    steps: int = 20,
    seconds: float = 1.0,
    limit: float = 60.0,
    gigabytes: float | None = None,
    threads: int = 2,
    tensorflow_python: str | None = None,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Runs all peers in turns. Returns what `--json` writes.

    In a round, a process takes up to `steps` steps at each size, or for so many `seconds`. A step may take `limit` seconds
    and a process `gigabytes`, by default most of what the machine has left. `settings` are fields of `Problem`.
    """
    settings = dict(settings or {})
    outcomes = {name: Outcome() for name in PEERS if name == "plain" or name in peers}
    memory = int(gigabytes * 1e9) if gigabytes else int(_SHARE * available_memory())
    for number in range(rounds):
        for name, outcome in outcomes.items():
            wanted = _sizes_left(outcome, sorted(sizes), number)
            if outcome.absent is not None or (number and not wanted):
                continue
            say(f"round {number + 1}/{rounds}  {PEERS[name].title}")
            job = {
                "variant": PEERS[name].variant, "problem": settings, "rows": wanted, "facts": number == 0, "steps": steps,
                "seconds": seconds, "threads": threads, "memory": memory,
            }  # fmt: skip
            command = _command(PEERS[name], tensorflow_python)
            if command is None:
                outcome.absent = "no interpreter for it was given (--tensorflow-python)"
                continue
            events, end = run_worker([*command, json.dumps(job)], limit, threads)
            take(outcome, events, end, wanted, f"out of memory (of {memory / 1e9:.1f} GB)")
    problem = Problem(rows=1, **settings)
    return {
        "benchmark": "peers",
        "problem": {key: value for key, value in asdict(problem).items() if key != "rows"},
        "rounds": rounds,
        "limit_seconds": limit,
        "limit_bytes": memory,
        "machine": {**machine(), "threads": threads},
        "rows": _rows(outcomes, sorted(sizes), problem),
        "left_out": [
            {"rows": size, "variant": name, "reason": outcome.reasons[size]}
            for size in sorted(sizes) for name, outcome in outcomes.items() if size in outcome.reasons
        ],
        "peers": [
            {"variant": name, "title": PEERS[name].title, **({"absent": outcome.absent} if outcome.absent else outcome.facts)}
            for name, outcome in outcomes.items()
        ],
    }  # fmt: skip


def _sizes_left(outcome: Outcome, sizes: Sequence[int], number: int) -> list[int]:
    """What to measure in this round: nothing that failed, and what is slow once."""
    if number == 0:
        return list(sizes)
    return [size for size in sizes if size not in outcome.reasons and min(outcome.seconds.get(size, [SLOW])) < SLOW]


def _command(peer: Peer, tensorflow_python: str | None) -> list[str] | None:
    interpreter = tensorflow_python if peer.own_environment else sys.executable
    return [interpreter, str(_FOLDER / peer.script)] if interpreter else None


def take(
    outcome: Outcome, events: list[dict[str, Any]], end: str | None, wanted: Sequence[int], no_memory: str
) -> None:
    """Adds what a worker's events say to what is known. `end` is why it ended early, None if it did not."""
    current = None  # the size that it is at
    reason = no_memory if end == "out of memory" else end
    for event in events:
        if "absent" in event:
            outcome.absent = event["absent"]
            return
        if "start" in event:
            current = event["start"]
        elif "case" in event:
            outcome.facts.setdefault("bounds", {})[event["case"]] = judge(event)
        elif "versions" in event or "epsilon" in event:
            outcome.facts |= event
        elif "seconds" in event:
            outcome.seconds.setdefault(event["rows"], []).extend(event["seconds"])
            outcome.extra[event["rows"]] = max(event["extra"], outcome.extra.get(event["rows"], 0))
            current = None
        elif "out_of_memory" in event:
            reason = no_memory
    if reason is None:
        return
    if "versions" not in outcome.facts:
        outcome.absent = reason  # it did not get as far as its first answer
        return
    failed = current or min(set(wanted) - outcome.seconds.keys(), default=None)
    if failed is None or failed in outcome.seconds:
        return  # an earlier round has it
    outcome.reasons[failed] = reason
    for size in wanted:
        if size > failed:
            outcome.reasons[size] = f"not tried: at {failed:,} rows {reason}"


def _rows(outcomes: Mapping[str, Outcome], sizes: Sequence[int], problem: Problem) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        timings = {
            name: Timing.of(outcome.seconds[size]) for name, outcome in outcomes.items() if size in outcome.seconds
        }
        for name, timing in timings.items():
            row: dict[str, Any] = {"rows": size, "variant": name, **timing.to_dict()}
            row["repeats"] = len(outcomes[name].seconds[size])
            row["examples_per_second"] = problem.batch / timing.best
            for other in ("plain", "adafest"):
                if other in timings:
                    row[f"ratio_to_{other}"] = ratio(timing, timings[other])
            extra = outcomes[name].extra[size]
            row["extra_memory"] = {"bytes": extra, "share_of_table": extra / (4 * size * problem.dim)}
            rows.append(row)
    return rows


# ---------------------------------------------------------------------- workers


def run_worker(
    command: Sequence[str], limit: float, threads: int = 2, setup: float = _SETUP
) -> tuple[list[dict[str, Any]], str | None]:
    """A worker's events, and why it ended early: None if it said that it was done, or that its library is absent.

    A step may take `limit` seconds, and everything between two other events `setup` seconds.
    """
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", env=_environment(threads)
            )
        except OSError as error:
            return [{"absent": f"its interpreter does not run: {error.strerror}"}], None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        ended = False
        try:
            while not ended:
                stepping = bool(events) and ("built" in events[-1] or "step" in events[-1])
                wait = limit if stepping else max(setup, limit)
                line = lines.get(timeout=wait)
                ended = line is None
                if line is not None and line.startswith("@"):
                    events.append(json.loads(line[1:]))
        except queue.Empty:
            return events, f"a step takes more than {wait:g} s" if stepping else f"no answer within {wait:g} s"
        finally:
            if not ended:
                process.kill()
            process.wait()
        if events and ("done" in events[-1] or "absent" in events[-1]):
            return events, None
        errors.seek(0)
        return events, _why(process.returncode, errors.read())


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _why(code: int, errors: str) -> str:
    """Why a process ended early. What the system kills, it kills for memory."""
    if code == -signal.SIGKILL or any(words in errors.lower() for words in OUT_OF_MEMORY):
        return "out of memory"
    last = (errors.strip().splitlines() or ["no message"])[-1][:300]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"failed with {how}: {last}"


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads)), "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
