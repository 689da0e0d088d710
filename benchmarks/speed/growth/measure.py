"""`python -m benchmarks growth`: how the time of a step grows with one quantity at a time, as fitted exponents.

A click model over batch, number of tables, dim and rows of a table; the tied Transformer over the length of a sequence. All
values of a quantity are measured in turns, as the variants are: a slow moment of the machine is nobody's growth.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.speed.access import draw_ids
from benchmarks.speed.machine import available_memory, machine
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.steps import Workload, matched_adafest, plain_step, private_run
from benchmarks.speed.tied import measure as tied
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from benchmarks.speed.varied import Memory, Quantity
from sparsedp.mechanisms import DPSGD, EANA, LazyDP, Mechanism
from sparsedp.models import PCTR

VARIANTS = {"plain": "PyTorch", "dpsgd": "DP-SGD", "adafest": "AdaFEST", "lazydp": "LazyDP", "eana": "EANA"}
SEQUENCE_VARIANTS = {name: tied.VARIANTS[name] for name in ("plain", "logits", "softmax", "lazydp")}
SLOW = frozenset({"dpsgd"})  # takes time for every row
HIDDEN, LAYERS = 128, 2  # of the click model's network
WARMUP = 2
_INTEGERS = 13
S = TypeVar("S", "Click", tied.Setting)


@dataclass(frozen=True)
class Click:
    """What a step of the click model is measured at."""

    batch: int = 1024
    tables: int = 8
    rows: int = 100_000  # of each table
    dim: int = 32

    @property
    def table_bytes(self) -> int:
        return 4 * self.tables * self.rows * self.dim

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tables} tables of {self.rows} rows, dim {self.dim}"


def _times(key: str, factors: Sequence[float]) -> Callable[[S], Iterable[S]]:
    """The setting with `key` multiplied by each of the factors, at least 1; each once."""

    def values(setting: S) -> Iterable[S]:
        return dict.fromkeys(replace(setting, **{key: max(1, round(getattr(setting, key) * f))}) for f in factors)

    return values


_BY_TWO, _BY_THREE = (0.25, 0.5, 1, 2, 4), (0.1, 0.3, 1, 3, 10)


# ---------------------------------------------------------------------- fits


@dataclass(frozen=True)
class Power:
    """y = c x^exponent, by least squares on logarithms."""

    first: float  # the smallest and the largest x
    last: float
    points: int
    exponent: float
    error: float | None  # the exponent's standard error; None for two points, which every power fits


def fit_power(x: Sequence[float], y: Sequence[float]) -> Power | None:
    """The power that fits best; None with fewer than two different x."""
    if len(set(x)) < 2:
        return None
    log_x, log_y = [math.log(value) for value in x], [math.log(value) for value in y]
    slope, intercept = tied.fit_line(log_x, log_y)
    mean = sum(log_x) / len(x)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(log_x, log_y))
    error = math.sqrt(residual / (len(x) - 2) / sum((a - mean) ** 2 for a in log_x)) if len(x) > 2 else None
    return Power(min(x), max(x), len(x), slope, error)


def fit_top(x: Sequence[float], y: Sequence[float]) -> Power | None:
    """`fit_power` from the geometric middle of the range on, where fixed costs hide less of the growth."""
    middle = math.sqrt(min(x) * max(x)) * (1 - 1e-9)
    upper = [(a, b) for a, b in zip(x, y) if a >= middle]
    return fit_power([a for a, _ in upper], [b for _, b in upper])


def find_exponents(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each quantity and variant the exponent of the best times, over the whole range and over its top half."""
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault((row["model"], row["quantity"], row["variant"]), []).append((row["value"], row["best"]))
    exponents = []
    for (model, quantity, variant), points in curves.items():
        x, y = [at for at, _ in points], [best for _, best in points]
        whole, top = fit_power(x, y), fit_top(x, y)
        if whole is not None:
            names = {"model": model, "quantity": quantity, "variant": variant}
            exponents.append({**names, **asdict(whole), "top": None if top is None else asdict(top)})
    return exponents


# ---------------------------------------------------------------------- the click model


