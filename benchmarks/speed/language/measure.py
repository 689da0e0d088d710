"""`python -m benchmarks language`: a step of language models of real sizes, private and not, in time and in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.speed.language.models import (
    CAUSAL,
    ENCODERS,
    SMALL,
    SMALL_CAUSAL,
    SMALL_VOCABULARIES,
    VOCABULARIES,
    Size,
    Vocabulary,
    causal,
    encoder,
    table_alone,
)
from benchmarks.speed.language.opacus_steps import MODES, opacus_step, why_not
from benchmarks.speed.machine import machine
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.steps import Workload, matched_adafest, plain_step, private_step
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from sparsedp.mechanisms import DPSGD, EANA, LazyDP, Mechanism

WAYS = ("lora", "full")
TABLE_REPEATS = 100  # times as many as of the models: they take a few ms
TOUCHED = 1000  # rows of a batch, about: AdaFEST's threshold is set so that as many untouched ones survive

VARIANTS = {
    "plain": "PyTorch",
    "plain_logits": "PyTorch, ordinary logits",
    "dpsgd": "DP-SGD",
    "adafest": "AdaFEST",
    "lazydp": "LazyDP",
    "eana": "EANA",
    "dpsgd_tied": "DP-SGD, tied table",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
}
_OF_ENCODERS = ("plain", "dpsgd", "adafest", *MODES)
_OF_TABLES = ("plain", "adafest", "eana")
_OF_CAUSAL = ("plain_logits", "plain", "adafest", "lazydp", "dpsgd_tied")


def mechanism_of(variant: str, rows: int) -> Mechanism:
    make: dict[str, Callable[[], Mechanism]] = {
        "dpsgd": DPSGD, "dpsgd_tied": DPSGD, "lazydp": LazyDP, "eana": EANA,
        "adafest": lambda: matched_adafest(TOUCHED, max(rows, 2 * TOUCHED)),
    }  # fmt: skip
    return make[variant]()


def step_of(variant: str, work: Workload, rows: int, watch: Stopwatch) -> Callable[[], None]:
    if variant.startswith("plain"):
        return plain_step(work, watch)
    if variant in MODES:
        return opacus_step(work, MODES[variant])
    return private_step(work, watch, mechanism_of(variant, rows))


def bench_language(
    models: Sequence[str], *, repeats: Mapping[str, int], small: bool = False, memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Times each model's steps in turns. `repeats` are by model, and of "opacus". Returns what `--json` writes."""
    sizes = SMALL if small else ENCODERS
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for name in models:
        for way in WAYS:
            say(f"{name}, {way}")
            rows += _encoder_rows(name, way, sizes[name], repeats, memory, left_out)
    vocabularies, words = (SMALL_VOCABULARIES, SMALL_CAUSAL) if small else (VOCABULARIES, CAUSAL)
    say("tables")
    tables = _table_rows(vocabularies, TABLE_REPEATS * repeats["tables"], memory)
    say("a causal model")
    return {
        "benchmark": "language", "machine": machine(), "sizes": {name: sizes[name].to_dict() for name in models},
        "rows": rows, "tables": tables, "causal": _causal_rows(words, repeats["tables"], memory), "left_out": left_out,
    }  # fmt: skip


def _timed(
    workloads: Mapping[str, Workload], rows: Mapping[str, int], repeats: int | Mapping[str, int], warmup: int = 1
) -> dict[str, dict[str, Any]]:
    watches = {key: Stopwatch() for key in workloads}
    steps = {key: step_of(key.split()[0], work, rows[key], watches[key]) for key, work in workloads.items()}
    timings = interleaved(steps, repeats, warmup=warmup)
    return {
        key: {"variant": key.split()[0], **timing.to_dict(), "stages": watches[key].stages, "timing": timing}
        for key, timing in timings.items()
    }


def _with_ratios(found: dict[str, dict[str, Any]], plain: str, peak: Mapping[str, Any]) -> list[dict[str, Any]]:
    unit = found[plain]["timing"]
    rows = []
    for key, row in found.items():
        row["ratio_to_plain"] = ratio(row["timing"], unit)
        if key in peak:
            row["memory"] = peak[key].beyond
            if plain in peak:
                row["memory_ratio"] = peak[key].beyond / max(1, peak[plain].beyond)
        rows.append({name: value for name, value in row.items() if name != "timing"})
    return rows


