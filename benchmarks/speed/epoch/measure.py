"""`python -m benchmarks epoch`: a whole epoch, batches included, against plain PyTorch's with the `DataLoader` as users have it.

Two towers on a `TensorDataset`, the default collate function, no workers: what most scripts have. Steps of so small a model take
less time than the fetching of their batches one example at a time. All threads of the machine, and one: waking a thread up takes
longer than most operations of so small a model. Then the same beside other work, where a thread that others wait for may have
to wait itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.machine import machine
from benchmarks.speed.processes import other_work
from benchmarks.speed.timing import interleaved, ratio
from sparsedp.engine import PrivacyEngine
from sparsedp.mechanisms import EANA, AdaFEST, LazyDP, Mechanism

MECHANISMS: dict[str, Mechanism] = {
    "lazydp": LazyDP(), "adafest": AdaFEST(threshold=10.0, noise_ratio=5.0), "eana": EANA(),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    examples: int = 200_000
    batch: int = 1024
    users: int = 100_000
    items: int = 50_000
    dim: int = 32


class TwoTowers(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.user = nn.Embedding(setting.users, setting.dim, sparse=True)
        self.item = nn.Embedding(setting.items, setting.dim, sparse=True)
        self.user_tower = nn.Sequential(
            nn.Linear(setting.dim, setting.dim), nn.ReLU(), nn.Linear(setting.dim, setting.dim)
        )
        self.item_tower = nn.Sequential(
            nn.Linear(setting.dim, setting.dim), nn.ReLU(), nn.Linear(setting.dim, setting.dim)
        )

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user_tower(self.user(user)) * self.item_tower(self.item(item))).sum(-1)


def bench_epoch(setting: Setting, *, repeats: int, busy_repeats: int) -> dict[str, Any]:
    """Times epochs, and passes that only fetch the batches, in turns; then epochs beside as many busy processes as there are
    threads. Returns what `--json` writes."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randint(setting.users, (setting.examples,), generator=generator),
        torch.randint(setting.items, (setting.examples,), generator=generator),
        torch.randint(2, (setting.examples,), generator=generator).float(),
    )
    made = {"plain": _plain(setting, data)}
    made |= {name: _private(setting, data, mechanism) for name, mechanism in MECHANISMS.items()}
    several = torch.get_num_threads()
    variants = {f"{name} {threads}": (name, threads) for threads in sorted({several, 1}, reverse=True) for name in made}
    loops = {
        key: [functools.partial(_with_threads, threads, run) for run in made[name]]
        for key, (name, threads) in variants.items()
    }
    epoch_of = {key: epoch for key, (epoch, _) in loops.items()}
    try:
        epochs = interleaved(epoch_of, repeats, warmup=1)
        fetching = interleaved({key: fetch for key, (_, fetch) in loops.items()}, repeats, warmup=1)
        with other_work(several):
            busy = interleaved(epoch_of, busy_repeats, warmup=0)
    finally:
        torch.set_num_threads(several)
    plain, busy_plain = (
        min((timings[key] for key, (name, _) in variants.items() if name == "plain"), key=lambda timing: timing.best)
        for timings in (epochs, busy)
    )
    rows = [
        {
            "variant": name,
            "threads": threads,
            **epochs[key].to_dict(),
            "fetching": fetching[key].to_dict(),
            "ratio_to_plain": ratio(epochs[key], plain),
            "busy": busy[key].to_dict(),
            "busy_ratio_to_plain": ratio(busy[key], busy_plain),
        }
        for key, (name, threads) in variants.items()
    ]
    return {"benchmark": "epoch", "setting": asdict(setting), "machine": machine(), "rows": rows}


def _with_threads(threads: int, run: Callable[[], None]) -> None:
    torch.set_num_threads(threads)
    run()


Loop = tuple[Callable[[], None], Callable[[], None]]  # an epoch, and its batches alone


def _plain(setting: Setting, data: TensorDataset) -> Loop:
    module = TwoTowers(setting)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return _loop(module, optimizer, DataLoader(data, batch_size=setting.batch, shuffle=True))


def _private(setting: Setting, data: TensorDataset, mechanism: Mechanism) -> Loop:
    module = TwoTowers(setting)
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=setting.batch, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mechanism=mechanism,
    )
    return _loop(*made)


def _loop(module: nn.Module, optimizer: Any, loader: Any) -> Loop:
    def epoch() -> None:
        for user, item, label in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(module(user, item), label).backward()
            optimizer.step()

    def fetch() -> None:
        for _ in loader:
            pass

    return epoch, fetch
