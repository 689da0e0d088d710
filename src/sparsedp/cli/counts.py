"""Files of counts and of released frequencies: how often rows are touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsedp.cli.files import write_file
from sparsedp.errors import ConfigError, one_line
from sparsedp.frequencies import FrequencyRelease
from sparsedp.mechanisms import PublicCounts


def read_public_counts(path: Path, key: str) -> PublicCounts:
    """The counts of each table in the file that `key` names, and the number of units that were counted."""
    if path.suffix not in _READERS:
        raise ConfigError(f"{key} {path}: expected a .npz, .pt or .json file")
    try:
        content = _READERS[path.suffix](path)
    except OSError:
        raise
    except Exception as error:  # each reader has errors of its own
        raise ConfigError(f"{key} {path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict) or "units" not in content:
        raise ConfigError(f"{key} {path}: expected, beside each table's counts, the number of counted units as 'units'")
    counts = {name: values for name, values in content.items() if name != "units"}
    return PublicCounts(counts, float(content["units"]))


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


_READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _read_npz,
    ".pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    ".json": lambda path: json.loads(path.read_text()),
}


def write_release(path: Path, release: FrequencyRelease) -> None:
    """A release with what it cost, so that a run that takes it pays for it."""
    assert release.drawn is not None
    settings = {"epsilon": release.epsilon, "delta": release.delta, "clip": release.clip}
    write_file(path, lambda file: torch.save({**settings, "frequencies": dict(release.drawn or {})}, file))


def read_release(path: Path, key: str) -> FrequencyRelease:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        frequencies = content.pop("frequencies")
        return FrequencyRelease(**content, drawn=frequencies)
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(f"{key} {path} is no release of sparsedp plan --release: {one_line(error)}") from error
