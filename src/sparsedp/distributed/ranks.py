"""The processes that train together, through torch.distributed."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsedp._torch import default_store
from sparsedp.capture import RowSpace
from sparsedp.distributed.exchange import ProcessExchange
from sparsedp.distributed.long_work import lost_ranks
from sparsedp.distributed.placement import Placement
from sparsedp.errors import SparseDPError
from sparsedp.tables import Ranks, RowExchange, Shard, TableSpec

_ANY = -1  # of what a rank has no part of
# Whole numbers as long as those of a tensor, by their bytes: a single number cannot be seen as several shorter ones.
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GRACE = 10.0  # seconds in which ranks that are there say so, after a message failed


@dataclass(frozen=True)
class ShardInSpace:
    """A shard of a table, and where its rows are in the numbering of all tables."""

    name: str
    table_first: int  # global row of the table's first row
    first: int  # global row of the shard's first row
    end: int
    columns: range


class ProcessRanks(Ranks):
    """Each process has this view of all of them."""

    several = True

    def __init__(self, group: Any, placement: Placement, tables: Mapping[str, TableSpec], dtype: torch.dtype) -> None:
        self.group, self.placement, self._tables, self._dtype = group, placement, tables, dtype
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._lost = 0  # how often a message failed
        self._spaces: dict[tuple[RowSpace, int], list[ShardInSpace]] = {}

    @cached_property
    def shards(self) -> Mapping[str, Shard]:  # type: ignore[override]
        return self.placement.of_rank(self.rank)

    def owns(self, name: str) -> bool:
        return name in self.shards

    def counts(self, name: str) -> bool:
        if name in self.placement.replicated:
            return self.rank == 0
        return self.owns(name) and self.shards[name].columns.start == 0

    def owned(self, name: str) -> range:
        return self.shards[name].rows if name in self.shards else range(0)

    def shards_in(self, space: RowSpace, rank: int) -> list[ShardInSpace]:
        """The shards that a rank has of the tables of a space, in the order of their names."""
        if (space, rank) not in self._spaces:
            shards = self.placement.of_rank(rank)
            self._spaces[space, rank] = [
                ShardInSpace(
                    name, start, start + shards[name].rows.start, start + shards[name].rows.stop, shards[name].columns
                )
                for name, start in zip(space.names, space.starts)
                if name in shards
            ]
        return self._spaces[space, rank]

    def exchange(self, space: RowSpace, rows: Tensor) -> RowExchange:
        return ProcessExchange(self, space, rows)

    def meet(
        self, step: int, batch: int, options: Iterable[tuple[str, bool, str | None]], dense: Iterable[Tensor]
    ) -> None:
        mine: dict[str, int] = {"its step": step, "its batch": batch}
        for name, is_trained, text in options:
            mine[f"whether '{name}' is trained"] = int(is_trained)
            mine[f"the optimizer's options for '{name}'"] = _ANY if text is None else zlib.crc32(text.encode())
        mine["its dense parameters"] = sum(_sum_of_bits(tensor) for tensor in dense) % (1 << 62)
        every = self._all_gather(torch.tensor(list(mine.values())))
        for what, numbers in zip(mine, every.T.tolist()):
            said = {rank: number for rank, number in enumerate(numbers) if number != _ANY}
            first = min(said, default=0)
            other = next((rank for rank, number in said.items() if number != said[first]), None)
            if other is not None:
                counted = (
                    f": {said[other]} there, {said[first]} on rank {first}" if what in ("its step", "its batch") else ""
                )
                raise SparseDPError(
                    f"Rank {other} differs from rank {first} in {what}{counted}. All ranks must take a step on each batch, "
                    "also on one without examples, from the same weights, with the same options: whatever changes these in "
                    "training has to do so on all of them. Nothing was written."
                )

    # ------------------------------------------------------------------ messages

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around whatever waits for other ranks: if that fails, says which of them are missing."""
        try:
            yield
        except RuntimeError as error:
            self._lost += 1
            missing = missing_ranks(self.rank, self.count, self._lost)
            if not missing:
                raise
            raise lost_ranks(missing, self.count) from error

    def all_to_all(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The parts of `values` go to the ranks, sent[r] numbers to rank r; what comes back has received[r] from rank r."""
        out = values.new_empty(sum(received))
        with self.watched():
            dist.all_to_all_single(out, values.contiguous(), list(received), list(sent), group=self.group)
        return out

    def gather(self, values: Tensor) -> list[Tensor]:
        """What each rank has, (n,) with n of its own."""
        sizes = self._all_gather(torch.tensor([len(values)])).flatten().tolist()
        padded = values.new_zeros(max(sizes))
        padded[: len(values)] = values
        return [part[:size] for part, size in zip(self._all_gather(padded), sizes)]

    def _all_gather(self, values: Tensor) -> Tensor:
        """What all ranks have, of one shape: (ranks, ...)."""
        parts = [torch.empty_like(values) for _ in range(self.count)]
        with self.watched():
            dist.all_gather(parts, values, group=self.group)
        return torch.stack(parts)

    def no_numbers(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype)

    def add_up_dense(self, sums: Sequence[Tensor]) -> None:
        if not sums:
            return
        flat = torch.cat([total.reshape(-1) for total in sums])
        with self.watched():
            dist.all_reduce(flat, group=self.group)
        for total, part in zip(sums, flat.split([total.numel() for total in sums])):
            total.copy_(part.view_as(total))

    def agree(self, error: Exception | None) -> None:
        if not self._all_gather(torch.tensor([error is not None])).any():
            return
        texts: list[Any] = [None] * self.count
        with self.watched():
            dist.all_gather_object(texts, None if error is None else (type(error), str(error)), group=self.group)
        if error is not None:
            raise error
        rank, (kind, text) = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise kind(f"On rank {rank}: {text}")


def missing_ranks(rank: int, count: int, attempt: int = 1) -> list[int]:
    """The ranks that do not say within some seconds that they lost somebody, as this one says; `attempt` of them."""
    store, waited, missing = default_store(), _GRACE, []
    try:
        store.set(f"sparsedp/lost/{attempt}/{rank}", "here")
    except RuntimeError:  # the store is rank 0's, or whoever launched all of them
        return [0] if rank else []
    for other in range(count):
        begin = time.monotonic()
        try:
            store.wait([f"sparsedp/lost/{attempt}/{other}"], timedelta(seconds=max(0.1, waited)))
        except RuntimeError:
            missing.append(other)
        waited -= time.monotonic() - begin
    return missing


def _sum_of_bits(tensor: Tensor) -> int:
    """A number that tells tensors apart that differ by accident."""
    numbers = _NUMBERS.get(tensor.element_size(), torch.uint8)
    return int(tensor.detach().contiguous().view(-1).view(numbers).sum(dtype=torch.int64))
