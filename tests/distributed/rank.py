"""One rank: python rank.py PORT RANK RANKS FOLDER. The function to call, and its arguments, are in the folder."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from pathlib import Path


def main(port: str, rank: str, ranks: str, folder: str) -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    name, args, kwargs = pickle.loads((Path(folder) / "call").read_bytes())
    module, _, function = name.rpartition(".")
    result = getattr(importlib.import_module(module or "programs"), function)(*args, **kwargs)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    # gloo's threads may abort a process that ends in the ordinary way, after its work is done (pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
