"""What ranks measure: each function runs on all of them at once, and returns what its rank has seen."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.speed.distributed.lookups import time_lookups
from benchmarks.speed.distributed.problem import Batches, dense_bytes, plain_step, private_step
from benchmarks.speed.distributed.setting import Setting
from benchmarks.speed.distributed.wire import WireMeter, messages_of
from benchmarks.speed.timing import Stopwatch, Timing
from benchmarks.speed.watch import forget_most_pages, memory_now

WARMUP = 3
_COUNTED = 3  # steps whose bytes are counted


def measure_steps(setting: dict[str, Any], variants: list[str], repeats: int) -> dict[str, Any]:
    """Of each variant: seconds of a step, in turns; where they go on this rank; and what this rank sends."""
    batches = Batches(Setting(**setting))
    watches = {name: _Watch() for name in variants}
    steps = {name: _step(name, batches, watches[name]) for name in variants}
    timings = together(steps, repeats, batches.renew)
    return {
        name: {
            **timings[name][0].to_dict(),
            "processor": timings[name][1].to_dict(),
            "stages": watches[name].stopwatch.stages,
            **_sent(steps[name], watches[name], batches),
            "dense_bytes": dense_bytes(batches.setting),
        }
        for name in variants
    }


class _Watch:
    """Of the stages of a step: takes their time or, with a meter, counts what is sent in them."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self.meter: WireMeter | None = None

    def __call__(self, stage: str) -> AbstractContextManager[None]:
        return self.stopwatch(stage) if self.meter is None else self.meter(stage)

    def lap(self) -> None:
        (self.stopwatch if self.meter is None else self.meter).lap()


def _sent(step: Callable[[], None], watch: _Watch, batches: Batches) -> dict[str, Any]:
    """Bytes that this rank sends in a step, by stage; how many collectives there are; the rows that its batch touches.

    Nobody but the step sends while it runs.
    """
    dist.barrier()
    watch.meter, rows = WireMeter(), 0
    for _ in range(_COUNTED):
        batches.renew()
        rows += batches.rows()
        step()
    sent = watch.meter.take()
    messages = messages_of(step)
    return {"bytes": sent, "messages": messages, "rows_touched": rows / _COUNTED}


def look_up_apart(setting: dict[str, Any], repeats: int) -> dict[str, Any]:
    """EANA's step with all tables in one collection, and with each divided by itself: seconds, stages and collectives."""
    batches = Batches(Setting(**setting))
    watches = {name: _Watch() for name in ("collection", "apart")}
    steps = {name: private_step("eana", batches, watch, name == "apart") for name, watch in watches.items()}
    timings = together(steps, repeats, batches.renew)
    return {
        name: {
            **timings[name][0].to_dict(),
            "stages": watches[name].stopwatch.stages,
            "messages": sum(messages_of(steps[name]).values()),
        }
        for name in steps
    }


def time_messages(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of one all-to-all of so many bytes from each rank, for each size."""
    ranks, seconds = dist.get_world_size(), {}
    for size in sizes:
        values = torch.zeros(max(1, size // 4 // ranks) * ranks)
        out = torch.empty_like(values)

        def send(out: torch.Tensor = out, values: torch.Tensor = values) -> None:
            dist.all_to_all_single(out, values)

        seconds[str(size)] = together({"": send}, repeats, lambda: None)[""][0].to_dict()
    return seconds


def look_up(batch: int, repeats: int) -> list[dict[str, Any]]:
    return [time_lookups(model, batch, repeats) for model in ("dlrm", "pctr")]


def train_large(setting: dict[str, Any], variant: str, steps: int) -> dict[str, Any]:
    """A few steps with tables of which one process alone could hold half: seconds of each, and this rank's memory."""
    forget_most_pages()
    begin = time.perf_counter()
    batches = Batches(Setting(**setting))
    step = _step(variant, batches, Stopwatch())
    gc.collect()
    built, resident = time.perf_counter() - begin, memory_now(b"VmRSS")
    seconds = []
    for _ in range(steps):
        batches.renew()
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "built_seconds": built, "seconds": seconds, "resident_bytes": resident, "peak_bytes": memory_now(b"VmHWM"),
    }  # fmt: skip


def _step(variant: str, batches: Batches, watch: Any) -> Callable[[], None]:
    if variant == "plain":
        return plain_step(batches, watch)
    return private_step(variant, batches, watch)


def together(
    variants: Mapping[str, Callable[[], None]], repeats: int, before: Callable[[], None]
) -> dict[str, tuple[Timing, Timing]]:
    """Runs the variants in turns on all ranks: seconds of a run, and processor seconds of the rank that takes most.

    A run takes as long as on the rank that ends last, from when all were there.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    for turn in range(-WARMUP, repeats):
        for name, run in variants.items():
            before()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            run()
            taken = [time.perf_counter() - start[0], time.process_time() - start[1]]
            slowest = torch.tensor(taken, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[name].append(slowest.tolist())
    return {
        name: (Timing.of([wall for wall, _ in values]), Timing.of([used for _, used in values]))
        for name, values in seconds.items()
    }
