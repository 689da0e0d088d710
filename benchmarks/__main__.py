"""`python -m benchmarks`: settles what must be settled before torch is loaded, then runs the command line."""

from __future__ import annotations

import os
import sys


def main() -> int:
    # OpenMP's threads spin while they wait, which on a busy machine makes steps many times slower. It reads this once,
    # when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from benchmarks.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
