"""`python -m benchmarks dual`: steps of the dual encoder under SGD, DP-SGD and EANA (EANA, Table 3), LazyDP and AdaFEST.

With dim, context length and batch of the paper's movie model, over the vocabularies of its Table 3, and with a larger batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.machine import available_memory, machine
from benchmarks.speed.peaks import Runs
from benchmarks.speed.steps import Workload, matched_adafest, plain_step, private_run
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from benchmarks.speed.varied import Memory, Quantity, measure_varied
from sparsedp.mechanisms import DPSGD, EANA, LazyDP, Mechanism
from sparsedp.models import DualEncoder
from sparsedp.nn import CandidateSampler, candidate_loss

VARIANTS = {"sgd": "SGD", "dpsgd": "DP-SGD", "eana": "EANA", "lazydp": "LazyDP", "adafest": "AdaFEST"}
DIM, LENGTH = 128, 20  # EANA, section 4.1
NEGATIVES = 63  # as many terms in a unit's softmax as the paper's batch of 64 has units
WARMUP = 2
_SLOW_BYTES = 1e9  # of tables, from which a dense step takes seconds


@dataclass(frozen=True)
class Setting:
    """What a step is measured at."""

    items: int = 5_000_000
    batch: int = 64

    @property
    def table_bytes(self) -> int:
        """Bytes of both towers' tables, which have a row for padding."""
        return 2 * 4 * DIM * (self.items + 1)

    def __str__(self) -> str:
        return f"{self.items:,} items, batch {self.batch:,}"


# ---------------------------------------------------------------------- the model and its batches


def workload(setting: Setting) -> Workload:
    """The dual encoder with tables whose memory all variants share, so that they fit several times."""
    weights = [torch.empty(setting.items + 1, DIM).uniform_(-0.1, 0.1) for _ in range(2)]
    for weight in weights:
        weight[0] = 0

    def make(sparse: bool) -> nn.Module:
        module = DualEncoder(1, DIM, (DIM,), sparse=sparse)
        module.items = setting.items
        for table, weight in zip((module.context_table, module.label_table), weights):
            assert isinstance(table, (nn.Embedding, nn.EmbeddingBag))
            table.num_embeddings, table.weight = len(weight), nn.Parameter(weight)
        return module

    return Workload("dual", make, draw_batch(setting), _loss)


def draw_batch(setting: Setting) -> tuple[Tensor, ...]:
    """Histories (batch, LENGTH), candidates (batch, 1 + NEGATIVES) and targets (batch,).

    Items 1, 2, ... are as popular as rank^-1, nearly (log-uniform). Negatives are uniform over all items: public, each
    unit's own, and the hardest for whatever lives by touching few rows.
    """
    uniform = torch.rand(setting.batch, LENGTH + 1, dtype=torch.float64)
    drawn = (uniform * math.log(setting.items + 1)).exp().long().clamp_max(setting.items)
    target = drawn[:, -1]
    candidates = CandidateSampler(setting.items, NEGATIVES)(target - 1) + 1  # 0 is padding
    return drawn[:, :-1], candidates, target


def _loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return candidate_loss(module(batch[0], batch[1]))


def touched_by(batch: tuple[Tensor, ...]) -> int:
    """The distinct rows of both tables that a batch looks up."""
    return torch.unique(batch[0]).numel() + torch.unique(batch[1]).numel()


# ---------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class Variant:
    step: Callable[[], None]
    watch: Stopwatch
    settle: Callable[[], None] | None = None


def make_variant(name: str, work: Workload, setting: Setting) -> Variant:
    watch = Stopwatch()
    if name == "sgd":
        return Variant(plain_step(work, watch), watch)
    run = private_run(work, watch, _mechanism(name, work, setting), sparse=True)
    if name != "lazydp":
        return Variant(run.step, watch)
    run.wait(1)  # or the first step would have nothing to settle, and be the best
    return Variant(run.step, watch, run.engine.settle)


def _mechanism(name: str, work: Workload, setting: Setting) -> Mechanism:
    if name == "adafest":
        return matched_adafest(touched_by(work.batch), 2 * setting.items)
    return {"dpsgd": DPSGD, "eana": EANA, "lazydp": LazyDP}[name]()


# ---------------------------------------------------------------------- measuring


def bench_dual(
    items: Sequence[int],
    batches: Sequence[int],
    *,
    repeats: int = 30,
    slow_repeats: int = 3,
    memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Times all variants in turns, for all vocabularies at the first batch size and all batch sizes at the first vocabulary.

    Returns what `--json` writes. `slow_repeats` are DP-SGD's where its steps take seconds.
    """
    base = Setting(items[-1], batches[0])
    quantities: list[tuple[str, Quantity[Setting]]] = [
        ("items", Quantity("Items", lambda s: [replace(s, items=n) for n in items])),
        ("batch", Quantity("Batch size", lambda s: [replace(s, items=items[0], batch=n) for n in batches])),
    ]
    rows, left_out = measure_varied(
        base, quantities, list(VARIANTS), that_fit,
        lambda setting, fitting: _measure(setting, fitting, repeats, slow_repeats), "not enough memory", say,
        Memory(memory_runs, lambda setting: Setting(items=100, batch=8)) if memory else None,
    )  # fmt: skip
    return {
        "benchmark": "dual",
        "base": asdict(base),
        "dim": DIM,
        "length": LENGTH,
        "negatives": NEGATIVES,
        "machine": machine(),
        "rows": rows,
        "left_out": left_out,
    }


def _measure(setting: Setting, names: Sequence[str], repeats: int, slow_repeats: int) -> list[dict[str, Any]]:
    work = workload(setting)
    slow = min(repeats, slow_repeats) if setting.table_bytes > _SLOW_BYTES else repeats
    counts = {name: slow if name == "dpsgd" else repeats for name in names}
    touched = touched_by(work.batch)
    made = {name: make_variant(name, work, setting) for name in names}

    def renew() -> None:
        # Another batch for every run: its rows are in nobody's cache, and LazyDP's have waited.
        work.batch = draw_batch(setting)

    timings = interleaved({name: variant.step for name, variant in made.items()}, counts, WARMUP, renew)
    rows = []
    for name, timing in timings.items():
        row: dict[str, Any] = {"variant": name, "rows_touched": touched, "repeats": counts[name], **timing.to_dict()}
        row["steps_per_second"] = 1 / timing.best
        row["ratio_to_sgd"] = ratio(timing, timings["sgd"])
        row["ratio_to_eana"] = ratio(timing, timings["eana"])
        if "dpsgd" in timings:
            row["dpsgd_over_this"] = ratio(timings["dpsgd"], timing)
        row["stages"] = made[name].watch.stages
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- memory


def that_fit(setting: Setting) -> list[str]:
    """The variants for which there is memory: DP-SGD has a gradient of the tables' size."""
    working = 64 * setting.batch * (LENGTH + NEGATIVES + 1) * DIM
    left = available_memory() - working - setting.table_bytes
    return [name for name in VARIANTS if left >= (setting.table_bytes if name == "dpsgd" else 0)]


def memory_runs(setting: Setting, names: Sequence[str]) -> Runs:
    """For `peaks`: some steps of each variant, and settling, on tables that are filled before."""
    work = workload(setting)
    return {name: functools.partial(_run_some, name, work, setting) for name in names}


def _run_some(name: str, work: Workload, setting: Setting) -> None:
    variant = make_variant(name, work, setting)
    for _ in range(2):
        variant.step()
        work.batch = draw_batch(setting)
    if variant.settle is not None:
        variant.settle()
