"""`python -m benchmarks lazydp`: a step of DLRM under SGD, DP-SGD in its three forms, LazyDP, EANA and AdaFEST.

Of the LazyDP paper's sections 4 and 7, at sizes that fit an ordinary machine: batch sizes (figures 10 and 14), stages of a
step (figures 3, 5 and 11), table sizes (figures 3, 5 and 13a), pooling factors and skew (figure 13 b and d).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsedp
from benchmarks.speed.access import SKEWS, Skew, draw_ids
from benchmarks.speed.baselines import MATERIALISED, dense_step
from benchmarks.speed.machine import available_memory, machine
from benchmarks.speed.peaks import Runs
from benchmarks.speed.steps import Workload, matched_adafest, plain_step, private_run
from benchmarks.speed.timing import Stopwatch, Timing, interleaved, ratio
from benchmarks.speed.varied import Memory, Quantity, measure_varied, off_base
from sparsedp.mechanisms import DPSGD, EANA, Mechanism
from sparsedp.models.dlrm import DLRM, MLPERF_DIM, MLPERF_TABLES, dlrm_table_sizes

VARIANTS = {
    "sgd": "SGD",
    "dpsgd_b": "DP-SGD(B)",
    "dpsgd_r": "DP-SGD(R)",
    "dpsgd_f": "DP-SGD(F)",
    "lazydp_unaggregated": "LazyDP without aggregation",
    "lazydp": "LazyDP",
    "eana": "EANA",
    "adafest": "AdaFEST",
}
# These draw noise for every row of every table, in every step or, unaggregated, on average.
SLOW = frozenset({"dpsgd_b", "dpsgd_r", "dpsgd_f", "lazydp_unaggregated"})
# Slower still: measured once, at the base setting and with the smallest tables (figures 3 and 5).
_SLOWEST = frozenset({"dpsgd_b", "dpsgd_r"})
_SIZES = (0.1, 0.3, 1)  # a tenth of the base is about figure 3's smallest
BYTES_PER_ROW = 4 * MLPERF_DIM
WARMUP = 2
_SETTLINGS = 3


@dataclass(frozen=True)
class Setting:
    """What a step is measured at."""

    gigabytes: float = 1.0  # of all tables together, 10^9 bytes each
    batch: int = 2048
    pooling: int = 1
    skew: Skew = "uniform"

    @property
    def table_sizes(self) -> list[int]:
        return dlrm_table_sizes(self.gigabytes * 1e9 / (BYTES_PER_ROW * sum(MLPERF_TABLES)))

    @property
    def table_bytes(self) -> int:
        return BYTES_PER_ROW * sum(self.table_sizes)

    def __str__(self) -> str:
        return f"{self.gigabytes:g} GB, batch {self.batch}, pooling {self.pooling}, {self.skew}"


QUANTITIES: dict[str, Quantity[Setting]] = {
    "batch": Quantity(
        "Batch size (figures 10 and 14)", lambda s: [replace(s, batch=max(1, int(s.batch * f))) for f in (0.5, 1, 2)]
    ),
    "gigabytes": Quantity(
        "Size of the tables (figures 3, 5 and 13a)",
        lambda s: [replace(s, gigabytes=s.gigabytes * size) for size in _SIZES],
    ),
    "pooling": Quantity("Ids per feature (figure 13b)", lambda s: [replace(s, pooling=p) for p in (1, 10, 30)]),
    "skew": Quantity("Skew of the lookups (figure 13d)", lambda s: [replace(s, skew=skew) for skew in SKEWS]),
}


# ---------------------------------------------------------------------- the model and its batches


def workload(setting: Setting) -> Workload:
    """DLRM with tables whose memory all variants share, so that they fit several times."""
    sizes = setting.table_sizes
    # So small that unclipped SGD does not diverge, whatever the pooling: its NaNs would be everybody's.
    weights = [torch.empty(rows, MLPERF_DIM).uniform_(-0.01, 0.01) for rows in sizes]

    def make(sparse: bool) -> nn.Module:
        module = DLRM([1] * len(sizes), pooling=setting.pooling, sparse=sparse)
        for table, weight in zip(module.tables, weights):
            assert isinstance(table, (nn.Embedding, nn.EmbeddingBag))
            table.num_embeddings, table.weight = len(weight), nn.Parameter(weight)
        return module

    return Workload("dlrm", make, draw_batch(setting, sizes))


def draw_batch(setting: Setting, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    ids = draw_ids(sizes, setting.batch, pooling=setting.pooling, skew=setting.skew)
    return torch.rand(setting.batch, 13) * 100, ids, torch.rand(setting.batch).round()


def touched_by(ids: Tensor) -> list[int]:
    """The distinct rows of each table that a batch looks up."""
    return [torch.unique(ids[:, table]).numel() for table in range(ids.shape[1])]


# ---------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class Variant:
    step: Callable[[], None]
    watch: Stopwatch
    settle: Callable[[], None] | None = None


def make_variant(
    name: str, work: Workload, setting: Setting, *, buffers: dict[str, Tensor], rounds: int = 0
) -> Variant:
    """`buffers` are shared by the baselines. LazyDP's noise is made to wait as long as it does in a long run."""
    watch = Stopwatch()
    if name == "sgd":
        return Variant(plain_step(work, watch), watch)
    if name in ("dpsgd_b", "dpsgd_r"):
        module = work.make(True)
        for key, parameter in module.named_parameters():
            buffers.setdefault(key, torch.empty_like(parameter, requires_grad=False))

        def losses() -> Tensor:
            *inputs, target = work.batch
            return binary_cross_entropy_with_logits(module(*inputs), target, reduction="none")

        form: Literal["B", "R"] = "B" if name == "dpsgd_b" else "R"
        return Variant(dense_step(module, losses, form, units=setting.batch, buffers=buffers, watch=watch), watch)
    run = private_run(work, watch, _mechanism(name, work, setting), sparse=True)
    if not name.startswith("lazydp"):
        return Variant(run.step, watch)
    run.wait(waiting_steps(setting.table_sizes, touched_by(work.batch[1]), rounds))
    return Variant(run.step, watch, run.engine.settle)


