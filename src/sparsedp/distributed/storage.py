"""The files of a checkpoint of several processes, which these write and read without waiting for each other in a message.

`torch.distributed.checkpoint` would let ranks that are done wait for the others in one, which fails at its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter


class Writer(FileSystemWriter):
    """Writes this rank's file. `meet` waits until all ranks have come to the same point."""

    def __init__(self, folder: Path, meet: Callable[[], None]) -> None:
        super().__init__(folder)
        self._meet = meet
        self._metadata: tuple[Any, Any] | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner)
            written.wait()
        finally:  # an error is told to the others in the message that follows
            self._meet()
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Is called on one rank while the others wait: the list of all tensors is written after that."""
        self._metadata = metadata, results

    def write_metadata(self) -> None:
        if self._metadata is not None:
            super().finish(*self._metadata)


class Reader(FileSystemReader):
    """Reads what this rank has, and `meet`s the others."""

    def __init__(self, folder: Path, meet: Callable[[], None]) -> None:
        super().__init__(folder)
        self._meet = meet

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            read = super().read_data(plan, planner)
            read.wait()
        finally:
            self._meet()
        return read
