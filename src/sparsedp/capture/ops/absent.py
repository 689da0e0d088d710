"""Lookups in tables whose rows are elsewhere, in the memory of other processes: somebody has found the result already.

The functions have the names and the arguments of torch's own, so that all that is known of those holds for them too; `found` is
what torch's would return. The table is a parameter without memory (device "meta"), by which its uses are known.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def embedding(input: Tensor, weight: Tensor, *, found: Tensor, **options: Any) -> Tensor:
    """As torch.nn.functional.embedding."""
    if has_torch_function((input, weight)):
        return handle_torch_function(embedding, (input, weight), input, weight, found=found, **options)
    return found


def embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor, *, found: Tensor, **options: Any) -> Tensor:
    """As torch.nn.functional.embedding_bag."""
    if has_torch_function((input, weight)):
        return handle_torch_function(embedding_bag, (input, weight), input, weight, offsets, found=found, **options)
    return found