def _mechanism(name: str, work: Workload, setting: Setting) -> Mechanism:
    if name == "dpsgd_f":
        return DPSGD()
    if name == "eana":
        return EANA()
    if name == "adafest":
        return matched_adafest(sum(touched_by(work.batch[1])), sum(setting.table_sizes))
    return sparsedp.LazyDP(aggregate=name == "lazydp")


def waiting_steps(table_sizes: Sequence[int], touched: Sequence[int], rounds: int) -> int:
    """How many steps the noise of a touched row has waited, on average, in a run that has been going on for long.

    There, as many steps of noise are settled in each step as are added: one for every row. So a row that is touched has
    waited rows / touched steps. Without aggregation, that is the work of a step, and a few steps after a start would hide
    it. Tables that `rounds` steps go over anyway do not count: what their rows wait for is soon right by itself.
    """
    large = [(rows, used) for rows, used in zip(table_sizes, touched) if rows > rounds * used]
    return round(sum(rows for rows, _ in large) / sum(used for _, used in large)) if large and rounds else 0


# ---------------------------------------------------------------------- measuring


def bench_lazydp(
    base: Setting,
    *,
    vary: Collection[str] = tuple(QUANTITIES),
    variants: Collection[str] = tuple(VARIANTS),
    repeats: int = 20,
    slow_repeats: int = 3,
    memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Times all variants in turns at the base setting and along each quantity of `vary`. Returns what `--json` writes.

    Along the quantities there are half as many repeats.
    """
    names = [name for name in VARIANTS if name == "sgd" or name in variants]
    rows, left_out = measure_varied(
        base, [(quantity, QUANTITIES[quantity]) for quantity in vary], names,
        lambda setting: _that_fit(_worth_while(names, setting, base), setting, available_memory()),
        lambda setting, fitting: _measure(setting, fitting, off_base(repeats, setting == base), slow_repeats),
        "not enough memory, or too slow to measure everywhere", say,
        Memory(memory_runs, lambda setting: replace(setting, gigabytes=0.001, batch=8)) if memory else None,
    )  # fmt: skip
    return {
        "benchmark": "lazydp",
        "base": asdict(base),
        "materialised": MATERIALISED,
        "machine": machine(),
        "rows": rows,
        "left_out": left_out,
    }


def _measure(setting: Setting, names: list[str], repeats: int, slow_repeats: int) -> list[dict[str, Any]]:
    work = workload(setting)
    sizes, touched = setting.table_sizes, sum(touched_by(work.batch[1]))
    most = {name: 1 if name in _SLOWEST else slow_repeats if name in SLOW else repeats for name in names}
    counts = {name: min(repeats, most[name]) for name in names}
    buffers: dict[str, Tensor] = {}
    made = {name: make_variant(name, work, setting, buffers=buffers, rounds=WARMUP + counts[name]) for name in names}

    def renew() -> None:
        # Another batch for every run: its rows are in nobody's cache, and LazyDP's have waited.
        work.batch = draw_batch(setting, sizes)

    timings = interleaved({name: variant.step for name, variant in made.items()}, counts, WARMUP, renew)
    rows = []
    for name, timing in timings.items():
        row: dict[str, Any] = {"variant": name, "repeats": counts[name], **timing.to_dict()}
        row["ratio_to_sgd"] = ratio(timing, timings["sgd"])
        if "dpsgd_f" in timings:
            row["dpsgd_f_over_this"] = ratio(timings["dpsgd_f"], timing)
        if "eana" in timings:
            row["ratio_to_eana"] = ratio(timing, timings["eana"])
        row["stages"] = made[name].watch.stages
        if name == "lazydp":
            row["settle"] = _time_settling(made[name], renew).to_dict()
        rows.append({"table_rows": sum(sizes), "rows_touched": touched, **row})
    return rows


def _time_settling(variant: Variant, renew: Callable[[], None]) -> Timing:
    """Times settling all tables, at the end of training. Aggregated, it takes as long after one step as after a thousand."""
    assert variant.settle is not None
    seconds = []
    for _ in range(_SETTLINGS):
        renew()
        variant.step()
        start = time.perf_counter()
        variant.settle()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)


# ---------------------------------------------------------------------- memory


def _worth_while(names: Sequence[str], setting: Setting, base: Setting) -> list[str]:
    """Without aggregation, LazyDP is measured over batch sizes alone (figure 10)."""
    smallest = replace(base, gigabytes=base.gigabytes * _SIZES[0])
    left_out = set() if setting in (base, smallest) else set(_SLOWEST)
    if replace(setting, batch=base.batch) != base:
        left_out.add("lazydp_unaggregated")
    return [name for name in names if name not in left_out]


def _that_fit(names: Sequence[str], setting: Setting, available: int) -> list[str]:
    """The variants for which there is memory. (B) and (R) share a gradient of the tables' size, (F) has another."""
    tables, working = setting.table_bytes, 2 * MATERIALISED
    if tables + working > available:
        return []
    left = available - tables - working
    dropped: set[str] = set()
    for group in ({"dpsgd_f"}, {"dpsgd_b", "dpsgd_r"}):
        if group & set(names):
            dropped |= group if left < tables else set()
            left -= tables
    return [name for name in names if name not in dropped]


def memory_runs(setting: Setting, names: Sequence[str]) -> Runs:
    """For `peaks`: some steps of each variant, and settling, on tables that are filled before."""
    work = workload(setting)
    return {name: functools.partial(_run_some, name, work, setting) for name in names}


def _run_some(name: str, work: Workload, setting: Setting) -> None:
    variant = make_variant(name, work, setting, buffers={})
    sizes = setting.table_sizes
    for _ in range(1 if name in SLOW else 2):
        work.batch = draw_batch(setting, sizes)
        variant.step()
    if variant.settle is not None:
        variant.settle()
