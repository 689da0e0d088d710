"""The same step by Opacus: "hooks" writes every example's gradient out, "ghost" has norms first and two backward passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.steps import Workload

MODES = {"opacus_hooks": "hooks", "opacus_ghost": "ghost"}
_ROOM = 1 << 33  # bytes of per-example gradients up to which hooks are run


def opacus_step(workload: Workload, mode: str) -> Callable[[], None]:
    """Dense gradients of the table, which are all that Opacus takes; secure mode, with four times the noise, is off."""
    import opacus

    warnings.simplefilter("ignore")
    module, units = workload.make(False), len(workload.batch[-1])
    trained = [p for p in module.parameters() if p.requires_grad]
    module, optimizer, *criterion, _ = opacus.PrivacyEngine(secure_mode=False).make_private(
        module=module,
        optimizer=torch.optim.SGD(trained, lr=0.01),
        data_loader=DataLoader(TensorDataset(torch.zeros(100 * units, 1)), batch_size=units),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    loss: Any = criterion[0] if criterion else nn.CrossEntropyLoss()
    ids, mask, labels = workload.batch

    def run() -> None:
        optimizer.zero_grad()
        loss(module(input_ids=ids, attention_mask=mask).logits, labels).backward()
        optimizer.step()

    return run


def why_not(workload: Workload, small: Workload, mode: str) -> str | None:
    """Why this step does not run, or None: whether it has room, and whether one of the same model, but small, runs."""
    units = len(workload.batch[-1])
    written = 4 * units * sum(p.numel() for p in workload.make(False).parameters() if p.requires_grad)
    if mode == "hooks" and written > _ROOM:
        return f"the gradients of all examples would take {written / 1e9:.0f} GB"
    try:
        opacus_step(small, mode)()
    except ImportError:
        return "opacus is not installed"
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError) as error:
        return str(error).strip().splitlines()[0][:160]
    return None
