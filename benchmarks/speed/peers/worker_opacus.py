"""Opacus: "hooks" writes every example's gradient out, "ghost" has norms without gradients and two backward passes.

Secure mode, which draws four times the noise, is off. With hooks, batches whose gradients take more than 1 GiB go through in
parts, by `signal_skip_step`, as Opacus' BatchMemoryManager does it. Opacus takes no sparse gradients, so the table's is dense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from problem import Case, Problem
from worker import Peer, importing, main

with importing():
    import opacus
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchmodels import case_loss, case_module, make_batches, make_net, moved


def make_private(variant: str, module: nn.Module, loss: nn.Module, problem: Problem) -> tuple[Any, ...]:
    """The engine; and module, optimizer and loss to train with."""
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.zeros(problem.examples, 1))
    engine = opacus.PrivacyEngine(secure_mode=False)
    module, optimizer, *criterion, _ = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), problem.lr),
        data_loader=DataLoader(data, batch_size=problem.batch),
        criterion=loss,
        noise_multiplier=problem.noise_multiplier,
        max_grad_norm=problem.clip,
        grad_sample_mode=variant,
    )
    return engine, module, optimizer, criterion[0] if criterion else loss


def make_step(variant: str, problem: Problem) -> Callable[[int], None]:
    _, module, optimizer, loss = make_private(variant, make_net(problem), nn.BCEWithLogitsLoss(), problem)
    batches = make_batches(problem)
    size = problem.units_at_a_time() if variant == "hooks" else problem.batch

    def step(number: int) -> None:
        parts = list(zip(*(tensor.split(size) for tensor in batches[number % len(batches)])))
        for place, (ids, target) in enumerate(parts, 1):
            optimizer.zero_grad()
            loss(module(ids), target).backward()
            if len(parts) > 1:
                optimizer.signal_skip_step(do_skip=place < len(parts))
            optimizer.step()

    return step


def epsilon(variant: str, problem: Problem) -> tuple[float, str]:
    net = nn.Linear(1, 1)
    engine, module, optimizer, loss = make_private(variant, net, nn.BCEWithLogitsLoss(), problem)
    loss(module(torch.zeros(2, 1)), torch.zeros(2, 1)).backward()
    optimizer.step()
    ((noise_multiplier, sample_rate, _),) = engine.accountant.history  # what one step has recorded
    engine.accountant.history = [(noise_multiplier, sample_rate, problem.steps)]
    return float(engine.get_epsilon(problem.delta)), engine.accountant.mechanism()


def clipped_sum(variant: str, case: Case) -> dict[str, np.ndarray]:
    plain = case_module(case)
    units = len(case.ids)
    exact = Problem(rows=1, batch=units, examples=10 * units, lr=1.0, noise_multiplier=0.0, clip=case.clip)
    _, module, optimizer, loss = make_private(variant, plain, case_loss(case), exact)

    def step() -> None:
        optimizer.zero_grad()
        loss(module(torch.from_numpy(case.ids)), torch.from_numpy(case.target)).backward()
        optimizer.step()

    return {name: (optimizer.expected_batch_size * value).numpy() for name, value in moved(plain, step).items()}


if __name__ == "__main__":
    versions = {"opacus": opacus.__version__, "torch": torch.__version__}
    main(Peer(lambda: versions, make_step, epsilon, clipped_sum))
