"""`sparsedp bench step`: a private step against a plain PyTorch one, and where its time goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from sparsedp.bench.peaks import Runs, peaks
from sparsedp.bench.timing import Stopwatch, interleaved, machine, ratio
from sparsedp.data import CRITEO_VOCABULARY
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import DPSGD, EANA, AdaFEST, Mechanism
from sparsedp.models import PCTR
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.sampling import BatchInfo
from sparsedp.tables import find_tables

# In the order of a step, for tables and plots.
STAGES = ("forward", "settling", "backward", "collect", "norms", "sums", "selection", "noise", "update")


def click_loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The mean cross-entropy of logits (B,) and a target of zeros and ones."""
    *inputs, target = batch
    return binary_cross_entropy_with_logits(module(*inputs), target)


@dataclass
class Workload:
    """A model, made anew for each variant, and a batch for it. Between steps it may be changed for another batch."""

    name: str
    make: Callable[[bool], nn.Module]  # sparse gradients for the tables or not
    batch: tuple[Tensor, ...]  # inputs and target
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] = click_loss  # of the module on the batch


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


def plain_step(workload: Workload, watch: Stopwatch | None = None) -> Callable[[], None]:
    """What a user has without privacy: sparse gradients for the tables, SGD, autograd."""
    module = workload.make(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    stage = Stopwatch() if watch is None else watch

    def run() -> None:
        optimizer.zero_grad()
        with stage("forward"):
            loss = workload.loss(module, workload.batch)
        with stage("backward"):
            loss.backward()
        with stage("update"):
            optimizer.step()
        stage.lap()

    return run


def private_step(
    workload: Workload, watch: Stopwatch, mechanism: Mechanism | None = None, sparse: bool = False
) -> Callable[[], None]:
    """The same step made private, on a batch of fixed size, so that both do the same work."""
    return private_run(workload, watch, mechanism, sparse).step


@dataclass(frozen=True)
class PrivateRun:
    """A private step that can be taken again and again, and what it was made of."""

    step: Callable[[], None]
    wait: Callable[[int], None]  # lets so many steps pass that nobody takes part in
    engine: PrivacyEngine
    optimizer: PrivateOptimizer


def private_run(
    workload: Workload, watch: Stopwatch, mechanism: Mechanism | None = None, sparse: bool = False
) -> PrivateRun:
    module = workload.make(sparse)
    units = len(workload.batch[-1])
    loader: Any = DataLoader(TensorDataset(torch.zeros(100 * units, 1)), batch_size=units)
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mechanism=mechanism,
    )
    optimizer.stage = watch
    steps = iter(range(1 << 60))

    def step() -> None:
        loader.current = BatchInfo(units, units, True, True, next(steps))
        optimizer.zero_grad()
        with watch("forward"):
            loss = workload.loss(module, workload.batch)
        with watch("backward"):
            loss.backward()
        optimizer.step()
        watch.lap()

    def wait(count: int) -> None:
        tables = find_tables(module)
        # The noise of the layers' matrices would take most of the time.
        matrices = [p for name, p in module.named_parameters() if name not in tables and p.ndim > 1]
        for parameter in matrices:
            parameter.requires_grad_(False)
        for _ in range(count):
            loader.current = BatchInfo(0, 0, True, True, next(steps))
            optimizer.zero_grad()
            optimizer.step()
        for parameter in matrices:
            parameter.requires_grad_(True)
        watch.forget()

    return PrivateRun(step, wait, engine, optimizer)


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


def made(work: Workload) -> Workload:
    """The workload with a model that there is already, for one variant to use."""
    module = work.make(True)
    return replace(work, make=lambda sparse: module)


def _run_some(name: str, model: str, work: Workload) -> None:
    step = plain_step(work) if name == "plain" else private_step(work, Stopwatch(), _mechanisms(model)[name])
    for _ in range(2):
        step()