# ---------------------------------------------------------------------- encoders


def _encoder_rows(
    name: str, way: str, size: Size, repeats: Mapping[str, int], memory: bool, left_out: list[dict[str, str]]
) -> list[dict[str, Any]]:
    variants = []
    for variant in _OF_ENCODERS:
        why = why_not(encoder(size, way), encoder(SMALL[name], way), MODES[variant]) if variant in MODES else None
        if why is None:
            variants.append(variant)
        else:
            left_out.append({"model": name, "way": way, "variant": variant, "why": why})
    work = encoder(size, way)
    counts = {
        variant: min(repeats["opacus"], repeats[name]) if variant in MODES else repeats[name] for variant in variants
    }
    found = _timed(dict.fromkeys(variants, work), dict.fromkeys(variants, size.rows), counts)
    peak = peaks(encoder_runs, (size, way, variants), (SMALL[name], way, variants)) if memory else {}
    return [{"model": name, "way": way, **row} for row in _with_ratios(found, "plain", peak)]


def encoder_runs(size: Size, way: str, variants: Sequence[str]) -> Runs:
    """For `peaks`: some steps of each variant, of a model that is made before."""
    return {variant: _run(variant, encoder(size, way), size.rows) for variant in variants}


def _run(variant: str, work: Workload, rows: int) -> Callable[[], None]:
    module = work.make(variant not in MODES)  # Opacus takes no sparse gradients
    return functools.partial(_run_some, variant, replace(work, make=lambda sparse: module), rows)


def _run_some(variant: str, work: Workload, rows: int) -> None:
    step = step_of(variant, work, rows, Stopwatch())
    for _ in range(2):
        step()


# ---------------------------------------------------------------------- tables


def _table_rows(vocabularies: Sequence[Vocabulary], repeats: int, memory: bool) -> list[dict[str, Any]]:
    works = {f"{variant} {v.rows}": table_alone(v) for v in vocabularies for variant in _OF_TABLES}
    rows = {f"{variant} {v.rows}": v.rows for v in vocabularies for variant in _OF_TABLES}
    found = _timed(works, rows, repeats, warmup=2)
    result = []
    for v in vocabularies:
        peak = peaks(table_runs, (v,), (SMALL_VOCABULARIES[0],)) if memory else {}
        mine = {variant: found[f"{variant} {v.rows}"] for variant in _OF_TABLES}
        result += [{**asdict(v), **row} for row in _with_ratios(mine, "plain", peak)]
    fewest = {variant: found[f"{variant} {vocabularies[0].rows}"] for variant in _OF_TABLES}
    for row in result:
        first = fewest[row["variant"]]
        row["ratio_to_fewest"] = {key: row[key] / first[key] for key in ("best", "median")}
    return result


def table_runs(vocabulary: Vocabulary) -> Runs:
    return {variant: _run(variant, table_alone(vocabulary), vocabulary.rows) for variant in _OF_TABLES}


# ---------------------------------------------------------------------- causal models


def causal_work(variant: str, vocabulary: Vocabulary) -> Workload:
    return causal(vocabulary, over_table=variant != "plain_logits", tied=variant == "dpsgd_tied")


def _causal_rows(vocabulary: Vocabulary, repeats: int, memory: bool) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    works = {variant: causal_work(variant, vocabulary) for variant in _OF_CAUSAL}
    found = _timed(works, dict.fromkeys(_OF_CAUSAL, vocabulary.rows), repeats)
    del works
    peak: dict[str, Any] = {}
    if memory:  # one at a time: each has tables of its own
        for variant in _OF_CAUSAL:
            peak |= peaks(causal_runs, (vocabulary, variant), (SMALL_CAUSAL, variant))
    return [{**asdict(vocabulary), **row} for row in _with_ratios(found, "plain", peak)]


def causal_runs(vocabulary: Vocabulary, variant: str) -> Runs:
    return {variant: _run(variant, causal_work(variant, vocabulary), vocabulary.rows)}
