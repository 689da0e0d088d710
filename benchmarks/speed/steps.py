"""A model with a batch, and plain and private steps on it that can be taken again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.timing import Stopwatch
from sparsedp.accounting import split_multiplier
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import AdaFEST, Mechanism
from sparsedp.optimizer import PrivateOptimizer
from sparsedp.sampling import BatchInfo

NOISE_RATIO = 5.0  # of AdaFEST's map and gradient


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


def made(work: Workload) -> Workload:
    """The workload with a model that there is already, for one variant to use."""
    module = work.make(True)
    return replace(work, make=lambda sparse: module)


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
        lookups = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
        tables = {id(part.weight) for part in lookups}
        # The noise of the layers' matrices would take most of the time.
        matrices = [p for p in module.parameters() if id(p) not in tables and p.ndim > 1]
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


def matched_adafest(touched: int, rows: int) -> AdaFEST:
    """AdaFEST that selects about as many untouched rows as a batch touches: the work of EANA and LazyDP."""
    deviation = split_multiplier(1.0, NOISE_RATIO)[0]
    return AdaFEST(threshold=deviation * float(norm.isf(min(0.5, touched / rows))), noise_ratio=NOISE_RATIO)
