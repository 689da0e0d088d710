"""SparseDP under its mechanisms. Sparse gradients; AdaFEST with a threshold at which it selects about as many untouched rows as
a batch touches. LazyDP's noise is aggregated; settling all rows at the end of training is not part of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from problem import Case, Problem
from worker import Peer, importing, main

with importing():
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchmodels import case_loss, case_module, make_batches, make_net, moved

    import sparsedp
    from sparsedp.sampling import BatchInfo


def mechanism(variant: str, problem: Problem, threshold: float) -> Any:
    if variant == "adafest":
        return sparsedp.AdaFEST(threshold=threshold, noise_ratio=problem.noise_ratio)
    return {"dpsgd": sparsedp.DPSGD, "lazydp": sparsedp.LazyDP, "eana": sparsedp.EANA}[variant]()


def make_private(module: nn.Module, mechanism: Any, problem: Problem) -> tuple[Any, ...]:
    """The engine, the optimizer, and what says of a batch that it has so many units."""
    engine = sparsedp.PrivacyEngine()
    loader: Any = DataLoader(TensorDataset(torch.zeros(problem.examples, 1)), batch_size=problem.batch)
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), problem.lr),
        data_loader=loader,
        noise_multiplier=problem.noise_multiplier,
        max_grad_norm=problem.clip,
        mechanism=mechanism,
    )
    steps = count()

    def begin(units: int) -> None:
        loader.current = BatchInfo(units, units, True, True, next(steps))

    return engine, optimizer, begin


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    net, batches, loss = make_net(problem, sparse=True), make_batches(problem), nn.BCEWithLogitsLoss()
    _, optimizer, begin = make_private(net, mechanism(variant, problem, problem.threshold()), problem)

    def step(number: int) -> None:
        ids, target = batches[number % len(batches)]
        begin(len(ids))
        optimizer.zero_grad()
        loss(net(ids), target).backward()
        optimizer.step()

    return step


def epsilon(variant: str, problem: Problem) -> tuple[float, str]:
    net = torch.nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Flatten(), nn.Linear(2, 1))
    engine, optimizer, begin = make_private(net, mechanism(variant, problem, 1.0), problem)
    begin(2)
    net(torch.zeros(2, 1, dtype=torch.int64)).sum().backward()
    optimizer.step()
    (entry,) = engine.ledger.entries  # what one step has recorded
    engine.ledger.record(entry.event, problem.steps - entry.count)
    return engine.get_epsilon(problem.delta), engine.accountant


def clipped_sum(variant: str, case: Case) -> dict[str, np.ndarray]:
    warnings.simplefilter("ignore")  # that a softmax uses the whole table
    module, loss, units = case_module(case), case_loss(case), len(case.ids)
    exact = Problem(rows=1, batch=units, examples=10 * units, lr=1.0, noise_multiplier=0.0, clip=case.clip)
    # Every row that a unit touches is selected.
    _, optimizer, begin = make_private(module, mechanism(variant, exact, 1e-6), exact)

    def step() -> None:
        begin(units)
        optimizer.zero_grad()
        loss(module(torch.from_numpy(case.ids)), torch.from_numpy(case.target)).backward()
        optimizer.step()

    return {name: (units * value).numpy() for name, value in moved(module, step).items()}


if __name__ == "__main__":
    versions = {"sparsedp": sparsedp.__version__, "torch": torch.__version__}
    main(Peer(lambda: versions, make_step, epsilon, clipped_sum))
