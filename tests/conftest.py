"""Every test draws the same numbers on every run, in whatever order and process it runs."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _draws_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global generators, and the operating system's bytes as `os.urandom` gives them, follow from the names of file and test.

    A statistical test that nobody seeded would otherwise fail once in some hundred runs with nothing wrong.
    """
    name = request.node.nodeid.rpartition("/")[2]  # without the folder: a test that is moved draws the same
    seed = zlib.crc32(f"tests/{name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr("os.urandom", np.random.default_rng([seed, 1]).bytes)
