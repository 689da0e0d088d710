"""`sparsedp bench vocabulary`: how a step's time and memory grow with the rows of one table (DP-AdaFEST, Table 4)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparsedp.bench.step import Workload, plain_step, private_step
from sparsedp.bench.timing import Stopwatch, interleaved, machine, peak_memory, ratio
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, Mechanism

DIM, BATCH = 64, 1024
SIZES = (100_000, 200_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)


class OneTable(nn.Module):
    def __init__(self, weight: torch.Tensor, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(weight.shape[0], weight.shape[1], sparse=sparse, _weight=weight)
        self.out = nn.Linear(weight.shape[1], 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).squeeze(1)


def workload(rows: int) -> Workload:
    """One table; all variants share its memory, so that the largest fits several times."""
    weight = torch.empty(rows, DIM).normal_(0, 0.05)
    ids = torch.randint(rows, (BATCH,))
    return Workload("table", lambda sparse: OneTable(weight, sparse), (ids, torch.rand(BATCH).round()))


def mechanisms(rows: int) -> dict[str, Callable[[], Mechanism]]:
    """Settings under which every sparse mechanism changes about as many rows as the batch touches."""
    return {
        "dpsgd": DPSGD,
        "adafest": lambda: AdaFEST(threshold=6.0 * 5 * 1.02, noise_ratio=5.0),
        "fest": lambda: FEST(k=BATCH, counts={"table.weight": torch.arange(rows, 0, -1)}),
        "eana": EANA,
        "exponential": lambda: ExponentialSelection(k=BATCH),
    }


def bench_vocabulary(sizes: list[int], *, repeats: int, memory: bool = True) -> dict[str, Any]:
    """Times all variants in turns at each size, and measures their memory at the largest. Returns what `--json` writes."""
    rows = []
    for size in sizes:
        work = workload(size)
        variants = {"plain": plain_step(work)}
        watches = {}
        for name, make in mechanisms(size).items():
            watches[name] = Stopwatch()
            variants[name] = private_step(work, watches[name], make(), sparse=True)
        timings = interleaved(variants, repeats, warmup=1)
        del work, variants
        for name, timing in timings.items():
            row: dict[str, Any] = {"rows": size, "variant": name, **timing.to_dict()}
            row["ratio_to_plain"] = ratio(timing, timings["plain"])
            row["dpsgd_over_this"] = ratio(timings["dpsgd"], timing)
            row["stages"] = watches[name].stages if name in watches else {}
            if memory and size == max(sizes):
                row["extra_memory"] = extra_memory(size, name)
            rows.append(row)
    return {"benchmark": "vocabulary", "dim": DIM, "batch": BATCH, "machine": machine(), "rows": rows}


def extra_memory(rows: int, variant: str) -> dict[str, float]:
    """Peak memory beyond the table, measured in a process of its own: bytes, and as a share of the table."""
    command = [sys.executable, "-m", "sparsedp.bench.vocabulary", str(rows), variant]
    extra = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["extra"]
    return {"bytes": extra, "share_of_table": extra / (rows * DIM * 4)}


def _measure(rows: int, variant: str) -> int:
    """Runs some steps; what the process took at most, less what it took with the table filled."""
    small = workload(2000)  # loads and compiles whatever a step needs
    _variant(small, 2000, variant)()
    work = workload(rows)
    before = peak_memory()
    run = _variant(work, rows, variant)
    for _ in range(5):
        run()
    return peak_memory() - before


def _variant(work: Workload, rows: int, variant: str) -> Callable[[], None]:
    if variant == "plain":
        return plain_step(work)
    return private_step(work, Stopwatch(), mechanisms(rows)[variant](), sparse=True)


if __name__ == "__main__":
    print(json.dumps({"extra": _measure(int(sys.argv[1]), sys.argv[2])}))
