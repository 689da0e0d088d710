"""Signs checkpoints with a key of the user's own, so that one that was edited without the key is found out.

The signature is HMAC-SHA256 over everything in a checkpoint, the weights included: an honest ledger of other weights is not
taken. The key is no part of the checkpoint. Without a key there is none, and what finds accidents is the ledger's own digest.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedp._torch import without_subclasses
from sparsedp.errors import CheckpointError, ConfigError
from sparsedp.kernels.mapped import PIECE

_SHORTEST = 16  # bytes of a key


def read_key(key: bytes | str | os.PathLike[str]) -> bytes:
    """The key itself, or that of a file, which is written with a new key if there is none."""
    if not isinstance(key, bytes):
        path = Path(key)
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        key = path.read_bytes()
    if len(key) < _SHORTEST:
        raise ConfigError(
            f"ledger_key must have at least {_SHORTEST} bytes, not {len(key)}: take secrets.token_bytes(32)."
        )
    return key


def sign(key: bytes, content: Mapping[str, Any]) -> str:
    """The signature of plain values and tensors, in any nesting; the tensors are read piece by piece."""
    code = hmac.new(key, b"checkpoint", "sha256")
    _add(code.update, content)
    return code.hexdigest()


def sign_order(key: bytes, arrays: Iterable[np.ndarray]) -> str:
    """The signature of which examples belong together, such as those of a user or of a span.

    Without the key it tells nothing of them.
    """
    code = hmac.new(key, b"order", "sha256")
    for array in arrays:
        code.update(f"{array.dtype.str} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return code.hexdigest()


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _add(update: Callable[[Any], None], value: Any) -> None:
    """Everything with its kind and length, so that no two contents give the same bytes."""
    if isinstance(value, Tensor):
        _add_tensor(update, value)
    elif isinstance(value, Mapping):
        update(b"mapping %d;" % len(value))
        for key, item in value.items():
            _add(update, key)
            _add(update, item)
    elif isinstance(value, (list, tuple)):
        update(b"sequence %d;" % len(value))
        for item in value:
            _add(update, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value).encode()
        update(b"%s %d;" % (type(value).__name__.encode(), len(text)) + text)
    else:
        raise CheckpointError(
            f"A checkpoint that is signed with a ledger_key holds tensors, numbers, text, lists and dicts, not "
            f"{type(value).__name__}."
        )


def _add_tensor(update: Callable[[Any], None], tensor: Tensor) -> None:
    with without_subclasses():
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            raise CheckpointError(f"A tensor of layout {tensor.layout} cannot be signed: make it dense.")
        update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.contiguous().view(-1)
        size = max(1, PIECE // tensor.element_size())
        for first in range(0, len(flat), size):
            update(flat[first : first + size].cpu().view(torch.uint8).numpy().data)
