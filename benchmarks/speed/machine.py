"""What numbers are measured with, and the memory that there is."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from sparsedp.version import __version__


def machine() -> dict[str, Any]:
    """What the numbers were measured with."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparsedp": __version__,
    }


def total_memory() -> int:
    """The memory of the machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    info = Path("/proc/meminfo")
    if info.is_file():
        line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return total_memory()
