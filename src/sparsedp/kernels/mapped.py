"""Copies tensors out of a mapped file, piece by piece, so that no more than a piece of it is ever in memory."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

from sparsedp._torch import without_subclasses

PIECE = 1 << 26  # bytes
_PAGEOUT = 21  # Linux: MADV_PAGEOUT, since 5.4


@torch.no_grad()
def copy_mapped(target: Tensor, source: Tensor) -> None:
    """target = source, of the same shape. The last piece comes first: after a reading of the whole file, it is cached.

    The guard of a lazy table is not asked.
    """
    with without_subclasses():
        if not (target.is_contiguous() and source.is_contiguous()):
            target.copy_(source)
            return
        ours, theirs = target.detach().view(-1), source.detach().view(-1)
        size = max(1, PIECE // source.element_size())
        for first in reversed(range(0, len(theirs), size)):
            piece = theirs[first : first + size]
            ours[first : first + size].copy_(piece)
            _give_back(piece)


def _give_back(tensor: Tensor) -> None:
    """Lets the system have the pages at once, not only when it runs short: until then they count as the process's.

    This is advice to the system: pages that belong to no file stay as they are, and what is read again comes from the file.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    begin, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT)
