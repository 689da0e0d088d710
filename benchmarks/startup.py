"""How long `sparsedp --version` and `--help` take: `python benchmarks/startup.py`. The goal is 0.3 s each."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

QUESTIONS = (["--version"], ["--help"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    beside = Path(sys.executable).with_name("sparsedp")
    command = str(beside) if beside.is_file() else shutil.which("sparsedp")
    if command is None:
        print("The sparsedp command is not installed in this environment", file=sys.stderr)
        return 2
    for question in QUESTIONS:
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            subprocess.run([command, *question], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        seconds = seconds[1:]  # the first one fills the system's caches
        print(f"sparsedp {question[0]}: best {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
