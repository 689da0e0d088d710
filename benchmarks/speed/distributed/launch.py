"""Starts ranks on loopback, each a process with one thread, and waits for what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.speed.machine import available_memory
from benchmarks.speed.processes import ROOT
from sparsedp.errors import SparseDPError

_OFTEN = 0.2  # seconds between looks at whether a rank has ended


_LEFT = 3 * 10**9  # bytes of memory that others on the machine are left with


def on_ranks(ranks: int, name: str, **arguments: Any) -> list[Any]:
    """What each of so many ranks returns of a function of `tasks.py`.

    If one of them fails, or the machine runs out of memory, all are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="sparsedp-bench-") as scratch:
        folder = Path(scratch)
        (folder / "task.json").write_text(json.dumps({"name": name, "arguments": arguments}))
        processes = []
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                "benchmarks.speed.distributed.worker",
                str(store.port),
                str(rank),
                str(ranks),
            ]
            with (folder / f"output-{rank}").open("wb") as output:
                processes.append(
                    subprocess.Popen([*command, scratch], stdout=output, stderr=subprocess.STDOUT, env=environment)
                )
        try:
            codes: list[int | None] = [None]
            while None in codes and not any(codes):
                time.sleep(_OFTEN)
                codes = [process.poll() for process in processes]
                if available_memory() < _LEFT:
                    raise SparseDPError(
                        f"Ended '{name}': less than {_LEFT / 1e9:.0f} GB of memory are left on this machine."
                    )
        finally:
            for process in processes:
                process.kill()
                process.wait()
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            text = (folder / f"output-{failed}").read_text(errors="replace").strip()
            raise SparseDPError(f"Rank {failed} of {ranks} failed in '{name}': {text[-2000:]}")
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]
