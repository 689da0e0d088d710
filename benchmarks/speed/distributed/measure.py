"""`python -m benchmarks distributed`: private steps with sharded tables against TorchRec's own, in processes on loopback.

Non-private is TorchRec as it is used: DistributedModelParallel, SGD fused into the tables' backward pass, and
DistributedDataParallel for the dense part. Each rank has one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from benchmarks.speed.distributed.launch import on_ranks
from benchmarks.speed.distributed.scaling import HOSTS, constants_of, seconds, wire_bytes, work_of
from benchmarks.speed.distributed.setting import DENSE, VARIANTS, Setting
from benchmarks.speed.machine import available_memory, machine, total_memory
from sparsedp.distributed import require_torchrec

RANKS = 2
TASKS = ("steps", "scaling", "lookups", "apart", "large")
SCALED = ("plain", "lazydp", "eana", "adafest")
LARGE_VARIANTS = ("lazydp", "adafest")
LARGE_STEPS = 5
_SMALLER = 0.1  # tables of the mechanisms that go over all rows in a step
_MESSAGES = (1 << 10, 1 << 23, 1 << 25)  # bytes of each rank
_LIBRARIES, _SPARE = 10**9, 4 * 10**9  # bytes of each rank besides its tables, and what others are left with


def bench_distributed(
    settings: Sequence[Setting],
    *,
    large: float,
    repeats: int,
    full: bool = True,
    tasks: Collection[str] = TASKS,
    variants: Collection[str] = tuple(VARIANTS),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What `--json` writes. `large` is the size of the one table of the task "large", in 10^9 bytes.

    Without `full`, sizes are small and repeats few: no model of more hosts is fitted to that.
    """
    require_torchrec()
    result: dict[str, Any] = {
        "benchmark": "distributed", "ranks": RANKS, "machine": {**machine(), "memory_bytes": total_memory()},
        "libraries": {name: version(name) for name in ("torchrec", "fbgemm-gpu-cpu")},
        "rows": [], "scaling": None, "lookups": [], "apart": [], "large": None,
    }  # fmt: skip
    chosen = [name for name in VARIANTS if name == "plain" or name in variants]
    if "steps" in tasks:
        for setting in settings:
            result["rows"] += _steps(setting, chosen, repeats, say)
    if "scaling" in tasks:
        scaled = [name for name in SCALED if name in chosen]
        result["scaling"] = _scaling(settings, scaled, repeats, full, result["rows"], say)
    if "lookups" in tasks:
        say("lookups in one process")
        batch = max(setting.batch for setting in settings)
        result["lookups"] = on_ranks(1, "look_up", batch=batch, repeats=repeats)[0]
    if "apart" in tasks:
        for setting in dict.fromkeys(replace(setting, model="many") for setting in settings):
            say(f"{setting}, each table divided by itself")
            found = on_ranks(RANKS, "look_up_apart", setting=asdict(setting), repeats=repeats)[0]
            result["apart"].append({"setting": asdict(setting), **found})
    if "large" in tasks:
        result["large"] = _large(large, max(setting.batch for setting in settings), say)
    return result


def _steps(setting: Setting, variants: Sequence[str], repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = measured(setting, RANKS, [name for name in variants if name not in DENSE], repeats, say)
    if dense := [name for name in variants if name in DENSE]:
        smaller = replace(setting, gigabytes=_SMALLER * setting.gigabytes)
        rows += measured(smaller, RANKS, ["plain", *dense], repeats, say)
    return rows


def measured(
    setting: Setting, ranks: int, variants: Sequence[str], repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each variant. Times are those of all ranks; stages and bytes those of the first."""
    say(f"{setting}, {ranks} process(es)")
    first = on_ranks(ranks, "measure_steps", setting=asdict(setting), variants=list(variants), repeats=repeats)[0]
    plain = first["plain"]
    return [
        {
            "setting": asdict(setting), "ranks": ranks, "variant": name, **row,
            "ratio_to_plain": _ratio(row, plain),
            "processor_ratio_to_plain": _ratio(row["processor"], plain["processor"]),
            "bytes_ratio_to_plain": row["bytes"]["step"] / plain["bytes"]["step"] if plain["bytes"]["step"] else None,
        }
        for name, row in first.items()
    ]  # fmt: skip


def _ratio(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one[key] / other[key] for key in ("best", "median")}


# ---------------------------------------------------------------------- weak scaling


def _scaling(
    settings: Sequence[Setting], variants: Sequence[str], repeats: int, full: bool, measured_rows: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Steps on one and on two ranks, each with the same part of a batch, and with `full` a model of them on more.

    `measured_rows` are those of the task "steps", which need not be measured again.
    """
    say("messages")
    messages = on_ranks(RANKS, "time_messages", sizes=list(_MESSAGES), repeats=repeats)[0]
    constants, rows = constants_of(messages), []
    for setting in settings:
        half = replace(setting, gigabytes=setting.gigabytes / RANKS)
        two = {row["variant"]: row for row in measured_rows if Setting(**row["setting"]) == setting}
        if not set(variants) <= two.keys():
            two = {row["variant"]: row for row in measured(setting, RANKS, variants, repeats, say)}
        one = {row["variant"]: row for row in measured(half, 1, variants, repeats, say)}
        double = {}
        if full:
            twice_the_batch = replace(half, batch=2 * half.batch)
            double = {row["variant"]: row for row in measured(twice_the_batch, 1, variants, repeats, say)}
        for name in variants:
            row = {
                "setting": asdict(setting), "variant": name, "rows_touched": one[name]["rows_touched"],
                "measured": {"1": one[name]["best"], "2": two[name]["best"]},
            }  # fmt: skip
            if full:
                work = work_of(one[name], double[name])
                dense = two[name]["dense_bytes"]
                row |= {
                    "fixed": work[0], "per_row": work[1],
                    "model": {str(n): seconds(n, two[name], one[name], work, constants, dense) for n in HOSTS},
                    "model_bytes": {str(n): wire_bytes(n, two[name], dense) for n in HOSTS},
                }  # fmt: skip
            rows.append(row)
    return {
        "latency": constants.latency,
        "bandwidth": constants.bandwidth,
        "messages": messages,
        "rows": rows,
    }


# ---------------------------------------------------------------------- a table of which half fits


def _large(gigabytes: float, batch: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Some steps with one table, divided by rows, and the memory of each rank."""
    setting = Setting("one", "row_wise", gigabytes, batch)
    result: dict[str, Any] = {
        "setting": asdict(setting),
        "table_bytes": setting.table_bytes,
        "rows": [],
        "left_out": None,
    }
    result["left_out"] = memory_lacking(setting.table_bytes, available_memory())
    if result["left_out"] is not None:
        say(f"{setting}: left out, {result['left_out']}")
        return result
    for name in LARGE_VARIANTS:
        say(f"{name}: {setting}")
        ranks = on_ranks(RANKS, "train_large", setting=asdict(setting), variant=name, steps=LARGE_STEPS)
        result["rows"].append({"variant": name, "ranks": ranks})
    return result


def memory_lacking(table: int, available: int) -> str | None:
    """Why a table of so many bytes cannot be trained now; None if it can."""
    needed = 1.05 * table + RANKS * _LIBRARIES + _SPARE
    if available >= needed:
        return None
    return f"{available / 1e9:.1f} GB of memory are available and {needed / 1e9:.1f} GB are needed"
