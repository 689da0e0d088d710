"""Lookups in tables whose rows are elsewhere, in the memory of other processes: somebody has found the result already.

The functions have the names and the arguments of torch's own, so that all that is known of those holds for them too; `found()` is
what torch's would return. (It is not an operand: nobody has to look for whose memory it has.) The table is a parameter without
memory (device "meta"), by which its uses are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def embedding(input: Tensor, weight: Tensor, *, found: Callable[[], Tensor], **options: Any) -> Tensor:
    """As torch.nn.functional.embedding."""
    if has_torch_function((input, weight)):
        return handle_torch_function(embedding, (input, weight), input, weight, found=found, **options)
    return found()


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None, *, found: Callable[[], Tensor], **options: Any
) -> Tensor:
    """As torch.nn.functional.embedding_bag."""
    if has_torch_function((input, weight)):
        return handle_torch_function(embedding_bag, (input, weight), input, weight, offsets, found=found, **options)
    return found()


def is_absent(func: Callable[..., Any]) -> bool:
    """Whether it is one of these functions."""
    return func is embedding or func is embedding_bag
