"""Whether all processes of a run were given the same configuration, code and versions: otherwise they would wait in vain."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from sparsedp.cli.config.config import Config
from sparsedp.cli.processes import Processes
from sparsedp.errors import ConfigError
from sparsedp.version import __version__


def require_same_configuration(config: Config, processes: Processes) -> None:
    """Raises on all processes, with the first key that differs."""
    every = processes.gather(_described(config))
    for rank, other in enumerate(every):
        for key in (*every[0], *other):
            here, there = every[0].get(key, "nothing"), other.get(key, "nothing")
            if there != here:
                raise ConfigError(
                    f"{key}: {there} on rank {rank}, {here} on rank 0. Start all processes with the same configuration, code and "
                    "versions"
                )


def _described(config: Config) -> dict[str, str]:
    """Every key with its value, what is in the files of the user's own code, and the versions of what computes."""
    code = {
        f"{key} (the file of {address})": _digest(config, key, address) for key, address in config.addresses().items()
    }
    versions = {
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the version of torch": torch.__version__,
        "the version of NumPy": np.__version__,
        "the version of SparseDP": __version__,
        "the version of TorchRec": _version_of("torchrec"),
    }
    return _keys(config.to_dict()) | code | versions


def _keys(values: Mapping[str, Any], path: str = "") -> dict[str, str]:
    keys: dict[str, str] = {}
    for name, value in values.items():
        keys |= _keys(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": repr(value)}
    return keys


def _digest(config: Config, key: str, address: str) -> str:
    config.code.find(address, key)
    file = config.code.file_of(address)
    return "no file" if file is None or not file.is_file() else hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
