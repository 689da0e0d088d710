"""The generators that everybody shares, which a private forward pass must not use."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937

from sparsedp.errors import UnsupportedError


class GlobalGenerators:
    """Where the generators stand that everybody shares: torch's on each device, numpy's and Python's.

    numpy and Python take 20 to 100 microseconds to tell the whole state of theirs. Both are Mersenne Twisters, whose place
    in its 624 words, and first word, tell as much: these are read where they lie in memory.
    """

    def __init__(self) -> None:
        self._numpy: Any = None
        self._watch: list[Any] = []
        self._python = _python_words()

    def places(self) -> dict[str, Any]:
        """By the generator's name; different from an earlier answer if it was used, or seeded, in between."""
        places: dict[str, Any] = {"torch": torch.default_generator.get_state().numpy().tobytes()}
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._numpy:  # the first time, or np.random.set_bit_generator put another in its place
            self._numpy, self._watch = generator, _numpy_words(generator)
        places["numpy"] = tuple(bytes(words) for words in self._watch) if self._watch else repr(generator.state)
        places["Python"] = bytes(self._python) if self._python is not None else random.getstate()
        if torch.cuda.is_initialized():
            places["CUDA"] = tuple((g.initial_seed(), g.get_offset()) for g in torch.cuda.default_generators)
        return places


def _numpy_words(generator: Any) -> list[Any]:
    """The first word of numpy's Mersenne Twister and its place; none for another generator."""
    if not isinstance(generator, MT19937):
        return []
    address = generator.ctypes.state_address  # of uint32 key[624] and int pos
    return [(ctypes.c_char * 4).from_address(address), (ctypes.c_char * 4).from_address(address + 4 * 624)]


def _python_words() -> Any:
    """The place of Python's Mersenne Twister and its first word: they lie behind the head of its object.

    None where they do not, as another one shows whose words are known.
    """
    trial = random.Random(1)
    random.Random.random(trial)
    words = trial.getstate()[1]
    expected = np.array([words[-1], words[0]], np.uint32).tobytes()
    if bytes(_behind_head(trial)) != expected:
        return None
    return _behind_head(getattr(random, "_inst"))  # noqa: B009


def _behind_head(value: Any) -> Any:
    return (ctypes.c_char * 8).from_address(id(value) + object.__basicsize__)


def refuse_moved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises if a generator that everybody shares was used in a forward pass."""
    moved = [name for name, place in after.items() if before.get(name, place) != place]
    if moved:
        raise UnsupportedError(
            f"The forward pass drew from {moved[0]}'s global generator, or seeded it. Random numbers under a seed that others "
            "may know void the guarantee: they go by position in the batch, so that one unit more changes everybody's. Draw "
            "them inside of forward() with operations such as F.dropout, torch.rand, torch.bernoulli, torch.randint or "
            "torch.multinomial, whose numbers then come from the engine's secret key."
        )
