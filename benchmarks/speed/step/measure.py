"""`python -m benchmarks step`: a private step against a plain PyTorch one, and where its time goes."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.speed.machine import machine
from benchmarks.speed.peaks import Runs, peaks
from benchmarks.speed.steps import Workload, made, plain_step, private_step
from benchmarks.speed.timing import Stopwatch, interleaved, ratio
from sparsedp.data import CRITEO_VOCABULARY
from sparsedp.mechanisms import DPSGD, EANA, AdaFEST, Mechanism
from sparsedp.models import PCTR

MODELS = ("mlp", "pctr")


def mlp(batch: int, width: int = 1024, features: int = 512) -> Workload:
    """Three hidden layers, no tables."""

    def make(sparse: bool) -> nn.Module:
        sizes = [features, width, width, width]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))

    return Workload("mlp", make, (torch.randn(batch, features), torch.rand(batch).round()))


def pctr(batch: int, scale: float) -> Workload:
    """The pCTR model with Criteo's vocabulary sizes times `scale`; ids are as popular as rank^-1.1."""
    sizes = [max(3, int(size * scale)) for size in CRITEO_VOCABULARY]
    popularity = [torch.arange(1, size + 1) ** -1.1 for size in sizes]
    ids = torch.stack([torch.multinomial(p, batch, replacement=True) for p in popularity], dim=1)
    return Workload(
        "pctr",
        lambda sparse: PCTR(sizes, sparse=sparse),
        (torch.rand(batch, 13), ids, torch.rand(batch).round()),
    )


def bench_step(models: list[str], *, batch: int, repeats: int, scale: float, memory: bool = True) -> dict[str, Any]:
    """Times each model's plain step and its private ones in turns. Returns what `--json` writes."""
    rows = []
    for name in models:
        workload, mechanisms = _workload(name, batch, scale), _mechanisms(name)
        watches = {mechanism: Stopwatch() for mechanism in mechanisms}
        plain_watch = Stopwatch()
        variants = {"plain": plain_step(workload, plain_watch)}
        variants |= {key: private_step(workload, watches[key], value) for key, value in mechanisms.items()}
        timings = interleaved(variants, repeats)
        del variants
        taken = peaks(memory_runs, (name, batch, scale), (name, 8, 0.001)) if memory else {}
        for mechanism in mechanisms:
            rows.append(
                {
                    "model": name,
                    "batch": batch,
                    "mechanism": mechanism,
                    "plain": timings["plain"].to_dict(),
                    "private": timings[mechanism].to_dict(),
                    "ratio": ratio(timings[mechanism], timings["plain"]),
                    "plain_stages": plain_watch.stages,
                    "stages": watches[mechanism].stages,
                    **({"plain_memory": taken["plain"].beyond, "memory": taken[mechanism].beyond} if memory else {}),
                }
            )
    return {"benchmark": "step", "scale": scale, "machine": machine(), "rows": rows}


def _workload(model: str, batch: int, scale: float) -> Workload:
    return mlp(batch) if model == "mlp" else pctr(batch, scale)


def _mechanisms(model: str) -> dict[str, Mechanism]:
    if model == "mlp":  # without tables all mechanisms are the same
        return {"dpsgd": DPSGD()}
    return {"dpsgd": DPSGD(), "adafest": AdaFEST(threshold=10.0, noise_ratio=5.0), "eana": EANA()}


def memory_runs(model: str, batch: int, scale: float) -> Runs:
    """For `peaks`: some steps of each variant, on a model that is made before."""
    work, names = _workload(model, batch, scale), ("plain", *_mechanisms(model))
    return {name: functools.partial(_run_some, name, model, made(work)) for name in names}


def _run_some(name: str, model: str, work: Workload) -> None:
    step = plain_step(work) if name == "plain" else private_step(work, Stopwatch(), _mechanisms(model)[name])
    for _ in range(2):
        step()
