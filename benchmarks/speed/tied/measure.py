"""`python -m benchmarks tied`: a step of a causal Transformer whose item table also scores all items (DPFormer, figure 3).

With and without privacy, over vocabularies and lengths: time, stages, memory, and the largest batch that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.ghost import Batch, add_ghost, add_unit_gradients, dense_step, unit_losses
from benchmarks.speed.machine import available_memory, machine
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.steps import matched_adafest
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from benchmarks.speed.varied import Memory, Quantity, measure_varied, off_base
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import DPSGD, LazyDP, Mechanism
from sparsedp.models import DPFormer
from sparsedp.nn import CandidateSampler, candidate_loss, sequence_loss
from sparsedp.sampling import BatchInfo

VARIANTS = {
    "plain": "PyTorch",
    "plain_chunked": "PyTorch, table_softmax_loss",
    "logits": "SparseDP, full logits",
    "softmax": "SparseDP, table_softmax_loss",
    "adafest": "SparseDP, candidates, AdaFEST",
    "lazydp": "SparseDP, candidates, LazyDP",
    "per_example": "per-example gradients",
    "ghost": "ghost clipping, not tied",
}
SLOW = frozenset({"per_example", "ghost"})
DIM, BLOCKS = 64, 2  # DPFormer, appendix E.2
NEGATIVES = 20
WARMUP = 1
_MOST = 1 << 28  # elements that the baselines' temporaries may have when they are timed
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What a step is measured at."""

    items: int = 3400
    length: int = 100
    batch: int = 64
    filled: float = 1.0  # the share of positions that are not padding, from 0.5 to 1

    def __str__(self) -> str:
        return f"{self.items} items, length {self.length}, batch {self.batch}, {100 * self.filled:g} % filled"


TINY = Setting(items=50, length=5, batch=4)  # for what goes before a measurement

QUANTITIES: dict[str, Quantity[Setting]] = {
    "items": Quantity("Vocabulary", lambda s: [replace(s, items=n) for n in (1000, 3400, 10_000, 30_000)]),
    "length": Quantity("Length of a sequence", lambda s: [replace(s, length=n) for n in (20, 50, 100, 200)]),
    "filled": Quantity("Positions that are not padding", lambda s: [replace(s, filled=f) for f in (0.5, 1.0)]),
}


# ---------------------------------------------------------------------- the model and its batches


def draw_batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Histories and targets, (batch, length), padded with 0 on the right: items are as popular as rank^-1.

    Lengths are uniform, from (2 filled - 1) times the full one to the full one.
    """
    popularity = torch.arange(1, setting.items + 1, dtype=torch.float64).reciprocal()
    drawn = 1 + torch.multinomial(popularity, setting.batch * (setting.length + 1), replacement=True)
    drawn = drawn.view(setting.batch, setting.length + 1)
    shortest = max(1, round((2 * setting.filled - 1) * setting.length))
    lengths = torch.randint(shortest, setting.length + 1, (setting.batch, 1))
    behind = torch.arange(setting.length) >= lengths
    return drawn[:, :-1].masked_fill(behind, 0), drawn[:, 1:].masked_fill(behind, 0)


def make_model(setting: Setting, tied: bool = True) -> DPFormer:
    return DPFormer(setting.items, setting.length, DIM, BLOCKS, dropout=0.0, tied=tied)


# ---------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class Variant:
    step: Callable[[], None]
    watch: Stopwatch


def make_variant(name: str, setting: Setting, batch: Batch, most: int = _MOST) -> Variant:
    watch = Stopwatch()
    if name in SLOW:
        module = make_model(setting, tied=name != "ghost")
        return Variant(
            dense_step(module, add_ghost if name == "ghost" else add_unit_gradients, batch, watch, most), watch
        )
    module = make_model(setting)
    if name.startswith("plain"):
        return Variant(_plain_step(module, _LOSSES[name], batch, watch), watch)
    mechanism = _mechanism(name, setting)
    loss = _candidates(setting, watch) if name in ("adafest", "lazydp") else _LOSSES[name]
    return Variant(_private_step(module, loss, batch, watch, setting.batch, mechanism), watch)


_LOSSES: dict[str, Loss] = {
    "plain": lambda module, history, target: unit_losses(module(history), target).mean(),
    "plain_chunked": lambda module, history, target: module(history, target=target).mean(),
    "logits": lambda module, history, target: sequence_loss(module(history), target),
    "softmax": lambda module, history, target: module(history, target=target).mean(),
}


def _candidates(setting: Setting, watch: Stopwatch) -> Loss:
    sampler = CandidateSampler(setting.items, NEGATIVES, shared=True)

    def loss(module: nn.Module, history: Tensor, target: Tensor) -> Tensor:
        with watch("candidates"):
            drawn = sampler(target - 1) + 1  # 0 is padding
        return candidate_loss(module(history, candidates=drawn), target != 0)

    return loss


def _mechanism(name: str, setting: Setting) -> Mechanism:
    if name == "lazydp":
        return LazyDP()
    if name == "adafest":
        # Untouched rows survive with the probability with which a unit's negatives touch them.
        return matched_adafest(NEGATIVES, setting.items)
    return DPSGD()


def _plain_step(module: nn.Module, loss: Loss, batch: Batch, watch: Stopwatch) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def run() -> None:
        optimizer.zero_grad()
        with watch("forward"):
            value = loss(module, *batch())
        with watch("backward"):
            value.backward()
        with watch("update"):
            optimizer.step()
        watch.lap()

    return run


def _private_step(
    module: nn.Module, loss: Loss, batch: Batch, watch: Stopwatch, units: int, mechanism: Mechanism
) -> Callable[[], None]:
    loader: Any = DataLoader(TensorDataset(torch.zeros(100 * units, 1)), batch_size=units)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.01), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    optimizer.stage = watch
    steps = iter(range(1 << 60))

    def run() -> None:
        loader.current = BatchInfo(units, units, True, True, next(steps))
        optimizer.zero_grad()
        with watch("forward"):
            value = loss(module, *batch())
        with watch("backward"):
            value.backward()
        optimizer.step()
        watch.lap()

    return run


# ---------------------------------------------------------------------- measuring


def bench_tied(
    base: Setting,
    *,
    vary: Collection[str] = tuple(QUANTITIES),
    variants: Collection[str] = tuple(VARIANTS),
    repeats: int = 10,
    slow_repeats: int = 2,
    memory: bool = True,
    gigabytes: float = 16.0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Times all variants in turns at the base setting and along each quantity of `vary`. Returns what `--json` writes.

    Along the quantities there are half as many repeats. `gigabytes` is the memory for which the largest batch is stated: 16 as
    in figure 3.
    """
    names = [name for name in VARIANTS if name == "plain" or name in variants]
    rows, left_out = measure_varied(
        base, [(quantity, QUANTITIES[quantity]) for quantity in vary], names,
        lambda setting: [name for name in _worth_while(names, setting, base) if _working(name, setting) <= available_memory()],
        lambda setting, fitting: _measure(setting, fitting, off_base(repeats, setting == base), slow_repeats),
        "too much memory or time", say,
        Memory(memory_runs, lambda setting: TINY) if memory else None,
    )  # fmt: skip
    measured = [row["variant"] for row in rows if row["base"]]
    say("the largest batches")
    return {
        "benchmark": "tied",
        "base": asdict(base),
        "dim": DIM,
        "blocks": BLOCKS,
        "negatives": NEGATIVES,
        "gigabytes": gigabytes,
        "machine": machine(),
        "rows": rows,
        "largest": largest_batches(base, measured, gigabytes) if memory else [],
        "left_out": left_out,
    }


