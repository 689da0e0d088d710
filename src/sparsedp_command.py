"""The `sparsedp` console script: settles what must be settled before torch is loaded, then runs the command line.

Outside of the package, because importing anything of it loads torch.
"""

from __future__ import annotations

import os


def main() -> int:
    # OpenMP's threads spin while they wait, which on a busy machine makes steps many times slower. It reads this once,
    # when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from sparsedp.cli.main import main

    return main()