def workload(setting: Click) -> Workload:
    """pCTR with a small network; all variants share the tables' memory."""
    weights = [torch.empty(setting.rows, setting.dim).uniform_(-0.01, 0.01) for _ in range(setting.tables)]

    def make(sparse: bool) -> nn.Module:
        module = PCTR([1] * setting.tables, _INTEGERS, HIDDEN, LAYERS, dims=setting.dim, sparse=sparse)
        for table, weight in zip(module.tables, weights):
            assert isinstance(table, nn.Embedding)
            table.num_embeddings, table.weight = len(weight), nn.Parameter(weight)
        return module

    return Workload("click", make, draw_batch(setting))


def draw_batch(setting: Click) -> tuple[Tensor, ...]:
    ids = draw_ids([setting.rows] * setting.tables, setting.batch)
    return torch.rand(setting.batch, _INTEGERS) * 100, ids, torch.rand(setting.batch).round()


def _mechanism(name: str, work: Workload, setting: Click) -> Mechanism:
    if name == "adafest":
        touched = sum(torch.unique(column).numel() for column in work.batch[1].unbind(1))
        return matched_adafest(touched, setting.tables * setting.rows)
    return {"dpsgd": DPSGD, "lazydp": LazyDP, "eana": EANA}[name]()


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Steps:
    """A step of each variant at one setting, and what gives all of them another batch."""

    run: dict[str, Callable[[], None]]
    renew: Callable[[], None]


def click_steps(setting: Click, names: Collection[str]) -> Steps:
    work = workload(setting)

    def renew() -> None:
        # Another batch for every run: its rows are in nobody's cache, and LazyDP's have waited.
        work.batch = draw_batch(setting)

    return Steps({name: _click_step(name, work, setting) for name in names}, renew)


def _click_step(name: str, work: Workload, setting: Click) -> Callable[[], None]:
    if name == "plain":
        return plain_step(work)
    return private_run(work, Stopwatch(), _mechanism(name, work, setting), sparse=True).step


def sequence_steps(setting: tied.Setting, names: Collection[str]) -> Steps:
    current = tied.draw_batch(setting)

    def renew() -> None:
        nonlocal current
        current = tied.draw_batch(setting)

    return Steps({name: tied.make_variant(name, setting, lambda: current).step for name in names}, renew)


def memory_runs(setting: Click, names: Sequence[str]) -> Runs:
    """For `peaks`: some steps of each variant, and settling, on tables that are filled before."""
    work = workload(setting)
    return {name: functools.partial(_run_some, name, work, setting) for name in names}


def _run_some(name: str, work: Workload, setting: Click) -> None:
    if name == "plain":
        step, settle = plain_step(work), None
    else:
        run = private_run(work, Stopwatch(), _mechanism(name, work, setting), sparse=True)
        step, settle = run.step, run.engine.settle
    for _ in range(2):
        step()
        work.batch = draw_batch(setting)
    if settle is not None:
        settle()


def that_fit(settings: list[Click]) -> dict[Click, list[str]]:
    """The variants at each setting for which there is memory, all at the same time, from the smallest tables on.

    DP-SGD has a gradient of the tables' size; what others need beside the tables is a few times a batch's activations.
    """
    left = available_memory()
    variants: dict[Click, list[str]] = {}
    for setting in sorted(settings, key=lambda setting: setting.table_bytes):
        working = 64 * setting.batch * (setting.tables * setting.dim + LAYERS * HIDDEN)
        tables = setting.table_bytes
        names = [name for name in VARIANTS if tables + working + (tables if name in SLOW else 0) <= left]
        left -= 2 * tables if "dpsgd" in names else tables if names else 0
        variants[setting] = names
    return {setting: variants[setting] for setting in settings}


def sequences_that_fit(settings: list[tied.Setting]) -> dict[tied.Setting, list[str]]:
    """Steps of a sequence model need their memory one after the other."""
    available = available_memory()
    return {
        setting: [*SEQUENCE_VARIANTS] if 24 * setting.batch * setting.length * setting.items <= available else []
        for setting in settings
    }


@dataclass(frozen=True)
class Model(Generic[S]):
    """A model with what it is measured along, and with which variants."""

    title: str
    variants: Mapping[str, str]
    quantities: Mapping[str, Quantity[S]]
    make: Callable[[S, list[str]], Steps]
    memory: Memory[S]
    fitting: Callable[[list[S]], dict[S, list[str]]]


