"""What the core asks of tables in which all ids outside of a selection share one trained row, the fallback.

`sparsedp.nn.FallbackEmbedding` and `FallbackEmbeddingBag` are such tables. A layer of your own is one if it derives from
`FallbackTable`: a mechanism's choice of rows, counts of the data and predictions then go through these methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn


class FallbackTable(nn.Module, ABC):
    """A table with a row for ids that a selection leaves out."""

    weight: Tensor

    @property
    @abstractmethod
    def fallback(self) -> int:
        """The row that stands for all ids that are not kept. Every selection contains it."""

    @abstractmethod
    def keep(self, rows: Tensor | Sequence[int]) -> None:
        """From now on, only `rows` are looked up as they are; all other ids become the fallback."""

    @abstractmethod
    def unchanged(self) -> AbstractContextManager[None]:
        """After it, the same ids are kept as before it."""

    @abstractmethod
    def real_ids(self) -> AbstractContextManager[None]:
        """Within it no id becomes the fallback."""


def fallback_tables(module: nn.Module) -> list[FallbackTable]:
    return [part for part in module.modules() if isinstance(part, FallbackTable)]


def keep_selection(module: nn.Module, selection: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A selection made before training, with the fallback rows of `module`'s tables; tells these tables about it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    chosen = dict(selection)
    for table in fallback_tables(module):
        if (name := names[id(table.weight)]) in chosen:
            chosen[name] = torch.unique(torch.cat([chosen[name], chosen[name].new_tensor([table.fallback])]))
            table.keep(chosen[name])
    return chosen


@contextmanager
def selection_kept(module: nn.Module, selection: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Within it, tables are as after `keep_selection`, whose result it gives; afterwards as they were."""
    with ExitStack() as stack:
        for table in fallback_tables(module):
            stack.enter_context(table.unchanged())
        yield keep_selection(module, selection)


@contextmanager
def real_ids(module: nn.Module) -> Iterator[None]:
    """Within it no id becomes the fallback, so that a count for the next selection sees what the data hold."""
    with ExitStack() as stack:
        for table in fallback_tables(module):
            stack.enter_context(table.real_ids())
        yield
