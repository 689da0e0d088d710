"""One plain file with the state_dict of a model whose tables are divided among processes, written without ever having a table.

The file is as `torch.save` writes it (a zip archive of a pickle and each tensor's bytes, see torch's notes on serialization),
and `torch.load` reads it. Tables come to rank 0 in pieces of some rows, each from the ranks that have it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsedp._torch import rebuild_tensor, storage_type, without_subclasses

if TYPE_CHECKING:
    from sparsedp.distributed.placement import PlacedShard
    from sparsedp.distributed.training import Together

_PIECE = 1 << 24  # bytes of a table that rank 0 has at a time
_ALIGNMENT = 64  # of tensors in the file, as torch.save has them
_NAME = "archive"
_PADDING, _ZIP64 = 0x4246, 20  # the id of a field of padding, as in torch's files; bytes of the field with large sizes


@dataclass(frozen=True)
class _Storage:
    """What stands in the pickle for the bytes of a tensor: `number` is their place in the file."""

    number: int
    dtype: torch.dtype
    numel: int


class _Stored:
    """Pickled, a tensor whose bytes are elsewhere in the file."""

    def __init__(self, storage: _Storage, shape: torch.Size) -> None:
        self._storage, self._shape = storage, shape

    def __reduce__(self) -> Any:
        stride = torch.empty(self._shape, device="meta").stride()
        return rebuild_tensor, (self._storage, 0, tuple(self._shape), stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", storage_type(value.dtype), str(value.number), "cpu", value.numel
        return None


def write_state_dict(target: str | os.PathLike[str] | IO[bytes], module: nn.Module, run: Together) -> None:
    """Writes the file on rank 0; all ranks call it, with all noise settled."""
    state = module.state_dict()
    other_names: dict[int, str] = {}  # the first name of each parameter, by its id
    first = {name: other_names.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    held_under = {key: first.get(key, key) for key in state}
    storages: dict[str, _Storage] = {}
    content: OrderedDict[str, _Stored] = OrderedDict()
    for key, name in held_under.items():
        parts = run.placement.get(name)
        shape = _shape_of(parts) if parts else state[key].shape
        dtype = run.held[name].dtype if parts else state[key].dtype
        content[key] = _Stored(storages.setdefault(name, _Storage(len(storages), dtype, shape.numel())), shape)
    with _opened(target) if run.rank == 0 else nullcontext() as archive:
        if archive is not None:
            pickled = io.BytesIO()
            _Pickler(pickled, protocol=2).dump(content)
            archive.writestr(f"{_NAME}/data.pkl", pickled.getvalue())
            archive.writestr(f"{_NAME}/byteorder", sys.byteorder)
        for name, storage in storages.items():
            with nullcontext() if archive is None else _entry(archive, f"{_NAME}/data/{storage.number}") as file:
                for piece in _pieces(name, run) if run.placement.get(name) else _whole(state[name]):
                    if file is not None and piece is not None:
                        file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
        if archive is not None:
            archive.writestr(f"{_NAME}/version", "3\n")


def _shape_of(parts: Sequence[PlacedShard]) -> torch.Size:
    """Of a table with these parts."""
    return torch.Size((max(part.shard.rows.stop for part in parts), max(part.shard.columns.stop for part in parts)))


def _opened(target: str | os.PathLike[str] | IO[bytes]) -> zipfile.ZipFile:
    return zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True)


def _entry(archive: zipfile.ZipFile, name: str) -> AbstractContextManager[IO[bytes]]:
    """A file in the archive, whose bytes begin at a multiple of `_ALIGNMENT`."""
    assert archive.fp is not None
    info = zipfile.ZipInfo(name)
    begin = archive.fp.tell() + 30 + len(name) + 4 + _ZIP64  # 30 and 4: of a header, and of the field of padding
    padding = -begin % _ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    return archive.open(info, "w", force_zip64=True)


def _whole(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor that every rank has."""
    with without_subclasses():
        flat = tensor.detach().as_subclass(Tensor).contiguous().view(-1)
    yield from flat.split(max(1, _PIECE // flat.element_size())) if flat.numel() else ()


@torch.no_grad()
def _pieces(name: str, run: Together) -> Iterator[Tensor | None]:
    """On rank 0 the rows of a table, some at a time; on the others nothing, while they send theirs."""
    with without_subclasses():
        mine = run.held[name].detach().as_subclass(Tensor)
    parts = run.placement[name]
    rows, dim = _shape_of(parts)
    size = max(1, _PIECE // (dim * mine.element_size()))
    # The same memory for all pieces: what is allocated in between would keep freed ones from being used again.
    pieces, arriving = (mine.new_empty(min(size, rows), dim) if run.rank == 0 else None for _ in range(2))
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        whole = None if pieces is None else pieces[: end - begin]
        run.long_work.meet()  # rank 0 may have been writing the piece before for long
        for part in parts:
            first, last = max(begin, part.shard.rows.start), min(end, part.shard.rows.stop)
            if first >= last:
                continue
            offset = part.shard.rows.start
            if part.rank == run.rank:
                local = mine[first - offset : last - offset].contiguous()
                if whole is None:
                    with run.watched():
                        dist.send(local, dst=0, group=run.group)
            elif arriving is not None:
                columns = len(part.shard.columns)
                local = arriving.view(-1)[: (last - first) * columns].view(last - first, columns)
                with run.watched():
                    dist.recv(local, src=part.rank, group=run.group)
            if whole is not None:
                whole[first - begin : last - begin, part.shard.columns.start : part.shard.columns.stop] = local
        yield whole
