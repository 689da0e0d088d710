"""`python -m benchmarks noise`: normal numbers from ChaCha8 against torch's `normal_`, and settling a table with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.machine import machine
from benchmarks.speed.timing import interleaved, ratio
from sparsedp.noise import GaussianNoise, RandomKey, row_normals
from sparsedp.tables import LazyOwner, Ownership, table_specs

SIZES = (10_000, 1_000_000, 10_000_000)
_DIM = 64


def bench_noise(sizes: list[int], *, repeats: int) -> dict[str, Any]:
    """Times each way to fill float32 tensors, in turns. Returns what `--json` writes."""
    rows = []
    for threads in sorted({1, torch.get_num_threads()}):
        for size in sizes:
            timings = interleaved(_variants(torch.empty(size), threads), repeats)
            for variant, timing in timings.items():
                rows.append(
                    {
                        "threads": threads,
                        "size": size,
                        "variant": variant,
                        **timing.to_dict(),
                        "nanoseconds_each": 1e9 * timing.best / size,
                        "ratio_to_torch": ratio(timing, timings["torch"]),
                    }
                )
    return {"benchmark": "noise", "machine": machine(), "rows": rows}


def _variants(values: Tensor, threads: int) -> dict[str, Callable[[], None]]:
    noise, key = GaussianNoise(RandomKey.from_os()), RandomKey.from_os()
    table = torch.empty(1, _DIM)
    rows = torch.arange(max(1, values.numel() // _DIM))
    steps = iter(range(1 << 60))

    def on_threads(run: Callable[[], Any]) -> Callable[[], None]:
        def timed() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                run()
            finally:
                torch.set_num_threads(before)

        return timed

    variants: dict[str, Callable[[], Any]] = {
        "torch": values.normal_,  # one generator: it draws on one thread, whatever their number
        "chacha": lambda: noise.fill({0: values}, 1.0, next(steps)),
        "settling": _settling(values.numel(), key),
    }
    if threads == 1:  # rows of a table, as LazyDP draws them
        variants["chacha rows"] = lambda: row_normals(key, rows, table)
    return {name: on_threads(run) for name, run in variants.items()}


def _settling(size: int, key: RandomKey) -> Callable[[], None]:
    """Settles all rows of a LazyDP table of about `size` numbers, in place."""
    table = nn.Parameter(torch.zeros(max(1, size // _DIM), _DIM))
    steps = 0
    tables = {"table": table}
    specs, optimizer = table_specs(tables, tables), torch.optim.SGD([table], lr=0.1)
    lazy = LazyOwner(Ownership(specs, tables, optimizer, lambda: key, 1.0, lambda: steps))

    def run() -> None:
        nonlocal steps
        lazy.begin(["table"])
        lazy.advance()
        steps += 1
        lazy.settle_all()

    return run
