"""Runs modules of the benchmarks in processes of their own, wherever the caller stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsedp.errors import SparseDPError

ROOT = Path(__file__).parents[2]  # the folder that `benchmarks` is in


def run_module(module: str, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m module ARGUMENTS`. Without `capture`, its output goes where ours does."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=capture, text=True, env=environment)


def in_own_process(module: str, setting: Any, variant: str) -> Any:
    """What `python -m module SETTING VARIANT` prints, as JSON: memory is measured in a process of its own."""
    done = run_module(module, json.dumps(asdict(setting)), variant, capture=True)
    if done.returncode:
        raise SparseDPError(f"Measuring the memory of {variant} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Keeps that many processes computing meanwhile, as on a machine that does other work as well."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
