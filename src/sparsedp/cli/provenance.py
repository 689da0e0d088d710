"""What a run was made with: versions and code, which may leave; the machine, sessions and digests of the data, which may not."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sparsedp
from sparsedp.cli.config.config import Config
from sparsedp.data.tablefiles import find_sources
from sparsedp.errors import DataError

_PACKAGES = ("sparsedp", "torch", "numpy", "scipy", "numba", "dp-accounting")
_WHOLE = 1 << 30  # bytes of a file up to which all of it counts for its digest
_PATHS = {"path", "paths", "held_out"}  # keys of a folder with data: others, such as that of a cache, hold none
_PART = 1 << 24  # of a larger one: its first and its last bytes


def environment() -> dict[str, Any]:
    """Versions, and the digest of this package's code: chosen before training, so that it may leave."""
    return {
        "day": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "sparsedp_sha256": _package_digest(Path(sparsedp.__file__).parent),
    }


def provenance(config: Config) -> dict[str, Any]:
    """The machine and the data: not for release."""
    data = config.to_dict()["data"]
    settings = json.dumps(data, sort_keys=True, default=str)
    return {
        "private": "Digests of private data, and about your machine: not for release.",
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "data": {
            "settings_sha256": hashlib.sha256(settings.encode()).hexdigest(),
            "files": [file_digest(path) for path in sorted(set(_files(data)))],
        },
        "sessions": [],
    }


def session(first_step: int) -> dict[str, Any]:
    """One stretch of a run, from its start or from where it is resumed."""
    return {"started": _now(), "after_step": first_step}


def ended(begun: dict[str, Any], last_step: int) -> dict[str, Any]:
    return {**begun, "ended": _now(), "last_step": last_step}


def peak_memory() -> int | None:
    """The most bytes that this process has had in memory; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


def file_digest(path: Path) -> dict[str, Any]:
    """SHA-256 of a file; of one above 1 GiB, of its size, its first and its last 16 MiB, which takes no time."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= _WHOLE:
            while block := file.read(_PART):
                digest.update(block)
        else:
            digest.update(str(size).encode() + file.read(_PART))
            file.seek(-_PART, os.SEEK_END)
            digest.update(file.read(_PART))
    changed = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return {
        "path": str(path),
        "bytes": size,
        "changed": changed.isoformat(timespec="seconds"),
        "sha256": digest.hexdigest(),
        "of": "all of it" if size <= _WHOLE else "its size, its first and last 16 MiB",
    }


def _files(value: Any, key: str = "") -> Iterator[Path]:
    """Whatever in the data's settings names a file that is there, or a pattern of files; where data are to lie, also a folder."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _files(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _files(item, key)
    elif isinstance(value, str) and os.sep in value and "\0" not in value:
        with suppress(OSError, DataError):  # text that is the name of no file
            if key in _PATHS or not Path(value).is_dir():
                yield from find_sources(value)


def _package_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
