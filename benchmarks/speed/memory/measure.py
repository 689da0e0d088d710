"""`python -m benchmarks memory`: whether a table of half of the machine's memory can be trained, settled, saved and loaded.

It can if nothing of its size is made beside it. Each variant runs in a process of its own, from the model to the files that a
run leaves; after each phase, anonymous memory beyond the table is written down, and the most that there was during it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.machine import available_memory, machine, total_memory
from benchmarks.speed.processes import in_own_process
from benchmarks.speed.steps import matched_adafest
from benchmarks.speed.watch import Watch, can_watch, forget_most_pages, memory_now
from sparsedp.engine import PrivacyEngine
from sparsedp.errors import SparseDPError
from sparsedp.mechanisms import EANA, LazyDP, Mechanism

DIM, BATCH, STEPS = 64, 1024, 5
VARIANTS = {"lazydp": "LazyDP", "adafest": "AdaFEST", "eana": "EANA", "plain": "PyTorch"}
PHASES = {
    "built": "model built",
    "private": "made private",
    "steps": f"{STEPS} steps",
    "evaluated": "evaluated",
    "settled": "settled",
    "written": "checkpoint written",
    "loaded": "checkpoint loaded",
    "saved": "model saved",
}
# These write files; EANA's and plain PyTorch's would be written by the same code.
ON_DISK = ("written", "loaded", "saved")
WITH_FILES = frozenset({"lazydp", "adafest"})
_DISK = 1.1  # times the table: what has to be free for a file of it
_MEMORY, _LIBRARIES = 1.1, 10**9  # times the table, and bytes: what has to be available for a run
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_SAMPLE = 1000  # rows that are compared after a checkpoint was loaded


@dataclass(frozen=True)
class Setting:
    gigabytes: float  # of the table, 10^9 bytes each
    batch: int = BATCH
    folder: str | None = None  # for files; None: none are written

    @property
    def rows(self) -> int:
        return max(1, round(self.gigabytes * 1e9 / (4 * DIM)))

    @property
    def table_bytes(self) -> int:
        return self.rows * DIM * 4


class OneTable(nn.Module):
    """As a user would build it."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, DIM, sparse=sparse)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).squeeze(1)


def bench_memory(
    *,
    gigabytes: float,
    batch: int = BATCH,
    variants: Collection[str] = tuple(VARIANTS),
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Runs the variants one after the other. `folder` is where files are written for a while; by default the system's own."""
    if not can_watch():
        raise SparseDPError(
            "Anonymous memory is read from /proc/self/status, which this system does not have: use Linux."
        )
    setting = Setting(gigabytes, batch)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="sparsedp-bench-") as scratch:
        for variant in (name for name in VARIANTS if name in variants):
            lacking = memory_lacking(setting.table_bytes, available_memory())
            if lacking is not None:
                say(f"{variant}: left out, {lacking}")
                left_out.append({"variant": variant, "reason": lacking})
                continue
            problem = disk_problem(Path(scratch), setting.table_bytes) if variant in WITH_FILES else None
            say(f"{variant}: a table of {gigabytes:.3g} GB" + (f"; no files, {problem}" if problem else ""))
            files = scratch if variant in WITH_FILES and problem is None else None
            rows += in_own_process("benchmarks.speed.memory.measure", replace(setting, folder=files), variant)
            if problem is not None:
                rows += [{"variant": variant, "phase": phase, "skipped": problem} for phase in ON_DISK]
    return {
        "benchmark": "memory",
        "machine": {**machine(), "memory_bytes": total_memory()},
        "gigabytes": gigabytes,
        "dim": DIM,
        "batch": batch,
        "table_rows": setting.rows,
        "table_bytes": setting.table_bytes,
        "rows": rows,
        "left_out": left_out,
    }


# ---------------------------------------------------------------------- what there has to be


def memory_lacking(table: int, available: int) -> str | None:
    """Why a table of so many bytes cannot be trained now; None if it can."""
    needed = _MEMORY * table + _LIBRARIES
    if available >= needed:
        return None
    return f"{available / 1e9:.1f} GB of memory are available and {needed / 1e9:.1f} GB are needed"


def disk_problem(folder: Path, table: int) -> str | None:
    """Why a file with a table of so many bytes cannot be written there; None if it can."""
    kind = file_system(folder, Path("/proc/mounts").read_text())
    if kind in _IN_MEMORY:
        return f"{folder.parent} is kept in memory ({kind}): choose another folder with --folder"
    free, needed = shutil.disk_usage(folder).free, _DISK * table
    if free >= needed:
        return None
    return f"{folder.parent} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed: choose another with --folder"


