"""Rows per second of building a click log's cache from text, on one core.

python benchmarks/clicklog.py [--rows 1000000] [--file LOG ...]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from sparsedp.data import (
    CountVocabulary,
    HashVocabulary,
    generated_click_log,
    open_click_log,
    write_click_log,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated file; 0 for none")
    parser.add_argument("--file", action="append", default=[], help="a click log to read as well")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        # Compile the parser before the clock runs.
        open_click_log(
            write_click_log(generated_click_log(100, scale=0.01), folder / "warm.tsv"),
            cache_dir=folder / "warm",
        )
        files = [Path(file) for file in arguments.file]
        if arguments.rows:
            files += write_click_log(generated_click_log(arguments.rows), folder / "generated.tsv")
        for file in files:
            for vocabulary in (HashVocabulary(), CountVocabulary(min_count=10)):
                seconds = []
                for repeat in range(arguments.repeats):
                    start = time.perf_counter()
                    log = open_click_log(file, cache_dir=folder / f"{repeat}", vocabulary=vocabulary)
                    seconds.append(time.perf_counter() - start)
                rates = sorted(len(log) / s for s in seconds)
                print(
                    f"{file.name}, {file.stat().st_size / 1e6:.0f} MB, {type(vocabulary).__name__}: "
                    f"{len(log):,} rows, {rates[-1]:,.0f} rows/s best, {rates[len(rates) // 2]:,.0f} median"
                )


if __name__ == "__main__":
    main()
