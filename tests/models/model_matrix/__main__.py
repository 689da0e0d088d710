"""`python -m model_matrix [--out FILE] [PATTERN ...]`: the matrix as a table, with each case's seconds of processor time."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from fnmatch import fnmatch

from model_matrix.cases import CASES
from model_matrix.expected import update
from model_matrix.harness import SIZES, Case, Reference, Sizes, run_case


def _run(case: Case, sizes: Sizes, references: dict[str, Reference]) -> tuple[str, str]:
    try:
        if case.name not in references:
            references.clear()  # those of cases that are done
            references[case.name] = Reference(case)
        result = run_case(case, sizes, references[case.name])
    except Exception as error:  # of the case itself: its model cannot be built
        return "broken", repr(error)
    return result.verdict, result.reason


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the matrix of models and prints its table.")
    parser.add_argument("pattern", nargs="*", default=["*"], help="shell patterns of names of cases")
    parser.add_argument("--sizes", choices=SIZES, action="append", help="tiny or large; both if it is not given")
    parser.add_argument("--out", help="a file for the table")
    parser.add_argument("--update", action="store_true", help="writes what came out to expected.tsv")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    results: dict[Sizes, dict[str, tuple[str, str]]] = {sizes: {} for sizes in options.sizes or SIZES}
    references: dict[str, Reference] = {}
    out = open(options.out, "w") if options.out else None  # noqa: SIM115
    for case in CASES:
        if not any(fnmatch(case.name, pattern) for pattern in options.pattern):
            continue
        if not case.is_installed:
            print(f"{case.name}\t{case.package} is not installed", flush=True)
            continue
        for sizes, of_sizes in results.items():
            start = time.process_time()
            verdict, reason = of_sizes[case.name] = _run(case, sizes, references)
            counts[sizes, verdict] += 1
            seconds = time.process_time() - start
            print(f"{case.name}\t{sizes}\t{verdict}\t{seconds:.1f}\t{reason[:300]}", flush=True)
            if out is not None:
                print(case.name, sizes, verdict, reason, sep="\t", file=out, flush=True)
    for (sizes, verdict), count in sorted(counts.items()):
        print(f"{sizes}: {count} {verdict}")
    if options.update:
        for sizes, of_sizes in results.items():
            update(of_sizes, [case.name for case in CASES], sizes)


if __name__ == "__main__":
    main()
