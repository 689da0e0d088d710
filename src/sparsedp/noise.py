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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sparsedp import chacha
from sparsedp.errors import SparseDPError
from sparsedp.threads import on_all_cores

# Words of a Mersenne Twister state.
_MT_WORDS = 624
# Elements that one thread draws at a time.
CHUNK = 1 << 18
# Tensors smaller than this are drawn at once: another thread would take longer to begin.
_SMALL = 1 << 15
# Where a mechanism's own randomness branches off, beyond any parameter's index; and the noise that LazyDP's rows wait for.
SELECTION, PREPARATION, WAITING = (1 << 30) + 1, (1 << 30) + 2, (1 << 30) + 3


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

    def stream(self, *path: int) -> np.ndarray:
        """A key of its own for `sparsedp.chacha`, (8,) uint32."""
        return chacha.stream_key(self._derive(b"chacha", path, 32))

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

    Every element's noise is a function of the key, the step, the tensor's index and the position in it alone. On the CPU it
    comes from ChaCha8 (`sparsedp.chacha`); on other devices from torch's generator there.
    """

    def __init__(self, key: RandomKey) -> None:
        self.key = key
        self._process = os.getpid()

    def fill(self, tensors: Mapping[int, torch.Tensor], std: float, step: int) -> None:
        """Overwrites each tensor with N(0, std^2); `tensors` maps a parameter's index to a contiguous tensor."""
        if os.getpid() != self._process:
            raise SparseDPError("This process was forked from the one that trains: both would draw the same noise.")
        large: list[Callable[[], None]] = []
        for index, tensor in tensors.items():
            flat = tensor.view(-1)
            if std == 0:
                tensor.zero_()
            elif tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
                flat.normal_(0.0, std, generator=self.key.torch(step, index, device=tensor.device))
            else:
                values, key = flat.numpy(), self.key.stream(step, index)
                for first in range(0, len(values), CHUNK):
                    draw = functools.partial(chacha.fill_normal, values[first : first + CHUNK], std, key, first)
                    if len(values) < _SMALL:
                        draw()
                    else:
                        large.append(draw)
        on_all_cores(lambda task: task(), large)


def row_normals(key: RandomKey, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Standard normals for rows of the table `like`, (n, ...): a function of the key, each row's number and the column."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    out = torch.empty(rows.numel(), like.shape[1:].numel(), dtype=dtype)
    chacha.fill_rows(out.numpy(), rows.cpu().numpy(), 1.0, key.stream())
    return out.to(like).view(rows.numel(), *like.shape[1:])


def add_row_normals(key: RandomKey, table: torch.Tensor, rows: torch.Tensor, std: np.ndarray) -> None:
    """table[rows[i]] += std[i] times what `row_normals` draws for that row, in place; `rows` are distinct."""
    if table.device.type == "cpu" and table.is_contiguous() and table.dtype in (torch.float32, torch.float64):
        chacha.add_rows(table.view(len(table), -1).numpy(), rows.numpy(), std, key.stream())
        torch.autograd.graph.increment_version(table)
        return
    scale = torch.from_numpy(std).to(table).view(-1, *[1] * (table.ndim - 1))
    table.index_add_(0, rows, row_normals(key, rows, table) * scale)
