"""What is known of a table without its weights, and which parameters of a module are tables."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TableSpec:
    """An embedding weight of `rows` x `dim`, wherever its rows are."""

    name: str  # as `named_parameters` has it
    rows: int
    dim: int
    dtype: torch.dtype
    index: int  # the table's place among the private parameters, by which its noise is drawn

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.dim))


@dataclass(frozen=True)
class Shard:
    """The part of a table that an owner has in memory: some of its rows, and of these some columns."""

    rows: range
    columns: range

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), len(self.columns)))

    def is_of(self, table: TableSpec) -> bool:
        """Whether a table has these rows and columns."""
        return all(
            part.step == 1 and 0 <= part.start <= part.stop <= size
            for part, size in ((self.rows, table.rows), (self.columns, table.dim))
        )


def table_specs(parameters: Mapping[str, Tensor], tables: Collection[str]) -> dict[str, TableSpec]:
    """The specs of some of the private parameters of a module, by name in alphabetical order."""
    specs = {
        name: TableSpec(name, parameter.shape[0], parameter.shape[1], parameter.dtype, index)
        for index, (name, parameter) in enumerate(parameters.items())
        if name in tables
    }
    return dict(sorted(specs.items()))


def table_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The tables of a module, for an optimizer of their own: of nn.Embedding, nn.EmbeddingBag and TorchRec's collections."""
    tables = find_tables(module)
    return [parameter for name, parameter in module.named_parameters() if name in tables]


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """All parameters of a module but its tables, for an optimizer of their own."""
    tables = find_tables(module)
    return [parameter for name, parameter in module.named_parameters() if name not in tables]


def find_tables(module: nn.Module) -> frozenset[str]:
    """Names of the embedding weights, as `named_parameters` has them."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    if (torchrec := sys.modules.get("torchrec.distributed.types")) is not None:
        # Those of sharded collections, which have parameters without modules of torch's.
        sharded = (m for m in module.modules() if isinstance(m, torchrec.ShardedModule))
        weights |= {id(parameter) for m in sharded for parameter in m.parameters()}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in weights)


def sharded_parts(module: nn.Module) -> list[str]:
    """Names of the parts of a module whose rows are in several processes: TorchRec's, and `sparsedp.distributed`'s own."""
    torchrec = sys.modules.get("torchrec.distributed.types")
    return [
        name
        for name, part in module.named_modules()
        if getattr(part, "is_sharded", False) is True
        or (torchrec is not None and isinstance(part, torchrec.ShardedModule))
    ]
