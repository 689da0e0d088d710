"""`python -m benchmarks startup`: how long `sparsedp --version` and `--help` take, in processes of their own."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from sparsedp.cli.arguments import positive_count
from sparsedp.errors import ConfigError

QUESTIONS = ("--version", "--help")
GOAL = 0.3  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive_count, default=20, metavar="N", help="of each question (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")


def run(args: argparse.Namespace) -> int:
    console, result = Console(), measure(args.repeats)
    for row in result["rows"]:
        console.print(
            f"sparsedp {row['question']}: median {row['median']:.3f} s, best {row['best']:.3f} s of {args.repeats}; "
            f"the goal is {GOAL} s",
            markup=False,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(repeats: int) -> dict[str, Any]:
    """Seconds of each question, which take turns; the first round fills the system's caches and does not count."""
    beside = Path(sys.executable).with_name("sparsedp")
    command = str(beside) if beside.is_file() else shutil.which("sparsedp")
    if command is None:
        raise ConfigError("The sparsedp command is not installed in this environment: pip install -e .")
    seconds: dict[str, list[float]] = {question: [] for question in QUESTIONS}
    for _ in range(repeats + 1):
        for question, times in seconds.items():
            started = time.perf_counter()
            subprocess.run([command, question], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
    rows = [
        {"question": question, "best": min(times[1:]), "median": statistics.median(times[1:])}
        for question, times in seconds.items()
    ]
    return {"benchmark": "startup", "repeats": repeats, "goal": GOAL, "rows": rows}
