"""`python -m benchmarks vocabulary`: how a step's time and memory grow with the rows of one table (DP-AdaFEST, Table 4)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.speed.machine import machine
from benchmarks.speed.papers.published import ADAFEST_TABLE_4
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.steps import Workload, plain_step, private_step
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from sparsedp.mechanisms import DPSGD, EANA, FEST, AdaFEST, ExponentialSelection, Mechanism

DIM, BATCH = 64, 1024
SIZES = tuple(rows for rows, *_ in ADAFEST_TABLE_4)


class OneTable(nn.Module):
    def __init__(self, weight: torch.Tensor, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(weight.shape[0], weight.shape[1], sparse=sparse, _weight=weight)
        self.out = nn.Linear(weight.shape[1], 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).squeeze(1)


def workload(rows: int, batch: int = BATCH) -> Workload:
    """One table; all variants share its memory."""
    weight = torch.empty(rows, DIM).normal_(0, 0.05)
    ids = torch.randint(rows, (batch,))
    return Workload("table", lambda sparse: OneTable(weight, sparse), (ids, torch.rand(batch).round()))


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
    """Times all variants at all sizes in turns, and measures their memory. Returns what `--json` writes."""
    variants, watches = {}, {}
    for size in sizes:
        work = workload(size)
        variants[f"plain {size}"] = plain_step(work)
        for name, make in mechanisms(size).items():
            watch = watches[f"{name} {size}"] = Stopwatch()
            variants[f"{name} {size}"] = private_step(work, watch, make(), sparse=True)
    timings = interleaved(variants, repeats, warmup=1)
    del work, variants
    rows = []
    for size in sizes:
        taken = peaks(memory_runs, (size,), (2000,)) if memory else {}
        for name in ("plain", *mechanisms(size)):
            key = f"{name} {size}"
            timing = timings[key]
            row: dict[str, Any] = {"rows": size, "variant": name, **timing.to_dict()}
            row["ratio_to_plain"] = ratio(timing, timings[f"plain {size}"])
            row["dpsgd_over_this"] = ratio(timings[f"dpsgd {size}"], timing)
            row["stages"] = watches[key].stages if key in watches else {}
            if name in taken:
                row["memory"] = taken[name].beyond
            rows.append(row)
    return {"benchmark": "vocabulary", "dim": DIM, "batch": BATCH, "machine": machine(), "rows": rows}


def memory_runs(rows: int) -> Runs:
    """For `peaks`: some steps of each variant, on a table that is filled before."""
    work = workload(rows)
    return {name: functools.partial(_run_some, name, work, rows) for name in ("plain", *mechanisms(rows))}


def _run_some(name: str, work: Workload, rows: int) -> None:
    step = (
        plain_step(work) if name == "plain" else private_step(work, Stopwatch(), mechanisms(rows)[name](), sparse=True)
    )
    for _ in range(3):
        step()
