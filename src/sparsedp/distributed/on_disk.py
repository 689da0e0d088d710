"""Large weights of a model that is made to be divided: in files, whose pages the system writes out when memory runs short.

Where the model is only looked at, to plan a run, their values are left out: files of zeros, which take no room at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsedp.errors import SparseDPError

LARGE = 1 << 26  # bytes; smaller tensors are made as ever


@contextmanager
def large_tensors_on_disk(folder: Path, large: int = LARGE) -> Iterator[None]:
    """Within it, what torch.empty makes of at least `large` bytes lies in a file in `folder`, which goes with the tensor.

    The weights of torch's modules are made by torch.empty; what is then drawn into them is the same.
    """
    with _OnDisk(folder, large):
        yield


@contextmanager
def large_tensors_without_values(large: int = LARGE) -> Iterator[None]:
    """Within it, tensors of at least `large` bytes have their shapes alone: they are zeros, which nothing fills or draws.

    What torch makes for a model and an optimizer lies in files with nothing in them, which go with the tensors. A forward pass
    reads as many zeros as it looks up. Smaller tensors are made as ever, of other random numbers than in a run.
    """
    with _WithoutValues(Path(tempfile.gettempdir()), large):
        yield


# What makes tensors of given shapes, what writes a whole tensor, and what those who make weights compute of whole ones.
_MAKERS = frozenset({
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.empty_like, torch.zeros_like,
    torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
})  # fmt: skip
_WRITERS = frozenset(
    f"{name}_" for name in (
        "normal", "uniform", "random", "exponential", "log_normal", "cauchy", "geometric", "bernoulli", "zero", "fill", "copy",
        "add", "sub", "mul", "div", "clamp", "clip", "erfinv", "constant", "kaiming_uniform",
    )
)  # fmt: skip
_COMPUTED = frozenset({
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "clamp", "lt", "le", "gt", "ge", "or", "and", "where", "any",
})  # fmt: skip


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
            self._make_room(handle, like.nbytes)
            flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
        finally:
            os.close(handle)
            os.unlink(path)  # the tensor keeps it
        return flat.view(like.shape).requires_grad_(like.requires_grad)

    @staticmethod
    def _make_room(handle: int, size: int) -> None:
        if hasattr(os, "posix_fallocate"):  # a disk that is too full is an error here, and not a signal later
            os.posix_fallocate(handle, 0, size)


class _WithoutValues(_OnDisk):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = kwargs or {}
        if func in _MAKERS and self._on_cpu(func, args, options):
            like = func(*args, **{**options, "device": "meta"})
            if like.nbytes >= self._large:
                return self._mapped(like)
        name = getattr(func, "__name__", "")
        if name in _WRITERS:
            written = args[0] if args else options.get("tensor")  # torch.nn.init has names for all of its arguments
            if self._has_no_values(written):
                return written
        elif name.strip("_") in _COMPUTED and any(map(self._has_no_values, args)):
            like = func(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args), **options)
            return self._mapped(like) if like.nbytes >= self._large else torch.zeros(like.shape, dtype=like.dtype)
        return func(*args, **options)

    @staticmethod
    def _on_cpu(func: Callable, args: tuple, options: Mapping[str, Any]) -> bool:
        if "out" in options or options.get("generator") is not None:
            return False
        device = options.get("device")
        if device is None and args and isinstance(args[0], Tensor) and func.__name__.endswith("_like"):
            device = args[0].device
        return device in (None, "cpu", torch.device("cpu"))

    def _mapped(self, like: Tensor) -> Tensor:
        try:
            return super()._mapped(like)
        except (
            RuntimeError
        ) as error:  # one number cannot stand for all: lookups of it would not be seen as those of a table
            raise SparseDPError(
                f"A weight of {like.nbytes:,} bytes takes no memory here, but as many addresses, and this process may not "
                "have so many. Raise that limit: ulimit -v unlimited."
            ) from error

    def _has_no_values(self, tensor: Any) -> bool:
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout != torch.strided
            or tensor.is_meta
            or tensor.nbytes < self._large
        ):
            return False
        return tensor.untyped_storage().filename is not None

    @staticmethod
    def _make_room(handle: int, size: int) -> None:
        os.ftruncate(handle, size)


@torch.no_grad()
def take_from_disk(model: nn.Module) -> None:
    """Takes into memory what is still in files: large weights that are no tables."""
    for parameter in model.parameters():
        if parameter.untyped_storage().filename is not None:
            parameter.data = parameter.data.clone()