MODELS: dict[str, Model[Any]] = {
    "click": Model(
        "Click model",
        VARIANTS,
        {
            "batch": Quantity("units in a batch", _times("batch", _BY_TWO)),
            "tables": Quantity("tables", _times("tables", _BY_TWO)),
            "dim": Quantity("dim of a table", _times("dim", _BY_TWO)),
            "rows": Quantity("rows of a table", _times("rows", _BY_THREE)),
        },
        click_steps,
        Memory(memory_runs, lambda setting: Click(batch=8, rows=10)),
        that_fit,
    ),
    "sequence": Model(
        "Tied Transformer",
        SEQUENCE_VARIANTS,
        {"length": Quantity("positions of a sequence", _times("length", _BY_TWO))},
        sequence_steps,
        Memory(tied.memory_runs, lambda setting: tied.TINY),
        sequences_that_fit,
    ),
}
VARIED = tuple(name for model in MODELS.values() for name in model.quantities)


# ---------------------------------------------------------------------- measuring


def bench_growth(
    click: Click,
    sequence: tied.Setting,
    *,
    vary: Collection[str] = VARIED,
    repeats: int = 12,
    slow_repeats: int = 4,
    memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Times all variants at all values of each quantity in `vary`, and fits. Returns what `--json` writes."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for model, base in (("click", click), ("sequence", sequence)):
        kind: Model[Any] = MODELS[model]
        for name, quantity in kind.quantities.items():
            if name not in vary:
                continue
            gc.collect()  # the last quantity's tables
            fit = kind.fitting(list(quantity.values(base)))
            say(f"{kind.title}, {quantity.title}: {', '.join(str(getattr(setting, name)) for setting in fit)}")
            for setting, fitting in fit.items():
                if missing := [variant for variant in kind.variants if variant not in fitting]:
                    left_out.append({"model": model, "setting": asdict(setting), "variants": missing})
            measured = _measure(name, fit, kind.make, repeats, slow_repeats)
            if memory:
                gc.collect()  # the tables that were timed
                taken = {
                    setting: peaks(kind.memory.runs, (setting, names), (kind.memory.small(setting), names))
                    for setting, names in fit.items()
                    if names
                }
                for row in measured:
                    row["memory"] = taken[type(base)(**row["setting"])][row["variant"]].beyond
            rows += [{"model": model, "quantity": name, **row} for row in measured]
    return {
        "benchmark": "growth",
        "click": asdict(click),
        "sequence": asdict(sequence),
        "network": [HIDDEN] * LAYERS,
        "transformer": {"dim": tied.DIM, "blocks": tied.BLOCKS, "negatives": tied.NEGATIVES},
        "repeats": repeats,
        "slow_repeats": min(repeats, slow_repeats),
        "machine": machine(),
        "rows": rows,
        "exponents": find_exponents(rows),
        "left_out": left_out,
    }


def _measure(
    quantity: str, fit: dict[S, list[str]], make: Callable[[S, list[str]], Steps], repeats: int, slow_repeats: int
) -> list[dict[str, Any]]:
    """All variants at all settings, in turns."""
    made = {setting: make(setting, names) for setting, names in fit.items() if names}
    places = {f"{name} {number}": (setting, name) for number, setting in enumerate(made) for name in made[setting].run}
    counts = {key: min(repeats, slow_repeats) if name in SLOW else repeats for key, (_, name) in places.items()}

    def renew() -> None:
        for steps in made.values():
            steps.renew()

    runs = {key: made[setting].run[name] for key, (setting, name) in places.items()}
    timings = interleaved(runs, counts, WARMUP, renew) if runs else {}
    plain = {setting: timings[key] for key, (setting, name) in places.items() if name == "plain"}
    rows = []
    for key, (setting, name) in places.items():
        timing = timings[key]
        row = {"value": getattr(setting, quantity), "setting": asdict(setting), "variant": name, "repeats": counts[key]}
        rows.append({**row, **timing.to_dict(), "ratio_to_plain": ratio(timing, plain[setting])})
    return rows
