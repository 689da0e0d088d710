"""One rank: python -m benchmarks.speed.distributed.worker PORT RANK RANKS FOLDER. The task is in the folder, as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path


def main(port: str, rank: str, ranks: str, folder: str) -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from benchmarks.speed.distributed import tasks

    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    task = json.loads((Path(folder) / "task.json").read_text())
    result = getattr(tasks, task["name"])(**task["arguments"])
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    # gloo's threads may abort a process that ends in the ordinary way, after its work is done (pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
