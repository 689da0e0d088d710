"""`python -m benchmarks bound`: the stages of plain and private steps against the least that this machine could take.

The bound of a stage is the larger of two times: for what has to be computed, and for what has to be read and written, each at
the best rate that the machine reaches at just that. Stages come one after the other, so theirs add up. What is counted is in
`benchmarks.speed.work`, the rates in `benchmarks.speed.rates`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from benchmarks.speed.dual import measure as dual
from benchmarks.speed.ghost import unit_losses
from benchmarks.speed.lazydp import measure as lazydp
from benchmarks.speed.machine import machine
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.rates import Rates
from benchmarks.speed.stages import STAGES
from benchmarks.speed.step.measure import pctr
from benchmarks.speed.steps import Workload, made, matched_adafest, plain_step, private_run
from benchmarks.speed.tied import measure as tied
from benchmarks.speed.timing import Stopwatch, Timing, interleaved, ratio
from benchmarks.speed.tuned import tuned_step
from benchmarks.speed.work import Counted, Work, count, plain_stages, private_stages
from sparsedp.mechanisms import DPSGD, EANA, LazyDP, Mechanism
from sparsedp.nn import CandidateSampler, candidate_loss, sequence_loss

VARIANTS = {
    "plain": "PyTorch", "tuned": "PyTorch, our table updates", "dpsgd": "DP-SGD", "adafest": "AdaFEST", "lazydp": "LazyDP",
    "eana": "EANA",
}  # fmt: skip
WARMUP = 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of all workloads."""

    batch: int = 2048  # of the click models and the dual encoder
    scale: float = 1.0  # pCTR: Criteo's vocabularies times this
    gigabytes: float = 1.0  # of DLRM's tables
    labels: int = 1_000_000  # items of the dual encoder
    items: int = 3400  # of the tied Transformer
    length: int = 100
    sequences: int = 64  # in its batch


_TINY = Sizes(batch=8, scale=0.001, gigabytes=0.001, labels=100, items=50, length=5, sequences=4)


@dataclass(frozen=True)
class Subject:
    """A model with its batches, and the mechanisms that it is measured with."""

    title: str
    setting: str
    plain: Workload
    private: Workload  # may have another loss, to the same value
    draw: Callable[[], tuple[Tensor, ...]]
    mechanisms: tuple[str, ...] = ("adafest", "lazydp", "eana")
    tuned: bool = False  # measured with `tuned_step` as well


def _pctr(sizes: Sizes) -> Subject:
    work = pctr(sizes.batch, sizes.scale)
    setting = f"Criteo's vocabularies times {sizes.scale:g}, batch {sizes.batch}"
    return Subject("pCTR", setting, work, work, lambda: pctr(sizes.batch, sizes.scale).batch, tuned=True)


def _dlrm(sizes: Sizes) -> Subject:
    setting = lazydp.Setting(gigabytes=sizes.gigabytes, batch=sizes.batch)
    work = lazydp.workload(setting)
    return Subject(
        "DLRM", str(setting), work, work, lambda: lazydp.draw_batch(setting, setting.table_sizes), tuned=True
    )


def _dual(sizes: Sizes) -> Subject:
    setting = dual.Setting(items=sizes.labels, batch=sizes.batch)
    work = dual.workload(setting)
    return Subject("Dual encoder", str(setting), work, work, lambda: dual.draw_batch(setting))


def _tied_workload(
    sizes: Sizes, loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
) -> tuple[tied.Setting, Workload]:
    setting = tied.Setting(items=sizes.items, length=sizes.length, batch=sizes.sequences)
    return setting, Workload("tied", lambda sparse: tied.make_model(setting), tied.draw_batch(setting), loss)


def _tied(sizes: Sizes) -> Subject:
    setting, plain = _tied_workload(sizes, lambda module, batch: unit_losses(module(batch[0]), batch[1]).mean())
    private = replace(plain, loss=lambda module, batch: sequence_loss(module(batch[0]), batch[1]))
    return Subject(
        "Tied Transformer, full logits", str(setting), plain, private, lambda: tied.draw_batch(setting), ("dpsgd",)
    )


def _tied_softmax(sizes: Sizes) -> Subject:
    setting, work = _tied_workload(sizes, lambda module, batch: module(batch[0], target=batch[1]).mean())
    return Subject(
        "Tied Transformer, table_softmax_loss", str(setting), work, work, lambda: tied.draw_batch(setting), ("dpsgd",)
    )


def _tied_candidates(sizes: Sizes) -> Subject:
    setting, work = _tied_workload(
        sizes, lambda module, batch: candidate_loss(module(batch[0], candidates=batch[1]), batch[2] != 0)
    )
    sample = CandidateSampler(setting.items, tied.NEGATIVES, shared=True)

    def draw() -> tuple[Tensor, ...]:
        history, target = tied.draw_batch(setting)
        return history, sample(target - 1) + 1, target  # 0 is padding

    work.batch = draw()
    return Subject(f"Tied Transformer, {tied.NEGATIVES} candidates", str(setting), work, work, draw)


SUBJECTS: dict[str, Callable[[Sizes], Subject]] = {
    "pctr": _pctr,
    "dlrm": _dlrm,
    "dual": _dual,
    "tied": _tied,
    "tied_softmax": _tied_softmax,
    "tied_candidates": _tied_candidates,
}


def _mechanism(name: str, counted: Counted) -> Mechanism:
    if name == "adafest":
        return matched_adafest(counted.touched, counted.rows)
    return {"dpsgd": DPSGD, "lazydp": LazyDP, "eana": EANA}[name]()


