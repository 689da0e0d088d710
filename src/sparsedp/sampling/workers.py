"""What data sets and collate functions draw at random, such as augmentations: from global generators under secret states.

They draw with torch, numpy or Python's `random`, example after example. Under a public seed an example's numbers would depend
on how many examples came before it: one unit more would change those of all units behind it, and no clipping bounds that. So
the states of the generators come from the key while data are fetched, in the workers as in the training process.

These generators can be run backwards by whoever sees enough of their numbers. Nobody does: the numbers go into gradients, which
are clipped and get noise. And their states are words of the cipher, from a stream of their own for each worker and each fetch:
one state tells nothing about another, nor about noise, samples or the key.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

_MT_WORDS = 624  # of 32 bits, a Mersenne Twister's state
_TORCH_WORDS = 1 + _MT_WORDS // 2  # of 64 bits, that make the state of torch's generator


@dataclass(frozen=True)
class WorkerInit:
    """A loader's `worker_init_fn` that gives worker i generators under `key` and i, and then calls the user's own."""

    key: RandomKey
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        seed_globals(self.key.generator(worker))
        if self.then is not None:
            self.then(worker)


def torch_generator(source: CipherGenerator) -> torch.Generator:
    """A torch generator with a secret state. A loader draws from it the seed that its workers find in their `worker_info`."""
    generator = torch.Generator()
    generator.set_state(_torch_state(source.words(_TORCH_WORDS)))
    return generator


def seed_globals(source: CipherGenerator) -> None:
    """Secret states for the CPU generators of torch, of numpy (the old functions of `np.random`) and of Python."""
    words = source.words(8 + _TORCH_WORDS)
    np.random.seed(words[:4].view(np.uint32))
    random.seed(int.from_bytes(words[4:8].tobytes(), "little"))
    torch.set_rng_state(_torch_state(words[8:]))


@contextmanager
def kept_globals() -> Iterator[None]:
    """Within it the global generators may be seeded; afterwards they go on as if nothing had been.

    (But for the second number of a pair that `np.random.randn` draws at a time, which numpy drops with the exchange.)
    """
    numpys: Any = np.random  # its stubs lack two functions
    kept = torch.get_rng_state(), random.getstate(), numpys.get_bit_generator()
    numpys.set_bit_generator(_numpy_scratch())  # an exchange, because to copy numpy's state takes 0.1 ms
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpys.set_bit_generator(kept[2])


@functools.cache
def _numpy_scratch() -> np.random.MT19937:
    return np.random.MT19937(0)  # seeded anew before each use


def _torch_state(words: np.ndarray) -> torch.Tensor:
    """The state of a CPU generator, all of it of words of the cipher: `manual_seed` keeps 32 bits, few enough to try them all.

    The first 8 bytes are what `torch.initial_seed` answers, from which many a `worker_init_fn` seeds other generators.
    """
    state = _torch_template().copy()
    state[:8] = words[:1].view(np.uint8)
    state_words = words[1:].view(np.uint32).astype(np.uint64)
    state_words[0] |= np.uint64(0x80000000)  # an all-zero state would stay zero
    state[24 : 24 + 8 * _MT_WORDS] = state_words.view(np.uint8)
    return torch.from_numpy(state)


@functools.cache
def _torch_template() -> np.ndarray:
    """A CPU generator's state before any number was drawn, with its Mersenne Twister marked as used up.

    torch's layout: seed (8 bytes), left (4), seeded (4), next (8), 624 words in 8 bytes each, then cached normals.
    `left` = 1 makes the generator mix the words before it hands out the first number.
    """
    state = torch.Generator().get_state().numpy().copy()
    state[8:12] = np.array([1], dtype=np.int32).view(np.uint8)
    state[16:24] = 0
    return state
