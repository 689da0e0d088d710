"""Runs a function of `programs.py`, or of `module.function`, in several processes: the ranks of a process group on loopback.

They are forked from processes that have imported what they need (`warm.py`).
"""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from warm import KEPT, Forked, warm

SECONDS = 300  # until ranks that do not end are killed


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    result: Any  # what the function returned; None if it did not
    output: str

    @property
    def value(self) -> Any:
        assert self.code == 0, self.output
        return self.result


def launch(ranks: int, program: str, *args: Any, lost: int | None = None, **kwargs: Any) -> list[Ended]:
    """Each rank's end. The store through which they meet is this process's: no rank's death takes it along.

    A rank that is `lost` is not waited for, but killed when all others have ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    call = pickle.dumps((program, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"output-{rank}" for rank in range(ranks)]
        processes: list[Forked] = []
        try:
            for rank, output in enumerate(outputs):
                what = ("rank.main", store.port, rank, ranks, folder, call)
                files = (os.devnull, str(output), str(output))
                processes.append(Forked(warm(rank % KEPT), files, environment, *what))
            for rank, process in enumerate(processes):
                if rank != lost:
                    process.wait(SECONDS)
        finally:
            for process in processes:
                process.kill()
        results = [Path(folder) / f"result-{rank}" for rank in range(ranks)]
        return [
            Ended(
                process.returncode,
                pickle.loads(result.read_bytes()) if result.is_file() else None,
                output.read_text(errors="replace"),
            )
            for process, result, output in zip(processes, results, outputs)
        ]