# ---------------------------------------------------------------------- measuring


def bench_bound(
    sizes: Sizes,
    *,
    subjects: Collection[str] = tuple(SUBJECTS),
    repeats: int = 10,
    rates: Rates,
    memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Times the plain and private steps of the subjects in turns, and bounds them. Returns what `--json` writes."""
    rows: list[dict[str, Any]] = []
    for key in SUBJECTS:
        if key in subjects:
            gc.collect()  # the last subject's tables
            subject = SUBJECTS[key](sizes)
            say(f"{subject.title}: {subject.setting}")
            measured = _measure(subject, repeats, rates)
            title, names = subject.title, [row["variant"] for row in measured]
            del subject
            gc.collect()
            taken = peaks(memory_runs, (key, sizes, names), (key, _TINY, names)) if memory else {}
            for row in measured:
                peak = {"memory": taken[row["variant"]].beyond} if memory else {}
                rows.append({"workload": key, "title": title, **row, **peak})
    say("the machine")
    return {
        "benchmark": "bound",
        "sizes": asdict(sizes),
        "repeats": repeats,
        "machine": machine(),
        "rates": rates.to_dict(),
        "rows": rows,
    }


def _measure(subject: Subject, repeats: int, rates: Rates) -> list[dict[str, Any]]:
    counted = count(subject.private)
    works = {"plain": plain_stages(subject.plain, counted.readings)}
    not_private = ("plain", "tuned") if subject.tuned else ("plain",)
    watches = {name: Stopwatch() for name in (*not_private, *subject.mechanisms)}
    steps = {"plain": plain_step(subject.plain, watches["plain"])}
    if subject.tuned:
        works["tuned"], steps["tuned"] = works["plain"], tuned_step(subject.plain, watches["tuned"])
    for name in subject.mechanisms:
        mechanism = _mechanism(name, counted)
        run = private_run(subject.private, watches[name], mechanism, sparse=True)
        if mechanism.noise_waits:
            run.wait(1)  # or the first step would have nothing to settle, and be the best
        run.step()  # on the batch that was counted
        assert run.optimizer.last_step is not None
        selected = {
            table: step.rows_touched if mechanism.noise_waits else step.rows_selected
            for table, step in run.optimizer.last_step.tables.items()
        }
        works[name] = private_stages(counted, mechanism, selected)
        steps[name] = run.step

    def renew() -> None:
        subject.plain.batch = subject.private.batch = subject.draw()

    timings = interleaved(steps, repeats, WARMUP, renew)
    stages = {name: bound_stages(works[name], watches[name].stages, timings[name], rates) for name in steps}
    bounds = {name: sum(stage["bound"] for stage in of_variant) for name, of_variant in stages.items()}
    return [
        {
            "setting": subject.setting,
            "variant": name,
            "repeats": repeats,
            "rows_touched": counted.touched,
            **timing.to_dict(),
            "ratio_to_plain": ratio(timing, timings["plain"]),
            "ratio_to_tuned": ratio(timing, timings["tuned"]) if subject.tuned else None,
            "bound": bounds[name],
            "over_bound": {"best": timing.best / bounds[name], "median": timing.median / bounds[name]},
            "bound_to_plain": bounds[name] / bounds["plain"],
            "stages": stages[name],
        }
        for name, timing in timings.items()
    ]


def memory_runs(key: str, sizes: Sizes, names: Collection[str]) -> Runs:
    """For `peaks`: some steps of each variant, and settling, on a model that is made before."""
    subject = SUBJECTS[key](sizes)
    counted, not_private = count(subject.private), {"plain", "tuned"}
    works = {name: made(subject.plain if name in not_private else subject.private) for name in names}
    return {name: functools.partial(_run_some, name, works[name], counted) for name in names}


def _run_some(name: str, work: Workload, counted: Counted) -> None:
    settle = None
    if name in ("plain", "tuned"):
        step = (plain_step if name == "plain" else tuned_step)(work, Stopwatch())
    else:
        run = private_run(work, Stopwatch(), _mechanism(name, counted), sparse=True)
        step, settle = run.step, run.engine.settle
    for _ in range(2):
        step()  # on the same batch: samplers of candidates refuse to draw in a fork
    if settle is not None:
        settle()


def bound_stages(
    works: Mapping[str, Work], measured: Mapping[str, float], step: Timing, rates: Rates
) -> list[dict[str, Any]]:
    """For each stage what it has to do, the least seconds for that, and its best time; then what is left of the best step."""
    stages = []
    for stage in STAGES:
        if stage not in works and stage not in measured:
            continue
        work = works.get(stage, Work())
        compute, move = rates.compute(work), rates.move(work)
        bound, best = max(compute, move), measured.get(stage)
        stages.append(
            {
                "stage": stage,
                "flops": work.flops,
                "bytes": work.bytes,
                "normals": work.normals,
                "exponentials": work.exponentials,
                "compute": compute,
                "move": move,
                "bound": bound,
                "best": best,
                "over_bound": best / bound if best is not None and bound > 0 else None,
            }
        )
    rest = max(0.0, step.best - sum(measured.values()))
    nothing = dict.fromkeys(("flops", "bytes", "normals", "exponentials"), 0)
    idle = dict.fromkeys(("compute", "move", "bound"), 0.0)
    return [*stages, {"stage": "the rest", **nothing, **idle, "best": rest, "over_bound": None}]