def file_system(folder: Path, mounts: str) -> str:
    """What kind of file system a folder is on, out of /proc/mounts."""
    mounted = [line.split()[1:3] for line in mounts.splitlines()]
    places = {place.replace("\\040", " "): kind for place, kind in mounted}
    return next(places[str(path)] for path in (folder.resolve(), *folder.resolve().parents) if str(path) in places)


# ---------------------------------------------------------------------- one variant, in its own process


class _Phases:
    """Writes down what each phase took, beyond what the process had before the first and the table's own bytes."""

    def __init__(self, watch: Watch, variant: str, table: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._watch, self._variant, self._table = watch, variant, table
        gc.collect()
        self._before, self._resident = memory_now(), memory_now(b"VmRSS")

    @contextmanager
    def __call__(self, name: str, file: Path | None = None) -> Iterator[None]:
        """`file` is what the phase writes or reads."""
        exact = forget_most_pages()
        self._watch.peak()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        now = memory_now()
        # What was there at either end was there, too: the last sample may be some milliseconds old.
        peak = max(self._watch.peak(), now)
        row = {"variant": self._variant, "phase": name, "seconds": seconds}
        row |= self._beyond("", now - self._before) | self._beyond("peak_", peak - self._before)
        if exact:  # of all pages, with those of mapped files and libraries
            row |= self._beyond("resident_peak_", memory_now(b"VmHWM") - self._resident)
        if file is not None:
            size = file.stat().st_size
            row |= {"file_bytes": size, "megabytes_per_second": size / 1e6 / seconds}
        self.rows.append(row)

    def _beyond(self, what: str, taken: int) -> dict[str, float]:
        extra = taken - self._table
        return {f"{what}bytes": extra, f"{what}share": extra / self._table}


def _measure(setting: Setting, variant: str) -> list[dict[str, Any]]:
    with Watch() as watch:
        tiny = replace(setting, gigabytes=1e-3)  # loads and compiles whatever a run needs
        _run(tiny, variant, _Phases(watch, variant, tiny.table_bytes))
        phases = _Phases(watch, variant, setting.table_bytes)
        _run(setting, variant, phases)
    return phases.rows


def _run(setting: Setting, variant: str, phases: _Phases) -> None:
    """The life of a model."""
    data = TensorDataset(torch.randint(setting.rows, (10 * setting.batch,)), torch.rand(10 * setting.batch).round())
    loader: Any = DataLoader(data, batch_size=setting.batch)
    with phases("built"):
        module: nn.Module = OneTable(setting.rows, sparse=True)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = PrivacyEngine()
    if variant != "plain":
        with phases("private"):
            module, optimizer, loader = engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                mechanism=_mechanism(variant, setting),
            )  # fmt: skip
    with phases("steps"):
        _train(module, optimizer, loader, STEPS)
    with phases("evaluated"):
        module.eval()
        with torch.no_grad():
            module(torch.randint(setting.rows, (setting.batch,)))
        module.train()
    if variant == "lazydp":
        with phases("settled"):
            engine.settle()
    if setting.folder is not None:
        _use_files(Path(setting.folder), setting, engine, module, lambda: _train(module, optimizer, loader, 1), phases)


def _mechanism(variant: str, setting: Setting) -> Mechanism:
    if variant == "lazydp":
        return LazyDP()
    if variant == "eana":
        return EANA()
    return matched_adafest(setting.batch, setting.rows)


def _train(module: nn.Module, optimizer: Any, loader: Any, steps: int) -> None:
    while steps:
        for ids, target in loader:
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(module(ids), target).backward()
            optimizer.step()
            steps -= 1
            if not steps:
                return


def _use_files(
    folder: Path, setting: Setting, engine: PrivacyEngine, module: Any, step: Callable[[], None], phases: _Phases
) -> None:
    """One file at a time, so that the disk need not hold two."""
    checkpoint, weights = folder / "checkpoint.pt", folder / "model.pt"
    try:
        with phases("written", checkpoint):
            engine.save_checkpoint(checkpoint)
        sample = torch.randint(setting.rows, (_SAMPLE,))
        written = module.table.weight[sample].detach().clone()
        step()
        with phases("loaded", checkpoint):
            engine.load_checkpoint(checkpoint)
        if not torch.equal(module.table.weight[sample], written):
            raise SparseDPError("The rows that were loaded are not those that were written.")
        checkpoint.unlink()
        with phases("saved", weights), weights.open("wb") as file:
            torch.save(module.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        checkpoint.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)


if __name__ == "__main__":
    print(json.dumps(_measure(Setting(**json.loads(sys.argv[1])), sys.argv[2])))
