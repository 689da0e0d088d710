"""The noise of bias-reduced SGD by the paper's filter and by composition, for the same coins.

python -m benchmarks.convex.bias_reduced [--rows 100000] [--epsilon 1] [--delta 1e-6]
"""

from __future__ import annotations

import argparse
from statistics import median

from sparsedp.convex.ladder import Ladder, composition_multiplier, filter_multiplier, filter_rungs
from sparsedp.noise import RandomKey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--runs", type=int, default=25, help="of which the one of median length is taken")
    arguments = parser.parse_args()
    ladder, epsilon, delta = Ladder(arguments.rows), arguments.epsilon, arguments.delta
    runs = [filter_rungs(ladder, epsilon, delta, RandomKey.from_seed(i).generator()) for i in range(arguments.runs)]
    rungs = min(runs, key=lambda one: abs(len(one) - median(len(run) for run in runs)))
    theirs, ours = 2 * filter_multiplier(epsilon, delta), composition_multiplier(ladder, rungs, epsilon, delta)
    print(f"{arguments.rows:,} rows, epsilon = {epsilon:g}, delta = {delta:g}; the median run has {len(rungs):,} steps")
    print(f"  the paper's filter: deviation {theirs:.4g} L on a sum of gradients (one row is replaced)")
    print(f"  composition:        deviation {ours:.4g} L (one row is added or removed)")
    print(f"  {theirs / ours:.0f} times less noise for the same steps and the same budget")


if __name__ == "__main__":
    main()
