"""Where randomness comes from: one secret key per purpose, and generators derived from it.

A `RandomKey` holds 256 bits from the operating system (or a test's seed). Every generator is a pure function of
the key and a path of integers such as (step, parameter, chunk), so a run has no generator state to lose: position
and key are the state. `torch.manual_seed` has no influence.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from sparsedp.errors import SparseDPError

# Words of a Mersenne Twister state.
_MT_WORDS = 624
# Elements drawn from one generator. Fixed, so that the noise does not depend on the number of threads.
CHUNK = 1 << 18
# Tensors up to this size share one generator, because making one costs as much as drawing thousands of numbers.
_SMALL = 1 << 16
# Last entry of the path of the generator that small tensors share, beyond any parameter's index.
_SHARED = 1 << 30
# Where a mechanism's own randomness branches off, beside the parameters' noise.
SELECTION = _SHARED + 1
PREPARATION = _SHARED + 2
# And the noise that LazyDP's rows wait for.
WAITING = _SHARED + 3


@dataclass(frozen=True)
class RandomKey:
    """A secret from which generators are derived. `seeded` keys are reproducible and must not protect a release."""

    secret: bytes
    seeded: bool

    @staticmethod
    def from_os() -> RandomKey:
        return RandomKey(os.urandom(32), seeded=False)

    @staticmethod
    def from_seed(seed: int) -> RandomKey:
        return RandomKey(hashlib.shake_256(f"seed {int(seed)}".encode()).digest(32), seeded=True)

    def __repr__(self) -> str:  # the secret must not end up in a log
        return f"RandomKey(seeded={self.seeded})"

    def _derive(self, purpose: bytes, path: tuple[int, ...], size: int) -> bytes:
        """`size` bytes that only the key and the path decide (SHAKE-256)."""
        return hashlib.shake_256(self.secret + purpose + struct.pack(f"<{len(path)}Q", *path)).digest(size)

    def child(self, *path: int) -> RandomKey:
        """A key of its own for another purpose."""
        return RandomKey(self._derive(b"child", path, 32), self.seeded)

    def numpy(self, *path: int) -> np.random.Generator:
        words = np.frombuffer(self._derive(b"numpy", path, 32), dtype=np.uint32)
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words.tolist())))

    def torch(self, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator whose whole state comes from the key.

        `Generator.manual_seed` keeps 32 bits of a CPU seed, few enough to try them all, so the CPU state is written in
        full.
        """
        generator = torch.Generator(device=device)
        if generator.device.type == "cpu":
            words = np.frombuffer(self._derive(b"torch", path, 4 * _MT_WORDS), dtype=np.uint32)
            generator.set_state(_cpu_state(words))
        else:
            generator.manual_seed(int.from_bytes(self._derive(b"torch", path, 8), "little") >> 1)
        return generator


@functools.cache
def _cpu_state_template() -> np.ndarray:
    """A CPU generator's state before any number was drawn, with its Mersenne Twister marked as used up.

    torch's layout: seed (8 bytes), left (4), seeded (4), next (8), 624 words in 8 bytes each, then cached normals.
    `left` = 1 makes the generator mix the words before it hands out the first number.
    """
    state = torch.Generator().get_state().numpy().copy()
    state[8:12] = np.array([1], dtype=np.int32).view(np.uint8)
    state[16:24] = 0
    return state


def _cpu_state(words: np.ndarray) -> torch.Tensor:
    state = _cpu_state_template().copy()
    wide = words.astype(np.uint64)
    wide[0] |= np.uint64(0x80000000)  # an all-zero state would stay zero
    state[24 : 24 + 8 * _MT_WORDS] = wide.view(np.uint8)
    return torch.from_numpy(state)


class GaussianNoise:
    """Independent normal noise for the tensors of one step, drawn on all cores.

    Every element's noise is a function of the key, the step, the tensor's index and the position in it alone.
    """

    def __init__(self, key: RandomKey) -> None:
        self.key = key
        self._process = os.getpid()

    def fill(self, tensors: Mapping[int, torch.Tensor], std: float, step: int) -> None:
        """Overwrites each tensor with N(0, std^2); `tensors` maps a parameter's index to a contiguous tensor."""
        if os.getpid() != self._process:
            raise SparseDPError("This process was forked from the one that trains: both would draw the same noise.")
        if std == 0:
            for tensor in tensors.values():
                tensor.zero_()
            return
        draws: list[tuple[tuple[int, ...], torch.Tensor]] = []
        small: list[torch.Tensor] = []
        for index, tensor in tensors.items():
            flat = tensor.view(-1)
            if flat.numel() <= _SMALL:
                small.append(flat)
                continue
            for chunk, part in enumerate(flat.split(CHUNK)):
                draws.append(((step, index, chunk), part))
        if small:
            together = torch.empty(sum(t.numel() for t in small), dtype=small[0].dtype, device=small[0].device)
            draws += [((step, _SHARED, chunk), part) for chunk, part in enumerate(together.split(CHUNK))]
        self._draw(draws, std)
        if small:
            for flat, part in zip(small, together.split([t.numel() for t in small])):
                flat.copy_(part)

    def _draw(self, draws: Sequence[tuple[tuple[int, ...], torch.Tensor]], std: float) -> None:
        def draw(task: tuple[tuple[int, ...], torch.Tensor]) -> None:
            path, part = task
            part.normal_(0.0, std, generator=self.key.torch(*path, device=part.device))

        workers = torch.get_num_threads()
        if workers == 1 or len(draws) == 1 or draws[0][1].device.type != "cpu":
            for task in draws:
                draw(task)
        else:
            list(_pool(workers).map(draw, draws))


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="sparsedp-noise")


def row_normals(key: RandomKey, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Standard normals for rows of the table `like`, (n, ...): a function of the key, each row's number and the column."""
    width = like.shape[1:].numel()
    values = np.empty((rows.numel(), width))
    for i, row in enumerate(rows.tolist()):
        values[i] = key.numpy(row).standard_normal(width)
    return torch.from_numpy(values).to(like.dtype).view(rows.numel(), *like.shape[1:])
