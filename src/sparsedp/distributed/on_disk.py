"""Large weights of a model that is made to be divided: in files, whose pages the system writes out when memory runs short."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1 << 26  # bytes; smaller tensors are made as ever


@contextmanager
def large_tensors_on_disk(folder: Path, large: int = LARGE) -> Iterator[None]:
    """Within it, what torch.empty makes of at least `large` bytes lies in a file in `folder`, which goes with the tensor.

    The weights of torch's modules are made by torch.empty; what is then drawn into them is the same.
    """
    with _OnDisk(folder, large):
        yield


class _OnDisk(TorchFunctionMode):
    def __init__(self, folder: Path, large: int) -> None:
        super().__init__()
        self._folder, self._large = folder, large

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = kwargs or {}
        if func is not torch.empty or options.get("device") not in (None, "cpu", torch.device("cpu")):
            return func(*args, **options)
        like = torch.empty(*args, **{**options, "device": "meta"})
        return self._mapped(like) if like.nbytes >= self._large else func(*args, **options)

    def _mapped(self, like: Tensor) -> Tensor:
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=".sparsedp-")
        try:
            if hasattr(os, "posix_fallocate"):  # a disk that is too full is an error here, and not a signal later
                os.posix_fallocate(handle, 0, like.nbytes)
            flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
        finally:
            os.close(handle)
            os.unlink(path)  # the tensor keeps it
        return flat.view(like.shape).requires_grad_(like.requires_grad)


@torch.no_grad()
def take_from_disk(model: nn.Module) -> None:
    """Takes into memory what is still in files: large weights that are no tables."""
    for parameter in model.parameters():
        if parameter.untyped_storage().filename is not None:
            parameter.data = parameter.data.clone()
