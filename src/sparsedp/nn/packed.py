"""Packed sequences, `torch.nn.utils.rnn.PackedSequence`, as padded ones and back, for recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function, has_torch_function

from sparsedp._torch import pad_packed


def time_steps(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """The rows of a packed sequence as (sequences, steps, ...), the longest sequence first, zeros behind the others' ends.

    In a private module, only for what looks at no step behind a sequence's end: how many there are is decided by the longest.
    """
    if has_torch_function((data, batch_sizes)):
        return handle_torch_function(time_steps, (data, batch_sizes), data, batch_sizes)
    return pad_packed(data, batch_sizes)


def packed_rows(steps: Tensor, data: Tensor, batch_sizes: Tensor) -> Tensor:
    """`steps` (sequences, steps, ...), in the order of the packed sequence `data`, as rows like those of it."""
    if has_torch_function((steps, data, batch_sizes)):
        return handle_torch_function(packed_rows, (steps, data, batch_sizes), steps, data, batch_sizes)
    return torch.cat([steps[:size, step] for step, size in enumerate(batch_sizes.tolist())])


def unpacked(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """(sequences, steps, ...) in the order of the packed sequence, and which steps are there, bool (sequences, steps, 1)."""
    data, sizes = packed.data, packed.batch_sizes
    return time_steps(data, sizes), time_steps(torch.ones_like(data[:, :1]), sizes) > 0


def packed_like(packed: PackedSequence, output: Tensor) -> PackedSequence:
    """`output` (sequences, steps, ...), packed as `packed` is."""
    data = packed_rows(output, packed.data, packed.batch_sizes)
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def reordered(state: Tensor, order: Tensor | None) -> Tensor:
    """A state (layers, sequences, hidden) with its sequences in another order; one that all of them share stays as it is."""
    return state if order is None or state.stride(1) == 0 else state.index_select(1, order)