def _worth_while(names: Sequence[str], setting: Setting, base: Setting) -> list[str]:
    """The baselines are measured over vocabularies alone."""
    return [name for name in names if name not in SLOW or replace(setting, items=base.items) == base]


def _working(name: str, setting: Setting) -> float:
    """Bytes that a step needs, roughly. Ghost clipping counts as too much where a step would take minutes."""
    logits = 4 * setting.batch * setting.length * setting.items
    if name == "ghost":
        products = 8 * setting.items**2
        return float("inf") if setting.items > 5_000 else 4 * logits + max(4 * _MOST, products)
    if name == "per_example":
        return 4 * _MOST + 6 * logits
    return 6 * logits


def _measure(setting: Setting, names: Sequence[str], repeats: int, slow_repeats: int) -> list[dict[str, Any]]:
    current = draw_batch(setting)

    def renew() -> None:
        nonlocal current
        current = draw_batch(setting)

    counts = {name: min(repeats, slow_repeats) if name in SLOW else repeats for name in names}
    made = {name: make_variant(name, setting, lambda: current) for name in names}
    timings = interleaved({name: variant.step for name, variant in made.items()}, counts, WARMUP, renew)
    rows = []
    for name, timing in timings.items():
        row: dict[str, Any] = {"variant": name, "repeats": counts[name], **timing.to_dict()}
        row["ratio_to_plain"] = ratio(timing, timings["plain"])
        if "plain_chunked" in timings:
            row["ratio_to_chunked"] = ratio(timing, timings["plain_chunked"])
        row["stages"] = made[name].watch.stages
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- memory


def largest_batches(setting: Setting, names: Sequence[str], gigabytes: float) -> list[dict[str, Any]]:
    """The largest batch of each variant that fits: from a line through the peaks at some batch sizes.

    The baselines work on the whole batch at once, as they do on an accelerator, and on smaller batches here.
    """
    largest = []
    for group, sizes in (
        ([n for n in names if n not in SLOW], [16, 32, 64]),
        ([n for n in names if n in SLOW], [2, 4, 6]),
    ):
        taken = [
            peaks(memory_runs, (replace(setting, batch=size), group, 1 << 62), (TINY, group)) for size in sizes if group
        ]
        for name in group:
            totals = [peak[name].total for peak in taken]
            each, fixed = fit_line(sizes, totals)
            largest.append(
                {
                    "variant": name,
                    "batches": sizes,
                    "bytes": totals,
                    "bytes_each": each,
                    "bytes_fixed": fixed,
                    "largest_batch": int((gigabytes * 1e9 - fixed) // each) if each > 0 else None,
                }
            )
    return largest


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
    return slope, mean_y - slope * mean_x


def memory_runs(setting: Setting, names: Sequence[str], most: int = _MOST) -> Runs:
    """For `peaks`: some steps of each variant; `most` is as in `make_variant`."""
    return {name: functools.partial(_run_some, name, setting, most) for name in names}


def _run_some(name: str, setting: Setting, most: int) -> None:
    batch = draw_batch(setting)
    run = make_variant(name, setting, lambda: batch, most).step
    for _ in range(2):
        run()
