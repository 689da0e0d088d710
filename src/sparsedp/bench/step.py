"""`sparsedp bench step`: a private step against a plain PyTorch one, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from sparsedp.bench.timing import Stopwatch, interleaved, machine, ratio
from sparsedp.data import CRITEO_VOCABULARY
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import DPSGD, EANA, AdaFEST, Mechanism
from sparsedp.models import PCTR
from sparsedp.sampling import BatchInfo


@dataclass(frozen=True)
class Workload:
    """A model, made anew for each variant, and a batch for it."""

    name: str
    make: Callable[[bool], nn.Module]  # sparse gradients for the tables or not
    batch: tuple[Tensor, ...]  # inputs and target


def mlp(batch: int, width: int = 1024, features: int = 512) -> Workload:
    """Three hidden layers, no tables."""

    def make(sparse: bool) -> nn.Module:
        sizes = [features, width, width, width]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))

    return Workload("mlp", make, (torch.randn(batch, features), torch.rand(batch).round()))


def pctr(batch: int, scale: float) -> Workload:
    """The pCTR model with Criteo's vocabulary sizes times `scale`."""
    sizes = [max(3, int(size * scale)) for size in CRITEO_VOCABULARY]
    ids = torch.stack([torch.randint(size, (batch,)) for size in sizes], dim=1)
    return Workload(
        "pctr",
        lambda sparse: PCTR(sizes, sparse=sparse),
        (torch.rand(batch, 13), ids, torch.rand(batch).round()),
    )


def plain_step(workload: Workload) -> Callable[[], None]:
    """What a user has without privacy: sparse gradients for the tables, SGD, autograd."""
    module = workload.make(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    *inputs, target = workload.batch

    def run() -> None:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(module(*inputs), target).backward()
        optimizer.step()

    return run


def private_step(
    workload: Workload, watch: Stopwatch, mechanism: Mechanism | None = None, sparse: bool = False
) -> Callable[[], None]:
    """The same step made private, on a batch of fixed size, so that both do the same work."""
    module = workload.make(sparse)
    *inputs, target = workload.batch
    units = len(target)
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

    def run() -> None:
        loader.current = BatchInfo(units, units, True, True, next(steps))
        optimizer.zero_grad()
        with watch("forward"):
            loss = binary_cross_entropy_with_logits(module(*inputs), target)
        with watch("backward"):
            loss.backward()
        optimizer.step()
        watch.lap()

    return run


def bench_step(models: list[str], *, batch: int, repeats: int, scale: float) -> dict[str, Any]:
    """Times each model's plain step and its private ones in turns. Returns what `--json` writes."""
    makers: dict[str, Callable[[], Workload]] = {"mlp": lambda: mlp(batch), "pctr": lambda: pctr(batch, scale)}
    rows = []
    for name in models:
        workload = makers[name]()
        mechanisms: dict[str, Mechanism] = {"dpsgd": DPSGD()}
        if name != "mlp":  # without tables all mechanisms are the same
            mechanisms |= {"adafest": AdaFEST(threshold=5.0, noise_ratio=5.0), "eana": EANA()}
        watches = {mechanism: Stopwatch() for mechanism in mechanisms}
        variants = {"plain": plain_step(workload)}
        variants |= {key: private_step(workload, watches[key], value) for key, value in mechanisms.items()}
        timings = interleaved(variants, repeats)
        for mechanism in mechanisms:
            rows.append(
                {
                    "model": name,
                    "batch": batch,
                    "mechanism": mechanism,
                    "plain": timings["plain"].to_dict(),
                    "private": timings[mechanism].to_dict(),
                    "ratio": ratio(timings[mechanism], timings["plain"]),
                    "stages": watches[mechanism].stages,
                }
            )
    return {"benchmark": "step", "scale": scale, "machine": machine(), "rows": rows}
