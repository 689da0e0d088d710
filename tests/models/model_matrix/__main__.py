"""`python -m model_matrix [--out FILE] [PATTERN ...]`: the matrix as a table, with each case's seconds of processor time."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from fnmatch import fnmatch

from model_matrix.cases import CASES
from model_matrix.expected import update
from model_matrix.harness import Case, run_case


def _run(case: Case) -> tuple[str, str]:
    try:
        result = run_case(case)
    except Exception as error:  # of the case itself: its model cannot be built
        return "broken", repr(error)
    return result.verdict, result.reason


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the matrix of models and prints its table.")
    parser.add_argument("pattern", nargs="*", default=["*"], help="shell patterns of names of cases")
    parser.add_argument("--out", help="a file for the table")
    parser.add_argument("--update", action="store_true", help="writes what came out to expected.tsv")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    results: dict[str, tuple[str, str]] = {}
    out = open(options.out, "w") if options.out else None  # noqa: SIM115
    for case in CASES:
        if not any(fnmatch(case.name, pattern) for pattern in options.pattern):
            continue
        start = time.process_time()
        verdict, reason = _run(case) if case.is_installed else ("skipped", f"{case.package} is not installed")
        counts[verdict] += 1
        results[case.name] = verdict, reason
        print(f"{case.name}\t{verdict}\t{time.process_time() - start:.1f}\t{reason[:300]}", flush=True)
        if out is not None:
            print(case.name, verdict, reason, sep="\t", file=out, flush=True)
    print(dict(counts))
    if options.update:
        update(
            {name: result for name, result in results.items() if result[0] != "skipped"}, [case.name for case in CASES]
        )


if __name__ == "__main__":
    main()
