"""What this process sends to others: the bytes that the system's sockets took, and how many messages there were.

The count is the kernel's own (TCP_INFO of each socket), so that it holds whatever sends: TorchRec, DistributedDataParallel in
C++, and gloo's headers and its ways of adding up. It is exact: what was written and is not sent yet is counted as well.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sparsedp.errors import SparseDPError

_UNSENT = 0x5411  # SIOCOUTQ: bytes that were written and are not acknowledged
# Where tcpi_bytes_acked is in struct tcp_info, Linux 4.1 and later, and how much of it is read.
_ACKED, _LENGTH = 120, 128


def bytes_sent() -> int:
    """That this process wrote into TCP sockets which are open now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as other:
                if other.type != socket.SOCK_STREAM or other.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
                unsent = struct.unpack("i", fcntl.ioctl(number, _UNSENT, b"\0" * 4))[0]
        except OSError:  # closed since, or it listens
            continue
        total += struct.unpack_from("Q", info, _ACKED)[0] + unsent
    return total


class WireMeter:
    """Stands where a stopwatch stands, and adds up the bytes that are sent in each stage, over all steps since it was made."""

    def __init__(self) -> None:
        self._stages: Counter[str] = Counter()
        self._within = 0
        self._steps = 0
        self._began = bytes_sent()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer, self._within = self._within, 0
        start = bytes_sent()
        try:
            yield
        finally:
            sent = bytes_sent() - start
            self._stages[stage] += sent - self._within
            self._within = outer + sent

    def lap(self) -> None:
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Bytes of a step, by stage; "step" is all of it."""
        if not self._steps:
            raise SparseDPError("No step was taken.")
        total = bytes_sent() - self._began
        return {stage: sent / self._steps for stage, sent in self._stages.items() if sent} | {
            "step": total / self._steps
        }


def messages_of(step: Callable[[], None]) -> dict[str, int]:
    """How many collectives of each kind a step takes, as torch's profiler sees them in C++."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found = Counter(event.name.removeprefix("gloo:") for event in profile.events() if event.name.startswith("gloo:"))
    return dict(sorted(found.items()))
